"""Options that are mappings, as one word of YAML on the command line: {click: 2, conversion: 1}."""

from collections.abc import Mapping
from typing import Any

import tyro
import yaml
from pydantic import TypeAdapter


def in_yaml(kind: Any) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """How tyro reads and writes an option of a mapping type."""
    adapter = TypeAdapter(kind)
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="YAML",
        instance_from_str=lambda words: adapter.validate_python(yaml.safe_load(words[0])),
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda value: [str(adapter.dump_python(value))],
    )
