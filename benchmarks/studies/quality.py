"""`gemline bench quality`: GEM, its teacher and the models on files, against LightGBM and bounds.

KuaiRand and MovieLens are measured; their trainings are kept in `--work` and used again. What takes
hours, on simulated logs, is printed as committed by `gemline bench history` and `gemline bench
ablation`, with its date and commit.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field
from rich.console import Console

from benchmarks.harness import RESULTS, ROOT, BenchmarkResult, commit
from etl.errors import UserError
from etl.spec.base import StrictModel
from etl.tables import atomic_io
from ranking.report.study import StudyResult, today

COLUMNS = ("figure", "value", "goal", "of")
KUAIRAND_GOALS = {
    "kuairand_click_gain": ">= 0.001",
    "kuairand_long_view_gain": ">= 0.001",
    "kuairand_like_gain": ">= 0.010",
    "kuairand_teacher_click_gain": ">= 0.003",
    "kuairand_teacher_long_view_gain": ">= 0.003",
}
HISTORY_GOALS = {"sim_gap_ratio": "<= 0.5", "sim_gap_no_history": "<= 1.0"}
ABLATION_GOALS = {"default_is_best": "true"}
MOVIELENS_GOALS = {
    "movielens_auc_gain": "> 0",
    "movielens_uauc_gain": "> 0",
    "movielens_tabular_auc_gain": "> 0",
}


KUAIRAND_DATA = ROOT.parent / "shared" / "data" / "KuaiRand-Pure"


class QualityArgs(StrictModel):
    """Arguments of the benchmark."""

    work: Annotated[
        Path, tyro.conf.arg(help="folder for tables and finished trainings; remove it to repeat")
    ] = Path("work/quality")
    kuairand: Annotated[
        Path | None,
        tyro.conf.arg(
            help="folder that holds KuaiRand's data/log_standard_*; by default that in shared/data "
            "beside the checkout"
        ),
    ] = None
    seeds: int = Field(default=5, ge=1)
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_quality(args: QualityArgs) -> None:
    """Gains over tuned LightGBM on KuaiRand and MovieLens, and committed gaps on simulated logs."""
    result = BenchmarkResult("Quality", COLUMNS)
    add_measured(result, KUAIRAND_GOALS, lambda: measure_kuairand_part(args))
    add_measured(result, MOVIELENS_GOALS, lambda: measure_movielens_part(args))
    add_committed(result, HISTORY_GOALS, RESULTS / "history.json")
    add_committed(result, ABLATION_GOALS, RESULTS / "ablation.json")
    result.show(args.as_json)


def measure_kuairand_part(args: QualityArgs) -> dict[str, object]:
    """The figures of KuaiRand; the table is printed, and saved in the folder of the trainings."""
    data = args.kuairand or KUAIRAND_DATA
    if not data.is_dir():
        raise UserError(f"{data} is absent; --kuairand names KuaiRand's folder")
    from benchmarks.studies.kuairand_quality import build_trials, measure_kuairand

    trials = build_trials(data, args.work / "kuairand")
    table = measure_kuairand(trials, args.seeds)
    Console(stderr=True).print(table.as_table())
    table.save_study(args.work / "kuairand.json", "gemline bench quality --json")
    return table.figures


def measure_movielens_part(args: QualityArgs) -> dict[str, object]:
    """The figures of MovieLens; kept in a file, as they take minutes."""
    from benchmarks.public.movielens import measure_movielens

    path = args.work / "movielens" / "figures.json"
    if not path.is_file():
        figures = measure_movielens(path.parent) | {"movielens_measured": f"{today()} {commit()}"}
        atomic_io.write_text(path, json.dumps(figures))
    kept: dict[str, object] = json.loads(path.read_text())
    return kept


def add_measured(
    result: BenchmarkResult, goals: dict[str, str], measure: Callable[[], dict[str, object]]
) -> None:
    """Add the figures of a measurement; null with the reason if its data cannot be had."""
    try:
        figures = measure()
    except UserError as error:
        figures = dict.fromkeys(goals) | {f"{key}_reason": str(error) for key in goals}
    result.figures |= figures
    for key, goal in goals.items():
        note = str(figures.get(f"{key}_reason", "measured"))
        result.rows.append((key, _shown(figures.get(key)), goal, note))


def add_committed(result: BenchmarkResult, goals: dict[str, str], path: Path) -> None:
    """Add the committed figures of a study, with its date, commit and command."""
    study = StudyResult.model_validate_json(path.read_text())
    source = f"{study.date} {study.commit}: {study.command}"
    for key, goal in goals.items():
        value = study.figures.get(key)
        result.figures |= {key: value, f"{key}_measured": source}
        if value is None:
            result.figures[f"{key}_reason"] = f"the committed study of {study.date} lacks it"
        result.rows.append((key, _shown(value), goal, source))


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
