"""A lake's tables under a changed spec: whose meaning stays are kept, the others made anew."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltalake import DeltaTable

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.tables import atomic_io
from etl.tables.lake import SPEC_PROPERTY, Lake
from etl.tables.place import place
from etl.told import all_contracts, promise

OF_EVENTS = ("time_zone", "buckets", "lateness", "request_gap", "most_events_a_day")
# What the values of a table mean, besides its contract and the codes of surfaces and events; those
# of models are not among them, as a GEM of the new spec makes them anew.
MEANING: Mapping[str, tuple[str, ...]] = {
    "events": OF_EVENTS,
    "parked": OF_EVENTS,
    "quarantine": (),
    "flow": OF_EVENTS,
    "attributes_user": ("attributes.user",),
    "attributes_item": ("attributes.item",),
    "impressions": (*OF_EVENTS, "objectives"),
    "items": (),
    "item_versions": ("attributes.item",),
    "history": OF_EVENTS,
    "examples": (*OF_EVENTS, "attributes", "counters"),
}


@dataclass(frozen=True)
class Upgrade:
    """Tables that stay as they are, and those that have to be made anew."""

    kept: tuple[str, ...]
    anew: tuple[str, ...]


def planned(root: str, old: DataSpec, new: DataSpec) -> Upgrade:
    """What becomes of a lake's tables; of one that was begun, of all of them.

    Raises UserError where codes that stand in tables would change, or a table is of a third spec.
    """
    ads = [{name: told.ads for name, told in spec.surfaces.items()} for spec in (old, new)]
    _refuse_other_codes("surfaces", *ads)
    _refuse_other_codes("events", old.events, new.events)
    lake = Lake(root, old)
    there = [name for name in all_contracts(old) if lake.exists(name)]
    of_new = {name for name in there if _stamp(lake, name, {old.hash, new.hash}) == new.hash}
    kept = tuple(name for name in there if name in of_new or _stays(old, new, name))
    return Upgrade(kept, tuple(name for name in there if name not in kept))


def upgrade(root: str, old: DataSpec, new: DataSpec) -> Upgrade:
    """Put a lake under a new spec; tables to be made anew, and GEM, are removed.

    Rankers stay: they answer until those of the new spec are promoted. Where it is cut off it can
    be called again.
    """
    found = planned(root, old, new)
    for name in found.anew:
        atomic_io.remove_folder(place(root, name))
    atomic_io.remove_folder(place(root, "models"))
    for name in found.kept:
        DeltaTable(Lake(root, new).path(name)).alter.set_table_properties(
            {SPEC_PROPERTY: new.hash}, raise_if_not_exists=False
        )
    return found


def _stamp(lake: Lake, name: str, known: set[str]) -> str:
    """The spec under which a table was written."""
    stamp: str = DeltaTable(lake.path(name)).metadata().configuration[SPEC_PROPERTY]
    if stamp not in known:
        raise UserError(
            f"table {name} in {lake.root} is of a third spec ({stamp}): name its old one"
        )
    return stamp


def _stays(old: DataSpec, new: DataSpec, name: str) -> bool:
    """Whether a table's contract and what its values mean are the same."""
    if name not in MEANING:
        return False
    before, after = (all_contracts(spec).get(name) for spec in (old, new))
    if not before or not after or promise(before) != promise(after):
        return False
    return all(_told(old, field) == _told(new, field) for field in MEANING[name])


def _told(spec: DataSpec, field: str) -> Any:
    """A field of a spec, `a.b` for what is within another."""
    told: Any = spec.model_dump(mode="json")
    for name in field.split("."):
        told = told[name]
    return told


def _refuse_other_codes(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    if [*old.items()] != [*new.items()][: len(old)]:
        raise UserError(
            f"{kind} were {', '.join(old)} and are {', '.join(new)}: their codes stand in tables. "
            "Keep the old ones as they were, in their order, and put new ones behind them"
        )
