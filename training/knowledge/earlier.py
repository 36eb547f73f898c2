"""What GEM kept of each user's impressions, looked up as of a second: strictly earlier ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import UserError
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from features.as_of import visible_before
from features.four_bits import Bytes
from features.inputs import KEPT_WIDTH

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Earlier:
    """n impressions of U users, sorted by user and by when they became visible.

    `keys` (n) hold user and second in one number; `shown`, `items` (n) and `kept` (n, Z / 2).
    """

    users: pa.Array
    keys: Int64
    shown: Int64
    items: Int64
    kept: Bytes

    @classmethod
    def nothing(cls) -> "Earlier":
        """No impression."""
        none = np.zeros(0, np.int64)
        kept = np.zeros((0, KEPT_WIDTH // 2), np.uint8)
        return cls(pa.array([], pa.string()), none, none, none, kept)

    def shuffled(self, seed: int) -> "Earlier":
        """Each impression with what was kept of another one: a control."""
        mixed = np.random.default_rng(seed).permutation(len(self.kept))
        return replace(self, kept=self.kept[mixed])

    def newest(
        self, users: npt.NDArray[np.object_], as_of: Int64, most: int
    ) -> tuple[Int64, Int64]:
        """The last `most` of each user (R) that were visible before a second (R).

        Positions of the first of them and of what comes after the last (R): user by user they lie
        together, oldest first.
        """
        user = pc.index_in(pa.array(users, pa.string()), self.users)
        found = user.fill_null(len(self.users)).to_numpy().astype(np.int64)
        first = np.searchsorted(self.keys, _key(found, np.zeros_like(as_of)))
        stop = visible_before(self.keys, _key(found, as_of))
        return np.maximum(first, stop - most), stop


def _key(user: Int64, second: Int64) -> Int64:
    return (user << 33) + second


def earlier(lake: Lake, days: Sequence[date] | None = None) -> Earlier:
    """All `user_knowledge` of a lake, or that of some days; nothing where none was written.

    Raises UserError where a row is of a GEM that had been trained on its day.
    """
    contract = contracts.user_knowledge(lake.spec)
    if not lake.exists(contract.name):
        return Earlier.nothing()
    stored = arrow.snapshot(lake, contract)
    rows = stored.read(day=stored.days() if days is None else days)
    refuse_seen(rows)
    rows = rows.sort_by([(name, "ascending") for name in contract.order_by]).combine_chunks()
    users = rows["user_id"].combine_chunks().unique()
    user = pc.index_in(rows["user_id"], users).to_numpy().astype(np.int64)
    kept = np.frombuffer(b"".join(rows["kept"].to_pylist()), np.uint8)
    return Earlier(
        users,
        _key(user, rows["visible_ts"].to_numpy()),
        rows["shown_ts"].to_numpy(),
        rows["item_ix"].to_numpy().astype(np.int64),
        kept.reshape(len(rows), KEPT_WIDTH // 2),
    )


def refuse_seen(rows: pa.Table) -> None:
    """Raises UserError where a row's GEM had been trained on its `day`."""
    if pc.any(pc.greater_equal(rows["fm_trained_until"], rows["day"])).as_py():
        raise UserError(
            "knowledge has rows whose GEM had been trained on their day; "
            "run `gemline knowledge` for those days again"
        )
