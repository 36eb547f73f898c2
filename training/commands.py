"""The commands `gemline train …` and `gemline teacher-predictions`.

torch is imported by the commands that need it, not by this module.
"""

import os
import tempfile
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

import tyro
import yaml
from pydantic import Field

from etl.cli.runner import (
    PROCESS_START,
    DayArgs,
    LakeArgs,
    holds_leases,
    parse_day_argument,
    parse_days_argument,
)
from etl.errors import UserError, error_from_exit_code
from etl.spec.units import DaySplit
from training.config import ParallelismConfig, TrainConfig
from training.plan.command import plan

MAX_RESTARTS = 3  # restarts of all processes from the last checkpoint


class SplitArgs(LakeArgs):
    """Days to train, to calibrate and to test on."""

    train: Annotated[str, tyro.conf.arg(help="days to train on, first:last")]
    test: Annotated[str, tyro.conf.arg(help="days to test on, first:last")]
    calibration: Annotated[str | None, tyro.conf.arg(help="the day to calibrate on")] = None
    data_until: Annotated[
        str, tyro.conf.arg(help="the latest day with complete data; labels are final up to its end")
    ]

    @property
    def split(self) -> DaySplit:
        """The days; raises UserError if they overlap or are not in order."""
        train_first, train_last = parse_days_argument(self.train, "--train")
        test_first, test_last = parse_days_argument(self.test, "--test")
        data_until = parse_day_argument(self.data_until, "--data-until")
        calibration = None
        if self.calibration:
            calibration = parse_day_argument(self.calibration, "--calibration")
        between = [calibration] if calibration else []
        order = [train_first, train_last, *between, test_first, test_last, data_until]
        overlap = train_last == test_first or calibration in {train_last, test_first}
        if sorted(order) != order or overlap:
            raise UserError(
                "the days must not overlap, and be in this order: --train, --calibration, --test, "
                "--data-until"
            )
        return DaySplit(
            train_first=train_first,
            train_last=train_last,
            calibration=calibration,
            test_first=test_first,
            test_last=test_last,
            data_until=data_until,
        )


class GemArgs(DayArgs, TrainConfig):
    """Days to train GEM on, and the configuration of training."""

    processes: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="processes on this machine, started by torchrun")
    ] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        tyro.conf.arg(help="what to train on; auto: CUDA where it can be used"),
    ] = "auto"
    parallelism: ParallelismConfig = ParallelismConfig()


@holds_leases("gem")
def gem(args: GemArgs) -> None:
    """Train GEM on some days, starting from the checkpoint of the day before.

    With --teacher.seeds or --teacher.blend, further models of the teacher are trained after it.
    """
    buckets = args.load_spec().buckets
    processes = max(args.processes, int(os.environ.get("WORLD_SIZE", "1")))  # that of torchrun
    readers = processes * max(1, args.workers)
    if not 1 <= readers <= buckets:
        raise UserError(
            f"{processes} processes times --workers {args.workers}: must be between 1 and "
            f"{buckets}, the spec's number of buckets, because each process reads separate buckets"
        )
    if args.processes > 1:
        _torchrun(args)
        return
    import torch.distributed as dist

    from training.distributed.device import resolve_device
    from training.distributed.process_group import process_group
    from training.teacher.ensemble import train_teacher, train_teacher_trees
    from training.trainer.throughput import Timeline
    from training.trainer.tracking import log_metrics, mlflow_run

    lake = args.open_lake()
    settings = args.model_dump(include=set(TrainConfig.model_fields))
    config = TrainConfig.model_validate(settings)
    timeline = Timeline(PROCESS_START)
    with process_group(device=resolve_device(args.device)) as (rank, _):
        timeline.record("imports")
        metrics_by_day = train_teacher(lake, args.day_range, config, timeline, args.parallelism)
        if rank == 0:
            with mlflow_run(args.lake, "gem", settings | {"days": args.days}):
                for step, metrics in enumerate(metrics_by_day):
                    log_metrics(metrics, step)
        dist.barrier()
    if rank == 0:
        train_teacher_trees(lake, args.day_range, config)


def _torchrun(args: GemArgs) -> None:
    """Train with several processes; after one is killed, all restart from the checkpoint."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # A restart uses a new store: the old one holds addresses of processes that are gone.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "gem.yaml")
        config.write_text(yaml.safe_dump(worker_settings(args)))
        command = [
            "--standalone",
            f"--max-restarts={MAX_RESTARTS}",
            f"--nproc-per-node={args.processes}",
            *("-m", "gemline", "train", "gem", "--config", str(config)),
        ]
        try:
            run(parse_args(command))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode
            raise error_from_exit_code(
                code,
                f"training failed with exit code {code}; the error of process {rank}, which failed "
                "first, is above. Run the same command again to resume from the last checkpoint",
            ) from None


def worker_settings(args: GemArgs) -> dict[str, object]:
    """The arguments of each training process that are not defaults, for a configuration file."""
    return args.model_dump(mode="json", exclude={"processes"}, exclude_defaults=True)


class UpgradeGemArgs(LakeArgs):
    """The lake of a GEM, with the spec that GEM is to have, and the size of its item table."""

    item_table_rows: Annotated[
        int | None, tyro.conf.arg(help="rows of a larger item table; by default as before")
    ] = None


@holds_leases("gem")
def upgrade(args: UpgradeGemArgs) -> None:
    """Carry the latest GEM over to a changed spec, or to a larger item table."""
    from training.distributed.process_group import process_group
    from training.trainer.upgrade import upgrade_teacher

    with process_group():
        print(*upgrade_teacher(args.open_lake(), args.item_table_rows), sep="\n")


class VerifyBatchesArgs(LakeArgs):
    """A day whose batches are verified."""

    day: Annotated[date, tyro.conf.arg(help="the last day that a GEM was trained on")]


def verify_batches(args: VerifyBatchesArgs) -> None:
    """Rebuild the first batches of a trained day from its manifest, and compare their digests."""
    from training.trainer import resume

    count = resume.verify_batches(args.open_lake(), args.day)
    print(f"{count} batches of {args.day} are identical to those GEM was trained on")


@holds_leases("baseline")
def baseline(args: SplitArgs) -> None:
    """Train LightGBM on the features without sequences, and predict the test days."""
    from training.baseline import BaselineConfig, train_baseline
    from training.evaluation.predictions import evaluation_path

    predictions = train_baseline(args.open_lake(), args.split, BaselineConfig())
    predictions.write(evaluation_path(args.lake, "lightgbm"), args.split)
    print(f"baseline: predicted {len(predictions.surface):,} impressions of the test days")


@holds_leases("evaluate")
def evaluate(args: SplitArgs) -> None:
    """Predict the test days with the GEM that was trained until the last training day."""
    from training.distributed.process_group import process_group
    from training.evaluation.predictions import evaluation_path
    from training.trainer.trainer import predict_test

    with process_group():
        predictions = predict_test(args.open_lake(), args.split)
    predictions.write(evaluation_path(args.lake, "gem"), args.split)
    print(f"evaluate: predicted {len(predictions.surface):,} impressions of the test days")


class ImportanceArgs(SplitArgs):
    """The split whose test days are predicted, and how many impressions of them."""

    rows: Annotated[int, Field(ge=1), tyro.conf.arg(help="number of impressions to predict")] = (
        10_000
    )


def importance(args: ImportanceArgs) -> None:
    """Measure how much worse GEM predicts the test days without each unit of features."""
    from training.data.batch import Shuffle
    from training.distributed.process_group import process_group
    from training.evaluation.importance import MIN_LABELS, measure_importances, take_rows
    from training.trainer.trainer import load_for_test

    lake, split = args.open_lake(), args.split
    with process_group():
        # Consecutive rows are of one user, whose attributes a permutation would hardly change.
        logits, all_batches = load_for_test(lake, split, Shuffle(0))
        batches = take_rows(all_batches, args.rows)
        if not batches:
            raise UserError(f"{split.test_first} to {split.test_last} have no final labels yet")
        study = measure_importances(lake.spec, logits, batches, split.train_last)
    study.save(args.lake)
    print(f"increase of NE without each unit, 1e-4 [95 %], on {study.num_rows:,} impressions:")
    for found in study.importances:
        print(f"{found.objective}: {found}")
    measured = {found.objective for found in study.importances}
    for objective in lake.spec.objectives:
        if objective not in measured:
            print(f"{objective}: fewer than {MIN_LABELS} positive or negative labels; raise --rows")


class TeacherPredictionsArgs(DayArgs):
    """Days to score, and the age of the GEM that scores them."""

    teacher_lag_days: Annotated[
        int,
        Field(ge=0),
        tyro.conf.arg(help="days by which the GEM of a day is older than necessary"),
    ] = 0


@holds_leases("teacher_predictions")
def teacher_predictions(args: TeacherPredictionsArgs) -> None:
    """Score each day with the latest GEM that was trained before it."""
    from training.distributed.process_group import process_group
    from training.teacher.outputs import write_teacher_outputs

    with process_group():
        rows = write_teacher_outputs(args.open_lake(), args.day_range, args.teacher_lag_days)
    print(f"teacher-predictions: scored {rows:,} impressions")


def check_drift(args: DayArgs) -> None:
    """Compare the latest day's prequential metrics with earlier days; exit 2 on drift."""
    from training.evaluation.drift import drift_metrics

    metrics = drift_metrics(args.open_lake(), args.day_range[1])
    for metric in metrics:
        print(f"{metric.name}: {' '.join(f'{value:.3g}' for value in metric.values)}")
    for metric in metrics:
        if metric.alarm:
            print(f"ALARM: {metric.alarm}")
    blocking = [metric.alarm for metric in metrics if metric.alarm and metric.blocks_promotion]
    if blocking:
        raise UserError(
            f"{'; '.join(blocking)}: promotion of rankers that learned from this GEM is blocked. "
            "Check the logs of that day; `gemline rank promote` promotes a ranker anyway"
        )


class ProbeArgs(LakeArgs):
    """The GEM whose probes are read, and the rows of which recipes are timed on a GPU."""

    day: Annotated[date, tyro.conf.arg(help="the last day that the GEM was trained on")]
    rows: Annotated[
        int | None,
        Field(ge=1),
        tyro.conf.arg(
            help="rows of the timed products; by default those of each layer in the probed steps"
        ),
    ] = None


@holds_leases("gem")
def probe(args: ProbeArgs) -> None:
    """Choose how each linear layer is computed with --compute.precision fp8, and say why."""
    from rich.console import Console

    from training.distributed.process_group import process_group
    from training.trainer.probing import choices_table, choose_precision

    lake = args.open_lake()
    with process_group():
        choices, chosen = choose_precision(lake, args.day, args.rows)
    chosen.save(args.lake)
    Console(width=160).print(choices_table(choices))
    print(
        f"probe: {chosen.fp8_share:.0%} of the products in FP8, chosen by {chosen.chosen_by}"
        + (f" on {chosen.device}" if chosen.device else ": no GPU, so no speeds")
    )


class CleanArgs(LakeArgs):
    """Which checkpoints to keep."""

    keep_days: Annotated[
        int,
        Field(ge=7),
        tyro.conf.arg(help="days whose checkpoints are kept; more where labels mature later"),
    ] = 30


@holds_leases("gem")
def clean(args: CleanArgs) -> None:
    """Remove old GEM checkpoints; those of recent days are needed by late data and rankers."""
    from training.teacher.ensemble import remove_old_models

    removed = remove_old_models(args.open_lake(), args.keep_days)
    print(f"clean: removed {len(removed)} checkpoints")


COMMANDS = {
    "train": {
        "gem": gem,
        "baseline": baseline,
        "evaluate": evaluate,
        "importance": importance,
        "upgrade": upgrade,
        "verify-batches": verify_batches,
        "check-drift": check_drift,
        "clean": clean,
        "probe": probe,
        "plan": plan,
    },
    "teacher-predictions": teacher_predictions,
}
