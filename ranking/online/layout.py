"""How the store's values are laid out: packed arrays, named as the columns that they hold."""

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from etl.spec.model import DataSpec
from etl.tables.contracts import item_key_columns
from features.inputs import KEPT_WIDTH, Features, Group, features_of

SEEN = b"1"
LONGEST_KEY = 500  # bytes; LMDB takes 511
UNKNOWN = -1  # of a key, or of a second from which something was known

HISTORY = np.dtype(
    [("visible", "<i8"), ("happened", "<i8"), ("event", "S40"), ("item", "<i4"),
     ("surface", "<i1"), ("type", "<i1"), ("dwell", "<u1")]
)  # fmt: skip
BEFORE = np.dtype(
    [("visible", "<i8"), ("shown", "<i8"), ("item", "<i4"), ("kept", "u1", (KEPT_WIDTH // 2,))]
)
# What is bid for an item: goals from 1, 0 is none; the hash of the advertiser, or NO_ADVERTISER.
OFFER = np.dtype([("since", "<i8"), ("bid", "<f8"), ("goal", "<i2"), ("advertiser", "<i8")])
SPARE = 64  # events kept beyond what is read: for requests that are older than the newest event


def key_of(name: str) -> bytes:
    """The key of a user or an item: its name, or its hash where that is too long for a key."""
    key = name.encode()
    return key if len(key) <= LONGEST_KEY else b"\xff" + blake2b(key, digest_size=32).digest()


@dataclass(frozen=True)
class Layout:
    """The dtypes that depend on the spec."""

    spec: DataSpec
    features: Features
    user: np.dtype
    item: np.dtype
    item_head: np.dtype

    @classmethod
    def of(cls, spec: DataSpec) -> "Layout":
        """As a spec declares its attributes."""
        features = features_of(spec)
        keys = len(item_key_columns(spec))
        head = [("index", "<i4"), ("since", "<i8"), ("keys", "<i8", (keys,))]
        return cls(
            spec,
            features,
            versions(features.user),
            versions(features.item),
            np.dtype(head),
        )


def versions(group: Group) -> np.dtype:
    """A version of an entity's attributes, valid from `since` (µs)."""
    return np.dtype(
        [
            ("since", "<i8"),
            ("ids", "<i8", (len(group.ids),)),
            ("numbers", "<f4", (len(group.numbers),)),
            ("given", "<f4", (sum(group.vectors.values()),)),
        ]
    )


@dataclass(frozen=True)
class Histories:
    """The last `most` events of a user, of the types in `codes`; of all where there are none."""

    codes: tuple[int, ...]
    most: int

    def with_event(self, stored: bytes, event: np.ndarray, now: int) -> bytes | None:
        """A user's events and one more, which came at a second; None if its type is not read."""
        if self.codes and int(event["type"][0]) not in self.codes:
            return None
        rows = np.concatenate((np.frombuffer(stored, HISTORY), event))
        if len(rows) > 1 and rows[-2]["visible"] >= rows[-1]["visible"]:
            rows = rows[np.lexsort((rows["event"], rows["happened"], rows["visible"]))]
        return rows[self.first_kept(rows["visible"], now) :].tobytes()

    def first_kept(self, visible: np.ndarray, now: int) -> int:
        """The first event to keep, by the seconds (N) from which a user's events are visible.

        All that become visible later than `now` stay, and as many before as are read.
        """
        return max(0, int(np.searchsorted(visible, now)) - self.most - SPARE)

    def seen(self, stored: bytes, as_of: int) -> np.ndarray:
        """The events that were visible strictly before a second, oldest first."""
        rows = np.frombuffer(stored, HISTORY)
        return rows[: np.searchsorted(rows["visible"], as_of)][-self.most :]
