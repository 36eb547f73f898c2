"""The commands of this folder."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dags.line import Place, line, newest_mature
from dags.local import run_line, run_steps
from etl.cli import DayArgs, LakeArgs, days_argument, exclusive
from etl.commands import TABLE_STEPS
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.base import Strict
from etl.tables.place import place as place_of

HOME = Path("work", "airflow")
Scale = Literal["tiny", "small", "base", "large"]


class RunArgs(DayArgs):
    """What the line runs on."""

    raw: Annotated[str, tyro.conf.arg(help="folder or URL of the raw logs")]
    scale: Annotated[Scale, tyro.conf.arg(help="size of GEM")] = "small"


class UpgradeArgs(RunArgs):
    """A changed spec, and the one that the lake has."""

    old: Annotated[Path, tyro.conf.arg(help="the spec that the tables were made under")]
    yes: Annotated[bool, tyro.conf.arg(help="do it without asking")] = False


@exclusive("run", "gem", *TABLE_STEPS)
def upgrade(args: UpgradeArgs) -> None:
    """Put a lake under a changed spec; tables that no changed key affects are kept."""
    from dags.upgrade import remember
    from etl.upgrade import plan_upgrade
    from etl.upgrade import upgrade as step

    spec, old = args.load(), load_spec(args.old)
    plan = plan_upgrade(args.lake, old, spec)
    print(f"changed keys: {', '.join(plan.changed) or 'none'}")
    print(f"kept: {', '.join(plan.kept) or 'nothing'}")
    print(f"removed, to be rebuilt: {', '.join((*plan.rebuilt, 'GEM and its knowledge'))}")
    if not args.yes:
        _confirm("Upgrade the lake?")
    step(args.lake, old, spec)
    place = Place(args.spec, args.raw, args.lake)
    steps = line(spec, place, newest_mature(spec, *args.span), ("--scale", args.scale))
    finished = remember(spec, place, steps, plan.kept)
    print(
        f"next: `gemline run` with the same arguments; it skips {', '.join(finished) or 'nothing'}"
    )


def _confirm(question: str) -> None:
    """Ask on the terminal; raises UserError unless the answer is yes."""
    if not sys.stdin.isatty():
        raise UserError("nothing was changed: add --yes to do this without being asked")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("nothing was changed")


class BatchArgs(Strict):
    """Steps of a plan that `gemline run` wrote."""

    plan: Path
    steps: tuple[str, ...]


@exclusive("run")
def run(args: RunArgs) -> None:
    """Run the whole line on some days; what finished before is skipped."""
    spec = args.load()
    place = Place(args.spec, args.raw, args.lake)
    days = newest_mature(spec, *args.span)
    print(
        f"{spec.name}: learn {days.first} to {days.train_last}, calibrate on "
        f"{days.calibration}, test on {days.test_first}; labels ripen until {days.last}",
        flush=True,
    )
    run_line(spec, place, line(spec, place, days, ("--scale", args.scale)))
    print(f"report: {place_of(args.lake, 'report.html')}")


def batch(args: BatchArgs) -> None:
    """Run some steps of a plan in this process."""
    if not args.plan.is_file():
        raise UserError(f"{args.plan}: no such plan; `gemline run` writes one")
    code = run_steps(args.plan, args.steps)
    if code:
        sys.exit(code)


class AirflowArgs(LakeArgs):
    """An Airflow of one's own."""

    raw: Annotated[str, tyro.conf.arg(help="folder or URL of the raw logs")]
    days: Annotated[
        tuple[str, ...],
        tyro.conf.arg(help="a run each, in order: 2026-01-01:2026-01-09 2026-01-10"),
    ]
    home: Annotated[Path, tyro.conf.arg(help="folder of its database and logs")] = HOME
    port: Annotated[int, tyro.conf.arg(help="of its page, on loopback")] = 8080


def airflow(args: AirflowArgs) -> None:
    """Start Airflow on this machine with the DAGs of a line, and run some days."""
    from dags.standalone import ended_runs, environment, follow, start, trigger

    spec = args.load()
    place = Place(args.spec, args.raw, args.lake)
    spans = [days_argument(days) for days in args.days]
    env = environment(place, args.home, args.port, spans[0][0])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by Ctrl-C
    running = start(env)
    address = env["AIRFLOW__API__BASE_URL"]
    try:
        before = ended_runs(address, spec.name)
        for first, last in spans:
            trigger(address, f"{spec.name}_raw", f"{first}:{last}")
        print(f"Airflow: {address} (Ctrl-C ends it)", flush=True)
        left = len(spans)
        for run in follow(address, spec.name, running, before):
            print(run, flush=True)
            left -= run.dag == f"{spec.name}_rankers"
            if run.dag == f"{spec.name}_rankers" and not left:
                report = place_of(args.lake, "report.html")
                print(f"all days are done; report: {report}", flush=True)
    except KeyboardInterrupt:
        print("ending Airflow")
    finally:
        running.stop()


COMMANDS = {"run": run, "batch": batch, "airflow": airflow, "upgrade": upgrade}
