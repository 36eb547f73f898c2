"""One family of events: its tokens in, encoded level by level, and what they tell as rows.

N events of R requests, W the family's width, d row width, n rows of a request.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from training.model.config import FamilyOptions, GemConfig
from training.model.sequence.level import Encoded, Level, Sizes
from training.model.sequence.summary import Pooled, SeedPooling, newest
from training.model.sequence.target import TargetAttention


class Family(nn.Module):
    """A stack of levels over the events of some types, each as short as or shorter than the last.

    A family has a width, a depth and a window of its own (event-level personalisation, Kunlun).
    """

    def __init__(self, config: GemConfig, own: FamilyOptions) -> None:
        super().__init__()
        options, d = config.sequence, config.row_width
        w, heads = own.width or config.event_width, own.heads or config.heads
        self.events = own.events
        self.newest = own.newest or config.encoded_events
        sizes = Sizes(w, heads, own.window or config.window, self.newest, d, config.told_rows)
        depth = 0 if options.flow == "sole" else own.layers or config.event_layers
        self.enter = nn.Identity() if w == config.event_width else nn.Linear(config.event_width, w)
        self.cls = (
            nn.Parameter(torch.randn(options.cls_rows, w) * w**-0.5) if options.cls_rows else None
        )
        self.levels = nn.ModuleList(Level(number, options, sizes) for number in range(depth))
        pool = Pooled if options.pooling == "pma" else SeedPooling
        self.pooled = pool(w, heads, config.pooled_rows)
        self.last = options.cls_rows + config.recent_rows
        self.rows = config.pooled_rows + self.last
        self.target = TargetAttention(w, heads)
        self.out = nn.Linear(w, d)

    def begin(self, tokens: Tensor, offsets: Tensor, ages: Tensor) -> Encoded:
        """Tokens (N, event width) as a sequence, learned rows last: they see all before them."""
        found = Encoded(self.enter(tokens), offsets, ages)
        return found if self.cls is None else append(found, self.cls)

    def level(self, number: int, found: Encoded, told: Tensor | None) -> Encoded:
        """One level up, while there is one; `told` (R, n, d) are rows of the requests."""
        return self.levels[number](found, told) if number < len(self.levels) else found

    def summary(self, found: Encoded) -> Tensor:
        """(R, rows, d): pooled rows, then the learned and the newest ones."""
        pooled = self.pooled(found.events, found.offsets)
        last = newest(found.events, found.offsets, self.last)
        return self.out(torch.cat((pooled, last), 1))

    def seen_by(self, candidates: Tensor, request: Tensor, found: Encoded) -> Tensor:
        """What candidates (B, event width) find in the events: a row of each (B, d)."""
        own = self.enter(candidates)
        return self.out(self.target(own, found.events, request, found.offsets))


def append(found: Encoded, rows: Tensor) -> Encoded:
    """The same rows (n, W) behind the newest event of each request, a second old."""
    count, requests, device = len(rows), len(found.offsets) - 1, rows.device
    offsets = found.offsets + count * torch.arange(requests + 1, device=device)
    at = (offsets[1:, None] - torch.arange(count, 0, -1, device=device)).flatten()
    here = torch.ones(int(offsets[-1]), dtype=torch.bool, device=device).index_fill_(0, at, False)
    here = here.nonzero().flatten()
    events = rows.new_empty(int(offsets[-1]), rows.shape[1])
    events = events.index_copy(0, here, found.events).index_copy(0, at, rows.repeat(requests, 1))
    ages = found.ages.new_ones(len(events)).index_copy_(0, here, found.ages)
    return Encoded(events, offsets, ages)


def families_of(config: GemConfig) -> Sequence[FamilyOptions]:
    """The families of a configuration; one of all events where it names none."""
    return list(config.sequence.families.values()) or [FamilyOptions(events=())]
