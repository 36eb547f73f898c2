"""Tables with changed counters, and the trainings of `gemline bench features` on them."""

import shutil
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import yaml

from benchmarks.pipelines import run_steps_in_process
from benchmarks.studies.ablation_trials import (
    VALIDATION_DAYS,
    KuaiRandTrials,
    SimulatedTrials,
    bench_trials,
)
from benchmarks.studies.counter_changes import CHANGES, DEFAULT, CounterChange
from benchmarks.studies.kuairand_quality import FIRST_DAY, build_trials
from benchmarks.studies.model_changes import DataSet
from benchmarks.studies.prequential import PrequentialTrials
from benchmarks.studies.seeded_estimates import SeededEstimate, ne_difference_over_seeds
from benchmarks.studies.trials import MODEL_OUTPUTS, TrialRunner
from dags.pipeline import data_steps
from dags.steps import PipelinePaths
from etl.errors import UserError
from etl.spec import DataSpec, load_spec
from etl.spec.units import DaySplit
from etl.tables.lake import Lake
from etl.tables.maintenance import upgrade_lake
from training.config import TrainConfig
from training.evaluation.predictions import Predictions

SPLIT = DaySplit(  # of the simulated logs; other studies report days from 11 January on
    train_first=date(2026, 1, 6),
    train_last=date(2026, 1, 8),
    calibration=None,
    test_first=date(2026, 1, 9),
    test_last=date(2026, 1, 9),
    data_until=date(2026, 1, 14),
)


@dataclass(frozen=True)
class FeatureStudy:
    """The tables and trainings of a work folder, built and run once.

    `trained_at` are the dates and commits of the trainings whose predictions were read.
    """

    work: Path
    kuairand: Path
    trained_at: set[str] = field(default_factory=set)

    def predictions(self, data: DataSet, name: str, seeds: int) -> list[Predictions]:
        """Predictions of the GEMs of some seeds on the validation days."""
        trials = self._trials(data, self._tables(data, name))
        predictions = [trials.gem(TrainConfig(seed=seed)) for seed in range(seeds)]
        self.trained_at.update(trials.trained_at())
        return predictions

    def ne_differences(self, data: DataSet, name: str, seeds: int) -> dict[str, SeededEstimate]:
        """The difference of NE from that with the spec's counters, by objective."""
        changed, reference = (self.predictions(data, each, seeds) for each in (name, DEFAULT))
        objectives = reference[0].objectives
        return {each: ne_difference_over_seeds(changed, reference, each) for each in objectives}

    def _tables(self, data: DataSet, name: str) -> Lake:
        base = build_tables(data, self.work, self.kuairand)
        if name == DEFAULT:
            return base
        folder = self.work / "features" / data / name.replace(" ", "_")
        return tables_with_counters(base, CHANGES[name][data], folder)

    def _trials(self, data: DataSet, lake: Lake) -> SimulatedTrials | KuaiRandTrials:
        folder = self.work / "features" / "trials"
        if data == "simulated":
            return SimulatedTrials(TrialRunner(lake, SPLIT, folder))
        days = VALIDATION_DAYS
        return KuaiRandTrials(PrequentialTrials(lake, FIRST_DAY, *days, folder), days)


def build_tables(data: DataSet, work: Path, kuairand: Path) -> Lake:
    """The tables of a data set, built once. Raises UserError if KuaiRand's folder is absent."""
    if data == "simulated":
        return bench_trials(work, SPLIT).lake
    if not kuairand.is_dir():
        raise UserError(f"{kuairand} is absent; --kuairand names KuaiRand's folder")
    return build_trials(kuairand, work / "kuairand").lake


def tables_with_counters(base: Lake, change: CounterChange, folder: Path) -> Lake:
    """The tables of a lake with changed counters, built once: those that stay valid are copied."""
    folder.mkdir(parents=True, exist_ok=True)
    spec, built = write_spec(base.spec, change, folder / "spec.yaml"), folder / "lake"
    if not built.exists():
        partial = folder / "lake.partial"
        shutil.rmtree(partial, ignore_errors=True)
        ignored = shutil.ignore_patterns("examples", *MODEL_OUTPUTS)
        shutil.copytree(base.root, partial, symlinks=True, ignore=ignored)
        missing = {"examples", *upgrade_lake(str(partial), base.spec, spec).rebuilt_tables}
        first, last = base.day_range("events")
        paths = PipelinePaths(folder / "spec.yaml", "", str(partial))
        steps = data_steps(spec, paths, ("--days", f"{first}:{last}"))
        run_steps_in_process([step for step in steps if missing & set(step.writes)])
        partial.rename(built)
    return Lake(str(built), spec)


def write_spec(base: DataSpec, change: CounterChange, path: Path) -> DataSpec:
    """Write a spec with changed counters; returns it."""
    content = base.model_dump(mode="json", exclude_unset=True)
    content["counters"] = change.apply(content["counters"])
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return load_spec(path)
