"""GEM: one model over all surfaces, from a batch and its looked-up vectors to logits.

B rows, R requests, d row width, O objectives, E embedding width.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from etl.errors import UserError
from features.inputs import ITEM, USER, Features
from training.data.batch import Batch
from training.model.config import GemConfig
from training.model.domains import DomainGate, Heads
from training.model.funnel import Funnel
from training.model.grouped import GroupedRows
from training.model.history import HistoryRows
from training.model.interaction import interaction
from training.model.interest import Interest
from training.model.lookup import Vectors
from training.model.matching import Found
from training.model.numeric import NumericRows
from training.model.value import ValueHead, Worth

FAINT = 1e-2  # variance of a row below which it stays small: one hardly learned tells little


@dataclass(frozen=True)
class Output:
    """`logits` (B, O) of each objective on the row's surface, and a compact `embedding` (B, E).

    `hidden` (B, M) is the layer before it, M the width of the MLP: what GEM makes of user and item
    before it turns to objectives. What outcomes are worth and the loss of guessing next events are
    there if they are asked for.
    """

    logits: Tensor
    embedding: Tensor
    hidden: Tensor
    worth: Worth | None
    next_action: Tensor | None


class Gem(nn.Module):
    """The dense part. Embedding tables stand outside (training/model/lookup.py)."""

    def __init__(self, features: Features, config: GemConfig) -> None:
        super().__init__()
        d = config.row_width
        self.features = features
        grouped = {"width": d, "below": config.weak_below, "shared": config.weak_rows}
        users = {USER: config.user_rows} if config.user_rows else {}
        self.user_ids = GroupedRows(users | features.user.ids, **grouped)
        own_ids = features.item.ids | features.context.ids
        self.own_ids = GroupedRows({ITEM: sys.maxsize} | own_ids, **grouped)
        self.history = HistoryRows(features, config, 1 + self.user_ids.rows)
        self.interests = nn.ModuleList(
            Interest(name, width, len(features.events), d)
            for name, width in features.item.vectors.items()
        )
        self.given_rows = nn.ModuleDict(
            {name: nn.Linear(width, d) for name, width in features.item.vectors.items()}
        )
        self.surface = nn.Embedding(len(features.surfaces) + 1, d)
        self.row_numbers = NumericRows(
            len(features.row_numbers), config.numeric_rows, d, config.mlp
        )
        self.user_numbers = NumericRows(len(features.user.numbers), 1, d, config.mlp // 4)
        self.norm = nn.LayerNorm(d, eps=FAINT)
        self.interaction = interaction(self._rows(config), config)
        self.trunk = nn.Sequential(
            nn.Linear(self.interaction.out_rows * d + self._wide(), config.mlp),
            nn.LayerNorm(config.mlp),
            nn.ReLU(),
            nn.Dropout(config.dropout),
        )
        self.embedding = nn.Linear(config.mlp, config.embedding)
        self.gate = DomainGate(len(features.surfaces), config.embedding)
        self.heads = Heads(len(features.surfaces), len(features.objectives), config.embedding)
        self.funnel = Funnel(features.objectives, config.after)
        self.value = value_head(features, config) if config.value else None

    def _rows(self, config: GemConfig) -> int:
        f = self.features
        ids = self.user_ids.rows + self.own_ids.rows
        given = len(f.item.vectors)
        history = self.history.request_rows + self.history.own_rows + given * len(f.events)
        return ids + given + 1 + config.numeric_rows + 1 + history

    def _wide(self) -> int:
        f = self.features
        given = sum(width + len(f.events) for width in f.item.vectors.values())
        return len(f.row_numbers) + len(f.user.numbers) + given

    def find(self, batch: Batch) -> Found:
        """The events of a batch that the model reads."""
        return self.history.find(batch)

    def forward(self, batch: Batch, found: Found, vectors: Vectors) -> Output:
        """Logits and embeddings of all rows; what belongs to a request is computed once."""
        user_row, user_numbers = self.user_numbers(batch.user_numbers)
        number_rows, row_numbers = self.row_numbers(batch.row_numbers)
        users = torch.stack((*self.user_ids(vectors.users), user_row[:, 0]), 1)
        summary, searched, guessed = self.history(batch, found, vectors, users)
        shared = torch.cat((users, summary), 1)[batch.request]
        liked = [interest(batch) for interest in self.interests]
        single = self._single_rows(batch, vectors)
        rows = torch.cat((shared, single, number_rows, searched, *(rows for rows, _ in liked)), 1)
        x = self.interaction(self.norm(rows).transpose(0, 1).contiguous()).transpose(0, 1)
        wide = (
            row_numbers,
            user_numbers[batch.request],
            *batch.row_vectors.values(),
            *(nearness for _, nearness in liked),
        )
        hidden = self.trunk(torch.cat((x.flatten(1), *wide), 1))
        embedding = self.embedding(hidden)
        gated = self.gate(embedding, batch.surface)
        logits = self.funnel(self.heads(gated, batch.surface))
        worth = self.value(gated) if self.value else None
        return Output(logits, embedding, hidden, worth, guessed)

    def _single_rows(self, batch: Batch, vectors: Vectors) -> Tensor:
        """What a candidate has of its own in one row each: ids, given vectors, surface."""
        found = self.own_ids(vectors.rows)
        given = [self.given_rows[name](v) for name, v in batch.row_vectors.items()]
        return torch.stack((*found, *given, self.surface(batch.surface)), 1)


def value_head(features: Features, config: GemConfig) -> ValueHead:
    """A head for what outcomes are worth. Raises UserError where the spec tells of no values."""
    if not features.valued:
        raise UserError("--model.value: no objective of the spec says `value: true`")
    return ValueHead(config.embedding, features.objectives, features.valued)
