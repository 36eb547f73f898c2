"""Figures of committed studies, for commands whose measurement takes hours."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from benchmarks.harness import BenchmarkResult
from etl.errors import UserError
from ranking.report.study import StudyResult

COLUMNS = ("figure", "value", "goal", "of")
Task = TypeVar("Task")
StudyFolder = Annotated[
    Path | None, tyro.conf.arg(help="folder for tables and trainings: runs the study in it")
]


def show_committed(title: str, goals: Mapping[str, str], path: Path, as_json: bool) -> None:
    """Print the committed figures of a study, which a run with `--work` measures."""
    result = BenchmarkResult(title, COLUMNS)
    command = f"gemline bench {path.stem} --work FOLDER"
    add_figures(result, goals, partial(committed_figures, path, command))
    for key in goals:
        result.figures.setdefault(f"{key}_measured", "no committed study")
    result.show(as_json)


def committed_figures(path: Path, command: str) -> dict[str, object]:
    """The figures of a study's file. Raises UserError if there is none yet."""
    if not path.is_file():
        raise UserError(f"{path.name} is absent: it is not committed yet; `{command}` measures it")
    study = StudyResult.model_validate_json(path.read_text())
    return study.figures | {"measured": f"{study.date} {study.commit}: {study.command}"}


def with_unmeasured(figures: Mapping[str, object], path: Path) -> dict[str, object]:
    """Figures, and those of a committed study that are absent or null in them, with their source.

    A part that a machine cannot measure, or that a run leaves out, keeps what another run measured.
    """
    merged = dict(figures)
    study = StudyResult.model_validate_json(path.read_text()) if path.is_file() else None
    for key, value in (study.figures if study else {}).items():
        is_note = key.endswith(("_measured", "_reason"))
        if study is None or is_note or value is None or merged.get(key) is not None:
            continue
        source = f"{study.date} {study.commit}: {study.command}"
        merged |= {key: value, f"{key}_measured": study.figures.get(f"{key}_measured", source)}
        merged.pop(f"{key}_reason", None)
    return merged


def add_figures(
    result: BenchmarkResult, goals: Mapping[str, str], figures: Callable[[], dict[str, object]]
) -> None:
    """Add figures and when they were measured; null with the reason if they cannot be had.

    A part of a study that was measured at another time has its own source under `{key}_measured`.
    """
    try:
        found = figures()
    except UserError as error:
        found = dict.fromkeys(goals) | {f"{key}_reason": str(error) for key in goals}
    source = found.pop("measured", None)
    absent = [key for key in goals if key not in found]
    found |= dict.fromkeys(absent) | {f"{key}_reason": f"{source} lacks it" for key in absent}
    result.figures |= found
    for key, goal in goals.items():
        if source:
            result.figures.setdefault(f"{key}_measured", source)
        note = str(found.get(f"{key}_reason") or found.get(f"{key}_measured") or source)
        result.rows.append((key, _shown(found[key]), goal, note))


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


def share_of(tasks: Iterable[Task], share: str) -> list[Task]:
    """The tasks of a process: every n-th one from the k-th on, for the share `k/n`.

    Raises UserError if the share is not one of 1/n to n/n.
    """
    k, _, n = share.partition("/")
    if not (k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n)):
        raise UserError(f"--share {share} is not k/n with k from 1 to n, such as 1/2")
    return list(tasks)[int(k) - 1 :: int(n)]


def trained_at_of(study: StudyResult | None) -> set[str]:
    """The dates and commits of the trainings of a committed study."""
    return (
        set(study.figures.get("trained_at", [f"{study.date} {study.commit}"])) if study else set()
    )
