"""The effect of an impression's position on its logits, apart from all other features.

A position is known only after ranking. The logit of an impression at position k is that of the
served position plus b(k) - b(served), where b depends on surface and position alone: an additive
bias tower without features of user or item, so that it cannot learn relevance. A ranker therefore
serves its logits as they are, and only evaluations on logged impressions add the effect.

Ads that the old ranker put first are better in ways that the new one may not see; learned together
with all else, b would take them for an effect of the position. Where the logs have propensities, b
is therefore learned from neighbouring positions alone, under weights that make both orders of their
ads equally likely (intervention harvesting; Agarwal et al., 2019).

S surfaces and the unknown one, P positions, O objectives, B impressions.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

MAX_POSITIONS = 32  # P; later positions share the effect of the last one
STEPS = MAX_POSITIONS - 1  # pairs of neighbouring positions
SLOPE_PRECISION, STEP_PRECISION = 10.0, 100.0  # of the priors of the slope and of deviations
NUISANCE_PRECISION = 1e-3  # of the prior of what the ads of a pair have in common


class LoggedLabels(Protocol):
    """What effects are learned from: surfaces (B), labels and their mask (B, O), weights (B, 2)."""

    @property
    def surface(self) -> Tensor:
        """Codes of surfaces (B)."""

    @property
    def labels(self) -> Tensor:
        """Labels (B, O)."""

    @property
    def label_mask(self) -> Tensor:
        """The labels to learn (B, O)."""

    @property
    def swap_weights(self) -> Tensor:
        """Weights (B, 2) as the upper and as the lower ad of a pair."""


class PositionBias(nn.Module):
    """Effects by surface and position (S, P, O); zero at the served position."""

    def __init__(self, served_position: int) -> None:
        super().__init__()
        self.served_position = min(served_position, MAX_POSITIONS - 1)

    def effects(self) -> Tensor:
        """What each position adds to logits (S, P, O)."""
        raise NotImplementedError

    def forward(self, positions: Tensor, surfaces: Tensor) -> Tensor:
        """What positions (B) add to logits (B, O); missing ones (NaN) are the served one."""
        known = positions.nan_to_num(float(self.served_position))
        return self.effects()[surfaces, known.clamp(0, MAX_POSITIONS - 1).long()]


class LearnedPositionBias(PositionBias):
    """Effects that are learned together with all else: a slope, and a deviation at each position.

    For logs without propensities.
    """

    def __init__(self, served_position: int, num_surfaces: int, num_objectives: int) -> None:
        super().__init__(served_position)
        self.slope = nn.Parameter(torch.zeros(1 + num_surfaces, 1, num_objectives))
        self.deviation = nn.Parameter(torch.zeros(1 + num_surfaces, MAX_POSITIONS, num_objectives))

    def effects(self) -> Tensor:
        """What each position adds to logits (S, P, O)."""
        bias = self.slope * torch.arange(MAX_POSITIONS)[:, None] + self.deviation
        return bias - bias[:, self.served_position, None]


class SwapPositionBias(PositionBias):
    """Effects from pairs of ads at neighbouring positions, weighted to be as likely swapped.

    By surface and objective a logistic regression with the logits of the served position as offset:
    a step from each position to the next (a common slope, and a deviation), and per pair of
    positions what the ads there have in common. It is fitted by normal equations that each batch
    adds to (iteratively reweighted least squares, each batch weighted once).
    """

    def __init__(self, served_position: int, num_surfaces: int, num_objectives: int) -> None:
        super().__init__(served_position)
        width, shape = 1 + 2 * STEPS, (1 + num_surfaces, num_objectives)
        self.register_buffer("information", torch.zeros(*shape, width, width, dtype=torch.float64))
        self.register_buffer("evidence", torch.zeros(*shape, width, dtype=torch.float64))
        self.register_buffer("coefficients", torch.zeros(*shape, width, dtype=torch.float64))
        precision = torch.full((width,), NUISANCE_PRECISION, dtype=torch.float64)
        precision[0], precision[1 : 1 + STEPS] = SLOPE_PRECISION, STEP_PRECISION
        self.register_buffer("prior", precision, persistent=False)

    information: Tensor
    evidence: Tensor
    coefficients: Tensor
    prior: Tensor

    def effects(self) -> Tensor:
        """What each position adds to logits (S, P, O)."""
        steps = self.coefficients[..., :1] + self.coefficients[..., 1 : 1 + STEPS]
        bias = nn.functional.pad(steps.cumsum(-1), (1, 0)).transpose(1, 2)
        return (bias - bias[:, self.served_position, None]).float()

    @torch.no_grad()
    def update(self, positions: Tensor, log: LoggedLabels, logits: Tensor, passes: int = 1) -> None:
        """Learn from impressions, given their logged positions (B).

        `logits` (B, O) are those of the served position. With several passes over the impressions
        each counts as its share of the evidence.
        """
        design, row, weights = _pair_rows(positions, log.swap_weights / passes)
        for surface in log.surface[row].unique().tolist():
            chosen = log.surface[row] == surface
            x, i = design[chosen], row[chosen]
            shift = x @ self.coefficients[surface].T
            p = torch.sigmoid(logits[i].double() + shift)
            weight = weights[chosen, None] * log.label_mask[i]
            curvature = weight * p * (1 - p)
            response = curvature * shift + weight * (log.labels[i] - p)
            self.information[surface] += torch.einsum("np,no,nq->opq", x, curvature, x)
            self.evidence[surface] += response.T @ x
            total = self.information[surface] + self.prior.diag()
            self.coefficients[surface] = torch.linalg.solve(total, self.evidence[surface])


def _pair_rows(positions: Tensor, swap_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each impression once per pair that it is in: design (n, 1 + 2 STEPS), its row, its weight."""
    known = positions.nan_to_num(-1.0).long()
    design, rows, weights = [], [], []
    for is_lower in (0, 1):
        pair = known - is_lower
        is_used = (swap_weights[:, is_lower] > 0) & (pair >= 0) & (pair < STEPS)
        chosen = is_used.nonzero().flatten()
        x = positions.new_zeros(len(chosen), 1 + 2 * STEPS, dtype=torch.float64)
        step, n = pair[chosen], torch.arange(len(chosen))
        x[n, 1 + STEPS + step] = 1.0
        if is_lower:
            x[:, 0] = 1.0
            x[n, 1 + step] = 1.0
        design.append(x)
        rows.append(chosen)
        weights.append(swap_weights[chosen, is_lower].double())
    return torch.cat(design), torch.cat(rows), torch.cat(weights)
