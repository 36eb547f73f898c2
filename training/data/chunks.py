"""A chunk: the examples of some days and one bucket with their labels, request by request."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables.arrow import Snapshot
from features.groups import run_starts
from features.inputs import Features
from training.data.ripened import Ripened

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
KEYS = ("impression_id", "request_id", "user_id", "item_ix", "surface")
POINTER = ("as_of_ts", "hist_len")


@dataclass(frozen=True)
class Chunk:
    """B rows sorted by request; `starts` (R+1) cut them into requests.

    `requests` (R) are their ids; `users`, `as_of` and `length` (R) point into the histories,
    `user_hashes` (R) into a table of users; the rest has B rows.
    """

    starts: Int64
    requests: npt.NDArray[np.object_]
    users: pa.Array
    user_hashes: Int64
    as_of: Int64
    length: Int64
    item: Int64
    surface: Int64
    ids: dict[str, Int64]
    user_numbers: Float32
    numbers: Float32
    labels: Float32
    known: npt.NDArray[np.bool_]
    values: Float32
    impressions: npt.NDArray[np.object_]

    @cached_property
    def user_names(self) -> npt.NDArray[np.object_]:
        """`users` (R) outside of Arrow."""
        return np.asarray(self.users)


def load_chunk(
    spec: DataSpec,
    features: Features,
    examples: Snapshot,
    impressions: Snapshot,
    days: Sequence[date],
    bucket: int,
    ripened: Ripened,
    surfaces: Sequence[int] = (),
) -> Chunk | None:
    """The rows, of some surfaces or all, of which some label ripened; None where there are none.

    Raises UserError where a label should be final but is not in the table.
    """
    ids = (*features.user.ids, *features.context.ids)
    numbers = (*features.user.numbers, *features.context.numbers, *features.counters)
    rows = examples.read([*KEYS, *POINTER, *ids, *numbers], day=days, bucket=bucket)
    rows = rows.sort_by([(name, "ascending") for name in examples.contract.order_by])
    labels, known, values = _labels(spec, impressions, days, bucket, rows, ripened)
    if ripened.thinning:
        known = ripened.thinning(labels, known, max(days).toordinal(), bucket)
    wanted = known.any(1) | ripened.unlabelled
    if surfaces:
        wanted &= np.isin(rows["surface"].to_numpy(), surfaces)
    if not wanted.any():
        return None
    rows = rows.filter(pa.array(wanted)).combine_chunks()
    request = pc.binary_join_element_wise(
        rows["user_id"], rows["as_of_ts"].cast(pa.string()), rows["request_id"], "\x1f"
    ).combine_chunks()
    starts = run_starts(request)
    first = pa.array(starts)
    users = rows["user_id"].combine_chunks().take(first)
    return Chunk(
        starts=np.append(starts, rows.num_rows),
        requests=np.asarray(rows["request_id"].combine_chunks().take(first)),
        users=users,
        user_hashes=hashes(users),
        as_of=rows["as_of_ts"].to_numpy()[starts],
        length=rows["hist_len"].to_numpy()[starts].astype(np.int64),
        item=rows["item_ix"].to_numpy().astype(np.int64),
        surface=rows["surface"].to_numpy().astype(np.int64),
        ids={name: rows[name].to_numpy().astype(np.int64) for name in ids},
        user_numbers=stack(rows, features.user.numbers),
        numbers=np.concatenate(
            (
                stack(rows, features.context.numbers),
                features.counter_inputs(stack(rows, features.counters)),
            ),
            axis=1,
        ),
        labels=labels[wanted],
        known=known[wanted],
        values=values[wanted],
        impressions=np.asarray(rows["impression_id"]),
    )


def hashes(names: pa.Array) -> Int64:
    """A number of 32 bits for each name (n), the same on every machine."""
    told = names.dictionary_encode()
    each = [crc32(name.encode()) for name in told.dictionary.to_pylist()]
    return np.array(each, np.int64)[told.indices.to_numpy()]


def stack(rows: pa.Table, names: Iterable[str]) -> Float32:
    """Columns side by side (B, F); nulls are NaN."""
    columns = [rows[name].to_numpy().astype(np.float32) for name in names]
    return np.stack(columns, 1) if columns else np.zeros((rows.num_rows, 0), np.float32)


def _labels(
    spec: DataSpec,
    impressions: Snapshot,
    days: Sequence[date],
    bucket: int,
    rows: pa.Table,
    ripened: Ripened,
) -> tuple[Float32, npt.NDArray[np.bool_], Float32]:
    names = ["impression_id", "surface"]
    names += [f"{what}_{name}" for name in spec.objectives for what in ("label", "ready")]
    names += [f"value_{name}" for name, told in spec.objectives.items() if told.value]
    span = f"{min(days)}:{max(days)}"
    table = impressions.read(names, day=days, bucket=bucket)
    where = pc.index_in(rows["impression_id"], table["impression_id"].combine_chunks())
    if where.null_count:
        raise UserError(f"impressions of {span} lack labels; run `gemline etl labels` for them")
    table = table.take(where)
    surface = table["surface"].to_numpy()
    shape = (table.num_rows, len(spec.objectives))
    labels, final, values = np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape)
    ready, served = np.zeros(shape, np.int64), np.zeros(shape, bool)
    for i, name in enumerate(spec.objectives):
        ready[:, i] = table[f"ready_{name}"].to_numpy() // MICROS["s"]
        served[:, i] = np.isin(surface, [spec.surface_codes[s] for s in spec.surfaces_of(name)])
        label = table[f"label_{name}"]
        final[:, i] = label.is_valid().to_numpy()
        labels[:, i] = label.fill_null(0).to_numpy()
        if spec.objectives[name].value:
            values[:, i] = table[f"value_{name}"].fill_null(0).to_numpy()
    known = served & _known(spec, rows, ready, served, ripened)
    if (known & ~final).any():
        name = list(spec.objectives)[int(np.argmax((known & ~final).any(0)))]
        raise UserError(
            f"labels of {name} on {span} are not final in the table although their window has "
            "closed; run `gemline etl labels` up to the newest day"
        )
    return labels, known, values.astype(np.float32)


def _known(spec: DataSpec, rows: pa.Table, ready: Int64, served: Bools, ripened: Ripened) -> Bools:
    """Which labels (B, O), final from `ready` on where a surface has them, a pass is about."""
    if ripened.purpose == "evaluation":
        return np.asarray((ready >= ripened.after) & (ready < ripened.until))
    held_out = _held_out(spec, rows)
    learned = np.where(held_out[:, None], np.where(served, ready, 0).max(1)[:, None], ready)
    times = learned if ripened.purpose == "training" else ready
    known = (times >= ripened.after) & (times < ripened.until)
    if ripened.purpose == "calibration":
        first_learned = np.where(served, learned, np.iinfo(np.int64).max).min(1)
        known &= (first_learned >= ripened.after)[:, None]
    return np.asarray(known)


def _held_out(spec: DataSpec, rows: pa.Table) -> Bools:
    """Rows (B) of requests that are held out: a share of them, by a hash of user and time."""
    user = hashes(rows["user_id"].combine_chunks()).astype(np.uint64)
    mixed = user * np.uint64(0x9E3779B97F4A7C15) ^ rows["as_of_ts"].to_numpy().astype(np.uint64)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x94D049BB133111EB)
    return np.asarray((mixed >> np.uint64(32)) < spec.calibration_holdout * 2.0**32)
