"""`gemline bench staleness`: the gain of students from an outdated GEM.

Students of the bench data are trained on the same most recent days, with the outputs of GEMs that
are some days older than necessary. A long study; results of finished trainings are kept in
`--work`, and the study resumes from them. The table is saved to benchmarks/results/staleness.json.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import RESULTS, BenchmarkResult
from benchmarks.studies.ablation_rows import OBJECTIVE
from etl.spec.base import StrictModel
from etl.spec.units import DAY, date_range

if TYPE_CHECKING:
    from benchmarks.studies.student_trials import TrainingChange, TransferTrials
    from etl.spec.units import DayRange
    from etl.tables.lake import Lake
    from training.evaluation.predictions import ConfidenceInterval

TRAINING_DAYS = 3  # training days of students, each with a GEM of the measured lag
MAX_TEACHER_LAG_DAYS = 7


class StalenessArgs(StrictModel):
    """Arguments of the study."""

    work: Annotated[Path, tyro.conf.arg(help="folder of `gemline bench transfer`")]
    seeds: int = Field(default=3, ge=1)
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


@dataclass(frozen=True)
class TransferGain:
    """NE by objective of a student that learns from an older GEM, minus that of labels only."""

    teacher_lag_days: int
    student: str
    ne_difference: "dict[str, ConfidenceInterval]"

    @property
    def name(self) -> str:
        """The key of its figures."""
        return f"{self.student}, {self.teacher_lag_days} days"


def bench(args: StalenessArgs) -> None:
    """Gains of students from GEMs of age 0 to 7 days, on fixed training days (long)."""
    from benchmarks.studies.student_trials import TransferTrials

    trials = TransferTrials.of(args.work)
    gains = [
        gain
        for lag_days in range(MAX_TEACHER_LAG_DAYS + 1)
        for gain in gains_at_lag(trials, lag_days, args.seeds)
    ]
    objectives = list(gains[0].ne_difference)
    result = BenchmarkResult(
        f"NE less that of labels alone, by the age of GEM; {TRAINING_DAYS} days to learn on, "
        f"{args.seeds} seeds, 1e-4 [95 %]",
        ("days too old", "student", *objectives),
    )
    for gain in gains:
        intervals = gain.ne_difference
        result.rows.append(
            (str(gain.teacher_lag_days), gain.student, *map(str, intervals.values()))
        )
        result.figures[gain.name] = {o: round(i.value, 6) for o, i in intervals.items()}
    missing = MAX_TEACHER_LAG_DAYS - max(gain.teacher_lag_days for gain in gains)
    if missing:
        result.figures["not measured"] = f"the last {missing} ages: no GEM is old enough"
    result.show(args.as_json)
    result.save_study(
        RESULTS / "staleness.json",
        f"gemline bench staleness --work work/bench --seeds {args.seeds}",
        {gain.name: gain.ne_difference[OBJECTIVE] for gain in gains},
    )


def gains_at_lag(
    trials: "TransferTrials", teacher_lag_days: int, seeds: int
) -> "list[TransferGain]":
    """Gains of each kind of student; empty if a training day has no GEM."""
    from benchmarks.studies.student_trials import LABELS_ONLY_CHANGE
    from training.evaluation.predictions import paired_ne_difference

    first = trials.split.train_last - timedelta(days=TRAINING_DAYS - 1)
    if first - timedelta(days=1 + teacher_lag_days) < trials.split.train_first:
        return []
    window = replace(trials, split=trials.split.model_copy(update={"train_first": first}))
    objectives = [
        name
        for name, objective in trials.lake.spec.objectives.items()
        if objective.label_maturity_seconds <= DAY
    ]
    labels_only = [window.student_predictions(LABELS_ONLY_CHANGE, seed) for seed in range(seeds)]
    lagged = with_older_teacher(window, teacher_lag_days)
    gains = []
    for student, change in _student_kinds(trials, has_controls=not teacher_lag_days).items():
        students = [lagged.student_predictions(change, seed) for seed in range(seeds)]
        differences = {
            objective: paired_ne_difference(students, labels_only, objective)
            for objective in objectives
        }
        gains.append(TransferGain(teacher_lag_days, student, differences))
    return gains


def _student_kinds(trials: "TransferTrials", has_controls: bool) -> "dict[str, TrainingChange]":
    """Options of distillation; shuffled controls do not depend on GEM, so one age suffices."""
    from benchmarks.studies.student_trials import transfer_change

    plain = {"kind": "plain", "weight": trials.distillation_weight}
    head = {"kind": "auxiliary", "gradient_ratio": trials.auxiliary_gradient_ratio}
    adapted = {**head, "use_adapter": True}
    kinds = {
        "plain distillation": transfer_change(**plain),
        "auxiliary head": transfer_change(**head),
        "auxiliary head, adapter": transfer_change(**adapted),
    }
    if has_controls:
        kinds["plain distillation, shuffled"] = transfer_change(**plain, shuffle_teacher=True)
        kinds["auxiliary head, adapter, shuffled"] = transfer_change(
            **adapted, shuffle_teacher=True
        )
    return kinds


def with_older_teacher(trials: "TransferTrials", teacher_lag_days: int) -> "TransferTrials":
    """The same trials with teacher outputs of GEMs that are `teacher_lag_days` older."""
    from benchmarks.studies.trials import symlinked_lake
    from training.distributed.process_group import process_group
    from training.teacher.outputs import write_teacher_outputs

    folder = trials.folder.parent / f"stale-{teacher_lag_days}"
    lake = symlinked_lake(trials.lake, folder / "lake")
    gem = Path(lake.root, "models", "gem")
    gem.parent.mkdir(exist_ok=True)
    if not gem.exists():
        gem.symlink_to(Path(trials.lake.root, "models", "gem").resolve())
    days = trials.split.train_first, trials.split.train_last
    is_scored = lake.exists("user_teacher_embeddings")
    if not is_scored or teacher_ages(lake, days) != {1 + teacher_lag_days}:
        with process_group():
            write_teacher_outputs(lake, days, teacher_lag_days)
        assert teacher_ages(lake, days) == {1 + teacher_lag_days}, "a GEM of these days is missing"
    return replace(trials, lake=lake, folder=folder / "trials")


def teacher_ages(lake: "Lake", days: "DayRange") -> set[int]:
    """Days from GEM's last training day to the days that it predicts; 0 if a day is missing.

    Those of the embeddings, which are written after the predictions of a day.
    """
    from etl.tables import arrow, model_schemas

    stored = arrow.snapshot(lake, model_schemas.user_teacher_embeddings(lake.spec))
    rows = stored.read(["day", "fm_trained_until"], day=list(date_range(*days)))
    predicted = rows.group_by(["day", "fm_trained_until"]).aggregate([]).to_pylist()
    ages = {(row["day"] - row["fm_trained_until"]).days for row in predicted}
    missing = set(date_range(*days)) - {row["day"] for row in predicted}
    return ages | {0} if missing else ages
