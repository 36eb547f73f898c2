"""When a user last did each thing with an item like the candidate, and whether it is due again.

B candidates, N events, G groups of candidates alike, A values of what makes them alike, T event
types, d row width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.model.events import AGES, age_bucket
from training.model.matching import Matches
from training.ops.ragged import group_of_each

NEVER = 2**40  # seconds
PHASES, REACH = 120, 3.0  # of ln(age / gap), from -3 to 3: steps of 5 %


@dataclass(frozen=True)
class Rhythm:
    """Of the matching events of each group and type (G, T + 1).

    `last` is the age of the newest in seconds, NEVER where there is none; `span` the seconds from
    the oldest to the newest, `gaps` how many there are between.
    """

    last: Tensor
    span: Tensor
    gaps: Tensor


def rhythm(matches: Matches, types: Tensor, ages: Tensor, kinds: int) -> Rhythm:
    """When the matching events of each group and of each of `kinds` types were."""
    groups = len(matches.kv_offsets) - 1
    cell = group_of_each(matches.kv_offsets) * kinds + types[matches.events]
    found, cells = ages[matches.events], groups * kinds
    last = torch.full((cells,), NEVER, dtype=ages.dtype, device=ages.device)
    last = last.scatter_reduce(0, cell, found, "amin")
    first = torch.zeros_like(last).scatter_reduce(0, cell, found, "amax")
    gaps = (torch.bincount(cell, minlength=cells) - 1).clamp(min=0)
    span = torch.where(gaps > 0, first - last, 0)
    return Rhythm(*(x.view(groups, kinds) for x in (last, span, gaps)))


class UsualGap(nn.Module):
    """The mean time between two events of a type with items of one value, over all users.

    It is learned by counting in the histories of what is trained on, which lie before it.
    """

    span: Tensor
    gaps: Tensor

    def __init__(self, values: int, kinds: int) -> None:
        super().__init__()
        self.register_buffer("span", torch.zeros(values, kinds, dtype=torch.float64))
        self.register_buffer("gaps", torch.zeros(values, kinds, dtype=torch.float64))

    def forward(self, values: Tensor, seen: Rhythm) -> Tensor:
        """Values (…) and their rhythms to seconds (…, T + 1), 0 where none were ever seen."""
        if self.training:
            kinds = self.span.shape[1]
            self.span.index_add_(0, values.flatten(), seen.span.double().view(-1, kinds))
            self.gaps.index_add_(0, values.flatten(), seen.gaps.double().view(-1, kinds))
        return (self.span[values] / self.gaps[values].clamp(min=1)).float()


class Recency(nn.Module):
    """A row for each event type: an embedding of the age of the last matching event, or of none.

    Attention must learn to pick the last event out of many before it can learn from its age; here
    the age itself is the input, and the history decides how far back it can reach. Added to it,
    from zero, are embeddings of that age as a share of the mean gap between two such events, the
    user's own and everybody's: what is done every three days is due on the third.
    """

    def __init__(self, values: int, types: int, width: int) -> None:
        super().__init__()
        self.kinds = types + 1
        self.age = nn.Embedding(self.kinds * (AGES + 1), width)
        nn.init.normal_(self.age.weight, std=0.05)
        self.own_phase = nn.Embedding(self.kinds * (PHASES + 1), width)
        self.usual_phase = nn.Embedding(self.kinds * (PHASES + 1), width)
        nn.init.zeros_(self.own_phase.weight)
        nn.init.zeros_(self.usual_phase.weight)
        self.usual = UsualGap(values, self.kinds)

    def forward(self, matches: Matches, types: Tensor, ages: Tensor) -> Tensor:
        """Types and ages in seconds of the events (N) to rows of the candidates (B, T, d)."""
        seen = rhythm(matches, types, ages, self.kinds)
        return self.rows(seen, matches.values)[matches.group_of, 1:]

    def rows(self, seen: Rhythm, values: Tensor) -> Tensor:
        """Rhythms (…, T + 1) with things of some values (…) as rows (…, T + 1, d)."""
        age = torch.where(seen.last < NEVER, age_bucket(seen.last), AGES)
        own = phase(seen.last, seen.span / seen.gaps.clamp(min=1))
        usual = phase(seen.last, self.usual(values, seen))
        slot = torch.arange(self.kinds, device=age.device)
        rows = self.age(age + slot * (AGES + 1))
        rows = rows + self.own_phase(own + slot * (PHASES + 1))
        return rows + self.usual_phase(usual + slot * (PHASES + 1))


def phase(last: Tensor, gap: Tensor) -> Tensor:
    """Bucket of ln(last / gap), of seconds; the last bucket where either is not known."""
    share = torch.log(last / gap.clamp(min=1.0)).clamp(-REACH, REACH - 1e-4)
    bucket = ((share + REACH) * (PHASES / (2 * REACH))).long()
    return torch.where((gap > 0) & (last < NEVER), bucket, PHASES)
