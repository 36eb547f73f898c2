"""What a step can tell the next of the tables it wrote: version, rows, and what they promise."""

import hashlib
from collections.abc import Iterable
from datetime import date

from etl.errors import UserError
from etl.spec.base import Strict
from etl.spec.model import DataSpec
from etl.tables import contracts
from etl.tables.contract import Contract
from etl.tables.lake import Lake


class Told(Strict):
    """A table: its version, its rows on the days asked for, a hash of its contract."""

    version: int
    rows: int
    contract: str


def told(lake: Lake, tables: Iterable[str], days: tuple[date, date]) -> dict[str, Told]:
    """What there is to tell of some tables; raises UserError where there is no such table."""
    known = all_contracts(lake.spec)
    found = {}
    for name in tables:
        if name not in known:
            raise UserError(f"no table is called {name}; known: {', '.join(known)}")
        version = lake.version(name)
        span = days if "day" in known[name].partition_by else None
        found[name] = Told(
            version=version, rows=lake.rows(name, span), contract=promise(known[name])
        )
    return found


def all_contracts(spec: DataSpec) -> dict[str, Contract]:
    """The contracts of all tables of a spec, by name."""
    made = [contract(spec) for contract in contracts.TABLES]
    made += [contracts.attributes(spec, entity) for entity in ("user", "item")]
    return {contract.name: contract for contract in made}


def promise(contract: Contract) -> str:
    """Twelve hex digits that change with what a table promises."""
    return hashlib.sha256(repr(contract).encode()).hexdigest()[:12]
