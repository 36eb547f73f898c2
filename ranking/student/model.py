"""The student: a small model in two programs, `user(request)` and `rank(state, candidates)`.

R requests, C candidates, W event width, O objectives, H hidden width.
"""

import torch
from torch import Tensor, nn

from features.inputs import Features
from ranking.inputs import CandidateInputs, UserInputs
from ranking.student.attention import Look, Seen
from ranking.student.before import Before
from ranking.student.config import StudentConfig
from ranking.student.liking import PACES, Alike, Liked, by_type
from ranking.student.tensors import State
from training.model.events import EventTokens
from training.model.numeric import RunningScale
from training.model.recency import Recency, Rhythm


class Student(nn.Module):
    """All features side by side, histories by attention and counts, one MLP, a head an objective.

    The first layer is split: what belongs to the user is multiplied once a request. Heads that
    imitate GEM are not of the model that serves; they stand in ranking/student/transfer.py.
    """

    def __init__(self, features: Features, config: StudentConfig) -> None:
        super().__init__()
        d, w, (first, second) = config.row_width, config.event_width, config.hidden
        given = sum(features.item.vectors.values())
        tables = 1 + len(features.item.ids)
        self.config = config
        self.kinds, self.compared = len(features.events), len(features.match)
        self.item_width = tables * d + given
        self.events = EventTokens(tables, d, given, len(features.surfaces), self.kinds, w)
        self.surface = nn.Embedding(len(features.surfaces) + 1, w)
        self.seen = Seen(w)
        self.look = Look(self.seen, config.heads)
        self.liked, self.alike = Liked(), Alike()
        self.row_scale = RunningScale(len(features.row_numbers))
        self.user_scale = RunningScale(len(features.user.numbers))
        self.before = Before(w, self.compared, config) if config.before else None
        pooled, looked = (b.pooled_width, b.looked_width) if (b := self.before) else (0, 0)
        self.recency = nn.ModuleList(
            Recency(features.item.ids[name], self.kinds, d) for name in features.match
        )
        numbers = len(features.user.numbers)
        users = len(features.user.ids) + bool(config.user_rows)
        self.user_layer = nn.Linear(users * d + numbers + pooled, first)
        own = len(features.context.ids) * d + len(features.row_numbers) + self.item_width
        counts = self.kinds * (1 + self.compared * len(PACES))
        self.row_layer = nn.Linear(own + 3 * w + counts + self._rhythms * d + looked, first)
        self.hidden = nn.Sequential(
            nn.LayerNorm(first),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(first, second),
            nn.ReLU(),
        )
        self.head = nn.Linear(second, len(features.objectives))
        nn.init.constant_(self.head.bias, -2.0)

    @property
    def _rhythms(self) -> int:
        return self.compared * self.kinds

    def user(self, inputs: UserInputs[Tensor]) -> State:
        """What all candidates of a request share."""
        item = self.events.item(inputs.events)
        happened = (inputs.types, inputs.surfaces, inputs.dwells, inputs.ages)
        kinds = by_type(inputs.types, self.kinds)
        parts = [inputs.user, _scaled(self.user_scale, inputs.numbers)]
        keys = values = item[:, :0]
        there = inputs.before_ages > 0
        if self.before:
            tokens = self.before(self.events.item(inputs.before), inputs.kept, inputs.before_ages)
            parts += self.before.pooled(tokens, there)
            keys, values = self.before.seen(tokens)
        own_keys, own_values = self.seen(self.events.tokens(item, *happened))
        return State(
            keys=own_keys,
            values=own_values,
            there=inputs.ages > 0,
            liked=self.liked(item, kinds, inputs.dwells, inputs.ages),
            seen_alike=inputs.alike,
            fading=self.alike.fading(kinds, inputs.ages),
            told=self.user_layer(torch.cat(parts, 1)),
            before_keys=keys,
            before_values=values,
            before_seen_alike=inputs.before_alike,
            before_there=there,
        )

    def rank(self, state: State, inputs: CandidateInputs[Tensor]) -> Tensor:
        """The hidden layer (R, C, H) of the candidates; `head` makes logits of it."""
        item = self.events.item(inputs.items)
        looked = [self.look(item, state.keys, state.values, state.there[:, None])]
        if self.before:
            known = (
                state.before_keys,
                state.before_values,
                state.before_seen_alike,
                state.before_there,
            )
            looked += self.before.looked(item, inputs.alike, *known)
        row = torch.cat(
            (
                inputs.items,
                inputs.context,
                _scaled(self.row_scale, inputs.numbers),
                self.surface(inputs.surfaces),
                item * looked[0],
                item @ state.liked.transpose(1, 2),
                self.alike(inputs.alike, state.seen_alike, state.fading),
                *self._recent(inputs),
                *looked,
            ),
            dim=2,
        )
        found: Tensor = self.hidden(self.row_layer(row) + state.told[:, None])
        return found

    def _recent(self, inputs: CandidateInputs[Tensor]) -> list[Tensor]:
        """When what is like a candidate was last dealt with (R, C, T * d), by each attribute."""
        rows = []
        for m, recency in enumerate(self.recency):
            assert isinstance(recency, Recency)
            seen = Rhythm(*(x[:, :, m] for x in (inputs.last, inputs.span, inputs.gaps)))
            rows.append(recency.rows(seen, inputs.alike[:, :, m])[:, :, 1:].flatten(2))
        return rows

    def forward(self, user: UserInputs[Tensor], candidates: CandidateInputs[Tensor]) -> Tensor:
        """The hidden layer (R, C, H) of all candidates of all requests."""
        return self.rank(self.user(user), candidates)


def _scaled(scale: RunningScale, numbers: Tensor) -> Tensor:
    """Numbers in any shape (…, F): what is padded is missing, and is not counted."""
    if not scale.training:
        scaled: Tensor = scale(numbers)
        return scaled
    return scale(numbers.flatten(0, -2)).view_as(numbers)
