"""The commands of this folder. torch is imported when a torch step is called."""

import os
import tempfile
from datetime import date
from pathlib import Path
from typing import Annotated

import tyro
import yaml
from pydantic import Field

from etl.cli import BEGAN, DayArgs, LakeArgs, days_argument, exclusive
from etl.errors import UserError, error_of_exit_code
from training.config import SpreadOptions, TrainConfig
from training.plan.command import plan
from training.split import Split

RESTARTS = 3  # of all processes, from the last checkpoint, when one is lost


class SplitArgs(LakeArgs):
    """Days to learn from, to calibrate on and to test on."""

    train: Annotated[str, tyro.conf.arg(help="first:last day to learn from")]
    test: Annotated[str, tyro.conf.arg(help="first:last day to test on")]
    calibration: Annotated[str | None, tyro.conf.arg(help="the day to calibrate on")] = None
    landed: Annotated[str, tyro.conf.arg(help="the newest day that has landed")]

    @property
    def split(self) -> Split:
        """The days, in order; raises UserError where they are not."""
        train, test = days_argument(self.train, "--train"), days_argument(self.test, "--test")
        day = self.calibration
        calibration = days_argument(day, "--calibration")[0] if day else None
        landed = days_argument(self.landed, "--landed")[0]
        between = [calibration] if calibration else []
        order = [*train, *between, *test, landed]
        if sorted(order) != order or train[1] == test[0] or calibration in {train[1], test[0]}:
            raise UserError("days must come in this order: train, calibration, test, landed")
        return Split(
            train_first=train[0],
            train_last=train[1],
            calibration=calibration,
            test_first=test[0],
            test_last=test[1],
            landed=landed,
        )


class GemArgs(DayArgs, TrainConfig):
    """How GEM is trained, and on which days."""

    processes: Annotated[int, tyro.conf.arg(help="processes on this machine, under torchrun")] = 1
    spread: SpreadOptions = SpreadOptions()


@exclusive("gem")
def gem(args: GemArgs) -> None:
    """Train GEM through some days, from the checkpoint of the day before."""
    buckets = args.load().buckets
    if not 1 <= args.processes * max(1, args.workers) <= buckets:
        raise UserError(
            f"--processes {args.processes} with --workers {args.workers}: together from 1 to "
            f"{buckets}, as many as the spec has buckets"
        )
    if args.processes > 1:
        _torchrun(args)
        return
    import torch.distributed as dist

    from training.gem import train
    from training.loop.timeline import Timeline
    from training.loop.tracking import track, tracked
    from training.parallel.processes import process_group

    lake = args.open_lake()
    chosen = args.model_dump(include=set(TrainConfig.model_fields))
    config = TrainConfig.model_validate(chosen)
    timeline = Timeline(BEGAN)
    with process_group() as (rank, _):
        timeline.spent("imports")
        scores = train(lake, args.span, config, timeline, args.spread)
        if rank == 0:
            with tracked(args.lake, "gem", chosen | {"days": args.days}):
                for step, found in enumerate(scores):
                    track(found, step)
        dist.barrier()


def _torchrun(args: GemArgs) -> None:
    """Train by several processes; those that are killed are started again from the checkpoint."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Restarted processes get a new store: in the old one are old addresses.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "gem.yaml")
        config.write_text(yaml.safe_dump(settings(args)))
        launch = [
            "--standalone",
            f"--max-restarts={RESTARTS}",
            f"--nproc-per-node={args.processes}",
        ]
        launch += ["-m", "gemline", "train", "gem", "--config", str(config)]
        try:
            run(parse_args(launch))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode
            raise error_of_exit_code(
                code,
                f"training failed with exit code {code}; the error of process {rank}, which failed "
                "first, is above. Run the same command again to go on from the last checkpoint",
            ) from None


def settings(args: GemArgs) -> dict[str, object]:
    """What each process is told, as a configuration file holds it."""
    return args.model_dump(mode="json", exclude={"processes"}, exclude_none=True)


class RebuildArgs(LakeArgs):
    """Arguments of the check of a day's batches."""

    day: Annotated[date, tyro.conf.arg(help="a day that GEM was trained until")]


def rebuild(args: RebuildArgs) -> None:
    """Rebuild the first batches of a trained day from its manifest, and compare them."""
    from training.rebuild import rebuild as step

    print(f"{step(args.open_lake(), args.day)} batches of {args.day} are as they were learned")


def baseline(args: SplitArgs) -> None:
    """Train LightGBM on the same non-sequence features, and predict the test days."""
    from training.baseline import BaselineConfig, train_baseline
    from training.predictions import evaluation_path

    predictions = train_baseline(args.open_lake(), args.split, BaselineConfig())
    predictions.write(evaluation_path(args.lake, "lightgbm"), args.split)
    print(f"baseline: {len(predictions.surface):,} test rows predicted")


def evaluate(args: SplitArgs) -> None:
    """Predict the test days by the GEM that was trained until the last training day."""
    from training.evaluate import predict_test
    from training.parallel.processes import process_group
    from training.predictions import evaluation_path

    with process_group():
        predictions = predict_test(args.open_lake(), args.split)
    predictions.write(evaluation_path(args.lake, "gem"), args.split)
    print(f"evaluate: {len(predictions.surface):,} test rows predicted")


class KnowledgeArgs(DayArgs):
    """Days, and how old a GEM tells of them."""

    stale: Annotated[int, tyro.conf.arg(help="days by which GEM is older than it could be")] = 0


@exclusive("knowledge")
def knowledge(args: KnowledgeArgs) -> None:
    """Score each day by the newest GEM that was trained before it."""
    from training.knowledge.write import write_knowledge
    from training.parallel.processes import process_group

    with process_group():
        rows = write_knowledge(args.open_lake(), args.span, args.stale)
    print(f"knowledge: {rows:,} impressions")


def health(args: DayArgs) -> None:
    """Whether GEM foretold the newest day as those before; what is strange fails."""
    from training.health import measures

    watched = measures(args.open_lake(), args.span[1])
    for measure in watched:
        print(f"{measure.name}: {' '.join(f'{value:.3g}' for value in measure.values)}")
    alarms = [measure for measure in watched if measure.alarm]
    for measure in alarms:
        print(f"ALARM: {measure.alarm}")
    stopping = [f"{measure.alarm}" for measure in alarms if measure.stops]
    if stopping:
        raise UserError(
            f"{'; '.join(stopping)}: nothing is promoted that learned from this GEM. Look at the "
            "logs of that day; `gemline rank promote` promotes nevertheless"
        )


class ForgetArgs(LakeArgs):
    """Arguments of what removes old GEMs."""

    keep_days: Annotated[
        int, Field(ge=7), tyro.conf.arg(help="days before the newest whose GEMs stay")
    ] = 30


@exclusive("gem")
def forget(args: ForgetArgs) -> None:
    """Remove the GEMs of long ago; late days and rankers need those of the last days."""
    from training.loop.checkpoint import forget_old

    gone = forget_old(args.lake, args.load().hash, args.keep_days)
    print(f"forget: {len(gone)} GEMs")


class LawcurveArgs(SplitArgs, TrainConfig):
    """Days, what all models share, and what is measured."""

    objective: Annotated[str, tyro.conf.arg(help="whose NE is measured")]
    seeds: Annotated[int, tyro.conf.arg(help="trainings of each model and size")] = 1


def lawcurve(args: LawcurveArgs) -> None:
    """NE against FLOPs of an example: GEM, plain Wukong and HSTU in six sizes (long; resumable)."""
    from training.lawcurve import lawcurve as measure
    from training.loop.loss import each
    from training.trials import Trials

    lake = args.open_lake()
    each({args.objective: 1.0}, list(lake.spec.objectives), "--objective")
    base = TrainConfig.model_validate(args.model_dump(include=set(TrainConfig.model_fields)))
    folder = Path(args.lake, "studies")
    command = (
        f"gemline train lawcurve --train {args.train} --test {args.test} "
        f"--objective {args.objective}"
    )
    study = measure(
        Trials(lake, args.split, folder / "trials"), base, args.objective, args.seeds, command
    )
    study.keep(folder / "lawcurve.json")
    study.show()
    print(f"kept in {folder / 'lawcurve.json'}; `gemline report` draws it")


COMMANDS = {
    "train": {
        "gem": gem,
        "baseline": baseline,
        "evaluate": evaluate,
        "rebuild": rebuild,
        "lawcurve": lawcurve,
        "health": health,
        "forget": forget,
        "plan": plan,
    },
    "knowledge": knowledge,
}
