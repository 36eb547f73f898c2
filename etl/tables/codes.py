"""Codes of surfaces and event types: assigned once in a lake, append-only.

Tables hold a surface or an event type by its place in the spec (1 is the first). The registry
`codes.json` of a lake keeps these orders, so that a name keeps its code when the spec gains others.
"""

from collections.abc import Mapping

from pydantic import ValidationError

from etl.errors import UserError
from etl.spec.base import Name, Strict
from etl.spec.model import DataSpec
from etl.tables import atomic_io
from etl.tables.place import place, text_of

FILE = "codes.json"


class Codes(Strict):
    """Names of surfaces and event types in the order of their codes."""

    surfaces: tuple[Name, ...] = ()
    events: tuple[Name, ...] = ()


def read_codes(root: str) -> Codes:
    """The registry of a lake, empty where it has none; raises UserError where it is damaged."""
    path = place(root, FILE)
    text = text_of(path)
    if text is None:
        return Codes()
    try:
        return Codes.model_validate_json(text)
    except ValidationError:
        raise UserError(
            f"{path} is damaged: without it no table can be read; restore it from a backup, or "
            "write the surfaces and event types into it in the order of their codes"
        ) from None


def bind(spec: DataSpec, codes: Codes) -> DataSpec:
    """The spec with surfaces and event types in the order of their codes, new names last."""
    surfaces = _in_order(spec.surfaces, codes.surfaces)
    events = _in_order(spec.events, codes.events)
    if (*spec.surfaces, *spec.events) == (*surfaces, *events):
        return spec
    dump = spec.model_dump()
    dump["surfaces"] = {name: dump["surfaces"][name] for name in surfaces}
    dump["events"] = {name: dump["events"][name] for name in events}
    return DataSpec.model_validate(dump)


def record_codes(root: str, spec: DataSpec) -> None:
    """Add the names of a spec that is bound to a lake to the registry of the lake."""
    known = read_codes(root)
    codes = Codes(
        surfaces=(*known.surfaces, *(n for n in spec.surfaces if n not in known.surfaces)),
        events=(*known.events, *(n for n in spec.events if n not in known.events)),
    )
    if codes != known:
        atomic_io.write_text(place(root, FILE), codes.model_dump_json())


def _in_order(names: Mapping[str, object], order: tuple[str, ...]) -> list[str]:
    return [*(n for n in order if n in names), *(n for n in names if n not in order)]
