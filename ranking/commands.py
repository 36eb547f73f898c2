"""Commands `gemline rank ...`, `report` and `explain`. torch is imported when one is called."""

import time
from importlib.util import find_spec
from typing import Annotated

import tyro
from pydantic import Field

from etl.cli.runner import (
    DataUntilTime,
    DayArgs,
    LakeArgs,
    format_data_until,
    holds_leases,
    parse_data_until,
    parse_day_argument,
)
from etl.errors import UserError
from etl.event_time import format_utc
from ranking.feature_store.command import check_consistency, materialize
from ranking.portfolio.command import portfolio
from ranking.serving.settings import LOOPBACK_HOSTS, HostPattern, ServiceLimits
from ranking.student.config import DomainTrainConfig, StudentTrainConfig
from training.commands import SplitArgs

Port = Annotated[int, Field(ge=0, lt=65536)]
SurfaceName = Annotated[str, tyro.conf.arg(help="a surface of the spec with ads")]
DataUntil = Annotated[str, tyro.conf.arg(help="the latest day whose data has landed")]


class TrainRankerArgs(SplitArgs, StudentTrainConfig):
    """Train the ranker of a surface, and compare it with one without GEM on the test days."""

    surface: SurfaceName
    compiled: Annotated[
        bool,
        tyro.conf.arg(
            help="also compile programs for this kind of machine: faster; takes a minute"
        ),
    ] = False


class TrainDomainArgs(SplitArgs, DomainTrainConfig):
    """Train the model of a domain: a student of several surfaces that their rankers start from."""

    domain: Annotated[str, tyro.conf.arg(help="a name under `domains` of the spec")]


class PromoteArgs(SplitArgs):
    """Evaluate a surface's latest ranker on the test days, and make it live if it passes."""

    surface: SurfaceName
    tolerance: Annotated[
        float, Field(gt=0), tyro.conf.arg(help="maximum deviation of predictions / outcomes from 1")
    ] = 0.1
    segment_tolerance: Annotated[
        float,
        Field(gt=0),
        tyro.conf.arg(
            help="maximum cumulative calibration error / outcomes in a segment, where it is beyond "
            "noise"
        ),
    ] = 0.25


class RefitArgs(LakeArgs):
    """Continue the training of a surface's live ranker on all labels that are final."""

    surface: SurfaceName
    data_until: DataUntilTime


class CalibrateArgs(LakeArgs):
    """Refresh the calibration offsets of a surface's live ranker on labels that became final."""

    surface: SurfaceName
    data_until: DataUntilTime


class RollbackArgs(LakeArgs):
    """Roll back to the previous version of a ranker, or unblock one that was rolled back."""

    surface: SurfaceName
    unblock: Annotated[
        str | None,
        tyro.conf.arg(help="allow this version, which was rolled back, to be promoted again"),
    ] = None


class ScoreArgs(DayArgs):
    """Score all candidates of some days with the live ranker of a surface."""

    surface: SurfaceName


class OffPolicyArgs(ScoreArgs):
    """Estimate the value of the live ranker of a surface from logged requests."""

    data_until: DataUntil


class ServeArgs(LakeArgs):
    """Serve rankings over HTTP, from live rankers and the online feature store."""

    host: Annotated[str, tyro.conf.arg(help="address to listen on")] = "127.0.0.1"
    port: Annotated[Port, tyro.conf.arg(help="port to listen on")] = 8080
    allowed_hosts: Annotated[
        tuple[HostPattern, ...],
        tyro.conf.arg(help="host names that clients may use, in addition to those of this machine"),
    ] = ()
    health_host: Annotated[str, tyro.conf.arg(help="address of /health")] = "127.0.0.1"
    health_port: Annotated[Port, tyro.conf.arg(help="port of /health; 0 for any free one")] = 8081
    workers: Annotated[int, Field(ge=1), tyro.conf.arg(help="worker processes")] = 1
    limits: Annotated[ServiceLimits, tyro.conf.arg(help="limits of each worker")] = ServiceLimits()
    compiled: Annotated[
        bool, tyro.conf.arg(help="run compiled programs where a ranker has them; needs torch")
    ] = False
    start_time: Annotated[
        str | None,
        tyro.conf.arg(
            help="start the service's clock at this time, for old logs: 2026-01-11T12:00, in the "
            "spec's time zone"
        ),
    ] = None


class ReportArgs(SplitArgs):
    """Write a report on tables and models."""

    raw: Annotated[
        str,
        tyro.conf.arg(
            help="folder of the raw logs, which has the true probabilities of simulated ones"
        ),
    ]


class ExplainArgs(LakeArgs):
    """Print one impression, with its features at that time and its predictions."""

    impression_id: tyro.conf.Positional[str]


@holds_leases("ranker-{surface}")
def train(args: TrainRankerArgs) -> None:
    """Train a surface's ranker with and without GEM, calibrate it, and save it."""
    from ranking.trainer.train import train_ranker

    lake = args.open_lake()
    lake.spec.require_ad_surface(args.surface)
    config = StudentTrainConfig.model_validate(
        args.model_dump(include={*StudentTrainConfig.model_fields})
    )
    folder = train_ranker(lake, args.surface, args.split, config, args.compiled)
    print(f"ranker of {args.surface}: {folder}")


@holds_leases("domain-{domain}")
def train_domain_model(args: TrainDomainArgs) -> None:
    """Train the model of a domain, from which the rankers of its surfaces may start."""
    from ranking.trainer.train import train_domain

    lake = args.open_lake()
    if args.domain not in lake.spec.domains:
        known = ", ".join(lake.spec.domains) or "none; add it under `domains` of the spec"
        raise UserError(f"no domain {args.domain!r}; known: {known}")
    config = DomainTrainConfig.model_validate(
        args.model_dump(include={*DomainTrainConfig.model_fields})
    )
    print(f"model of {args.domain}: {train_domain(lake, args.domain, args.split, config)}")


@holds_leases("ranker-{surface}")
def promote(args: PromoteArgs) -> None:
    """Make a surface's latest ranker live if it is calibrated and better than the live one."""
    from ranking.registry.promotion import PromotionConfig
    from ranking.registry.tracking import register_decision
    from ranking.trainer.promote import promote_if_better

    lake = args.open_lake()
    lake.spec.require_ad_surface(args.surface)
    config = PromotionConfig(tolerance=args.tolerance, segment_tolerance=args.segment_tolerance)
    decision = promote_if_better(lake, args.surface, args.split, config)
    register_decision(lake, args.surface)
    print(f"ranker of {args.surface}: {decision}")


@holds_leases("ranker-{surface}")
def refit(args: RefitArgs) -> None:
    """Train the live ranker further on all labels that are final, and make the result live."""
    from ranking.registry.records import read_refit_record
    from ranking.trainer.refit import blocked_refit, refit_live_ranker

    lake = args.open_lake()
    lake.spec.require_ad_surface(args.surface)
    data_until = parse_data_until(lake.spec, args.data_until)
    if blocked := blocked_refit(lake.root, args.surface):
        print(
            f"ranker of {args.surface}: not refit, because its refit {blocked} was rolled back: "
            f"run `gemline rank rollback --surface {args.surface} --unblock {blocked}`, or promote "
            f"a new ranker; if the newest labels are correct, `gemline rank calibrate --surface "
            f"{args.surface}` refreshes the calibration of the live one"
        )
        return
    folder = refit_live_ranker(lake, args.surface, data_until)
    record = read_refit_record(lake.root, args.surface)
    assert record is not None
    newest = ", ".join(f"{name} {time}" for name, time in record.newest_label_times.items())
    print(f"ranker of {args.surface}: {folder.name} is live; newest labels: {newest} UTC")


@holds_leases("ranker-{surface}")
def calibrate(args: CalibrateArgs) -> None:
    """Refresh the calibration offsets of the live ranker on labels that it has not learned."""
    from ranking.trainer.calibrate import refresh_live_calibration

    lake = args.open_lake()
    lake.spec.require_ad_surface(args.surface)
    data_until = parse_data_until(lake.spec, args.data_until)
    offsets = refresh_live_calibration(lake, args.surface, data_until)
    until = format_utc(offsets.labels_until)
    print(f"calibration of {offsets.version}: offsets from labels final by {until} UTC")


@holds_leases("live-{surface}")
def rollback(args: RollbackArgs) -> None:
    """Roll back to the previous ranker version and block the live one until it is unblocked."""
    from ranking.registry.ranker import live_pointer

    args.load_spec().require_ad_surface(args.surface)
    pointer = live_pointer(args.lake, args.surface)
    if args.unblock:
        pointer.unblock(args.unblock)
        print(f"ranker of {args.surface}: {args.unblock} may be promoted again")
    else:
        print(f"ranker of {args.surface}: {pointer.rollback()} is live again")


@holds_leases("scores-{surface}")
def score(args: ScoreArgs) -> None:
    """Score all candidates of some days with a surface's live ranker, to table `scores`."""
    from ranking.scoring.batch import score_days

    lake = args.open_lake()
    lake.spec.require_ad_surface(args.surface)
    num_candidates = score_days(lake, args.surface, args.day_range)
    print(f"scores of {args.surface}: {num_candidates:,} candidates")


def off_policy(args: OffPolicyArgs) -> None:
    """Estimate the value of a surface's ranker from logged requests (off-policy evaluation)."""
    from rich.console import Console

    from ranking.off_policy.evaluation import evaluate_policy

    lake = args.open_lake()
    lake.spec.require_ad_surface(args.surface)
    data_until = parse_day_argument(args.data_until, "--data-until")
    Console().print(evaluate_policy(lake, args.surface, args.day_range, data_until))


def serve(args: ServeArgs) -> None:
    """Serve rankings over HTTP."""
    from ranking.feature_store.wal import FeatureStoreHandle
    from ranking.registry.manifest import require_trusted_key
    from ranking.serving.auth import validate_exposure
    from ranking.serving.server import run_server
    from ranking.serving.settings import Settings, clock_offset_seconds

    if args.compiled and find_spec("torch") is None:
        raise UserError("--compiled needs torch: pip install 'gemline[train]'")
    if args.compiled:
        require_trusted_key()
    validate_exposure(args.host, args.allowed_hosts)
    spec = args.load_spec()
    features = FeatureStoreHandle(args.lake, spec)  # fails here, not in every worker
    features.close()
    clock_offset = clock_offset_seconds(spec, args.start_time) if args.start_time else 0
    if time.time() + clock_offset < features.store.earliest_request:
        data_until = format_data_until(features.store.data_until)
        raise UserError(
            "the service's clock is before its online features: set --start-time to the end of "
            f"their data, {data_until}, or later"
        )
    settings = Settings(
        spec=args.spec.absolute(),
        lake=args.lake,
        limits=args.limits,
        workers=args.workers,
        allowed_hosts=LOOPBACK_HOSTS + args.allowed_hosts,
        use_compiled=args.compiled,
        clock_offset_seconds=clock_offset,
    )
    run_server(settings, args.host, args.port, (args.health_host, args.health_port))


@holds_leases("report")
def report(args: ReportArgs) -> None:
    """Write a report on tables and models as one HTML file."""
    from ranking.report.build import build_report

    print(f"report: {build_report(args.open_lake(), args.raw, args.split)}")


def explain(args: ExplainArgs) -> None:
    """Print one impression: its record, labels, features, history, and predictions."""
    from ranking.explain import explain_impression

    print(explain_impression(args.open_lake(), args.impression_id))


COMMANDS = {
    "rank": {
        "train": train,
        "train-domain": train_domain_model,
        "promote": promote,
        "refit": refit,
        "calibrate": calibrate,
        "rollback": rollback,
        "score": score,
        "off-policy": off_policy,
        "materialize": materialize,
        "check-consistency": check_consistency,
        "portfolio": portfolio,
        "serve": serve,
    },
    "report": report,
    "explain": explain,
}
