"""Output heads: logits by surface and objective, ESMM chain, outcome values, next action.

B batch, H hidden width, S surfaces, O objectives, N events of R requests, W event width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etl.errors import UserError
from training.model.sequence.pyramid import EncodedEvents


class DomainGate(nn.Module):
    """Gate by surface, h * 2 sigmoid(MLP([surface ; stop_gradient(h)])) (PEPNet, 2302.01115)."""

    def __init__(self, surfaces: int, hidden: int, width: int = 16) -> None:
        super().__init__()
        self.surface = nn.Embedding(surfaces + 1, width)
        self.mlp = nn.Sequential(
            nn.Linear(width + hidden, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, hidden)
        )

    def forward(self, h: Tensor, surface: Tensor) -> Tensor:
        """(B, H) to (B, H)."""
        gate_input = torch.cat((self.surface(surface), h.detach()), 1)
        return h * 2 * torch.sigmoid(self.mlp(gate_input))


class SurfaceHeads(nn.Module):
    """A shared linear head for each objective, plus a correction by surface that starts at zero."""

    def __init__(self, surfaces: int, objectives: int, hidden: int) -> None:
        super().__init__()
        self.shared = nn.Linear(hidden, objectives)
        self.surface_weight = nn.Parameter(torch.zeros(surfaces + 1, objectives, hidden))
        self.surface_bias = nn.Parameter(torch.zeros(surfaces + 1, objectives))
        nn.init.constant_(self.shared.bias, -2.0)

    def forward(self, h: Tensor, surface: Tensor) -> Tensor:
        """Hidden units (B, H) and surface codes (B) to logits (B, O)."""
        correction = torch.einsum("bh,boh->bo", h, self.surface_weight[surface])
        logits: Tensor = self.shared(h) + correction + self.surface_bias[surface]
        return logits


class EsmmChain(nn.Module):
    """P(conversion) = P(click) P(conversion | click), trained on all rows (ESMM, 1804.07931).

    `parents` maps an objective to the one that must precede it; the head of an objective with a
    parent computes the logit of the conditional probability. Raises UserError for an unknown name
    or a cycle.
    """

    def __init__(self, objectives: Sequence[str], parents: Mapping[str, str]) -> None:
        super().__init__()
        unknown = sorted({*parents, *parents.values()} - set(objectives))
        if unknown:
            raise UserError(
                f"--model.esmm-parents names {', '.join(unknown)}; "
                f"objectives are {', '.join(objectives)}"
            )
        column = {name: number for number, name in enumerate(objectives)}
        self.child_parent_columns = [
            (column[name], column[parents[name]]) for name in _topological_order(parents)
        ]

    def forward(self, logits: Tensor) -> Tensor:
        """Conditional logits (B, O) to unconditional ones."""
        columns = list(logits.unbind(1))
        for child, parent in self.child_parent_columns:
            columns[child] = joint_logit(columns[parent], columns[child])
        return torch.stack(columns, 1)


def joint_logit(a: Tensor, b: Tensor) -> Tensor:
    """Logit of sigmoid(a) sigmoid(b), numerically stable: -ln(e^-a + e^-b + e^-(a+b))."""
    return -torch.logsumexp(torch.stack((-a, -b, -a - b)), 0)


def _topological_order(parents: Mapping[str, str]) -> list[str]:
    """Objectives that have a parent, each after its parent."""
    ordered: list[str] = []
    for child in parents:
        chain: list[str] = []
        name = child
        while name in parents and name not in ordered:
            if name in chain:
                raise UserError(f"--model.esmm-parents has a cycle: {' after '.join(chain)}")
            chain.append(name)
            name = parents[name]
        ordered += reversed(chain)
    return ordered


MIN_LOG_STD = 1e-3  # keeps the likelihood finite if all values are equal
MAX_LOG_STD = 5.0  # limits the mean to e^12.5 times the median


@dataclass(frozen=True)
class ZilnDistribution:
    """Zero-inflated log-normal distribution: ln(value) of an outcome is normal, if it occurs.

    `log_mean` and `log_std` are the parameters of that normal distribution (B, O).
    """

    log_mean: Tensor
    log_std: Tensor

    def expected_value(self, logits: Tensor) -> Tensor:
        """Expected value (B, O) of an impression: P(outcome) exp(log_mean + log_std² / 2)."""
        return torch.sigmoid(logits) * torch.exp(self.log_mean + self.log_std.square() / 2)

    def negative_log_likelihood(self, values: Tensor) -> Tensor:
        """Negative log-likelihood of positive values (B, O), without constants; 0 for others."""
        positive = values > 0
        log_values = torch.where(positive, values, 1.0).log()
        loss = F.gaussian_nll_loss(
            self.log_mean, log_values, self.log_std.square(), reduction="none"
        )
        return torch.where(positive, loss, 0.0)


class ZilnValueHead(nn.Module):
    """Predicts outcome values from an embedding (ZILN, 1912.07753)."""

    def __init__(self, hidden: int, objectives: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden, 2 * objectives)

    def forward(self, h: Tensor) -> ZilnDistribution:
        """Embeddings (B, H) to the distribution of each objective's value (B, O)."""
        log_mean, raw_std = self.out(h).chunk(2, 1)
        return ZilnDistribution(log_mean, F.softplus(raw_std).clamp(MIN_LOG_STD, MAX_LOG_STD))


MAX_SAMPLES = 512  # sampled events per batch, which are negatives of each other


def sample_followed_events(offsets: Tensor, max_samples: int = MAX_SAMPLES) -> Tensor:
    """Positions (n) of at most `max_samples` random events with a successor in their request."""
    is_offset = torch.zeros(int(offsets[-1]) + 1, dtype=torch.bool, device=offsets.device)
    is_offset[offsets] = True
    followed = (~is_offset[1:]).nonzero().flatten()
    if len(followed) <= max_samples:
        return followed
    return followed[torch.randperm(len(followed), device=followed.device)[:max_samples]]


class NextActionLoss(nn.Module):
    """Sampled softmax over next items: the item that follows an event, among those of other events.

    The generative task of HSTU (2402.17152, section 2) as an auxiliary loss of ranking. The encoder
    must be causal.
    """

    def __init__(self, width: int, event_width: int) -> None:
        super().__init__()
        self.query_projection = nn.Linear(event_width, width, bias=False)

    def forward(
        self,
        encoded: EncodedEvents,
        positions: Tensor,
        offsets: Tensor,
        next_item_ids: Tensor,
        next_item_vectors: Tensor,
    ) -> Tensor:
        """Mean loss of the events at `positions` (n).

        Args:
            encoded: The encoded sequences, which may end with CLS tokens.
            positions: Positions of the events in the sequences without CLS tokens.
            offsets: Offsets (R + 1) of the sequences without CLS tokens.
            next_item_ids: The item (n) of each following event; equal items are not negatives.
            next_item_vectors: Vectors (n, W) of those items.
        """
        request = torch.searchsorted(offsets, positions, right=True) - 1
        events = encoded.events[positions - offsets[request] + encoded.offsets[request]]
        queries = self.query_projection(events)
        scores = queries @ next_item_vectors.T / next_item_vectors.shape[1] ** 0.5
        same_item = (next_item_ids[:, None] == next_item_ids).fill_diagonal_(False)
        target = torch.arange(len(positions), device=positions.device)
        return F.cross_entropy(scores.masked_fill(same_item, -torch.inf), target)
