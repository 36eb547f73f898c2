"""Reading a spec: every error at once, each with its line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from etl.errors import UserError
from etl.spec.base import suggestion
from etl.spec.model import DataSpec, MisfitError

Location = tuple[str | int, ...]
TAGS = ("event_log", "impression_log", "attributes", "categorical", "numeric", "vector", "clock")


def load_spec(path: Path) -> DataSpec:
    """The spec in a YAML file, where the order of names means nothing.

    Raises UserError with all that is wrong in it.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such spec; shipped ones lie in conf/specs")
    text = path.read_text()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    twice = [f"{path}:{line}: {key}: this key is there twice" for key, line in repeated(root)]
    if twice:
        raise UserError("\n".join(twice))
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a spec is a mapping; see docs/spec.md for a worked example")
    try:
        return DataSpec.model_validate(_by_name(raw), context=declared_names(raw))
    except ValidationError as error:
        raise UserError("\n".join(explain(path, root, error))) from None


def _by_name(value: Any) -> Any:
    """The same values, all mappings in the order of their names."""
    if not isinstance(value, dict):
        return value
    return {name: _by_name(inner) for name, inner in sorted(value.items(), key=lambda i: str(i[0]))}


def repeated(node: yaml.Node | None) -> Iterator[tuple[str, int]]:
    """Keys that one mapping holds twice, and their line; YAML would keep the last in silence."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            yield from repeated(child)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, child in node.value:
            if key.value in seen:
                yield str(key.value), key.start_mark.line + 1
            seen.add(key.value)
            yield from repeated(child)


def declared_names(raw: dict[str, Any]) -> dict[str, list[str]]:
    """The names that each section declares, valid or not."""

    def keys(value: object) -> list[str]:
        return [str(key) for key in value] if isinstance(value, dict) else []

    attributes = raw.get("attributes")
    item = attributes.get("item") if isinstance(attributes, dict) else None
    categories = [
        name
        for name, attribute in (item.items() if isinstance(item, dict) else ())
        if isinstance(attribute, dict) and attribute.get("type") == "categorical"
    ]
    return {
        "surfaces": keys(raw.get("surfaces")),
        "events": keys(raw.get("events")),
        "objectives": keys(raw.get("objectives")),
        "categorical item attributes": categories,
        "attribution keys": ["item", *categories],
        "counter keys": ["user", "item", "surface", *categories],
    }


def explain(path: Path, root: yaml.Node | None, error: ValidationError) -> list[str]:
    """One line an error, in the order of the file: `conf/specs/x.yaml:12: objectives.click…`."""
    found = []
    for item in _single(error):
        location, line, siblings = locate(root, item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            known = [k for k in known_keys(item["loc"]) if k not in siblings]
            message = f"unknown key; {suggestion(str(location[-1]), known)}"
        name = ".".join(map(str, location)) or "spec"
        found.append((line, f"{path}:{line}: {name}: {message}"))
    return [text for _, text in sorted(found)]


def _single(error: ValidationError) -> Iterator[Any]:
    """The errors of a validation, one for each part that does not fit."""
    for item in error.errors():
        misfits = item.get("ctx", {}).get("error")
        if isinstance(misfits, MisfitError):
            yield from (
                {"loc": where, "msg": what, "type": "misfit"} for where, what in misfits.problems
            )
        else:
            yield item


def locate(root: yaml.Node | None, location: Location) -> tuple[Location, int, list[str]]:
    """A location without union tags, the line of its deepest part in the file, the keys there."""
    assert root is not None
    node, line, siblings, path = root, root.start_mark.line, list[str](), list[str | int]()
    for part in location:
        if isinstance(node, yaml.MappingNode):
            pairs = {key.value: (key, value) for key, value in node.value}
            if str(part) not in pairs and part in TAGS:
                continue
            siblings = list(pairs)
            if str(part) in pairs:
                line, node = pairs[str(part)][0].start_mark.line, pairs[str(part)][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line
        path.append(part)
    return tuple(path), line + 1, siblings


def known_keys(location: tuple[str | int, ...]) -> list[str]:
    """Keys that the model around a location knows."""
    model: Any = DataSpec.model_json_schema()
    defs = model["$defs"]
    for part in location[:-1]:
        model = resolve(model, defs)
        if part in TAGS and "discriminator" in model:
            model = {"$ref": model["discriminator"]["mapping"][part]}
        elif part in model.get("properties", {}):
            model = model["properties"][part]
        else:
            values = [*model.get("patternProperties", {}).values(), model.get("items")]
            model = next(filter(None, values), {})
    return list(resolve(model, defs).get("properties", {}))


def resolve(model: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """A schema with its `$ref` followed and an optional one opened."""
    for choice in model.get("anyOf", ()):
        if choice.get("type") != "null":
            model = choice
    return defs[model["$ref"].rsplit("/", 1)[1]] if "$ref" in model else model
