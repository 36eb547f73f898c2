"""What a history tells of a request and of each of its candidates, as rows for Wukong.

B candidates of R requests, N events, d row width, W event width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from etl.errors import UserError
from features.inputs import ITEM, Features
from training.data.batch import Batch, History
from training.model.config import GemConfig
from training.model.events import EventTokens, item_input
from training.model.lookup import Vectors
from training.model.matching import Found, MatchedAttention, Sought, find
from training.model.recency import Recency
from training.model.sequence.interformer import InterFormer
from training.model.sequence.level import Encoded
from training.model.sequence.next_action import NextAction, followed


class HistoryRows(nn.Module):
    """The newest events encoded in depth; the whole history searched for events like a candidate.

    Two stages as in SIM (2006.05639): sequence layers cost too much for thousands of events, and
    what lies far back is asked for by what it has in common with the candidate.
    """

    def __init__(self, features: Features, config: GemConfig, user_rows: int) -> None:
        super().__init__()
        d, w = config.row_width, config.event_width
        tables = 1 + len(features.item.ids)
        given = sum(features.item.vectors.values())
        self.items = (ITEM, *features.item.ids)
        self.match = features.match
        self.events = EventTokens(tables, d, given, len(features.surfaces), len(features.events), w)
        self.candidate = nn.Linear(tables * d + given, w)
        self.candidate.weight = self.events.item.weight
        self.encoder = InterFormer(user_rows, config)
        self.sought = tuple(
            Sought(family.newest, _codes(features, family.events))
            for family in self.encoder.families
        )
        self.most = config.matched_events
        self.matched = nn.ModuleList(MatchedAttention(w, config.heads) for _ in features.match)
        self.recency = nn.ModuleList(
            Recency(features.item.ids[name], len(features.events), d) for name in features.match
        )
        self.out = nn.Linear(w, d)
        self.next_action = nn.ModuleList(
            NextAction(w, family.out.in_features)
            for family in self.encoder.families
            if config.sequence.next_action
        )
        self.request_rows = self.encoder.out_rows
        families = len(self.encoder.families)
        self.own_rows = families + len(features.match) * (1 + len(features.events))

    def find(self, batch: Batch) -> Found:
        """The events of a batch that are read."""
        return find(batch, self.match, self.sought, self.most)

    def forward(
        self, batch: Batch, found: Found, vectors: Vectors, users: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows that candidates of a request share (R, n, d), and rows of each (B, m, d).

        `users` (R, u, d) are the rows of the users. In training also the loss of guessing next
        events, if it is asked for.
        """
        history = batch.history
        newest, matched = found.split(self.events(history, vectors.events, found.positions))
        ages, _ = found.split(history.ages[found.positions])
        families = self.encoder.families
        begun = [
            family.begin(*parts)
            for family, *parts in zip(families, newest, found.offsets, ages, strict=True)
        ]
        shared, encoded = self.encoder(users, begun)

        candidate = self.candidate(
            item_input({name: vectors.rows[name] for name in self.items}, batch.row_vectors)
        )
        seen = [
            family.seen_by(candidate, batch.request, events)
            for family, events in zip(families, encoded, strict=True)
        ]
        alike = [
            self.out(f(candidate, e, m))
            for f, e, m in zip(self.matched, matched, found.read, strict=True)
        ]
        recencies = [
            f(m, history.types, history.ages)
            for f, m in zip(self.recency, found.matches, strict=True)
        ]
        own = torch.cat((torch.stack((*seen, *alike), 1), *recencies), 1)
        guessed = self._guessed(history, found, vectors, encoded) if self.training else None
        return shared, own, guessed

    def _guessed(
        self, history: History, found: Found, vectors: Vectors, encoded: Sequence[Encoded]
    ) -> Tensor | None:
        losses, first = [], 0
        for guess, offsets, events in zip(self.next_action, found.offsets, encoded, strict=False):
            at = followed(offsets)
            then = first + at + 1
            given = {n: v[found.positions[then]] for n, v in history.item_vectors.items()}
            told = {name: vectors.events[name][then] for name in self.items}
            if len(at):
                items = self.candidate(item_input(told, given))
                ids = history.items[found.positions[then]]
                losses.append(guess(events, at, offsets, ids, items))
            first += int(offsets[-1])
        return torch.stack(losses).mean() if losses else None


def _codes(features: Features, events: Sequence[str]) -> tuple[int, ...]:
    unknown = [name for name in events if name not in features.events]
    if unknown:
        raise UserError(
            f"a family of events names {', '.join(unknown)}, which the spec lacks; it has "
            f"{', '.join(features.events)}"
        )
    return tuple(1 + features.events.index(name) for name in events)
