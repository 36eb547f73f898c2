"""GEM: one model over all surfaces, from a batch and its looked-up vectors to logits.

B rows, R requests, N events, d row width, W event width, O objectives, E embedding width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.data.batch import Batch
from training.data.features import Features
from training.model.config import GemConfig
from training.model.domains import DomainGate, Heads
from training.model.events import EventTokens, item_input
from training.model.lookup import ITEM, Vectors
from training.model.matching import MatchedAttention, match
from training.model.numeric import NumericRows
from training.model.recency import Recency
from training.model.sequence import EventLayer, Summary, TargetAttention
from training.model.wukong import Wukong


@dataclass(frozen=True)
class Output:
    """`logits` (B, O) of each objective on the row's surface, and a compact `embedding` (B, E)."""

    logits: Tensor
    embedding: Tensor


class Gem(nn.Module):
    """The dense part. Embedding tables stand outside (training/model/lookup.py)."""

    def __init__(self, features: Features, config: GemConfig) -> None:
        super().__init__()
        d, w = config.row_width, config.event_width
        tables = 1 + len(features.item.ids)
        given = sum(features.item.vectors.values())
        self.features = features
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
        self.event_rows = nn.Linear(w, d)
        self.given_rows = nn.ModuleDict(
            {name: nn.Linear(width, d) for name, width in features.item.vectors.items()}
        )
        self.surface = nn.Embedding(len(features.surfaces) + 1, d)
        self.row_numbers = NumericRows(
            len(features.row_numbers), config.numeric_rows, d, config.mlp
        )
        self.user_numbers = NumericRows(len(features.user.numbers), 1, d, config.mlp // 4)
        self.norm = nn.LayerNorm(d)
        self.wukong = Wukong(
            self._rows(config), d, config.layers, config.fm_rows, config.linear_rows,
            config.rank, config.mlp,
        )  # fmt: skip
        self.trunk = nn.Sequential(
            nn.Linear(self.wukong.out_rows * d + self._wide(), config.mlp),
            nn.LayerNorm(config.mlp),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.mlp, config.embedding),
        )
        self.gate = DomainGate(len(features.surfaces), config.embedding)
        self.heads = Heads(len(features.surfaces), len(features.objectives), config.embedding)

    def _rows(self, config: GemConfig) -> int:
        f = self.features
        ids = 1 + len(f.item.ids) + len(f.context.ids) + len(f.user.ids)
        history = 1 + config.pooled_rows + config.recent_rows
        history += len(f.match) * (1 + len(f.events))
        return ids + len(f.item.vectors) + 1 + config.numeric_rows + 1 + history

    def _wide(self) -> int:
        f = self.features
        return len(f.row_numbers) + len(f.user.numbers) + sum(f.item.vectors.values())

    def forward(self, batch: Batch, vectors: Vectors) -> Output:
        """Logits and embeddings of all rows; what belongs to a request is computed once."""
        events = self._encode(batch, vectors)
        rows = torch.cat(
            (
                self._request_rows(batch, vectors, events)[batch.request],
                self._own_rows(batch, vectors, events),
            ),
            dim=1,
        )
        x = self.wukong(self.norm(rows))
        wide = (
            self.row_numbers.scale(batch.row_numbers),
            self.user_numbers.scale(batch.user_numbers)[batch.request],
            *batch.row_vectors.values(),
        )
        embedding = self.trunk(torch.cat((x.flatten(1), *wide), 1))
        gated = self.gate(embedding, batch.surface)
        return Output(self.heads(gated, batch.surface), embedding)

    def _encode(self, batch: Batch, vectors: Vectors) -> Tensor:
        """Event tokens through the sequence layers (N, W)."""
        item = item_input(vectors.events, batch.history.item_vectors)
        events = self.events(batch.history, item)
        for layer in self.layers:
            events = layer(events, batch.history.offsets)
        return events

    def _request_rows(self, batch: Batch, vectors: Vectors, events: Tensor) -> Tensor:
        """What a request's candidates share: user attributes and the history's summary."""
        users = [vectors.users[name] for name in self.features.user.ids]
        summary = self.event_rows(self.summary(events, batch.history.offsets))
        numbers = self.user_numbers(batch.user_numbers)
        return torch.cat((*(u[:, None] for u in users), numbers, summary), 1)

    def _own_rows(self, batch: Batch, vectors: Vectors, events: Tensor) -> Tensor:
        """What a candidate has of its own: item, context, surface, counters, matching history."""
        names = (ITEM, *self.features.item.ids, *self.features.context.ids)
        found = [vectors.rows[name] for name in names]
        item = {name: vectors.rows[name] for name in (ITEM, *self.features.item.ids)}
        token = self.candidate(item_input(item, batch.row_vectors))
        history = batch.history
        matches = [
            match(batch.row_ids[name], history.item_ids[name], batch.request, history.offsets)
            for name in self.features.match
        ]
        attended = [self.target(token, events, batch.request, history.offsets)]
        attended += [f(token, events, m) for f, m in zip(self.matched, matches, strict=True)]
        recency = [
            f(m, history.types, history.ages) for f, m in zip(self.recency, matches, strict=True)
        ]
        given = [self.given_rows[name](v) for name, v in batch.row_vectors.items()]
        own = [*found, *given, self.surface(batch.surface), *map(self.event_rows, attended)]
        single = torch.stack(own, 1)
        return torch.cat((single, *recency, self.row_numbers(batch.row_numbers)), 1)
