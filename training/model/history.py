"""What a history tells of a request and of each of its candidates, as rows for Wukong.

B candidates of R requests, N events, d row width, W event width.
"""

import torch
from torch import Tensor, nn

from training.data.batch import Batch
from training.data.features import Features
from training.model.config import GemConfig
from training.model.events import EventTokens, item_input
from training.model.lookup import ITEM, Vectors
from training.model.matching import Found, MatchedAttention
from training.model.recency import Recency
from training.model.sequence import EventLayer, Summary, TargetAttention


class HistoryRows(nn.Module):
    """The newest events encoded in depth; the whole history searched for events like a candidate.

    Two stages as in SIM (2006.05639): sequence layers cost too much for thousands of events, and
    what lies far back is asked for by what it has in common with the candidate.
    """

    def __init__(self, features: Features, config: GemConfig) -> None:
        super().__init__()
        d, w = config.row_width, config.event_width
        tables = 1 + len(features.item.ids)
        given = sum(features.item.vectors.values())
        self.items = (ITEM, *features.item.ids)
        self.events = EventTokens(tables, d, given, len(features.surfaces), len(features.events), w)
        self.candidate = nn.Linear(tables * d + given, w)
        self.candidate.weight = self.events.item.weight
        self.layers = nn.ModuleList(
            EventLayer(w, config.heads, config.window) for _ in range(config.event_layers)
        )
        self.summary = Summary(w, config.heads, config.pooled_rows, config.recent_rows)
        self.target = TargetAttention(w, config.heads)
        self.matched = nn.ModuleList(MatchedAttention(w, config.heads) for _ in features.match)
        self.recency = nn.ModuleList(Recency(len(features.events), d) for _ in features.match)
        self.out = nn.Linear(w, d)
        self.request_rows = config.pooled_rows + config.recent_rows
        self.own_rows = 1 + len(features.match) * (1 + len(features.events))

    def forward(self, batch: Batch, found: Found, vectors: Vectors) -> tuple[Tensor, Tensor]:
        """Rows that candidates of a request share (R, n, d), and rows of each (B, m, d)."""
        history = batch.history
        events, *matched = found.split(self.events(history, vectors.events, found.positions))
        for layer in self.layers:
            events = layer(events, found.offsets)
        shared = self.out(self.summary(events, found.offsets))

        candidate = self.candidate(
            item_input({name: vectors.rows[name] for name in self.items}, batch.row_vectors)
        )
        attended = [
            self.target(candidate, events, batch.request, found.offsets),
            *(
                f(candidate, e, m)
                for f, e, m in zip(self.matched, matched, found.matches, strict=True)
            ),
        ]
        recencies = [
            f(m, history.types, history.ages)
            for f, m in zip(self.recency, found.matches, strict=True)
        ]
        return shared, torch.cat((self.out(torch.stack(attended, 1)), *recencies), 1)
