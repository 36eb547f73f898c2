"""The data sets of the ablation: simulated logs of the demo's size, and the slice of KuaiRand."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from benchmarks.harness import BENCH_SIMULATOR, DEMO_SIMULATOR, SIMULATOR_SPEC
from benchmarks.pipelines import BENCH_DAYS, DEMO_DAYS, simulated_tables
from benchmarks.studies.kuairand_quality import (
    FIRST_PREDICTED_DAY,
    FIRST_TEST_DAY,
    LAST_DAY,
    build_trials,
)
from benchmarks.studies.model_changes import DataSet
from benchmarks.studies.prequential import PrequentialTrials, pooled
from benchmarks.studies.trials import TrialRunner
from dags.pipeline import latest_mature_split
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.units import DayRange, DaySplit, parse_date_range
from etl.tables.lake import Lake
from training.baseline import BaselineConfig
from training.config import TrainConfig
from training.evaluation.predictions import Predictions

TEST_DAYS = 3
TEST_DAYS_OF_KUAIRAND = FIRST_TEST_DAY, LAST_DAY
VALIDATION_DAYS = FIRST_PREDICTED_DAY, FIRST_TEST_DAY - timedelta(days=1)


@dataclass(frozen=True)
class SimulatedTrials:
    """Trainings on the demo's days but the last ones, which test."""

    runner: TrialRunner

    def gem(self, config: TrainConfig) -> Predictions:
        """Predictions of a GEM on the test days, sorted by impression."""
        return self.runner.gem_all_surfaces(config)

    def lightgbm(self) -> Predictions:
        """Predictions of LightGBM on the same rows."""
        return self.runner.lightgbm(BaselineConfig()).sorted_by_impression()

    def gem_per_surface(self, config: TrainConfig) -> Predictions:
        """Predictions of a GEM for each surface."""
        return self.runner.gem_per_surface(config)

    def trained_at(self) -> set[str]:
        """Dates and commits of the GEMs whose predictions were read."""
        return self.runner.trained_at


@dataclass(frozen=True)
class KuaiRandTrials:
    """Trainings that predict each day from models of all days before; some days are reported."""

    trials: PrequentialTrials
    days: DayRange

    def gem(self, config: TrainConfig) -> Predictions:
        """Predictions of a GEM on the reported days."""
        return pooled(self.trials.gem(config), *self.days)

    def lightgbm(self) -> Predictions:
        """Predictions of LightGBM on the same rows."""
        configs = dict.fromkeys(self.trials.lake.spec.objectives, BaselineConfig())
        return pooled(self.trials.lightgbm(configs), *self.days)

    def gem_per_surface(self, config: TrainConfig) -> None:
        """None: most of the 15 tabs have too few rows."""

    def trained_at(self) -> set[str]:
        """Dates and commits of the models whose predictions were read."""
        return self.trials.trained_at


def ablation_trials(
    data: DataSet, work: Path, kuairand: Path, days: DayRange = TEST_DAYS_OF_KUAIRAND
) -> SimulatedTrials | KuaiRandTrials:
    """The trainings on a data set, whose tables are built once; `days` of KuaiRand are reported.

    Raises UserError if KuaiRand's folder is absent.
    """
    if data == "simulated":
        return SimulatedTrials(demo_trials(work))
    if not kuairand.is_dir():
        raise UserError(f"{kuairand} is absent; --kuairand names KuaiRand's folder")
    return KuaiRandTrials(build_trials(kuairand, work / "kuairand"), days)


def demo_trials(work: Path) -> TrialRunner:
    """Trainings on simulated logs of the demo's size, tested on the last TEST_DAYS."""
    days = latest_mature_split(load_spec(SIMULATOR_SPEC), *parse_date_range(DEMO_DAYS))
    split = DaySplit(
        train_first=days.train_first,
        train_last=days.test_last - timedelta(days=TEST_DAYS),
        calibration=None,
        test_first=days.test_last - timedelta(days=TEST_DAYS - 1),
        test_last=days.test_last,
        data_until=days.data_until,
    )
    return simulated_trials(work, DEMO_SIMULATOR, DEMO_DAYS, split)


def bench_trials(work: Path, split: DaySplit) -> TrialRunner:
    """Trainings on the frozen logs of `gemline bench history`, of two million events."""
    return simulated_trials(work, BENCH_SIMULATOR, BENCH_DAYS, split)


def simulated_trials(work: Path, simulator: Path, days: str, split: DaySplit) -> TrialRunner:
    """Simulated logs and their tables, built once in `work`, and trainings on days of them."""
    paths = simulated_tables(work, simulator, days)
    lake = Lake(paths.lake, load_spec(SIMULATOR_SPEC))
    return TrialRunner(lake, split, work.resolve() / "trials")
