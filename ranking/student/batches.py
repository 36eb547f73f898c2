"""Batches of stored examples as the arrays that rankers read."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from features.four_bits import unpacked
from features.inputs import ITEM, USER
from ranking.inputs import Before, Candidates, Ids, Items, Places, Requests, newest, places
from ranking.reads import Reads
from ranking.rhythm import NEVER, Rhythm, rhythm
from training.data.batch import Batch
from training.data.reader import Reader
from training.knowledge.earlier import Earlier


@dataclass(frozen=True)
class Inputs:
    """Requests and their candidates; `rows` are where the rows of the batch are among these."""

    requests: Requests
    candidates: Candidates
    rows: Places


@dataclass(frozen=True)
class Assembly:
    """Makes what a student reads, from a batch, its items and what GEM kept of impressions."""

    reader: Reader
    earlier: Earlier
    reads: Reads

    def __call__(self, batch: Batch) -> Inputs:
        """The arrays of a batch."""
        counts = np.bincount(batch.request.numpy(), minlength=len(batch.as_of))
        rows = newest(np.concatenate(([0], np.cumsum(counts))), int(counts.max(initial=0)))
        return Inputs(self._requests(batch), self._candidates(batch, rows), rows)

    def _requests(self, batch: Batch) -> Requests:
        history = batch.history
        at = newest(history.offsets.numpy(), self.reads.events)
        ids = {ITEM: history.items} | history.item_ids
        return Requests(
            events=Items(
                {name: at(v.numpy()) for name, v in ids.items()},
                at(_side_by_side(len(history.items), history.item_vectors)),
            ),
            types=at(history.types.numpy()),
            surfaces=at(history.surfaces.numpy()),
            dwells=at(history.dwells.numpy()),
            ages=at(history.ages.numpy()).astype(np.float32),
            user_ids={name: v.numpy() for name, v in batch.user_ids.items()} | self._users(batch),
            user_numbers=batch.user_numbers.numpy(),
            before=self._before(batch),
        )

    def _users(self, batch: Batch) -> Ids:
        return {USER: batch.user.numpy() % self.reads.user_rows} if self.reads.user_rows else {}

    def _candidates(self, batch: Batch, at: Places) -> Candidates:
        features = self.reader.features
        ids = {name: at(v.numpy()) for name, v in batch.row_ids.items()}
        return Candidates(
            items=Items(
                {ITEM: at(batch.item.numpy())} | {n: ids[n] for n in features.item.ids},
                at(_side_by_side(len(batch), batch.row_vectors)),
            ),
            context_ids={name: ids[name] for name in features.context.ids},
            numbers=at(batch.row_numbers.numpy(), np.nan),
            surfaces=at(batch.surface.numpy()),
            rhythms=tuple(self._rhythm(batch, name, at) for name in features.match),
            present=at.there,
        )

    def _rhythm(self, batch: Batch, name: str, at: Places) -> Rhythm:
        history = batch.history
        found = rhythm(
            batch.row_ids[name].numpy(),
            batch.request.numpy(),
            history.item_ids[name].numpy(),
            history.offsets.numpy(),
            history.types.numpy(),
            history.ages.numpy(),
            1 + len(self.reader.features.events),
        )
        return Rhythm(at(found.last, NEVER), at(found.span), at(found.gaps))

    def _before(self, batch: Batch) -> Before:
        table, as_of = self.reader.items, batch.as_of.numpy()
        stored = self.earlier
        at = places(*stored.newest(batch.users, as_of, self.reads.before))
        index = at(stored.items)
        known = table.versions_at(index, np.broadcast_to(as_of[:, None], index.shape))
        given = [
            np.zeros((*index.shape, 0), np.float32),
            *(v[known] for v in table.vectors.values()),
        ]
        kept = unpacked(at(stored.kept)) * at.there[..., None].astype(np.float32)
        return Before(
            items=Items(
                {ITEM: index} | {name: v[known] for name, v in table.ids.items()},
                np.concatenate(given, -1),
            ),
            kept=kept,
            ages=_ages(at, as_of, stored.shown),
        )


def _ages(at: Places, as_of: np.ndarray, shown: np.ndarray) -> np.ndarray:
    ages = as_of[:, None] - at(shown)
    return np.where(at.there, np.maximum(ages, 1), 0).astype(np.float32)


def _side_by_side(n: int, vectors: Mapping[str, Tensor]) -> np.ndarray:
    return np.concatenate([np.zeros((n, 0), np.float32), *(v.numpy() for v in vectors.values())], 1)
