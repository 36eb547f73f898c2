"""The non-sequence features of impressions as one matrix, for tree models."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt

from etl.errors import UserError
from training.data.reader import Reader
from training.data.ripened import Ripened


@dataclass(frozen=True)
class Tabular:
    """B rows: `features` (B, F) with NaN for missing."""

    names: tuple[str, ...]
    features: npt.NDArray[np.float32]
    user: npt.NDArray[np.int64]
    surface: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]
    known: npt.NDArray[np.bool_]
    impressions: npt.NDArray[np.object_]


def tabulate(reader: Reader, days: Sequence[date], ripened: Ripened) -> Tabular:
    """What GEM reads of some days, without histories and ids of users and items.

    Raises UserError where no impression of the days has a final label.
    """
    f, buckets = reader.features, range(reader.lake.spec.buckets)
    parts = []
    for _, chunk in reader.chunks(days, buckets, ripened):
        held = reader.items.versions_at(chunk.item, np.repeat(chunk.as_of, np.diff(chunk.starts)))
        ids = [chunk.ids[name] for name in (*f.user.ids, *f.context.ids)]
        ids += [reader.items.ids[name][held] for name in f.item.ids]
        matrix = np.concatenate(
            (
                np.stack([chunk.surface, *ids], 1).astype(np.float32),
                chunk.user_numbers,
                reader.items.numbers[held],
                chunk.numbers,
                *(vectors[held] for vectors in reader.items.vectors.values()),
            ),
            axis=1,
        )
        user = np.repeat(chunk.user_hashes, np.diff(chunk.starts))
        parts.append((matrix, user, chunk.surface, chunk.labels, chunk.known, chunk.impressions))
    if not parts:
        raise UserError(
            f"no impressions with a final label on {days[0]} to {days[-1]}; name other days"
        )
    features, user, surface, labels, known, impressions = (
        np.concatenate(part) for part in zip(*parts, strict=True)
    )
    categorical = ("surface", *f.user.ids, *f.context.ids, *f.item.ids)
    vectors = tuple(f"{n}_{i}" for n, width in f.item.vectors.items() for i in range(width))
    names = (*categorical, *f.user.numbers, *f.row_numbers, *vectors)
    assert features.shape[1] == len(names)
    return Tabular(names, features, user, surface, labels, known, impressions)
