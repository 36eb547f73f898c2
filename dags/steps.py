"""A step of the pipeline, and the paths and days that its command names."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from etl.errors import UserError

Engine = Literal["spark", "torch"]
# Kinds of the sources whose files the steps that read `raw` read, by the name of the step.
RAW_SOURCE_KINDS = {
    "ingest": ("event_log", "impression_log"),
    "attributes": ("attributes",),
    "audience": ("audience_labels", "audits"),
    "campaign_days": ("spend",),
}


@dataclass(frozen=True)
class Step:
    """A command of `gemline`, with what it reads and writes as paths below the lake, or `raw`.

    `surface` is the ad surface of a step that runs once per surface. A step that `is_distributed`
    may run in several processes, on several machines. Its state is recorded as `state_name`, if
    that is given, instead of its name.
    """

    name: str
    engine: Engine
    command: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    surface: str | None = None
    is_distributed: bool = False
    state_name: str = ""

    @property
    def recorded_name(self) -> str:
        """The name under which the lake records that the step has finished."""
        return self.state_name or self.name


def split_flags(option: str, text: str) -> tuple[str, ...]:
    """The flags that an option has in one text. Raises UserError if a quotation mark has no end."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def earlier_steps(step: Step, steps: Sequence[Step]) -> list[str]:
    """The names of the steps before a step of a pipeline that have to finish before it starts.

    They write what it reads or writes, or read what it writes.
    """
    before = steps[: steps.index(step)]
    touched = {*step.reads, *step.writes}
    return [
        other.name
        for other in before
        if touched.intersection(other.writes) or set(step.writes).intersection(other.reads)
    ]


@dataclass(frozen=True)
class PipelinePaths:
    """The spec, the raw logs and the lake that a pipeline works on."""

    spec: Path
    raw: str
    lake: str

    @property
    def cli_flags(self) -> tuple[str, ...]:
        """Flags of every step."""
        return ("--spec", str(self.spec), "--lake", self.lake)


@dataclass(frozen=True)
class ModelFlags:
    """Flags that name the days of the steps that train and use models.

    GEM trains on `training_days` and writes predictions for `teacher_days`, which include the days
    of refits. Rankers, baselines and the report follow `split`. `scored_days` are those from the
    first test day on; `data_until` is the last day with logs.
    """

    training_days: tuple[str, ...]
    teacher_days: tuple[str, ...]
    split: tuple[str, ...]
    scored_days: tuple[str, ...]
    data_until: tuple[str, ...]
