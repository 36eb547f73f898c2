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
