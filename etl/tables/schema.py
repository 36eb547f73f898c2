"""The columns of a contract as Arrow has them."""

import pyarrow as pa

from etl.tables.contract import Contract

ARROW_TYPES = {
    "string": pa.string(),
    "tinyint": pa.int8(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "binary": pa.binary(),
}


def arrow_type(name: str) -> pa.DataType:
    """The Arrow type of a Spark SQL type, lists included."""
    if name.startswith("array<"):
        return pa.list_(arrow_type(name[6:-1]))
    return ARROW_TYPES[name]


def arrow_schema(contract: Contract) -> pa.Schema:
    """The schema of a whole table."""
    return pa.schema([(n, arrow_type(t)) for n, t in contract.columns.items()])
