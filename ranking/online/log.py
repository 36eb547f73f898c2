"""What was told live, kept until the tables hold it: a store made anew can be told it again."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Literal

from ranking.online.store import Txn

Kind = Literal["event", "user", "item"]


@dataclass(frozen=True)
class Told:
    """An event, or a version of a user or an item, as its fields; when it was told, in µs."""

    kind: Kind
    told_ts: int
    fields: dict[str, object]


def keep(txn: Txn, kind: Kind, told_ts: int, what: object) -> None:
    """Remember an event or a version."""
    value = json.dumps({"kind": kind, "fields": asdict(what)}).encode()  # type: ignore[call-overload]
    name = told_ts.to_bytes(8, "big") + blake2b(value, digest_size=8).digest()
    txn.put("log", name, value)


def since(txn: Txn, told_ts: int) -> Iterator[Told]:
    """All that was told from a time on, in that order."""
    for name, value in txn.from_key("log", told_ts.to_bytes(8, "big")):
        said = json.loads(value)
        yield Told(said["kind"], int.from_bytes(name[:8], "big"), said["fields"])
