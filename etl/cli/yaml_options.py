"""Command-line options that hold a YAML mapping, such as `{click: 2, conversion: 1}`."""

from collections.abc import Mapping
from typing import Any

import tyro
import yaml
from pydantic import TypeAdapter


def yaml_option(type_: Any) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """A tyro constructor that parses an option of type `type_` from one argument of YAML."""
    adapter = TypeAdapter(type_)

    def parse(words: list[str]) -> Any:
        try:
            content = yaml.safe_load(words[0])
        except yaml.YAMLError as error:  # tyro reports a ValueError
            raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
        return adapter.validate_python(content)

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="YAML",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda value: [str(adapter.dump_python(value))],
    )
