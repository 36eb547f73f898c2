"""The commands `gemline run`, `refresh`, `batch`, `manifests`, `upgrade` and `airflow`."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import Field

from dags.pipeline import GEM_MODEL_DIR, latest_mature_split, pipeline_steps
from dags.runner import carry_over_step_states, pending_steps, run_pipeline, run_steps
from dags.steps import PipelinePaths, split_flags
from etl.cli.runner import DayArgs, LakeArgs, holds_leases, parse_data_until, parse_days_argument
from etl.errors import UserError, error_from_exit_code
from etl.event_time import is_in_future
from etl.spec import load_spec
from etl.spec.base import StrictModel
from etl.spec.model import DataSpec
from etl.spec.units import DayRange, DaySplit
from etl.table_commands import TABLE_STEPS, score_leases
from etl.tables.atomic_io import publish_folder, remove_folder, staging_folder
from etl.tables.lease import hold_leases
from etl.tables.uri import list_matching, resolve_uri

AIRFLOW_HOME = Path("work", "airflow")
Scale = Literal["tiny", "small", "base", "large"]


class RunArgs(DayArgs):
    """Days, raw logs and GEM size of a pipeline run."""

    raw: Annotated[str, tyro.conf.arg(help="folder or URL of the raw logs")]
    scale: Annotated[Scale, tyro.conf.arg(help="size of GEM")] = "small"
    gem: Annotated[
        str, tyro.conf.arg(help="further flags of `gemline train gem`, in one argument")
    ] = ""

    @property
    def paths(self) -> PipelinePaths:
        """The spec, raw logs and lake."""
        return PipelinePaths(self.spec, self.raw, self.lake)

    @property
    def gem_flags(self) -> tuple[str, ...]:
        """Flags of `gemline train gem`. Raises UserError if a quotation mark has no end."""
        return ("--scale", self.scale, *split_flags("--gem", self.gem))


def _refuse_pins(args: LakeArgs) -> None:
    if args.pins:
        raise UserError("--pins: steps of a run read what earlier ones have written; leave it out")


class UpgradeArgs(RunArgs):
    """A changed spec, and the spec that the lake was written under."""

    old_spec: Annotated[Path, tyro.conf.arg(help="the spec that the tables were written under")]
    yes: Annotated[bool, tyro.conf.arg(help="do not ask for confirmation")] = False


@holds_leases("run", "gem", *TABLE_STEPS)
def upgrade(args: UpgradeArgs) -> None:
    """Migrate a lake and its GEM to a changed spec; tables that no changed key affects are kept."""
    from etl.tables.maintenance import plan_upgrade, upgrade_lake

    _refuse_pins(args)
    spec, old_spec = args.load_spec(), load_spec(args.old_spec)
    split = latest_mature_split(spec, *args.day_range)
    steps = pipeline_steps(spec, args.paths, split, args.gem_flags)
    plan = plan_upgrade(args.lake, old_spec, spec)
    print(f"changed keys: {', '.join(plan.changed_keys) or 'none'}")
    print(f"kept: {', '.join(plan.kept_tables) or 'nothing'}")
    if plan.repartitioned_tables:
        print(f"repartitioned: {', '.join(plan.repartitioned_tables)}")
    print(f"removed, to be rebuilt: {', '.join(plan.rebuilt_tables) or 'nothing'}")
    if not args.yes:
        _confirm("Upgrade the lake?")
    finished = _finished_steps(args, old_spec, split)
    with hold_leases(args.lake, score_leases(old_spec), "gemline upgrade"):
        if plan.repartitioned_tables:
            _repartition(args)
        upgrade_lake(args.lake, old_spec, spec)
    _upgrade_gem(args)
    kept_tables = {*plan.kept_tables, *plan.repartitioned_tables}
    carry_over_step_states(spec, args.paths, steps, finished, kept_tables)
    pending = pending_steps(spec, args.paths, steps)
    skipped = ", ".join(step.name for step in steps if step not in pending) or "nothing"
    print(f"next: `gemline run` with the same arguments; it skips {skipped}")


def _finished_steps(args: UpgradeArgs, old_spec: DataSpec, split: DaySplit) -> set[str]:
    """Names of the steps that `gemline run` would skip under the old spec.

    A step is recorded with the path of its spec, which has been edited in place since, or copied.
    """
    finished: set[str] = set()
    for path in (args.spec, args.old_spec):
        paths = PipelinePaths(path, args.raw, args.lake)
        steps = pipeline_steps(old_spec, paths, split, args.gem_flags)
        pending = pending_steps(old_spec, paths, steps)
        finished |= {step.name for step in steps if step not in pending}
    return finished


def _repartition(args: UpgradeArgs) -> None:
    """Rewrite the tables of which only the buckets change."""
    from gemline import main

    flags = ["--spec", str(args.spec), "--old-spec", str(args.old_spec), "--lake", args.lake]
    if code := main(["etl", "repartition", *flags]):
        raise error_from_exit_code(
            code, "tables are not repartitioned; the reason is above. Run the same command again"
        )


def _upgrade_gem(args: UpgradeArgs) -> None:
    """Carry the latest GEM over to the new spec; without a complete one, remove unfinished ones."""
    from gemline import main

    folder = resolve_uri(args.lake, *GEM_MODEL_DIR.split("/"))
    checkpoints = [path.name for path in list_matching(folder, "[0-9]*")]
    if all(name.endswith(".partial") for name in checkpoints):
        remove_folder(folder)
        return
    code = main(["train", "upgrade", "--spec", str(args.spec), "--lake", args.lake])
    if code:
        raise error_from_exit_code(
            code,
            "the tables are upgraded, but GEM is not; the reason is above. Run the same command "
            f"again, or remove {folder} and {folder.parent / 'compressor'} to train a new GEM",
        )


def _confirm(question: str) -> None:
    """Ask on the terminal; raises UserError unless the answer is yes."""
    if not sys.stdin.isatty():
        raise UserError("nothing was changed: pass --yes to upgrade without confirmation")
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("nothing was changed")


class RefreshArgs(LakeArgs):
    """Raw logs, and the time until which they are complete."""

    raw: Annotated[str, tyro.conf.arg(help="folder or URL of the raw logs")]
    data_until: Annotated[
        str,
        tyro.conf.arg(
            help="time until which all events have landed, in the spec's time zone: "
            "2026-01-08T14:00"
        ),
    ]


class BatchArgs(StrictModel):
    """Steps of a plan that `gemline run` wrote."""

    plan: Path
    steps: tuple[str, ...]


@holds_leases("run")
def run(args: RunArgs) -> None:
    """Run the whole pipeline on some days; steps that have finished are skipped."""
    _refuse_pins(args)
    spec = args.load_spec()
    split = latest_mature_split(spec, *args.day_range)
    if is_in_future(spec.day_end(split.data_until)):
        raise UserError(
            f"--days {args.days}: {split.data_until} is not over, so that its labels would miss "
            "outcomes: end with a day before, and add the current one with `gemline refresh`"
        )
    print(
        f"{spec.name}: train on {split.train_first} to {split.train_last}, calibrate on "
        f"{split.calibration}, test on {split.test_first}; labels mature until {split.data_until}",
        flush=True,
    )
    steps = pipeline_steps(spec, args.paths, split, args.gem_flags)
    run_pipeline(spec, args.paths, steps)
    print(f"report: {resolve_uri(args.lake, 'report.html')}")


@holds_leases("run")
def refresh(args: RefreshArgs) -> None:
    """Update the tables of the current day with the logs so far, and refit the live rankers."""
    from dags.refresh import plan_refresh, refresh_steps

    _refuse_pins(args)
    spec, paths = args.load_spec(), PipelinePaths(args.spec, args.raw, args.lake)
    plan = plan_refresh(spec, args.raw, args.lake, parse_data_until(spec, args.data_until))
    surfaces = ", ".join(plan.surfaces) or "no surface, because none has a live ranker"
    print(f"{spec.name}: tables of {plan.days}, refits of {surfaces}", flush=True)
    run_pipeline(spec, paths, refresh_steps(spec, paths, plan))


def batch(args: BatchArgs) -> None:
    """Run some steps of a plan in this process."""
    if not args.plan.is_file():
        raise UserError(f"{args.plan}: no such plan; `gemline run` writes one")
    code = run_steps(args.plan, args.steps)
    if code:
        sys.exit(code)


class ManifestsArgs(RunArgs):
    """A pipeline run, the cluster that it is to run on, and where to write its files."""

    cluster: Annotated[
        Path, tyro.conf.arg(help="the cluster: conf/clusters/kubernetes.yaml, slurm.yaml")
    ]
    out: Annotated[Path, tyro.conf.arg(help="folder of the files; it must not exist")]


def manifests(args: ManifestsArgs) -> None:
    """Write the pipeline's steps as Kubernetes manifests or Slurm batch scripts."""
    from dags.clusters import load_cluster, render_files

    _refuse_pins(args)
    spec, cluster = load_spec(args.spec), load_cluster(args.cluster)
    split = latest_mature_split(spec, *args.day_range)
    paths = PipelinePaths(Path(cluster.home, args.spec), args.raw, args.lake)
    steps = pipeline_steps(spec, paths, split, args.gem_flags)
    files = render_files(cluster, spec, paths, steps, split.data_until)
    if args.out.exists() or args.out.is_symlink():
        raise UserError(f"{args.out} exists; remove it, or name another folder")
    try:
        staging = staging_folder(args.out)
        for name, text in files.items():
            Path(staging, name).write_text(text)
        publish_folder(staging, args.out)
    except (NotADirectoryError, PermissionError, FileNotFoundError) as error:
        raise UserError(f"--out {args.out} cannot be written: {error.strerror}") from None
    print(f"{args.out}: {len(files)} files")


class AirflowArgs(LakeArgs):
    """Raw logs, days and address of a local Airflow."""

    raw: Annotated[str, tyro.conf.arg(help="folder or URL of the raw logs")]
    days: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        tyro.conf.arg(help="one run each, in order: 2026-01-01:2026-01-09 2026-01-10"),
    ]
    home: Annotated[Path, tyro.conf.arg(help="folder of Airflow's database and logs")] = (
        AIRFLOW_HOME
    )
    port: Annotated[int, tyro.conf.arg(help="port of the web interface, on loopback")] = 8080


def _stored_days(args: AirflowArgs) -> list[DayRange]:
    """The days of the lake's events, which earlier calls may have run; none in a new lake."""
    lake = args.open_lake()
    return [lake.day_range("events")] if lake.latest_day("events") else []


def airflow(args: AirflowArgs) -> None:
    """Start Airflow on this machine with the DAGs of a spec, and run some days."""
    from dags.orchestration.standalone import (
        airflow_environment,
        finished_dag_runs,
        start_airflow,
        trigger_dag_run,
        watch_dag_runs,
    )

    _refuse_pins(args)
    spec = args.load_spec()
    paths = PipelinePaths(args.spec, args.raw, args.lake)
    day_ranges = [parse_days_argument(days) for days in args.days]
    first_day = min(first for first, _ in (*day_ranges, *_stored_days(args)))
    env = airflow_environment(paths, args.home, args.port, first_day)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as with Ctrl-C
    processes = start_airflow(env)
    address = env["AIRFLOW__API__BASE_URL"]
    last_dag = f"{spec.name}_rankers"
    try:
        already_finished = finished_dag_runs(address, spec.name)
        for first, last in day_ranges:
            trigger_dag_run(address, f"{spec.name}_raw", f"{first}:{last}")
        print(f"Airflow: {address} (stop with Ctrl-C)", flush=True)
        remaining = len(day_ranges)
        for dag_run in watch_dag_runs(address, spec.name, processes, already_finished):
            print(dag_run, flush=True)
            if dag_run.dag_id == last_dag:
                remaining -= 1
                if not remaining:
                    report = resolve_uri(args.lake, "report.html")
                    print(f"all runs have finished; report: {report}", flush=True)
    except KeyboardInterrupt:
        print("stopping Airflow")
    finally:
        processes.stop()


COMMANDS = {
    "run": run,
    "refresh": refresh,
    "batch": batch,
    "manifests": manifests,
    "airflow": airflow,
    "upgrade": upgrade,
}
