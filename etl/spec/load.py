"""Loading a spec from YAML, with all of its errors reported at once and by line."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from etl.errors import UserError
from etl.spec.attributes import COUNTER_KEYS
from etl.spec.base import suggest_name
from etl.spec.counters import EVENT_NUMBERS
from etl.spec.model import DataSpec, SpecConsistencyError
from etl.spec.sections import NEW_ITEM

Location = tuple[str | int, ...]
KEY_MARKER = "[key]"  # the last part of Pydantic's location of a key that is not valid


def load_spec(path: Path) -> DataSpec:
    """The spec in a YAML file; the order of names in the file has no effect.

    Raises UserError with one line for each error.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such spec; shipped specs are in conf/specs")
    try:
        text = path.read_text("utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}): save it in this encoding") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise UserError(f"{path}: not valid YAML: {error}") from None
    duplicates = [f"{path}:{line}: {key}: duplicate key" for key, line in duplicate_keys(root)]
    if duplicates:
        raise UserError("\n".join(duplicates))
    if not isinstance(raw, dict):
        raise UserError(
            f"{path}: a spec must be a mapping; see docs/guides/your-logs.md for a worked example"
        )
    try:
        return DataSpec.model_validate(sort_keys(raw), context=declared_names(raw))
    except ValidationError as error:
        raise UserError("\n".join(format_errors(path, root, error))) from None


def sort_keys(value: Any) -> Any:
    """The same value with the keys of all mappings sorted."""
    if not isinstance(value, dict):
        return value
    return {key: sort_keys(value[key]) for key in sorted(value, key=str)}


def duplicate_keys(node: yaml.Node | None) -> Iterator[tuple[str, int]]:
    """Duplicate keys of mappings, with the line of the second, which YAML would silently use."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from duplicate_keys(child)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, child in node.value:
            if key.value in seen:
                yield str(key.value), key.start_mark.line + 1
            seen.add(key.value)
            yield from duplicate_keys(child)


def declared_names(raw: dict[str, Any]) -> dict[str, list[str]]:
    """The names that each section declares, whether or not the section is valid."""

    def keys(value: object) -> list[str]:
        return [str(key) for key in value] if isinstance(value, dict) else []

    attributes = raw.get("attributes")

    def attributes_of(entity: str, *types: str) -> list[str]:
        declared = attributes.get(entity) if isinstance(attributes, dict) else None
        return [
            str(name)
            for name, attribute in (declared.items() if isinstance(declared, dict) else ())
            if isinstance(attribute, dict) and attribute.get("type") in types
        ]

    categories = attributes_of("item", "categorical")
    segments = [
        *categories,
        *attributes_of("user", "categorical"),
        *attributes_of("context", "categorical", "clock"),
        NEW_ITEM,
    ]
    counter_keys = [
        *COUNTER_KEYS,
        *categories,
        *attributes_of("user", "categorical"),
        *attributes_of("context", "categorical", "clock"),
    ]
    return {
        "surfaces": keys(raw.get("surfaces")),
        "events": keys(raw.get("events")),
        "objectives": keys(raw.get("objectives")),
        "audiences": keys(raw.get("audiences")),
        "categorical item attributes": categories,
        "categorical attributes and new_item": segments,
        "attributes of users and of the context with one value": [
            name
            for entity in ("user", "context")
            for name in attributes_of(entity, "categorical", "numeric", "clock")
        ],
        "numeric context attributes": attributes_of("context", "numeric"),
        "attribution keys": ["item", *categories],
        "attributes of events": attributes_of("event", "numeric", "categorical"),
        "counter keys": counter_keys,
        "counter keys and categorical event attributes": [
            *counter_keys,
            *attributes_of("event", "categorical"),
        ],
        "dwell, value and numeric attributes of events and of the context": [
            *EVENT_NUMBERS,
            *attributes_of("event", "numeric"),
            *attributes_of("context", "numeric"),
        ],
    }


def format_errors(path: Path, root: yaml.Node | None, error: ValidationError) -> list[str]:
    """One line for each error, in the order of the file: `x.yaml:12: objectives.click: ...`."""
    errors = []
    for detail in _flatten_errors(error):
        location, line, siblings = locate(root, detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            known = [key for key in known_keys(detail["loc"]) if key not in siblings]
            message = f"unknown key; {suggest_name(str(location[-1]), known)}"
        name = ".".join(map(str, location)) or "spec"
        errors.append((line, f"{path}:{line}: {name}: {message}"))
    return [text for _, text in sorted(errors)]


def _flatten_errors(error: ValidationError) -> Iterator[Any]:
    """Pydantic's error details, with a SpecConsistencyError expanded into its problems."""
    for detail in error.errors():
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, SpecConsistencyError):
            for path, text in cause.problems:
                yield {"loc": path, "msg": text, "type": "inconsistent"}
        else:
            yield detail


@cache
def discriminator_tags() -> frozenset[str]:
    """The values of `type` and `kind` that tell models apart; Pydantic's locations contain them."""

    def tags(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            yield from schema.get("discriminator", {}).get("mapping", {})
        for inner in schema.values() if isinstance(schema, dict) else schema:
            if isinstance(inner, dict | list):
                yield from tags(inner)

    return frozenset(tags(DataSpec.model_json_schema()))


def locate(root: yaml.Node | None, location: Location) -> tuple[Location, int, list[str]]:
    """Where an error is in the file.

    Returns:
        The location without Pydantic's markers of unions and keys, the line of its deepest part
        that the file has, and the keys of the mapping there.
    """
    assert root is not None
    node, line = root, root.start_mark.line
    siblings: list[str] = []
    path: list[str | int] = []
    for part in location:
        if part == KEY_MARKER:
            continue
        if isinstance(node, yaml.MappingNode):
            pairs = {key.value: (key, value) for key, value in node.value}
            if str(part) not in pairs and part in discriminator_tags():
                continue
            siblings = list(pairs)
            if str(part) in pairs:
                line, node = pairs[str(part)][0].start_mark.line, pairs[str(part)][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line
        path.append(part)
    return tuple(path), line + 1, siblings


def known_keys(location: Location) -> list[str]:
    """The keys of the model that holds a location."""
    schema: Any = DataSpec.model_json_schema()
    definitions = schema["$defs"]
    for part in location[:-1]:
        schema = resolve_ref(schema, definitions)
        if part in discriminator_tags() and "discriminator" in schema:
            schema = {"$ref": schema["discriminator"]["mapping"][part]}
        elif part in schema.get("properties", {}):
            schema = schema["properties"][part]
        else:
            values = [*schema.get("patternProperties", {}).values(), schema.get("items")]
            schema = next(filter(None, values), {})
    return list(resolve_ref(schema, definitions).get("properties", {}))


def resolve_ref(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema with its `$ref` resolved; of an optional one, the schema of its value."""
    for choice in schema.get("anyOf", ()):
        if choice.get("type") != "null":
            schema = choice
    return definitions[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
