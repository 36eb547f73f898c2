"""Figures of committed studies, for commands whose measurement takes hours."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from benchmarks.harness import BenchmarkResult
from etl.errors import UserError
from ranking.report.study import StudyResult

COLUMNS = ("figure", "value", "goal", "of")
Task = TypeVar("Task")


def show_committed(title: str, goals: Mapping[str, str], path: Path, as_json: bool) -> None:
    """Print the committed figures of a study."""
    result = BenchmarkResult(title, COLUMNS)
    add_committed(result, goals, path)
    result.show(as_json)


def add_committed(result: BenchmarkResult, goals: Mapping[str, str], path: Path) -> None:
    """Add the committed figures of a study, with its date, commit and command.

    A figure that no committed study has is null, with the reason.
    """
    study = StudyResult.model_validate_json(path.read_text()) if path.is_file() else None
    source = f"{study.date} {study.commit}: {study.command}" if study else "no committed study"
    for key, goal in goals.items():
        value = study.figures.get(key) if study else None
        result.figures |= {key: value, f"{key}_measured": source}
        if value is None:
            lacks = f"the study of {study.date} lacks it" if study else f"{path.name} is absent"
            result.figures[f"{key}_reason"] = f"{lacks}; a run with --work measures it"
        result.rows.append((key, shown(value), goal, source))


def shown(value: object) -> str:
    """A figure as text of a table."""
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


def share_of(tasks: Iterable[Task], share: str) -> list[Task]:
    """The tasks of a process: every n-th one from the k-th on, for the share `k/n`.

    Raises UserError if the share is not one of 1/n to n/n.
    """
    k, _, n = share.partition("/")
    if not (k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n)):
        raise UserError(f"--share {share} is not k/n with k from 1 to n, such as 1/2")
    return list(tasks)[int(k) - 1 :: int(n)]
