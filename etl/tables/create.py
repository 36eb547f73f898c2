"""Tables as their contracts say, made in one commit: columns, what is never null, what holds."""

import pyarrow as pa
from deltalake import DeltaTable

from etl.tables.codes import record_codes
from etl.tables.contract import Contract
from etl.tables.lake import Lake
from etl.tables.schema import arrow_type

# The lowest protocol under which every writer enforces the constraints.
PROTOCOL = {"delta.minReaderVersion": "1", "delta.minWriterVersion": "3"}


def create(lake: Lake, contract: Contract) -> None:
    """Create a table by its contract unless it is there; raises UserError if of another spec."""
    if lake.exists(contract.name):
        lake.open(contract.name)
        return
    record_codes(lake.root, lake.spec)
    fields = [
        pa.field(name, arrow_type(type_), nullable=name not in contract.never_null)
        for name, type_ in contract.columns.items()
    ]
    check = {"delta.constraints.contract": contract.check} if contract.check else {}
    DeltaTable.create(
        lake.path(contract.name),
        pa.schema(fields),
        mode="ignore",
        partition_by=list(contract.partition_by),
        configuration=lake.properties | PROTOCOL | check,
        raise_if_key_not_exists=False,
    )
