"""`gemline bench freshness`: what a refit on the newest labels is worth, and how soon it is live.

Without `--work` the committed figures are printed. With it, on the frozen logs of `gemline bench
history`: the students of all surfaces as the gate judges them on a run of the tenth day, which have
learned labels until the fifth, and their refits until the tenth, both on impressions of the
eleventh; window mixing as in `zipper.py`; and the time that the day after takes from raw logs to
live refits. Students learn from labels only, so that no GEM is trained. Finished trainings are kept
in that folder.
"""

import time
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import BENCH_SIMULATOR, DEMO_SIMULATOR, RESULTS, BenchmarkResult
from benchmarks.pipelines import BENCH_DAYS, fresh_copy, simulated_tables
from benchmarks.studies.committed import StudyFolder, share_of, show_committed
from dags.pipeline import data_steps, latest_mature_split, split_flags, statistics_step
from dags.runner import run_pipeline
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.base import StrictModel
from etl.spec.units import DaySplit

if TYPE_CHECKING:
    from benchmarks.studies.trials import TrialRunner
    from training.evaluation.predictions import ConfidenceInterval, Predictions

FIRST_DAY, RUN_DAY, EVALUATED_DAY = (date(2026, 1, day) for day in (1, 10, 11))
DEMO_DAYS, DEMO_LAST_DAY = "2026-01-01:2026-01-10", date(2026, 1, 11)
GOALS = {
    "label_to_ranker_minutes": "<= 60",
    "hourly_equals_daily": "true",
    "refit_click_ne_gain": "> 0",
    "ri_auc_zipper": ">= 0.8",
    "zipper_bias": "<= 0.01",
}
RESULT = RESULTS / "freshness.json"
GATED, REFIT = "at the gate", "refit"


class FreshnessArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    seeds: int = Field(default=3, ge=1)
    share: Annotated[
        str, tyro.conf.arg(help="run only part k of n of the trainings, and no comparison: k/n")
    ] = "1/1"
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_freshness(args: FreshnessArgs) -> None:
    """NE of live rankers with and without refits, and minutes from logs to live refits."""
    if args.work is None:
        show_committed("Freshness", GOALS, RESULT, args.as_json)
        return
    from benchmarks.studies.zipper import KINDS, RUN_DAYS, ZipperTrials, add_zipper_rows
    from training.evaluation.predictions import paired_ne_difference

    trials, zipper = FreshnessTrials.of(args.work), ZipperTrials.of(args.work / "zipper")
    for seed in share_of(range(args.seeds), args.share):
        trials.predictions(REFIT, seed)
    zipper_runs = product(KINDS, RUN_DAYS, range(args.seeds))
    for run in share_of(zipper_runs, args.share):
        zipper.predictions(*run)
    if args.share != "1/1":
        return
    models = {
        name: [trials.predictions(name, seed) for seed in range(args.seeds)]
        for name in (GATED, REFIT)
    }
    result = BenchmarkResult(
        f"Rankers on {EVALUATED_DAY}, all surfaces, labels only, {args.seeds} seeds",
        ("ranker", "labels until", "objective", "NE", "predictions / outcomes",
         "NE less that at the gate, 1e-4 [95 %]"),
    )  # fmt: skip
    for objective in trials.runner.lake.spec.objectives:
        difference = paired_ne_difference(models[REFIT], models[GATED], objective)
        add_rows(result, trials.split, objective, models, difference)
        result.record(f"refit_{objective}_ne_gain", -difference.value, "labels of one class")
        result.record(f"refit_{objective}_ne_gain_low", -difference.high, "labels of one class")
    add_zipper_rows(result, zipper, args.seeds)
    record_last_day_of_demo(result, args.work / "last-day")
    result.show(args.as_json)
    command = f"gemline bench freshness --work work/bench --seeds {args.seeds}"
    result.save_study(RESULT, command)


def add_rows(
    result: BenchmarkResult,
    split: DaySplit,
    objective: str,
    models: "dict[str, list[Predictions]]",
    difference: "ConfidenceInterval",
) -> None:
    """A row for each model."""
    from statistics import mean

    from benchmarks.harness import format_mean_std
    from training.evaluation.metrics import ne_by_objective
    from training.evaluation.predictions import calibration_interval

    for name, by_seed in models.items():
        ne = [ne_by_objective(predictions)[objective] for predictions in by_seed]
        ratio = mean(calibration_interval(predictions, objective).value for predictions in by_seed)
        until = split.train_last if name == GATED else RUN_DAY
        gain = "" if name == GATED else str(difference)
        result.rows.append((name, str(until), objective, format_mean_std(ne), f"{ratio:.3f}", gain))


@dataclass(frozen=True)
class FreshnessTrials:
    """Students at the gate of a run of RUN_DAY and their refits, and their predictions."""

    runner: "TrialRunner"
    split: DaySplit

    @classmethod
    def of(cls, work: Path) -> "FreshnessTrials":
        """Trials on the frozen logs; predictions of finished ones are kept in `work`."""
        from benchmarks.studies.trials import TrialRunner
        from etl.tables.lake import Lake

        paths = simulated_tables(work, BENCH_SIMULATOR, BENCH_DAYS)
        spec = load_spec(paths.spec)
        split = latest_mature_split(spec, FIRST_DAY, RUN_DAY)
        tested = split.model_copy(
            update={
                "test_first": EVALUATED_DAY,
                "test_last": EVALUATED_DAY,
                "data_until": EVALUATED_DAY + timedelta(days=spec.label_maturity_days),
            }
        )
        runner = TrialRunner(Lake(paths.lake, spec), tested, work.resolve() / "freshness")
        return cls(runner, split)

    def predictions(self, name: str, seed: int) -> "Predictions":
        """Calibrated predictions of EVALUATED_DAY of all surfaces, sorted by impression."""
        from benchmarks.studies.refit_predictions import labels_only
        from benchmarks.studies.trials import trial_path
        from training.data.reader import INPUT_TABLES
        from training.evaluation.predictions import Predictions, concat_predictions

        runner, config = self.runner, labels_only(seed).model_dump_json()
        paths = {
            kind: trial_path(
                runner.folder, runner.lake, INPUT_TABLES, runner.split, f"{kind} {config}"
            )
            for kind in (GATED, REFIT)
        }
        if not all(path.is_file() for path in paths.values()):
            by_surface = [self._train(surface, seed) for surface in runner.lake.spec.ad_surfaces]
            for kind, path in paths.items():
                merged = concat_predictions([found[kind] for found in by_surface])
                merged.sorted_by_impression().write(path, runner.split)
        return Predictions.read(paths[name], runner.split)

    def _train(self, surface: str, seed: int) -> "dict[str, Predictions]":
        """Train and calibrate the student of a surface, and its refit; predictions of both."""
        from benchmarks.studies.refit_predictions import labels_only
        from ranking.trainer.calibrate import fit_calibration
        from ranking.trainer.continuation import continue_until
        from ranking.trainer.train import predict_test_days, train_on_surfaces

        lake, tested, split = self.runner.lake, self.runner.split, self.split
        trainer = train_on_surfaces(lake, (surface,), split, labels_only(seed))
        calibration = fit_calibration(lake, split, trainer, {})
        snapshot = trainer.snapshot(split.train_first, lake.spec.day_end(split.train_last))
        reader = trainer.student.input_builder.reader
        refit = continue_until(reader, snapshot, calibration, lake.spec.day_end(RUN_DAY))
        return {
            name: predict_test_days(lake, tested, model.averaged).calibrated(fitted).predictions
            for name, model, fitted in (
                (GATED, trainer, calibration),
                (REFIT, refit.trainer, refit.calibration),
            )
        }


def record_last_day_of_demo(result: BenchmarkResult, work: Path) -> None:
    """Minutes from the raw logs of the demo's last day to live refits of all its rankers.

    Once in a daily run, and once in refreshes while the day lasts, each in a copy of the lake that
    `work` keeps. The tables of the days before and a live ranker of each surface exist.
    """
    from benchmarks.studies.hourly_runs import HourlyRuns
    from gemline import main

    days_before = simulated_tables(work, DEMO_SIMULATOR, DEMO_DAYS)
    paths = fresh_copy(days_before, work.resolve() / "daily")
    spec, last = load_spec(paths.spec), str(DEMO_LAST_DAY)
    before = latest_mature_split(spec, FIRST_DAY, DEMO_LAST_DAY - timedelta(days=1))

    def run(subcommand: str, surface: str, *flags: str) -> None:
        if main(["rank", subcommand, *paths.cli_flags, "--surface", surface, *flags]):
            raise UserError(f"rank {subcommand} of {surface} failed; the reason is above")

    for surface in spec.ad_surfaces:
        run("train", surface, *split_flags(before), "--distillation.kind", "none")
        run("promote", surface, *split_flags(before))
    hourly = HourlyRuns.copy_of(paths, DEMO_LAST_DAY, work / "hourly")
    start = time.perf_counter()
    run_pipeline(spec, paths, data_steps(spec, paths, ("--days", last)))
    for surface in spec.ad_surfaces:
        run("refit", surface, "--data-until", last)
    result.record("label_to_ranker_minutes", (time.perf_counter() - start) / 60, "")
    run_pipeline(spec, paths, [statistics_step(paths, ("--days", last))])
    minutes = hourly.refresh_all(Path(paths.raw))
    result.record("refresh_minutes", max(minutes), "")
    result.record("event_to_ranker_minutes_hourly", 60 + max(minutes), "")
    different = hourly.different_tables(paths.lake)
    result.figures["hourly_equals_daily"] = not different
    if different:
        result.figures["hourly_equals_daily_reason"] = f"different: {', '.join(different)}"
