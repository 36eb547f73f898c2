"""The commands of this folder. torch is imported when a command is called."""

import os
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Annotated

import tyro
from pydantic import Field

from etl.cli import DayArgs, LakeArgs, days_argument, exclusive
from etl.errors import UserError
from etl.signature import PUBLIC
from etl.spec import DataSpec
from ranking.serve.settings import LOOPBACK_HOSTS, Limits
from ranking.student.config import DomainTraining, StudentTraining
from training.commands import SplitArgs

Port = Annotated[int, Field(ge=0, lt=65536)]
HostPattern = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\])$")]
Surface = Annotated[str, tyro.conf.arg(help="a surface of the spec that carries ads")]


class SurfaceArgs(SplitArgs, StudentTraining):
    """A surface, the days of its ranker, and how it is trained."""

    surface: Surface
    compiled: Annotated[
        bool, tyro.conf.arg(help="programs compiled for this machine, too: faster, a minute more")
    ] = False


class DomainArgs(SplitArgs, DomainTraining):
    """A domain, the days of its model, and how it is trained."""

    domain: Annotated[str, tyro.conf.arg(help="one of the spec's `domains`")]


class PromoteArgs(SplitArgs):
    """A surface, and the days on which its rankers are judged."""

    surface: Surface
    tolerance: Annotated[
        float, Field(gt=0), tyro.conf.arg(help="by how much predictions / outcomes may be off 1")
    ] = 0.1


class RollbackArgs(LakeArgs):
    """A surface; a version that was rolled back may answer again."""

    surface: Surface
    lift: Annotated[
        str | None, tyro.conf.arg(help="a version that was rolled back: it may be promoted again")
    ] = None


class ScoreArgs(DayArgs):
    """A surface, and the days to score."""

    surface: Surface


class ReplayArgs(ScoreArgs):
    """A surface, logged days, and up to when their labels may have ripened."""

    landed: Annotated[str, tyro.conf.arg(help="the newest day that has landed")]


class StoreArgs(LakeArgs):
    """Up to when the online features are made from tables."""

    landed: Annotated[str, tyro.conf.arg(help="the newest day that has landed")]


class ServeArgs(LakeArgs):
    """Where the service listens, who may reach it, and how much it takes on."""

    host: str = "127.0.0.1"
    port: Port = 8080
    allowed_hosts: Annotated[
        tuple[HostPattern, ...], tyro.conf.arg(help="names by which clients reach it")
    ] = ()
    health_host: str = "127.0.0.1"
    health_port: Annotated[Port, tyro.conf.arg(help="of /health; 0: any that is free")] = 8081
    workers: Annotated[int, Field(ge=1), tyro.conf.arg(help="processes")] = 1
    limits: Annotated[Limits, tyro.conf.arg(help="of each worker")] = Limits()
    compiled: Annotated[bool, tyro.conf.arg(help="answer with compiled programs, by torch")] = False
    clock: Annotated[
        str | None, tyro.conf.arg(help="the time to begin at, for old logs: 2026-01-11T12:00")
    ] = None


class ReportArgs(SplitArgs):
    """What the report is about."""

    raw: Annotated[str, tyro.conf.arg(help="folder of the raw logs, for the simulator's truth")]


class ExplainArgs(LakeArgs):
    """One impression."""

    impression: tyro.conf.Positional[str]


@exclusive("ranker-{surface}")
def train(args: SurfaceArgs) -> None:
    """Train a surface's student with and without GEM, calibrate it, save the ranker."""
    from ranking.train import train_ranker

    lake = args.open_lake()
    check_surface(lake.spec, args.surface)
    config = StudentTraining.model_validate(
        args.model_dump(include={*StudentTraining.model_fields})
    )
    folder = train_ranker(lake, args.surface, args.split, config, args.compiled)
    print(f"ranker of {args.surface}: {folder}")


@exclusive("domain-{domain}")
def domain(args: DomainArgs) -> None:
    """Train the model of a domain, from which the rankers of its surfaces may begin."""
    from ranking.train import train_domain

    lake = args.open_lake()
    if args.domain not in lake.spec.domains:
        known = ", ".join(lake.spec.domains) or "none, name them under `domains` of the spec"
        raise UserError(f"no domain {args.domain!r}; known: {known}")
    config = DomainTraining.model_validate(args.model_dump(include={*DomainTraining.model_fields}))
    print(f"model of {args.domain}: {train_domain(lake, args.domain, args.split, config)}")


@exclusive("ranker-{surface}")
def promote(args: PromoteArgs) -> None:
    """Let a surface's newest ranker answer, if it is better than the one that does."""
    from ranking.promote import GateConfig
    from ranking.promote import promote as judge

    lake = args.open_lake()
    check_surface(lake.spec, args.surface)
    verdict = judge(lake, args.surface, args.split, GateConfig(tolerance=args.tolerance))
    print(f"ranker of {args.surface}: {verdict}")


@exclusive("ranker-{surface}")
def rollback(args: RollbackArgs) -> None:
    """Let the ranker answer that did before; the one that did is barred until --lift names it."""
    from ranking.package.versions import current

    check_surface(args.load(), args.surface)
    pointer = current(args.lake, args.surface)
    if args.lift:
        pointer.lift(args.lift)
        print(f"ranker of {args.surface}: {args.lift} may be promoted again")
    else:
        print(f"ranker of {args.surface}: {pointer.rollback()} answers again")


@exclusive("scores-{surface}")
def score(args: ScoreArgs) -> None:
    """Write what a surface's ranker gives every candidate of some days."""
    from ranking.batch import score_days

    lake = args.open_lake()
    check_surface(lake.spec, args.surface)
    print(f"scores of {args.surface}: {score_days(lake, args.surface, args.span):,} candidates")


def replay(args: ReplayArgs) -> None:
    """Estimate what a surface's ranker would have brought on logged requests."""
    from rich.console import Console

    from ranking.replay.table import replayed

    lake = args.open_lake()
    check_surface(lake.spec, args.surface)
    landed = days_argument(args.landed, "--landed")[1]
    Console().print(replayed(lake, args.surface, args.span, landed))


def store(args: StoreArgs) -> None:
    """Make the online features of a lake's tables; a running service takes them up."""
    from etl.tables.lease import held
    from etl.tables.place import here, place
    from ranking.online.renew import renew

    last, lake = days_argument(args.landed, "--landed")[1], args.open_lake()
    root = here(place(args.lake))  # of an object store each machine has its own store
    with held(str(root), ["store"], "gemline rank store"):
        print(f"online features: {renew(lake, last)}")


def serve(args: ServeArgs) -> None:
    """Answer requests for rankings over HTTP."""
    from ranking.online.live import Live
    from ranking.serve.access import check_exposure
    from ranking.serve.run import run
    from ranking.serve.settings import Settings

    if args.compiled and find_spec("torch") is None:
        raise UserError("--compiled needs torch: pip install 'gemline[train]'")
    if args.compiled and not os.environ.get(PUBLIC):
        raise UserError(f"compiled programs are native code: set {PUBLIC} to whom you trust")
    check_exposure(args.host, args.allowed_hosts)
    live = Live(args.lake, args.load())  # what is wrong is reported here, once
    live.close()
    shift = shift_to(args.clock) if args.clock else 0
    if time.time() + shift < live.store.first_request:
        until = datetime.fromtimestamp(live.store.landed, UTC)
        raise UserError(
            f"the online features hold what had landed by {until:%Y-%m-%d %H:%M} UTC: begin with "
            "--clock at that time"
        )
    settings = Settings(
        spec=args.spec.absolute(), lake=args.lake, limits=args.limits, workers=args.workers,
        hosts=LOOPBACK_HOSTS + args.allowed_hosts, compiled=args.compiled, shift=shift,
    )  # fmt: skip
    run(settings, args.host, args.port, (args.health_host, args.health_port))


def shift_to(clock: str) -> int:
    """Seconds from now to a time; raises UserError where it is none."""
    try:
        then = datetime.fromisoformat(clock).astimezone()
    except ValueError:
        raise UserError(f"--clock {clock} is no time; write 2026-01-11T12:00") from None
    return round((then - datetime.now().astimezone()).total_seconds())


def report(args: ReportArgs) -> None:
    """Write what happened to one HTML file."""
    from ranking.report.build import build_report

    print(f"report: {build_report(args.open_lake(), args.raw, args.split)}")


def explain(args: ExplainArgs) -> None:
    """Print all that is known of one impression."""
    from ranking.explain import explain as page

    print(page(args.open_lake(), args.impression))


def check_surface(spec: DataSpec, surface: str) -> None:
    """Raises UserError unless the surface carries ads."""
    if surface not in spec.ad_surfaces:
        raise UserError(f"no ads on surface {surface!r}; known: {', '.join(spec.ad_surfaces)}")


COMMANDS = {
    "rank": {
        "train": train,
        "domain": domain,
        "promote": promote,
        "rollback": rollback,
        "score": score,
        "replay": replay,
        "store": store,
        "serve": serve,
    },
    "report": report,
    "explain": explain,
}
