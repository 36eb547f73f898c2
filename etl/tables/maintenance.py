"""Maintenance of a lake: expired days, vacuum of old table versions, upgrade to a changed spec.

An upgrade keeps the tables that no changed key affects and removes the others to be rebuilt. Tables
of which only the partitions change are rewritten (`etl.tables.repartition`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from deltalake import CommitProperties, DeltaTable

from etl.errors import UserError
from etl.spec.base import StrictModel
from etl.spec.effects import changed_keys, effect_of
from etl.spec.model import DataSpec
from etl.spec.sections import RetainedTable
from etl.spec.units import DAY
from etl.tables import atomic_io, step_state
from etl.tables.code_registry import register_codes
from etl.tables.day_order import forget_days
from etl.tables.erased_versions import holds_erased_users
from etl.tables.lake import (
    REPARTITIONING,
    SPEC_PROPERTY,
    Lake,
    commit_metadata,
    last_commit_metadata,
)
from etl.tables.schemas import NO_DAY, table_registry
from etl.tables.uri import list_matching, resolve_uri


def vacuum_lake(lake: Lake, keep_days: int, *, full: bool = False) -> dict[str, int]:
    """Remove the files that no table version of the last `keep_days` days uses.

    Pinned versions (`etl.tables.step_state`) are kept regardless of age, unless users have been
    erased since. `full` also removes files that no commit names, such as those of killed writers;
    no writer may be running.

    Returns:
        Number of files removed, by table.
    """
    pins = step_state.read_pins(lake.root)
    removed_files = {}
    for name in _existing_tables(lake):
        table = lake.open(name)
        versions = {pin.versions[name] for pin in pins if name in pin.versions}
        pinned = {v for v in versions if not holds_erased_users(lake, name, v)}
        removed = table.vacuum(
            retention_hours=24 * keep_days,
            dry_run=False,
            enforce_retention_duration=False,
            full=full,
            keep_versions=sorted(pinned | {table.version()}),
        )
        removed_files[name] = len(removed)
    return removed_files


def expire_days(lake: Lake) -> dict[str, int]:
    """Remove the days of tables that are older than their `retention` in the spec.

    The age of a day is counted from the last ingested day; records without a day are kept. The
    files of removed rows stay until `vacuum_lake` removes the table versions that have them.

    Returns:
        Number of rows removed, by table.
    """
    removed_rows: dict[str, int] = {}
    for name, first_kept in first_kept_days(lake).items():
        rows = lake.rows_by_day(name)
        if not rows:
            continue
        removed_rows[name] = sum(n for day, n in rows.items() if NO_DAY < day < first_kept)
        if removed_rows[name]:
            lake.open(name).delete(f"day > '{NO_DAY}' AND day < '{first_kept}'")
    return removed_rows


def first_kept_days(lake: Lake) -> dict[RetainedTable, date]:
    """The first day that `retention` keeps, by table; tables that keep all days are left out."""
    last_day = lake.last_ingested_day()
    if last_day is None:
        return {}
    return {
        name: last_day - timedelta(days=seconds // DAY - 1)
        for name, seconds in lake.spec.retention.items()
    }


def expire_logs(lake: Lake) -> None:
    """Remove the log entries of all versions of tables but the latest, which get checkpoints.

    Entries hold the smallest and largest values of the columns of each file, so also ids of users.
    Vacuum the lake before: the files of versions whose entries are gone would stay. A last commit
    repeats what the last write recorded, such as the versions of the tables that it read.
    """
    for name in _existing_tables(lake):
        table = lake.open(name)
        if recorded := last_commit_metadata(table):
            _record_again(lake, table, recorded)
        table.create_checkpoint()
        for file in list_matching(resolve_uri(lake.table_uri(name), "_delta_log"), "[0-9]*"):
            if int(file.name.partition(".")[0]) < table.version():
                file.unlink()


def _record_again(lake: Lake, table: DeltaTable, recorded: Mapping[str, Any]) -> None:
    """Commit the metadata of the last write without a change of the table."""
    table.alter.set_table_properties(
        {SPEC_PROPERTY: lake.spec.hash},
        raise_if_not_exists=False,
        commit_properties=CommitProperties(custom_metadata={"facts": commit_metadata(**recorded)}),
    )


def _existing_tables(lake: Lake) -> list[str]:
    return [name for name in sorted(table_registry(lake.spec)) if lake.exists(name)]


# Tables with outputs of rankers, which may change with the spec, so these are rebuilt, too, unless
# only the layout of tables changes, or only tables that no model reads. What GEM predicted before
# it learned a day cannot be predicted again: it stays, unless impressions or objectives change.
RANKER_OUTPUT_TABLES = {
    "scores",
    "forecast_sample",  # and what is built with it from the scored impressions
    "forecast_margins",
    "forecast_sketches",
}


@dataclass(frozen=True)
class UpgradePlan:
    """The spec keys that changed, and the tables that are kept, repartitioned or rebuilt."""

    changed_keys: tuple[str, ...]
    kept_tables: tuple[str, ...]
    repartitioned_tables: tuple[str, ...]
    rebuilt_tables: tuple[str, ...]


def plan_upgrade(lake_root: str, old_spec: DataSpec, new_spec: DataSpec) -> UpgradePlan:
    """The plan of an upgrade; for an interrupted upgrade, the remaining work.

    Raises UserError if a surface or an event type whose code tables hold is changed or missing, or
    if a table was written under a third spec.
    """
    lake, new_lake = Lake(lake_root, old_spec), Lake(lake_root, new_spec)
    _check_immutable_keys("surfaces", old_spec.surfaces, new_spec.surfaces)
    _check_immutable_keys("events", old_spec.events, new_spec.events)
    before, after = (spec.model_dump(mode="json") for spec in (lake.spec, new_lake.spec))
    paths = changed_keys(before, after)
    effects = [effect_of(path) for path in paths]
    moved = {table for effect in effects if effect.is_layout for table in effect.tables}
    affected = {table for effect in effects if not effect.is_layout for table in effect.tables}
    if any(effect.affects_models for effect in effects):
        affected |= RANKER_OUTPUT_TABLES
    if moved and "examples" in affected:  # which predictions follow to their new buckets
        affected.add("teacher_predictions")
    # Of tables that the new spec does not have, no step would know, nor erase users from them.
    affected |= {*table_registry(old_spec)} - {*table_registry(new_spec)}
    existing = [name for name in table_registry(old_spec) if lake.exists(name)]
    hashes = lake.spec.hash, new_lake.spec.hash
    remaining = [name for name in existing if _table_spec_hash(lake, name, hashes) != hashes[1]]
    rebuilt = [name for name in remaining if name in affected]
    repartitioned = [name for name in remaining if name in moved - affected]
    return UpgradePlan(
        changed_keys=tuple(".".join(path) for path in paths),
        kept_tables=tuple(name for name in existing if name not in {*rebuilt, *repartitioned}),
        repartitioned_tables=tuple(repartitioned),
        rebuilt_tables=tuple(rebuilt),
    )


def upgrade_lake(lake_root: str, old_spec: DataSpec, new_spec: DataSpec) -> UpgradePlan:
    """Upgrade a lake to a new spec: remove the tables and domain models that must be rebuilt.

    GEM is kept; `gemline train upgrade` carries it over. Rankers are kept and serve until those of
    the new spec are promoted. The tables to be repartitioned must have been rewritten before. An
    interrupted upgrade can be run again.
    """
    plan = plan_upgrade(lake_root, old_spec, new_spec)
    assert not plan.repartitioned_tables
    lake = Lake(lake_root, new_spec)
    register_codes(lake_root, lake.spec)
    forget_days(lake_root, plan.rebuilt_tables)
    for name in plan.rebuilt_tables:
        atomic_io.remove_folder(resolve_uri(lake_root, name))
    atomic_io.remove_folder(resolve_uri(lake_root, "models", "domains"))
    for name in plan.kept_tables:
        set_spec_hash(lake, name, lake.spec.hash)
    return plan


def set_spec_hash(lake: Lake, name: str, spec_hash: str) -> None:
    """Set the hash of the spec under which a table can be opened."""
    DeltaTable(lake.table_uri(name)).alter.set_table_properties(
        {SPEC_PROPERTY: spec_hash}, raise_if_not_exists=False
    )


def _table_spec_hash(lake: Lake, name: str, known_hashes: tuple[str, str]) -> str:
    """The hash of the spec under which a table was written; UserError if not a known one."""
    written: str = DeltaTable(lake.table_uri(name)).metadata().configuration[SPEC_PROPERTY]
    if written not in (*known_hashes, REPARTITIONING):
        raise UserError(
            f"table {name} in {lake.root} was written under a third spec ({written}): pass that "
            "spec as --old-spec"
        )
    return written


def _check_immutable_keys(
    section: str, old: Mapping[str, StrictModel], new: Mapping[str, StrictModel]
) -> None:
    for name, model in old.items():
        if name not in new:
            raise UserError(f"{section}: {name} is missing, but tables hold its code: keep it")
        changed = [
            f"{key}: {value}"
            for key, value in model
            if effect_of((section, name, key)).is_immutable and getattr(new[name], key) != value
        ]
        if changed:
            raise UserError(
                f"{section}.{name} was {', '.join(changed)}: that cannot be changed in a lake that "
                "has tables; use another --lake, or another name"
            )
