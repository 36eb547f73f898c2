"""Codes of surfaces and event types: assigned once in a lake, append-only.

Tables store a surface or an event type as its position in the spec, from 1. The file `codes.json`
of a lake records the order, so that names keep their codes when others are added to the spec.
"""

from collections.abc import Mapping

from pydantic import ValidationError

from etl.errors import UserError
from etl.spec.base import Name, StrictModel
from etl.spec.model import DataSpec
from etl.tables import atomic_io
from etl.tables.uri import read_text_if_exists, resolve_uri

REGISTRY_FILE = "codes.json"


class CodeRegistry(StrictModel):
    """Names of surfaces and event types in the order of their codes."""

    surfaces: tuple[Name, ...] = ()
    events: tuple[Name, ...] = ()


def read_codes(root: str) -> CodeRegistry:
    """The registry of a lake, empty if it has none; raises UserError if the file is damaged."""
    path = resolve_uri(root, REGISTRY_FILE)
    text = read_text_if_exists(path)
    if text is None:
        return CodeRegistry()
    try:
        return CodeRegistry.model_validate_json(text)
    except ValidationError:
        raise UserError(
            f"{path} is damaged, and no table can be read without it: restore it from a backup, or "
            "write the surfaces and event types into it in the order of their codes"
        ) from None


def assign_codes(spec: DataSpec, registry: CodeRegistry) -> DataSpec:
    """The spec with its surfaces and event types in the order of their codes, new names last."""
    surfaces = _order_names(spec.surfaces, registry.surfaces)
    events = _order_names(spec.events, registry.events)
    if (*spec.surfaces, *spec.events) == (*surfaces, *events):
        return spec
    dump = spec.model_dump()
    dump["surfaces"] = {name: dump["surfaces"][name] for name in surfaces}
    dump["events"] = {name: dump["events"][name] for name in events}
    return DataSpec.model_validate(dump)


def register_codes(root: str, spec: DataSpec) -> None:
    """Append the new names of a spec to the registry of a lake."""
    registry = read_codes(root)
    codes = CodeRegistry(
        surfaces=_append_names(registry.surfaces, spec.surfaces),
        events=_append_names(registry.events, spec.events),
    )
    if codes != registry:
        atomic_io.write_text(resolve_uri(root, REGISTRY_FILE), codes.model_dump_json())


def _append_names(registered: tuple[str, ...], names: Mapping[str, object]) -> tuple[str, ...]:
    return *registered, *(name for name in names if name not in registered)


def _order_names(names: Mapping[str, object], registered: tuple[str, ...]) -> list[str]:
    return [name for name in _append_names(registered, names) if name in names]
