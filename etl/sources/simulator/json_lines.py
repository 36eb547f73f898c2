"""JSON lines from columns, and gzip files from JSON lines."""

import gzip
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

FASTEST = 1  # gzip level


def json_lines(columns: Mapping[str, pa.Array]) -> pa.StringArray:
    """One JSON object a row, a newline after each; a null leaves its field out of the object.

    Columns hold numbers, text that needs no escape, lists of numbers, or dictionaries of these.
    """
    members = [_member(name, values) for name, values in columns.items()]
    body = pc.binary_join_element_wise(*members, ",", null_handling="skip")
    return pc.binary_join_element_wise("{", body, "}\n", "")


def text(values: pa.Array) -> pa.StringArray:
    """Numbers as text."""
    return pc.cast(values, pa.string())


def write_lines(lines: pa.StringArray, path: Path) -> None:
    """Write lines as a gzip file whose bytes follow from them alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    joined = pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "")
    path.write_bytes(gzip.compress(joined[0].as_buffer(), FASTEST, mtime=0))


def _member(name: str, values: pa.Array) -> pa.StringArray:
    """`"name":value` of each row, null where the value is."""
    if isinstance(values, pa.DictionaryArray):
        return _member(name, values.dictionary).take(values.indices)
    if pa.types.is_string(values.type):
        return pc.binary_join_element_wise(f'"{name}":"', values, '"', "")
    if pa.types.is_list(values.type):
        listed = pc.binary_join(pc.cast(values, pa.list_(pa.string())), ",")
        return pc.binary_join_element_wise(f'"{name}":[', listed, "]", "")
    return pc.binary_join_element_wise(f'"{name}":', text(values), "")
