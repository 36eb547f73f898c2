"""The store of online features: what is known of users and items now."""

from dataclasses import dataclass
from pathlib import Path

from etl.errors import UserError
from etl.spec.base import Strict
from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS
from etl.tables.contracts import RESERVED_ITEMS
from ranking.online.counters import LEVELS, Counters
from ranking.online.database import Database, Txn, environment
from ranking.online.layout import Histories, Layout

TABLES = (
    "meta", "users", "items", "versions", "offers", "history", "before", "seen",
    *(level.table for level in LEVELS),
)  # fmt: skip
META = b"store"
MARGIN_DAYS = 2  # beyond the lateness: days of other time zones, clocks that run ahead
REQUEST_SLACK = 3600  # seconds by which a request may be older than the features


class Meta(Strict):
    """What a store holds: histories of `length` events of a sequence, all that landed by a second.

    `items` is the number of items that had an index then: those that come later may have another
    one in the tables.
    """

    spec: DataSpec
    sequence: str
    length: int
    landed: int = 0
    items: int = RESERVED_ITEMS


@dataclass(frozen=True)
class Store(Database):
    """Features of users and items of a spec, and how each is laid out."""

    meta: Meta
    layout: Layout
    counters: Counters
    histories: Histories

    @property
    def spec(self) -> DataSpec:
        """The spec that it was built for."""
        return self.meta.spec

    @property
    def landed(self) -> int:
        """The second by which all that it was built from had landed."""
        return self.meta.landed

    @property
    def first_request(self) -> int:
        """The earliest second of which it can answer a request: a day before all had landed."""
        return self.landed - DAY

    @property
    def settled_ts(self) -> int:
        """The time (µs) before which the tables are final: a later log holds no older events.

        Events since then are known by their ids, so that a live one is not counted again.
        """
        days = self.spec.lateness_days + MARGIN_DAYS
        return (self.landed - days * DAY) * MICROS["s"]

    def applied(self, txn: Txn, log: bytes) -> int:
        """The number of the last entry of a log, by its identity, that was applied."""
        return int.from_bytes(txn.get("meta", b"applied " + log), "big")

    def set_applied(self, txn: Txn, log: bytes, sequence: int) -> None:
        """Remember, with its effects, that an entry of a log was applied."""
        txn.put("meta", b"applied " + log, sequence.to_bytes(8, "big"))


def create(folder: Path, meta: Meta) -> Store:
    """An empty store in a new folder."""
    env, tables = environment(folder, TABLES, metasync=False)
    with Database(env, tables).writing() as txn:
        txn.put("meta", META, meta.model_dump_json().encode())
    env.close()
    return open_store(folder, meta.spec)


def open_store(folder: Path, spec: DataSpec) -> Store:
    """The store of a folder; raises UserError where there is none, or one of another spec."""
    if not (folder / "data.mdb").is_file():
        raise UserError(f"{folder} holds no online features; run `gemline rank store` first")
    env, tables = environment(folder, TABLES, metasync=False)
    with Database(env, tables).reading() as txn:
        meta = Meta.model_validate_json(txn.get("meta", META))
    if meta.spec.hash != spec.hash:
        env.close()
        raise UserError(
            f"{folder} holds features of spec {meta.spec.hash}, not of {spec.hash}: run "
            "`gemline rank store` again"
        )
    events = meta.spec.sequences[meta.sequence].events or ()
    codes = tuple(meta.spec.event_codes[name] for name in events)
    return Store(
        env, tables, meta, Layout.of(meta.spec), Counters.of(meta.spec),
        Histories(codes, meta.length),
    )  # fmt: skip
