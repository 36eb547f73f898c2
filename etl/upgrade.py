"""A lake under a changed spec: tables that no changed key affects are kept, the others removed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltalake import DeltaTable

from etl.errors import UserError
from etl.spec.effects import changed_keys, effect_of
from etl.spec.model import DataSpec
from etl.tables import atomic_io
from etl.tables.codes import record_codes
from etl.tables.lake import SPEC_PROPERTY, Lake
from etl.tables.place import place
from etl.told import all_contracts

# Tables of what models predicted: an upgrade removes the models, so these are rebuilt, too.
OF_MODELS = {"knowledge", "user_knowledge", "scores"}


@dataclass(frozen=True)
class Upgrade:
    """Keys that changed, tables that are kept, and tables that have to be rebuilt."""

    changed: tuple[str, ...]
    kept: tuple[str, ...]
    rebuilt: tuple[str, ...]


def plan_upgrade(root: str, old: DataSpec, new: DataSpec) -> Upgrade:
    """What an upgrade does with the tables of a lake, or has left to do where it was interrupted.

    Raises UserError where a surface or an event type that tables hold is changed or left out, or a
    table was written under a third spec.
    """
    lake, new_lake = Lake(root, old), Lake(root, new)
    _refuse_changed("surfaces", old.surfaces, new.surfaces)
    _refuse_changed("events", old.events, new.events)
    before, after = (spec.model_dump(mode="json") for spec in (lake.spec, new_lake.spec))
    paths = changed_keys(before, after)
    affected = {table for path in paths for table in effect_of(path).tables}
    existing = [name for name in all_contracts(old) if lake.exists(name)]
    hashes = lake.spec.hash, new_lake.spec.hash
    upgraded = {name for name in existing if _spec_hash(lake, name, hashes) == hashes[1]}
    kept = {*existing} - affected - OF_MODELS | upgraded
    return Upgrade(
        tuple(".".join(path) for path in paths),
        tuple(name for name in existing if name in kept),
        tuple(name for name in existing if name not in kept),
    )


def upgrade(root: str, old: DataSpec, new: DataSpec) -> Upgrade:
    """Put a lake under a new spec: tables to be rebuilt, and GEM, are removed.

    Rankers stay: they serve until those of the new spec are promoted. An upgrade that was
    interrupted can be run again.
    """
    plan = plan_upgrade(root, old, new)
    lake = Lake(root, new)
    record_codes(root, lake.spec)
    for name in plan.rebuilt:
        atomic_io.remove_folder(place(root, name))
    atomic_io.remove_folder(place(root, "models"))
    for name in plan.kept:
        DeltaTable(lake.path(name)).alter.set_table_properties(
            {SPEC_PROPERTY: lake.spec.hash}, raise_if_not_exists=False
        )
    return plan


def _spec_hash(lake: Lake, name: str, known: tuple[str, str]) -> str:
    """The hash of the spec under which a table was written."""
    written: str = DeltaTable(lake.path(name)).metadata().configuration[SPEC_PROPERTY]
    if written not in known:
        raise UserError(
            f"table {name} in {lake.root} was written under a third spec ({written}): give that "
            "one as --old"
        )
    return written


def _refuse_changed(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in old.items():
        if name not in new:
            raise UserError(f"{kind}: {name} is missing, but tables hold its code: keep it")
        fixed = [(key, held) for key, held in value if effect_of((kind, name, key)).fixed]
        changed = [f"{key}: {held}" for key, held in fixed if getattr(new[name], key) != held]
        if changed:
            raise UserError(
                f"{kind}.{name} was {', '.join(changed)}: that cannot be changed in a lake that "
                "has tables; use another --lake, or another name"
            )
