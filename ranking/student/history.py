"""A student's history modules: attention, mean items, match counts, teacher embeddings.

R requests, C candidates, L events, K earlier impressions, W event width, T event types, M
similarity attributes, Z width of a teacher embedding, D decay times.
"""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from features.recency import AGE_BUCKETS
from features.schema import TEACHER_EMBEDDING_WIDTH
from ranking.inputs.arrays import TeacherHistoryInputs
from ranking.student.config import StudentConfig
from training.model.history.events import DWELL_BUCKETS, PRIOR_EVENTS, age_bucket

MASKED_SCORE = -1e9  # finite, so that a softmax over masked scores alone is not NaN


class KeyValueProjection(nn.Module):
    """Keys and values of tokens, computed once per request for all candidates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (R, L, W) to keys and values of the same shape."""
        return self.k(tokens), self.v(tokens)


class TargetAttention(nn.Module):
    """Attention from each candidate to the tokens of its request (DIN, 1706.06978, dot products).

    Queries are initialized with the projection of the keys, so that similar items match from the
    first step on.
    """

    def __init__(self, key_value: KeyValueProjection, heads: int) -> None:
        super().__init__()
        width = key_value.k.in_features
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.q.weight.data.copy_(key_value.k.weight.data)
        self.out = nn.Linear(width, width)

    def forward(self, candidates: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attend from candidates (R, C, W) to keys and values (R, L, W); returns (R, C, W).

        `mask` (R, C or 1, L) is True where a candidate may attend. A candidate without tokens to
        attend to gets zeros.
        """
        q, k, v = (self._split_heads(x) for x in (self.q(candidates), keys, values))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = torch.where(mask[:, None], scores, MASKED_SCORE)
        attended = torch.softmax(scores, -1) @ v
        has_tokens = mask.any(2, keepdim=True).float()
        output: Tensor = has_tokens * self.out(attended.transpose(1, 2).flatten(2))
        return output

    def _split_heads(self, x: Tensor) -> Tensor:
        """(R, n, W) to (R, heads, n, W / heads)."""
        return torch.unflatten(x, 2, (self.heads, -1)).transpose(1, 2)


DECAY_TIMES = (3600.0, 6 * 3600.0, 86400.0, 3 * 86400.0, 12 * 86400.0)  # seconds, initial values


def one_hot_types(types: Tensor, num_types: int) -> Tensor:
    """One-hot event types (R, L, T) of codes (R, L) from 1; all zeros in padding."""
    return (types[..., None] == torch.arange(1, num_types + 1, device=types.device)).float()


def shares_attribute(candidate_ids: Tensor, history_ids: Tensor) -> list[Tensor]:
    """For each similarity attribute, whether a candidate and an event have the same value.

    Candidates (R, C, M) and events (R, L, M) give M masks (R, C, L). Value 0, the unknown one,
    matches no value.
    """
    masks = []
    for m in range(candidate_ids.shape[2]):
        candidate_values, event_values = candidate_ids[:, :, None, m], history_ids[:, None, :, m]
        masks.append((candidate_values == event_values) & (candidate_values != 0))
    return masks


class TypeMeanPooling(nn.Module):
    """Mean item of each type of a user's events, as in training/model/history/events.py."""

    def __init__(self) -> None:
        super().__init__()
        self.dwell_weight = nn.Parameter(torch.zeros(DWELL_BUCKETS))
        self.age_weight = nn.Parameter(torch.zeros(AGE_BUCKETS))

    def forward(
        self, items: Tensor, type_one_hot: Tensor, dwells: Tensor, age_seconds: Tensor
    ) -> Tensor:
        """Items (R, L, W) and types (R, L, T) to means (R, T, W), weighted by dwell and age."""
        weight = torch.exp(self.dwell_weight[dwells] + self.age_weight[age_bucket(age_seconds)])
        weighted_types = (type_one_hot * weight[..., None]).transpose(1, 2)
        return (weighted_types @ items) / (weighted_types.sum(2, keepdim=True) + PRIOR_EVENTS)


class DecayedMatchCounts(nn.Module):
    """Counts of the events similar to a candidate, by type, with exponential decay at D rates."""

    def __init__(self) -> None:
        super().__init__()
        initial = [math.log(seconds) for seconds in DECAY_TIMES]
        self.log_decay_time = nn.Parameter(torch.tensor(initial))

    def decay_weights(self, type_one_hot: Tensor, age_seconds: Tensor) -> Tensor:
        """The weight of each event in each count (R, L, T * D), of types (R, L, T)."""
        decay = torch.exp(-age_seconds[..., None] / self.log_decay_time.exp())
        return (type_one_hot[..., None] * decay[:, :, None]).flatten(2)

    def forward(self, candidate_ids: Tensor, history_ids: Tensor, decay_weights: Tensor) -> Tensor:
        """Logarithms of counts (R, C, M * T * D) of candidates (R, C, M) and events (R, L, M)."""
        counts = [
            torch.log1p(mask.float() @ decay_weights)
            for mask in shares_attribute(candidate_ids, history_ids)
        ]
        if not counts:
            return candidate_ids[..., :0].to(decay_weights.dtype)
        return torch.cat(counts, 2)


class TeacherHistoryState(NamedTuple):
    """The representation of earlier impressions that candidates read."""

    keys: Annotated[Tensor, "R K W"]
    values: Annotated[Tensor, "R K W"]
    similarity_ids: Annotated[Tensor, "R K M"]
    mask: Annotated[Tensor, "R K"]


class TeacherHistory(nn.Module):
    """GEM's embeddings of the user's earlier impressions as tokens (LoopFM, 2605.29280, section 3).

    With `attention` pooling a candidate attends to all tokens, and once more for each similarity
    attribute to those that share it. Otherwise the tokens are pooled into the user's features.
    """

    def __init__(self, width: int, num_similarity_attributes: int, config: StudentConfig) -> None:
        super().__init__()
        self.embedding_projection = nn.Linear(TEACHER_EMBEDDING_WIDTH, width)
        self.age_embedding = nn.Embedding(AGE_BUCKETS, width)
        self.norm = nn.LayerNorm(width)
        self.pooling = config.teacher_history_pooling
        self.key_value = KeyValueProjection(width)
        uses_attention = self.pooling == "attention"
        num_attentions = 1 + num_similarity_attributes if uses_attention else 0
        self.attentions = nn.ModuleList(
            TargetAttention(self.key_value, config.heads) for _ in range(num_attentions)
        )
        self.pooled_width = 0 if uses_attention else width
        self.attended_width = num_attentions * width

    def forward(self, items: Tensor, inputs: TeacherHistoryInputs[Tensor]) -> Tensor:
        """Tokens (R, K, W) of projected items (R, K, W)."""
        tokens: Tensor = self.norm(
            items
            + self.embedding_projection(inputs.embeddings)
            + self.age_embedding(age_bucket(inputs.age_seconds))
        )
        return tokens

    def pool(self, tokens: Tensor, mask: Tensor) -> list[Tensor]:
        """The sum or the mean of a user's tokens (R, W); empty with attention."""
        if self.pooling == "attention":
            return []
        total = (tokens * mask[..., None]).sum(1)
        if self.pooling == "sum":
            return [total]
        return [total / mask.sum(1, keepdim=True).clamp(min=1)]

    def attend(
        self, items: Tensor, candidate_ids: Tensor, state: TeacherHistoryState
    ) -> list[Tensor]:
        """Each attention's output (R, C, W) for candidates (R, C, W) with attributes (R, C, M)."""
        if not self.attentions:
            return []
        present = state.mask[:, None]
        shared = shares_attribute(candidate_ids, state.similarity_ids)
        masks = [present, *(present & mask for mask in shared)]
        return [
            attention(items, state.keys, state.values, mask)
            for attention, mask in zip(self.attentions, masks, strict=True)
        ]
