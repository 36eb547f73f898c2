"""Teacher embeddings of each user's impressions, looked up as of a second (exclusive)."""

import logging
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Bytes, Int64
from etl.errors import UserError
from etl.tables import arrow, model_schemas
from etl.tables.lake import Lake
from features.ragged import count_visible
from features.schema import TEACHER_EMBEDDING_WIDTH

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeacherEmbeddings:
    """Embeddings of n impressions of U users, sorted by user and by visibility time.

    `embedding_int4` (n, Z / 2) packs two numbers into a byte. `sort_keys` (n) combine user
    and second in one number, ascending. All are of one compressor; None if there are none.
    """

    users: pa.Array
    sort_keys: Int64
    impression_ts: Int64
    item_index: Int64
    embedding_int4: Bytes
    compressor_version: str | None = None

    @classmethod
    def empty(cls, compressor_version: str | None = None) -> "TeacherEmbeddings":
        """No impressions."""
        none = np.zeros(0, np.int64)
        embeddings = np.zeros((0, TEACHER_EMBEDDING_WIDTH // 2), np.uint8)
        return cls(pa.array([], pa.string()), none, none, none, embeddings, compressor_version)

    def latest(
        self, users: npt.NDArray[np.object_], as_of: Int64, max_impressions: int
    ) -> tuple[Int64, Int64]:
        """The last `max_impressions` of each user (R) that were visible strictly before a second.

        Returns the position of the first impression and the position after the last one, both (R);
        the impressions of a user are consecutive, oldest first.
        """
        index = pc.index_in(pa.array(users, pa.string()), self.users)
        user = index.fill_null(len(self.users)).to_numpy().astype(np.int64)
        first = np.searchsorted(self.sort_keys, _sort_key(user, np.zeros_like(as_of)))
        stop = count_visible(self.sort_keys, _sort_key(user, as_of))
        return np.maximum(first, stop - max_impressions), stop


def _sort_key(user: Int64, second: Int64) -> Int64:
    return (user << 33) + second


def load_teacher_embeddings(lake: Lake, compressor_version: str | None = None) -> TeacherEmbeddings:
    """The rows of a compressor in the table `user_teacher_embeddings`; empty without the table.

    By default that is the compressor of the latest day. Embeddings of others cannot be compared
    with them; a warning reports later ones that are left out.

    Raises UserError if a row was predicted by a GEM that was trained on the row's day.
    """
    schema = model_schemas.user_teacher_embeddings(lake.spec)
    if not lake.exists(schema.name):
        return TeacherEmbeddings.empty(compressor_version)
    table = arrow.snapshot(lake, schema)
    rows = table.read(day=table.days())
    assert_teacher_is_earlier(rows)
    latest = latest_compressor(rows)
    if latest and compressor_version not in {None, latest}:
        log.warning(
            "teacher embeddings of the latest day are of compressor %s: a ranker that was trained "
            "with those of %s reads these alone until it is trained again",
            latest,
            compressor_version,
        )
    version = compressor_version or latest
    rows = of_compressor(rows, version)
    rows = rows.sort_by([(name, "ascending") for name in schema.order_by]).combine_chunks()
    users = rows["user_id"].combine_chunks().unique()
    user = pc.index_in(rows["user_id"], users).to_numpy().astype(np.int64)
    stored_bytes = b"".join(rows["teacher_embedding_int4"].to_pylist())
    embeddings = np.frombuffer(stored_bytes, np.uint8)
    return TeacherEmbeddings(
        users=users,
        sort_keys=_sort_key(user, rows["visible_ts"].to_numpy()),
        impression_ts=rows["impression_ts"].to_numpy(),
        item_index=rows["item_index"].to_numpy().astype(np.int64),
        embedding_int4=embeddings.reshape(len(rows), TEACHER_EMBEDDING_WIDTH // 2),
        compressor_version=version,
    )


def latest_compressor(rows: pa.Table, among: Collection[str] = ()) -> str | None:
    """The compressor of the embeddings of the latest day, of some compressors or of all.

    None without embeddings.
    """
    if among:
        rows = rows.filter(pc.is_in(rows["compressor_version"], pa.array(sorted(among))))
    if not len(rows):
        return None
    latest = pc.index(rows["visible_ts"], pc.max(rows["visible_ts"])).as_py()
    version: str = rows["compressor_version"][latest].as_py()
    return version


def of_compressor(rows: pa.Table, version: str | None) -> pa.Table:
    """The rows of a compressor; none without one."""
    return rows.filter(pc.equal(rows["compressor_version"], pa.scalar(version, pa.string())))


def assert_teacher_is_earlier(rows: pa.Table) -> None:
    """Raises UserError if the GEM of a row was trained on the labels of the row's `day`."""
    if pc.any(pc.greater_equal(rows["fm_trained_until"], rows["day"])).as_py():
        raise UserError(
            "teacher predictions have rows whose GEM was trained on their day; run `gemline "
            "teacher-predictions` for those days again"
        )
