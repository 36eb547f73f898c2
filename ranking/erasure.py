"""`gemline erase`: removes users from the tables, files and feature store of a lake.

Spark is imported only when the command runs.
"""

from collections.abc import Collection
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tyro

from etl.cli.runner import LakeArgs, holds_leases
from etl.commands import TABLE_STEPS
from etl.errors import UserError
from etl.spec.units import MICROS
from etl.tables import atomic_io, step_state
from etl.tables.lake import Lake
from etl.tables.lease import hold_leases
from etl.tables.maintenance import expire_logs, vacuum_lake
from etl.tables.pointer import remove_unreferenced_versions
from etl.tables.uri import list_matching, local_cache_path, resolve_uri
from ranking.feature_store.materialize import materialize
from ranking.feature_store.store import open_store
from ranking.feature_store.wal import feature_store_pointer, open_wal
from ranking.registry.ranker import live_pointer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PREDICTION_FILES = ("evaluations/*.parquet", "portfolio/*.parquet", "models/gem/blend/*.parquet")


class EraseArgs(LakeArgs):
    """Whom to erase, and whether old versions of tables go at once."""

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
        """The ids of all named users; raises UserError if there are none."""
        ids = set(self.user)
        if self.users is not None:
            if not self.users.is_file():
                raise UserError(f"--users {self.users}: there is no such file")
            ids |= {line.strip() for line in self.users.read_text().splitlines()}
        ids.discard("")
        if not ids:
            raise UserError("nobody is named: give ids with --user, or a file of ids with --users")
        return sorted(ids)


@holds_leases(*TABLE_STEPS, "vacuum", "gem", "forecast", "roi", "portfolio")
def erase(args: EraseArgs) -> None:
    """Remove users from all tables, prediction files and the feature store.

    Raw records of these users that are ingested again are left out. What still holds them, such as
    old versions of tables and trained models, is listed.
    """
    lake = args.open_lake()
    surfaces = [f"{step}-{s}" for s in lake.spec.ad_surfaces for step in ("ranker", "scores")]
    domains = [f"domain-{domain}" for domain in lake.spec.domains]
    with hold_leases(args.lake, [*surfaces, *domains], "gemline erase"):
        erased = erase_users(lake, args.ids, args.before)
        for what, rows in erased.items():
            print(f"{what}: {rows:,} rows removed")
        kept_logs = _remove_old_versions(lake) if args.now else None
    for line in remaining_traces(lake, kept_logs):
        print(line)


def erase_users(lake: Lake, ids: list[str], before: date | None = None) -> dict[str, int]:
    """Remove users from a lake, or what was known of them before a day.

    A run that was interrupted can be repeated.

    Returns:
        The number of rows that were removed, by where they were.

    Raises:
        UserError: The day is in a part of the histories that is compacted.
    """
    from etl.erasure.erased_users import record_erased_users
    from etl.erasure.tables import ErasureScope, erase_from_tables
    from etl.runtime.spark import spark_session
    from features.forecast.build import build_forecast
    from features.history.compact import assert_not_compacted

    if before is not None and lake.exists("history"):
        assert_not_compacted(lake, before)
    now, latest = datetime.now(UTC), lake.latest_day("events")
    seconds = max(int(now.timestamp()), lake.spec.day_end(latest) if latest else 0)
    until_ts = seconds * MICROS["s"]
    if before is not None:
        until_ts = lake.spec.day_start(before) * MICROS["s"] - 1
    users = spark_session("erase").createDataFrame(pa.table({"user_id": ids}))
    record_erased_users(lake, users, until_ts, now.date())
    scope = ErasureScope.of_users(lake, users, before)
    erased = _erase_from_files(lake, scope.impressions) | erase_from_tables(scope)
    scope.impressions.unpersist()
    forecast_day = lake.latest_day("forecast_sample")
    if forecast_day and erased.get("forecast_sample"):
        build_forecast(lake, forecast_day)
    return erased | _erase_from_feature_store(lake, set(ids), until_ts)


def _erase_from_files(lake: Lake, impressions: "DataFrame") -> dict[str, int]:
    """Remove impressions from files with predictions; returns the rows that were removed."""
    from pyspark.sql import SparkSession

    erased = {}
    for pattern in PREDICTION_FILES:
        *folders, name = pattern.split("/")
        for path in list_matching(resolve_uri(lake.root, *folders), name):
            table = pq.read_table(atomic_io.download(path))
            ids = table.select(["impression_id"]).unify_dictionaries()
            stored = SparkSession.active().createDataFrame(ids)
            found = stored.join(impressions, "impression_id", "left_semi").toArrow()
            if not len(found):
                continue
            is_erased = pc.is_in(table["impression_id"], found["impression_id"].combine_chunks())
            with atomic_io.replace_file(path) as temporary:
                pq.write_table(table.filter(pc.invert(is_erased)), temporary)
            erased["/".join((*folders, path.name))] = len(found)
    return erased


def _erase_from_feature_store(lake: Lake, users: Collection[str], until_ts: int) -> dict[str, int]:
    """Remove users from the write-ahead log, and build the store anew from the erased tables.

    Running services load the new store; the previous ones are removed.
    """
    pointer = feature_store_pointer(lake.root)
    live = pointer.live_folder
    if live is None:
        return {}
    wal = open_wal(local_cache_path(resolve_uri(lake.root, "feature_store_wal")))
    entries = wal.erase_users(users, until_ts)
    wal.close()
    store = open_store(local_cache_path(live), lake.spec)
    data_until = store.data_until
    store.close()
    materialize(lake, data_until)
    pointer.forget_previous()
    remove_unreferenced_versions(pointer.folder, pointer)
    return {"feature store, posted": entries}


def _remove_old_versions(lake: Lake) -> list[str]:
    """Remove unpinned old versions and their logs; returns the tables whose logs are pinned."""
    vacuum_lake(lake, keep_days=0)
    return expire_logs(lake)


def remaining_traces(lake: Lake, kept_logs: list[str] | None) -> list[str]:
    """What may still hold erased users, one line each.

    `kept_logs` are the tables with pinned versions after old ones were removed; None: none were.
    """
    lines = []
    if kept_logs is None:
        lines.append(
            "old versions of tables hold them until `gemline etl vacuum` has removed these, and "
            "the logs of the tables for 180 days: --now removes both at once"
        )
    lines += [
        f"run {pin.run_id} has pinned versions of {', '.join(sorted(pin.versions))}: when it has "
        "ended, run this again with --now"
        for pin in step_state.read_pins(lake.root)
    ]
    lines += _models_with_examples(lake)
    lines.append("raw logs, and backups of the lake, are not part of it: erase them there, too")
    return lines


def _models_with_examples(lake: Lake) -> list[str]:
    """Retained rankers, whose test vectors are inputs of real impressions, and GEM."""
    lines = []
    for surface in lake.spec.ad_surfaces:
        state = live_pointer(lake.root, surface).read()
        if state:
            lines.append(
                f"rankers {', '.join(state.retained)} of {surface}: test vectors hold encoded "
                "inputs of up to 64 impressions, and weights were learned from all: train and "
                "promote a new one"
            )
    if list_matching(resolve_uri(lake.root, "models", "gem"), "[0-9]*"):
        lines.append("models/gem: weights were learned from all impressions; train GEM anew")
    return lines


COMMANDS = {"erase": erase}
