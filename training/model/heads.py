"""Output heads: logits by surface and objective, ESMM chain, outcome values, next action.

B batch, H hidden width, S surfaces, O objectives, N events of R requests, W event width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from etl.errors import UserError
from training.model.running_statistics import RunningStatistics
from training.model.sequence.pyramid import EncodedEvents
from training.model.weights import full_values, set_values


class DomainGate(nn.Module):
    """Gate by surface, h * 2 sigmoid(MLP([surface ; stop_gradient(h)])) (PEPNet, 2302.01115)."""

    def __init__(self, surfaces: int, hidden: int, width: int = 16) -> None:
        super().__init__()
        self.surface = nn.Embedding(surfaces + 1, width)
        self.mlp = nn.Sequential(
            nn.Linear(width + hidden, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, hidden)
        )
        self.activation = nn.Sigmoid()

    def forward(self, h: Tensor, surface: Tensor) -> Tensor:
        """(B, H) to (B, H)."""
        gate_input = torch.cat((self.surface(surface), h.detach()), 1)
        gated: Tensor = h * 2 * self.activation(self.mlp(gate_input))
        return gated


class ObjectiveTowers(nn.Module):
    """A small MLP for each objective, whose last layer has a correction by surface.

    The correction starts at zero. W is the width of a tower; O includes auxiliary objectives.
    """

    def __init__(self, surfaces: int, objectives: int, hidden: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(objectives, hidden, width))
        nn.init.uniform_(self.weight, -(hidden**-0.5), hidden**-0.5)
        self.bias = nn.Parameter(torch.zeros(objectives, width))
        self.out_weight = nn.Parameter(torch.empty(objectives, width))
        nn.init.uniform_(self.out_weight, -(width**-0.5), width**-0.5)
        self.out_bias = nn.Parameter(torch.full((objectives,), -2.0))
        self.surface_weight = nn.Parameter(torch.zeros(surfaces + 1, objectives, width))
        self.surface_bias = nn.Parameter(torch.zeros(surfaces + 1, objectives))

    def start_from(self, outputs: Tensor) -> None:
        """Start the first outputs (n) from constants, such as logits of base rates, except NaN."""
        bias = full_values(self.out_bias)
        values = F.pad(outputs.to(bias), (0, len(bias) - len(outputs)), value=torch.nan)
        set_values(self.out_bias, torch.where(values.isnan(), bias, values))

    def forward(self, h: Tensor, surface: Tensor) -> Tensor:
        """Hidden units (B, H), or (B, O, H) if each tower has its own, and surfaces to logits."""
        product = "bh,ohw->bow" if h.dim() == 2 else "boh,ohw->bow"
        tower = torch.relu(torch.einsum(product, h, self.weight) + self.bias)
        # On CUDA the gradient of an embedding is many times faster than that of an index.
        surface_weight = F.embedding(surface, self.surface_weight.flatten(1)).view_as(tower)
        logits: Tensor = (tower * (self.out_weight + surface_weight)).sum(2)
        return logits + self.out_bias + F.embedding(surface, self.surface_bias)


MAX_CONDITIONAL_RATE = 0.99  # of an objective as frequent as its parent, for a finite logit


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

    def initial_logits(self, rates: Tensor) -> Tensor:
        """The logits (O) with which `forward` predicts rates (O); NaN where a rate is NaN.

        A child whose parent has no rate yet starts from its own.
        """
        start = rates.clone()
        for child, parent in self.child_parent_columns:
            if not rates[parent].isnan():
                start[child] = (rates[child] / rates[parent]).clamp(max=MAX_CONDITIONAL_RATE)
        return torch.logit(start)

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
        # `F.gaussian_nll_loss` checks the variances, for which the host waits.
        log_std = self.log_std.clamp(min=MIN_LOG_STD)
        deviation = (log_values - self.log_mean) / log_std
        return torch.where(positive, log_std.log() + deviation.square() / 2, 0.0)


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


class FollowedEvents(NamedTuple):
    """Sampled events: `positions` (n), of which only those that `exist` (n) have a successor."""

    positions: Tensor
    exist: Tensor

    @property
    def next_positions(self) -> Tensor:
        """Positions (n) of the next events; those of events without a successor are arbitrary."""
        return self.positions + self.exist.long()


def sample_followed_events(
    offsets: Tensor,
    total: int,
    max_samples: int = MAX_SAMPLES,
    is_unknown: Tensor | None = None,
) -> FollowedEvents:
    """At most `max_samples` random events of `total` that have a successor in their request.

    The number of samples does not depend on how many there are, so that no host waits for it. An
    event of an item that `is_unknown` (total) is no successor.
    """
    is_last = torch.zeros(total + 1, dtype=torch.bool, device=offsets.device)
    is_last = is_last.index_fill(0, offsets, True)[1:]  # the event before each offset
    is_excluded = is_last if is_unknown is None else is_last | is_unknown.roll(-1)
    priority = torch.rand(total, device=offsets.device).masked_fill(is_excluded, -1.0)
    chosen = priority.topk(min(max_samples, total))
    return FollowedEvents(chosen.indices, chosen.values >= 0)


FREQUENCY_BUCKETS = 2**16
FREQUENCY_DECAY = 0.999  # by batch: counts of about the last thousand


class ItemFrequency(RunningStatistics):
    """The share of each item among sampled events, from counts that decay with each batch.

    Counted over many batches, because each item of a single one seems equally rare. Items are
    hashed to buckets, so that the share of a rare item may be too large.
    """

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(FREQUENCY_BUCKETS))

    def forward(self, items: Tensor, exist: Tensor) -> Tensor:
        """Count the sampled items (n) that `exist`, and return the share of each (n)."""
        buckets = items % FREQUENCY_BUCKETS
        self.counts.mul_(FREQUENCY_DECAY)
        self.counts.index_add_(0, buckets, exist.to(self.counts))
        return self.counts[buckets] / self.counts.sum().clamp(min=1e-12)

    @override
    def increments(self) -> list[Tensor]:
        """The items that were counted, and the number of batches that were: one or none."""
        before = self._base("counts")
        is_counted = (self.counts != before).any()
        return [(self.counts - FREQUENCY_DECAY * before) * is_counted, is_counted]

    @override
    def add(self, increments: Sequence[Tensor]) -> None:
        """Count the items of all processes, and decay by the batch of each."""
        counts, batches = increments
        self.counts.copy_(self._base("counts") * FREQUENCY_DECAY**batches + counts)


class NextActionLoss(nn.Module):
    """Sampled softmax over next items: the item that follows an event, among those of other events.

    The generative task of HSTU (2402.17152, section 2) as an auxiliary loss of ranking. The encoder
    must be causal. Items are negatives in proportion to their frequency q, so log((n - 1) q), the
    log of how often an item is expected among the n - 1 other events, is subtracted from their
    scores (logQ correction; Yi et al., RecSys 2019): the sum over negatives then estimates that
    over all items, and popular items are not penalized. The next item itself is present without
    sampling, so its score is not corrected (2507.09331).
    """

    def __init__(self, width: int, event_width: int) -> None:
        super().__init__()
        self.query_projection = nn.Linear(event_width, width, bias=False)
        self.item_frequency = ItemFrequency()

    def forward(
        self,
        encoded: EncodedEvents,
        sample: FollowedEvents,
        offsets: Tensor,
        next_item_ids: Tensor,
        next_item_vectors: Tensor,
    ) -> Tensor:
        """Mean loss of a sample of events (n), in training.

        Args:
            encoded: The encoded sequences, which may end with CLS tokens.
            sample: The events, as positions in the sequences without CLS tokens.
            offsets: Offsets (R + 1) of the sequences without CLS tokens.
            next_item_ids: The item (n) of each following event; equal items are not negatives.
            next_item_vectors: Vectors (n, W) of those items.
        """
        positions = sample.positions
        request = torch.searchsorted(offsets, positions, right=True) - 1
        events = encoded.events[positions - offsets[request] + encoded.offsets[request]]
        queries = self.query_projection(events)
        scores = queries @ next_item_vectors.T / next_item_vectors.shape[1] ** 0.5
        frequency = self.item_frequency(next_item_ids, sample.exist)
        return sampled_softmax_loss(scores, next_item_ids, frequency, sample.exist)


def sampled_softmax_loss(scores: Tensor, items: Tensor, frequency: Tensor, exist: Tensor) -> Tensor:
    """Mean cross-entropy of scores (n, n) of each query with all sampled `items` (n).

    The item of query i is item i; those of other queries are its negatives, unless they are the
    same item. `frequency` (n) is the probability with which each item is sampled. Queries and items
    that do not `exist` (n) do not count.
    """
    samples = exist.sum()
    expected_count = (samples - 1).clamp(min=1) * frequency
    target = torch.arange(len(items), device=items.device)
    is_target = target[:, None] == target
    log_count = torch.where(exist, expected_count, 1.0).log()
    corrected = scores - log_count.expand_as(scores).masked_fill(is_target, 0.0)
    is_ignored = ((items[:, None] == items) | ~exist) & ~is_target
    losses = F.cross_entropy(
        corrected.masked_fill(is_ignored, -torch.inf), target, reduction="none"
    )
    return (losses * exist).sum() / samples.clamp(min=1)
