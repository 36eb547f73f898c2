"""`gemline bench quality`: GEM, its teacher and the models on files, against LightGBM and bounds.

What takes long is printed as committed, with its date, commit and command. `--measure` measures
KuaiRand and MovieLens and saves them to benchmarks/results. KuaiRand's finished trainings are kept
in `--work`; several processes may share them, each with `--share k/n`, then one of them without.
Simulated logs are measured by `gemline bench history` and `gemline bench ablation`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from pydantic import Field
from rich.console import Console

from benchmarks.harness import RESULTS, ROOT, BenchmarkResult
from benchmarks.studies.committed import COLUMNS, add_figures, committed_figures, share_of
from etl.errors import UserError
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from benchmarks.studies.prequential import PrequentialTrials

KUAIRAND_GOALS = {
    "kuairand_click_gain": ">= 0.001",
    "kuairand_long_view_gain": ">= 0.001",
    "kuairand_like_gain": ">= 0.010",
    "kuairand_teacher_click_gain": ">= 0.003",
    "kuairand_teacher_long_view_gain": ">= 0.003",
}
HISTORY_GOALS = {
    "sim_gap_ratio": "<= 0.5",
    "sim_gap_ratio_observable": "",
    "sim_gap_no_history": "<= 1.0",
}
ABLATION_GOALS = {"default_is_best": "true"}
MOVIELENS_GOALS = {
    "movielens_auc_gain": "> 0",
    "movielens_uauc_gain": "> 0",
    "movielens_tabular_auc_gain": "> 0",
}
Part = Literal["kuairand", "movielens", "sim"]
KUAIRAND_COMMAND = "gemline bench quality --only kuairand --measure"
MOVIELENS_COMMAND = "gemline bench quality --only movielens --measure"
KUAIRAND_DATA = ROOT.parent / "shared" / "data" / "KuaiRand-Pure"
KuaiRandFolder = Annotated[
    Path | None,
    tyro.conf.arg(
        help="folder that holds KuaiRand's data/log_standard_*; by default that in shared/data "
        "beside the checkout"
    ),
]


class QualityArgs(StrictModel):
    """Arguments of the benchmark."""

    only: Annotated[Part | None, tyro.conf.arg(help="one part alone")] = None
    measure: Annotated[
        bool,
        tyro.conf.arg(
            help="measure KuaiRand and MovieLens, instead of printing the committed results"
        ),
    ] = False
    work: Annotated[
        Path, tyro.conf.arg(help="folder for tables and finished trainings; remove it to repeat")
    ] = Path("work/quality")
    kuairand: KuaiRandFolder = None
    movielens: Annotated[
        Path | None,
        tyro.conf.arg(help="folder of ml-100k.inter, .item and .user; downloaded if not given"),
    ] = None
    seeds: int = Field(default=5, ge=1)
    share: Annotated[
        str,
        tyro.conf.arg(help="run only part k of n of KuaiRand's trainings, and no comparison: k/n"),
    ] = "1/1"
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_quality(args: QualityArgs) -> None:
    """Gains over tuned LightGBM on KuaiRand and MovieLens, and committed gaps on simulated logs."""
    if args.share != "1/1":
        train_share(args)
        return
    parts: dict[Part, Callable[[BenchmarkResult, QualityArgs], None]] = {
        "kuairand": add_kuairand,
        "movielens": add_movielens,
        "sim": add_simulated,
    }
    result = BenchmarkResult("Quality", COLUMNS)
    for name, add in parts.items():
        if args.only in (None, name):
            add(result, args)
    result.show(args.as_json)


def add_kuairand(result: BenchmarkResult, args: QualityArgs) -> None:
    """Add the figures of KuaiRand."""
    path, command = RESULTS / "kuairand.json", KUAIRAND_COMMAND
    add_figures(
        result, KUAIRAND_GOALS, lambda: study_figures(args, path, command, measure_kuairand_part)
    )


def add_movielens(result: BenchmarkResult, args: QualityArgs) -> None:
    """Add the figures of MovieLens."""
    path, command = RESULTS / "movielens.json", MOVIELENS_COMMAND
    add_figures(
        result, MOVIELENS_GOALS, lambda: study_figures(args, path, command, measure_movielens_part)
    )


def add_simulated(result: BenchmarkResult, _args: QualityArgs) -> None:
    """Add the committed figures of simulated logs."""
    for goals, study in ((HISTORY_GOALS, "history"), (ABLATION_GOALS, "ablation")):
        path, command = RESULTS / f"{study}.json", f"gemline bench {study}"
        figures = partial(committed_figures, path, command)
        add_figures(result, goals, figures)


def study_figures(
    args: QualityArgs,
    path: Path,
    command: str,
    measure: Callable[[QualityArgs], BenchmarkResult],
) -> dict[str, object]:
    """The figures of the study at `path`; with `--measure`, it is measured and saved before."""
    if args.measure:
        table = measure(args)
        Console(stderr=True).print(table.as_table())
        trained_at = table.figures.get("measured_at")
        table.save_study(
            path, command, trained_at=trained_at if isinstance(trained_at, list) else ()
        )
    return committed_figures(path, command)


def train_share(args: QualityArgs) -> None:
    """Run a share of the trainings on KuaiRand. Raises UserError unless they are to be measured."""
    if not args.measure or args.only != "kuairand":
        raise UserError("--share splits KuaiRand's trainings: it needs --only kuairand --measure")
    from benchmarks.studies.kuairand_quality import trainings

    for train in share_of(trainings(kuairand_trials(args), args.seeds), args.share):
        train()


def measure_kuairand_part(args: QualityArgs) -> BenchmarkResult:
    """GEM, its teacher and LightGBM on KuaiRand. Raises UserError if its files are absent."""
    from benchmarks.studies.kuairand_quality import measure_kuairand

    return measure_kuairand(kuairand_trials(args), args.seeds)


def kuairand_trials(args: QualityArgs) -> "PrequentialTrials":
    """The trainings on KuaiRand. Raises UserError if its files are absent."""
    data = args.kuairand or KUAIRAND_DATA
    if not data.is_dir():
        raise UserError(f"{data} is absent; --kuairand names KuaiRand's folder")
    from benchmarks.studies.kuairand_quality import build_trials

    return build_trials(data, args.work / "kuairand")


def measure_movielens_part(args: QualityArgs) -> BenchmarkResult:
    """Both benchmarks on files, on MovieLens. Raises UserError if its files cannot be had."""
    from benchmarks.public.movielens import measure_movielens, movielens_folder

    return measure_movielens(args.movielens or movielens_folder(), args.work / "movielens")
