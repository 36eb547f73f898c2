"""`gemline erase`: removes users from the tables, files and feature store of a lake.

Spark is imported only when the command runs.
"""

import json
import re
import time
from collections import defaultdict
from collections.abc import Collection
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tyro

from etl.cli.runner import LakeArgs, holds_leases
from etl.errors import TemporaryError, UserError
from etl.spec.units import MICROS
from etl.table_commands import TABLE_STEPS, VacuumArgs
from etl.tables import atomic_io, step_state
from etl.tables.erased_versions import holds_erased_users
from etl.tables.forecast_schemas import FORECAST_SCHEMAS
from etl.tables.lake import Lake
from etl.tables.lease import hold_leases
from etl.tables.maintenance import expire_logs, vacuum_lake
from etl.tables.pointer import remove_unreferenced_versions
from etl.tables.schemas import table_registry
from etl.tables.uri import list_matching, local_cache_path, resolve_uri
from ranking.feature_store.materialize import materialize, materialize_lease
from ranking.feature_store.store import read_data_until
from ranking.feature_store.wal import compact_wal, feature_store_pointer, open_wal
from ranking.registry.ranker import live_pointer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PREDICTION_FILES = (
    *("evaluations/*.parquet", "portfolio/*.parquet"),
    *("models/gem/blend/*.parquet", "models/domains/*/*.parquet"),
)
EVALUATION_STEPS = ("evaluate", "baseline", "report")  # they run side by side: a lease for each
LOSS_REPORTS = "models/gem/**/non_finite_loss.json"


class EraseArgs(LakeArgs):
    """Users to erase, and whether old versions of tables are removed at once."""

    user: Annotated[tuple[str, ...], tyro.conf.arg(help="ids of users")] = ()
    users: Annotated[Path | None, tyro.conf.arg(help="a file with one id per line")] = None
    before: Annotated[
        date | None, tyro.conf.arg(help="erase only what was known before this day")
    ] = None
    now: Annotated[
        bool,
        tyro.conf.arg(help="remove old versions of all tables, and their logs, at once"),
    ] = False

    @property
    def ids(self) -> list[str]:
        """The ids of all users; raises UserError if there are none."""
        ids = set(self.user)
        if self.users is not None:
            if not self.users.is_file():
                raise UserError(f"--users {self.users}: there is no such file")
            try:
                text = self.users.read_text("utf-8-sig")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"--users {self.users} is not UTF-8 ({error.reason}): save it in this encoding"
                ) from None
            ids |= {line.strip() for line in text.splitlines()}
        ids.discard("")
        if not ids:
            raise UserError("no ids of users are given: pass --user or --users")
        return sorted(ids)


@holds_leases("run", *TABLE_STEPS, "vacuum", "gem", *EVALUATION_STEPS, "portfolio")
def erase(args: EraseArgs) -> None:
    """Remove users from all tables, prediction files, the feature store and the forecasts.

    Raw records of these users that are ingested again are left out. What still holds them, such as
    old versions of tables and trained models, is listed.
    """
    lake = args.open_lake()
    _check_pins(lake)
    surfaces = [f"{step}-{s}" for s in lake.spec.ad_surfaces for step in ("ranker", "scores")]
    domains = [f"domain-{domain}" for domain in lake.spec.domains]
    with (
        hold_leases(args.lake, [*surfaces, *domains], "gemline erase"),
        materialize_lease(args.lake, "gemline erase"),
    ):
        for what, rows in erase_users(lake, args.ids, args.before).items():
            print(f"{what}: {rows:,} rows removed")
        if args.now:
            vacuum_lake(lake, keep_days=0, full=True)
            expire_logs(lake)
        _rebuild_forecasts(lake)
    for line in remaining_traces(lake, has_old_versions=not args.now):
        print(line)


def _check_pins(lake: Lake) -> None:
    """Raise an error if tables are read at old versions, by this command or by a run."""
    if lake.pinned_versions:
        raise UserError("--pins: users are erased from the latest versions; leave it out")
    for pin in step_state.read_pins(lake.root):
        raise TemporaryError(
            f"run {pin.run_id} reads pinned versions of {', '.join(sorted(pin.versions))}, and "
            "would write rows of erased users again: wait until it has ended, or release the "
            f"versions with `gemline etl unpin --run-id {pin.run_id}`"
        )


def erase_users(lake: Lake, ids: list[str], before: date | None = None) -> dict[str, int]:
    """Remove users from a lake, or what was known of them before a day.

    A run that was interrupted can be repeated. Forecasts are left to be built anew.

    Returns:
        The number of rows that were removed, by where they were.

    Raises:
        UserError: The day is in a part of the histories that is compacted.
    """
    from etl.erasure.erased_users import erased_until, record_erased_users
    from etl.erasure.tables import ErasureScope, erase_from_tables
    from etl.runtime.spark import spark_session
    from features.history.compact import require_not_compacted

    now = int(time.time())
    if before is not None:
        if before > lake.spec.day_of(now):
            raise UserError(
                f"--before {before} is in the future: later events of these users would be left "
                "out for good; name today or an earlier day"
            )
        require_not_compacted(lake, before)
    until_ts = erased_until(lake, before, now) * MICROS["s"]
    users = spark_session("erase").createDataFrame(pa.table({"user_id": ids}))
    record_erased_users(lake, users, until_ts, lake.spec.day_of(now))
    scope = ErasureScope.of_users(lake, users, before)
    erased = _erase_from_files(lake, scope.impressions) | erase_from_tables(scope)
    scope.impressions.unpersist()
    return erased | _erase_from_feature_store(lake, set(ids), until_ts)


def _erase_from_files(lake: Lake, impressions: "DataFrame") -> dict[str, int]:
    """Remove impressions from files with predictions; returns the rows that were removed."""
    from pyspark.sql import SparkSession

    erased = {}
    root = resolve_uri(lake.root)
    for pattern in PREDICTION_FILES:
        for path in list_matching(root, pattern):
            table = pq.read_table(atomic_io.download(path))
            stored = SparkSession.active().createDataFrame(table.select(["impression_id"]))
            found = stored.join(impressions, "impression_id", "left_semi").toArrow()
            if not len(found):
                continue
            is_erased = pc.is_in(table["impression_id"], found["impression_id"].combine_chunks())
            with atomic_io.replace_file(path) as temporary:
                pq.write_table(table.filter(pc.invert(is_erased)), temporary)
            erased[str(path).removeprefix(f"{root}/")] = len(found)
    return erased | _remove_loss_reports(lake)


def _remove_loss_reports(lake: Lake) -> dict[str, int]:
    """Remove the reports of losses that are not finite, which list all impressions of a batch.

    They are removed whoever is erased: impressions that have expired from the tables cannot be
    assigned to users any more. Returns the number of impressions in each report.
    """
    erased = {}
    root = resolve_uri(lake.root)
    for path in list_matching(root, LOSS_REPORTS):
        report = json.loads(path.read_text())
        path.unlink()
        erased[str(path).removeprefix(f"{root}/")] = len(report["impressions"])
    return erased


def _erase_from_feature_store(lake: Lake, users: Collection[str], until_ts: int) -> dict[str, int]:
    """Remove users from the write-ahead log, and build the store anew from the erased tables.

    The log is compacted, unless a service has it open.
    """
    wal_folder = local_cache_path(resolve_uri(lake.root, "feature_store_wal"))
    erased = {}
    if wal_folder.exists():
        wal = open_wal(wal_folder)
        erased["feature store, posted"] = wal.erase_users(users, until_ts)
        wal.close()
        if not compact_wal(wal_folder):
            print(
                f"{wal_folder} is open in a service: its free pages hold removed entries until "
                "they are overwritten; stop the service and run this command again"
            )
    _rebuild_feature_store(lake)
    return erased


def _rebuild_feature_store(lake: Lake) -> None:
    """Build the store from the tables, with data until the same time; earlier ones are removed.

    Running services load the new store. If none can be built, for example without a ranker of the
    lake's spec, there is no store until the next `gemline rank materialize`, and services have to
    be stopped.
    """
    pointer = feature_store_pointer(lake.root)
    live = pointer.live_folder
    if live is None:
        return
    try:
        materialize(lake, read_data_until(local_cache_path(live)))
        pointer.forget_previous()
    except UserError as error:
        atomic_io.remove_folder(pointer.folder)
        print(f"the feature store was removed and could not be built: {error}")
        print("stop services that are running: they answer from the removed store")
        return
    remove_unreferenced_versions(pointer.folder, pointer)


def _rebuild_forecasts(lake: Lake) -> None:
    """Replace the tables of forecasts, whose counts and sketches cannot be edited.

    The tables are removed first, with all their versions. Without scored days they stay away until
    the next build.
    """
    from features.forecast.build import build_forecast

    if lake.spec.forecast is None:
        return
    for schema in FORECAST_SCHEMAS:
        atomic_io.remove_folder(resolve_uri(lake.root, schema(lake.spec).name))
    latest_scores = lake.latest_day("scores")
    if latest_scores is None:
        return
    try:
        build_forecast(lake, latest_scores)
    except UserError as error:
        print(f"forecasts were removed and could not be built: {error}")


def remaining_traces(lake: Lake, *, has_old_versions: bool) -> list[str]:
    """What may still hold erased users, one line each."""
    lines = []
    if has_old_versions:
        lines += [
            f"old versions of {', '.join(names)} hold them until a `gemline etl vacuum` of {day} "
            "or later, if it keeps the default number of days"
            for day, names in _old_versions_by_last_day(lake).items()
        ]
        lines.append(
            "the logs of the tables hold them for 180 days: --now removes these and old versions "
            "at once"
        )
    if not isinstance(resolve_uri(lake.root), Path):
        lines.append(
            "the lake is in an object store: feature stores, their logs and copies of files on "
            "other machines were not reached; run this on each machine that serves"
        )
    lines += [
        f"run {pin.run_id} has pinned versions that hold them: its next steps are refused"
        for pin in step_state.read_pins(lake.root)
        if any(holds_erased_users(lake, name, v) for name, v in pin.versions.items())
    ]
    for surface in lake.spec.ad_surfaces:
        state = live_pointer(lake.root, surface).read()
        if state:
            lines.append(
                f"rankers {', '.join(state.retained)} of {surface}: test vectors hold encoded "
                "inputs of up to 64 impressions; train and promote a new one"
            )
    if list_matching(resolve_uri(lake.root, "models"), "*"):
        lines.append(
            "models and rankers: weights were learned from all impressions; train them anew"
        )
    lines += [
        f"{folder} has a table of users, whose rows were learned by the hashes of their ids: train "
        "it anew"
        for folder in _models_with_user_table(lake)
    ]
    if resolve_uri(lake.root, "report.html").exists():
        lines.append("report.html was made with the data of erased users: run `gemline report`")
    lines.append("raw logs, backups of the lake, and logs of services: delete the users there")
    return lines


def _old_versions_by_last_day(lake: Lake) -> dict[date, list[str]]:
    """Tables of users with files of old versions, by the first day of a vacuum that removes these.

    The vacuum keeps files for the default number of days after the commit that replaced them.
    """
    keep = timedelta(days=VacuumArgs.model_fields["keep_days"].default)
    tables = defaultdict(list)
    for name, schema in sorted(table_registry(lake.spec).items()):
        if schema.user_rows is None or not lake.exists(name):
            continue
        table = lake.open(name)
        root = resolve_uri(lake.table_uri(name))
        files = table.vacuum(retention_hours=0, dry_run=True, enforce_retention_duration=False)
        if any((root / file).exists() for file in files):  # earlier vacuums removed the others
            replaced_ms = table.history(1)[0]["timestamp"]
            gone = datetime.fromtimestamp(replaced_ms / 1000, UTC) + keep
            tables[gone.date() + timedelta(days=1)].append(name)
    return dict(sorted(tables.items()))


def _models_with_user_table(lake: Lake) -> list[str]:
    """Folders of models and rankers that have embeddings of hashed users."""
    root = resolve_uri(lake.root)
    patterns = ("models/**/*.json", "rankers/*/*/ranker.json")
    files = [file for pattern in patterns for file in list_matching(root, pattern)]
    has_table = re.compile(r'"user_hash_buckets": *[1-9]')
    found = (file for file in files if has_table.search(file.read_text()))
    return [str(file.parent).removeprefix(f"{root}/") for file in found]


COMMANDS = {"erase": erase}
