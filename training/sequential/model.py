"""A user's earlier events and a candidate to one logit: GEM's blocks on a log of files.

B rows, E events of C chunks, n rows of features, d row width, W event width, M numbers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.fitting.fit import Learner
from training.model.config import GemConfig
from training.model.numeric import NumericRows
from training.model.sequence.affinity import Affinity
from training.model.sequence.layers import TransformerLayer
from training.model.sequence.target import TargetAttention
from training.sequential.files import POSITIVE, UNKNOWN, Log
from training.sequential.names import Names
from training.sequential.streams import Streams
from training.tabular.model import Stream

SIZE = GemConfig(
    layers=2, fm_rows=16, linear_rows=16, rank=8, dropout=0.2, heads=4, item_dropout=0.1
)
STREAMS = (SIZE, SIZE.model_copy(update={"interaction": "two_streams"}))
FAINT = 1e-2  # variance of a row below which it stays small
SPANS = (8, 64, 2**30)  # newest events that a mean is taken of
PRIOR = 3.0


class EventTokens(nn.Module):
    """An item, whether it was liked, and what was known of user and item then: (E, W)."""

    def __init__(self, items: int, numbers: int, width: int) -> None:
        super().__init__()
        self.item = nn.Linear(items, width)
        self.label = nn.Embedding(1 + POSITIVE, width)
        self.known = NumericRows(numbers, 1, width, width)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, items: Tensor, labels: Tensor, numbers: Tensor) -> Tensor:
        """Items (E, n d), labels (E) and numbers (E, M) to (E, W)."""
        token = self.item(items) + self.label(labels) + self.known(numbers)[0][:, 0]
        return self.norm(token + self.mix(token))


class History(nn.Module):
    """What a user's earlier events tell of a candidate, as rows (B, n, d)."""

    def __init__(self, items: int, numbers: int, size: GemConfig) -> None:
        super().__init__()
        w, d = size.event_width, size.row_width
        self.tokens = EventTokens(items, numbers, w)
        self.layers = nn.ModuleList(
            TransformerLayer(w, size.heads, size.window, w) for _ in range(size.event_layers)
        )
        self.target = TargetAttention(w, size.heads)
        self.affinity = Affinity(items, w, size.heads)
        self.mean = nn.Linear(w, d)
        self.out = nn.Linear(w, d)
        self.rows = 3 + len(SPANS)

    def forward(self, found: Streams, candidates: Tensor, items: Tensor) -> Tensor:
        """Items of candidates (B, n d) and of events (E, n d) to rows."""
        tokens = self.tokens(items, found.labels, found.events.numbers)
        events = tokens
        for layer in self.layers:
            events = layer(events, found.offsets)
        seen = found.chunk, found.offsets, found.limits
        own = self.tokens.item(candidates)
        read = (
            self.target(own, events, *seen),
            self.affinity(candidates, items, tokens, *seen),
            _last(found, events),
        )
        return torch.cat((self.out(torch.stack(read, 1)), self._means(found, events)), 1)

    def _means(self, found: Streams, events: Tensor) -> Tensor:
        """Of the newest events, of more and of all that a row sees (B, spans, d)."""
        sums = F.pad(self.mean(events).double().cumsum(0), (0, 0, 1, 0))
        first = found.offsets[found.chunk][:, None]
        stop = first + found.limits[:, None]
        begin = torch.maximum(first, stop - torch.tensor(SPANS))
        return ((sums[stop] - sums[begin]) / (stop - begin + PRIOR)[..., None]).float()


class Sequential(Learner):
    """A sum of logits: of single values, and of streams of interactions between all rows."""

    def __init__(self, log: Log, numbers: int, size: GemConfig = SIZE) -> None:
        super().__init__()
        d = size.row_width
        users, items = (log.users, log.user_attributes), (log.items, log.item_attributes)
        self.users, self.items = Names(*users, d), Names(*items, d)
        self.user_alone, self.item_alone = Names(*users, 1), Names(*items, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        self.numbers = NumericRows(numbers, size.numeric_rows, d, size.mlp)
        self.history = History(self.items.rows * d, numbers, size)
        rows = self.users.rows + self.items.rows + size.numeric_rows + self.history.rows
        self.norm = nn.LayerNorm(d, eps=FAINT)
        self.streams = nn.ModuleList(Stream(rows, config) for config in STREAMS)
        self.item_dropout = size.item_dropout

    @property
    def embeddings(self) -> list[Tensor]:
        """The weights of single values, which memorise."""
        names = (self.users, self.items, self.user_alone, self.item_alone)
        return [table for of in names for table in of.tables]

    def forward(self, found: Streams) -> Tensor:
        """Streams to logits (B)."""
        rows, events = found.rows, found.events
        index = rows.item
        if self.training:
            index = torch.where(torch.rand(len(index)) < self.item_dropout, UNKNOWN, index)
        items = self.items(index, rows.key)
        seen = self.items(events.item, events.key).flatten(1)
        x = torch.cat(
            (
                self.users(rows.user, rows.person),
                items,
                self.numbers(rows.numbers)[0],
                self.history(found, items.flatten(1), seen),
            ),
            1,
        )
        x = self.norm(x).transpose(0, 1).contiguous()
        alone = self.user_alone(rows.user, rows.person).sum((1, 2))
        alone = self.bias + alone + self.item_alone(index, rows.key).sum((1, 2))
        return alone + torch.stack([stream(x) for stream in self.streams]).sum(0)


def _last(found: Streams, events: Tensor) -> Tensor:
    """The newest event that each row sees (B, W), zeros where there is none."""
    at = found.offsets[found.chunk] + found.limits
    return F.pad(events, (0, 0, 1, 0))[torch.where(found.limits > 0, at, 0)]
