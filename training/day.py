"""The batches of a day that a process trains on, from where an earlier one has come to.

A day is cut to lanes, as many as there were processes when it began. Whoever goes on with it,
with fewer processes or more, takes what is left of each lane: no row twice, and none left out.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta

import torch
import torch.distributed as dist

from etl.spec.units import each_day
from etl.tables.lake import Lake
from training.data.batch import Batch
from training.data.lanes import Pass, read
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import Ripened
from training.loop.checkpoint import Manifest
from training.loop.loss import thinning


@dataclass(frozen=True)
class Day:
    """All labels that ripened on a day, and how far a training has come with them."""

    lake: Lake
    reader: Reader
    day: date
    start: Manifest

    def lane(self, lane: int, taken: int = 0) -> Iterator[Batch]:
        """A lane's batches, without those that were taken."""
        start, spec, config = self.start, self.lake.spec, self.start.training
        first = self.day == start.trained_from
        after = 0 if first else spec.day_start(self.day)
        oldest = max(start.trained_from, self.day - timedelta(days=spec.ripens_after_days + 1))
        kept = thinning(config, tuple(spec.objectives))
        asked = Pass(
            list(each_day(oldest, self.day)),
            Ripened(after, spec.day_end(self.day), "training", thinning=kept),
            config.batch_rows,
            Shuffle(config.seed),
            (lane, start.processes),
            taken,
        )
        return read(self.reader, asked, config.workers)

    def of(self, rank: int, world: int) -> "Lanes":
        """What one of the processes takes."""
        taken = dict(enumerate(self.start.taken))
        mine = range(rank, self.start.processes, world)
        return Lanes({lane: self.lane(lane, taken.get(lane, 0)) for lane in mine}, taken)

    def spare(self, rank: int) -> Iterator[Batch]:
        """Batches to repeat without labels, by a process that has nothing left."""
        return self.lane(rank % self.start.processes)


class Lanes(Iterator[Batch]):
    """A batch of each lane in turn, and how many batches were `taken` of each, ever."""

    def __init__(self, lanes: Mapping[int, Iterator[Batch]], taken: Mapping[int, int]) -> None:
        self.taken = Counter(taken)
        self._lanes, self._turn = lanes, deque(lanes)

    def __next__(self) -> Batch:
        """The next batch."""
        while self._turn:
            lane = self._turn[0]
            batch = next(self._lanes[lane], None)
            if batch is not None:
                self._turn.rotate(-1)
                self.taken[lane] += 1
                return batch
            self._turn.popleft()
        raise StopIteration

    def taken_by_all(self, lanes: int) -> tuple[int, ...]:
        """How many batches all processes have taken of each lane."""
        taken = torch.tensor([self.taken[lane] for lane in range(lanes)])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return tuple(taken.tolist())
