"""Numbers as rows of embeddings: standardized values and piecewise-linear encoding.

B examples, F numeric features, G groups of features, T segments, d row width.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from training.model.running_statistics import RunningStatistics
from training.model.weights import full_values, set_values

Moments = tuple[Tensor, Tensor, Tensor]  # count, mean and variance of each feature


class RunningStandardizer(RunningStatistics):
    """Standardizes values (B, F) by running mean and variance; NaN and infinite values become 0.

    In training the statistics are updated with a batch before it is scaled, so training and serving
    apply the same formula.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor
    _batch: Moments  # of this process in a step on several processes

    def __init__(self, num_features: int, max_count: float = 20_000) -> None:
        super().__init__()
        self.max_count = max_count
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("variance", torch.ones(num_features))
        self.register_buffer("count", torch.zeros(num_features))

    def forward(self, values: Tensor) -> Tensor:
        """(B, F) to (B, F), clipped to six standard deviations."""
        finite = values.isfinite()
        if self.training:
            self._update(values, finite)
        scaled = (values - self.mean) * torch.rsqrt(self.variance + 1e-6)
        return torch.where(finite, scaled, 0.0).clamp(-6, 6)

    @torch.no_grad()
    def _update(self, values: Tensor, finite: Tensor) -> None:
        """Merge the statistics of the finite values of a batch (Chan's parallel formula).

        The count is capped at `max_count`, which makes the statistics a moving average.
        """
        batch = _moments(values, finite)
        if self.base is not None:
            self._batch = batch
        self._merge(*batch)

    def _merge(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        weight = count / (self.count + count).clamp(min=1)
        delta = mean - self.mean
        self.variance += weight * (variance - self.variance + (1 - weight) * delta**2)
        self.mean += weight * delta
        self.count.copy_((self.count + count).clamp(max=self.max_count))

    @override
    def increments(self) -> list[Tensor]:
        """Count, and sums of values and squares about the mean of the base."""
        count, mean, variance = (x.double() for x in self._batch)
        shift = mean - self._base("mean")
        return [count, count * shift, count * (variance + shift.square())]

    @override
    def add(self, increments: Sequence[Tensor]) -> None:
        """Merge the statistics of the batches of all processes, as those of one batch."""
        count, total, squares = increments
        shift, square = (x / count.clamp(min=1) for x in (total, squares))
        for name, values in self.named_buffers(recurse=False):
            values.copy_(self._base(name))
        variance = (square - shift.square()).clamp(min=0)
        self._merge(*(x.to(self.mean) for x in (count, self.mean + shift, variance)))


def _moments(values: Tensor, finite: Tensor) -> Moments:
    """Count, mean and variance (F) of the finite values (B, F)."""
    count = finite.sum(0)
    divisor = count.clamp(min=1)
    mean = torch.where(finite, values, 0.0).sum(0) / divisor
    variance = torch.where(finite, values - mean, 0.0).square_().sum(0) / divisor
    return count, mean, variance


def quantile_edges(values: Tensor, segments: int) -> Tensor:
    """The edges (F, T + 1) of segments with about equally many of the finite values (n, F).

    A feature with fewer distinct quantiles has fewer segments: its last edge is repeated. One
    without finite values has edges of 0.
    """
    levels = torch.linspace(0, 1, segments + 1, dtype=torch.float64)
    edges = torch.zeros(values.shape[1], segments + 1)
    for feature, column in enumerate(values.double().unbind(1)):
        finite = column[column.isfinite()]
        if len(finite):
            distinct = _quantiles(finite, levels).float().unique()
            edges[feature, : len(distinct)] = distinct
            edges[feature, len(distinct) :] = distinct[-1]
    return edges


def _quantiles(values: Tensor, levels: Tensor) -> Tensor:
    """`torch.quantile` of any number of values (n); it has a limit of 2**24."""
    ordered, ranks = values.sort().values, levels * (len(values) - 1)
    below, above = ordered[ranks.floor().long()], ordered[ranks.ceil().long()]
    return torch.lerp(below, above, ranks.frac())


MAX_OUTER = 2.0  # segments' lengths that values beyond the outer edges count at most
MAX_SEGMENT_SHARE = 2.0  # times its share of the values that a segment has before edges are moved
MIN_VALUES = 1_000  # of a feature, from which edges are moved


class PiecewiseLinearEncoding(nn.Module):
    """Piecewise-linear encoding (2203.05556): values (B, F) to components (B, F, T).

    Component t is the share of the segment from edge t - 1 to edge t that lies below the value:
    those of lower segments are 1, those of higher ones 0. The outer segments continue beyond the
    edges, so that a value is a linear function of its components. Missing values have only zeros.
    """

    edges: Tensor

    def __init__(self, num_features: int, segments: int) -> None:
        super().__init__()
        self.segments = segments
        self.register_buffer("edges", torch.linspace(-3, 3, segments + 1).repeat(num_features, 1))

    def fit(self, values: Tensor, features: Sequence[int] | slice = slice(None)) -> None:
        """Use the quantiles of values (n, F) as edges, by default of all features."""
        edges = quantile_edges(values[:, features], self.segments)
        self.edges[features] = edges.to(self.edges)  # values are on the CPU

    def is_outdated(self, values: Tensor) -> Tensor:
        """Whether a feature's edges (F) are no longer quantiles of its values (n, F).

        They are not if one segment has more than MAX_SEGMENT_SHARE times its share of the values,
        or that many are beyond an outer edge; values that equal an edge do not count. With fewer
        than MIN_VALUES values edges are kept, and so are those of a feature that was constant.
        """
        edges, columns = self.edges.contiguous(), values.to(self.edges).T.contiguous()
        finite = columns.isfinite()
        segment = torch.searchsorted(edges, columns)
        is_inside = finite & (segment == torch.searchsorted(edges, columns, right=True))
        counts = edges.new_zeros(len(edges), edges.shape[1] + 1)
        counts.scatter_add_(1, segment, is_inside.to(counts))
        num_values = finite.sum(1)
        is_coarse = counts.amax(1) * self.segments > MAX_SEGMENT_SHARE * num_values
        return is_coarse & (num_values >= MIN_VALUES) & ~self.is_constant

    @property
    def is_constant(self) -> Tensor:
        """Whether a feature (F) had one value or none when it was fitted: its edges are equal."""
        return self.edges[:, 0] == self.edges[:, -1]

    def forward(self, values: Tensor, features: Tensor | slice = slice(None)) -> Tensor:
        """Components of finite values (B, n, T), of some features (n) or of all."""
        values, edges = values[:, features], self.edges[features]
        left, length = edges[:, :-1], edges.diff()
        exists = length > 0
        number = torch.arange(self.segments, device=length.device)
        last = exists.sum(1, keepdim=True) - 1
        low = torch.where(number == 0, -MAX_OUTER, 0.0)
        high = torch.where(number == last, 1 + MAX_OUTER, 1.0)
        scale = torch.where(exists, 1 / length.clamp(min=1e-12), 0.0)
        finite = values.isfinite()
        share = (torch.where(finite, values, 0.0)[..., None] - left).mul_(scale)
        return share.clamp_(low.expand_as(high), high).mul_(finite[..., None])


class InputScale(nn.Module):
    """A learned factor for each of n inputs (RealMLP, 2407.04491, section 3): (B, n) to (B, n).

    A factor is 1 + c w, with a weight w that starts at zero. The steps of AdamW do not depend on
    the size of gradients, so that factors are trained at `lr_factor` c times its rate, and weight
    decay draws them to 1. Relevant inputs grow, and the others are learned slowly.
    """

    def __init__(self, inputs: int, lr_factor: float) -> None:
        super().__init__()
        self.lr_factor = lr_factor
        self.weight = nn.Parameter(torch.zeros(inputs))

    @property
    def factors(self) -> Tensor:
        """The factor (n) of each input."""
        return 1 + self.lr_factor * self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Scale inputs."""
        return x * self.factors


class NumericRows(NamedTuple):
    """`rows` (B, G, d) for the interaction module, and the `standardized` values (B, F), scaled."""

    rows: Tensor
    standardized: Tensor


class NumericEmbedding(nn.Module):
    """Values (B, F), NaN where missing, to a row of width d for each group of features.

    The row of a group is the sum over its features of x w + z W + m u, with the standardized value
    x, its components z of the piecewise-linear encoding and the indicator m of a missing value. W
    and u are zeros at the start, so that training begins with a linear embedding. With a
    `scale_lr_factor`, all three are multiplied by a learned factor of the feature.
    """

    def __init__(
        self, groups: Sequence[Hashable], width: int, segments: int, scale_lr_factor: float = 0.0
    ) -> None:
        super().__init__()
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        self.group_names = tuple(numbers)
        of_feature = torch.tensor([numbers[group] for group in groups], dtype=torch.int64)
        self.register_buffer("group_of_feature", of_feature, persistent=False)
        self.register_buffer("order", of_feature.argsort(stable=True), persistent=False)
        sizes = torch.bincount(of_feature, minlength=len(numbers))
        self.inputs_by_group = [int(size) * (segments + 2) for size in sizes]
        self.standardizer = RunningStandardizer(len(groups))
        self.encoding = PiecewiseLinearEncoding(len(groups), segments)
        self.linear = nn.Parameter(torch.empty(len(groups), width))
        nn.init.uniform_(self.linear, -1.0, 1.0)
        self.linear.data *= sizes[of_feature, None] ** -0.5
        self.piecewise = nn.Parameter(torch.zeros(len(groups), segments, width))
        self.missing = nn.Parameter(torch.zeros(len(groups), width))
        self.bias = nn.Parameter(torch.zeros(len(numbers), width))
        self.scale = InputScale(len(groups), scale_lr_factor) if scale_lr_factor else None

    order: Tensor
    group_of_feature: Tensor

    @torch.no_grad()
    def move_edges(self, values: Tensor, features: Tensor) -> None:
        """Use the quantiles of values (n, F) as edges of some features (f).

        A feature's function keeps its values at the new edges, and where the feature is missing:
        its row of segment t is the difference of the function at the edges t and t - 1, and the
        function at the first edge is added to the bias of its group.
        """
        piecewise = full_values(self.piecewise)
        edges = quantile_edges(values[:, features.cpu()].cpu(), self.encoding.segments)
        knots = self.encoding.edges.new_zeros(edges.shape[1], len(piecewise))
        knots[:, features] = edges.to(knots).T
        components = self.encoding(knots, features)
        at_edges = torch.einsum("kft,ftd->fkd", components, piecewise[features])
        first = at_edges[:, 0]
        piecewise = piecewise.index_copy(0, features, at_edges.diff(dim=1))
        missing = full_values(self.missing).index_add(0, features, -first)
        if self.scale:
            first = (
                first * (1 + self.scale.lr_factor * full_values(self.scale.weight))[features, None]
            )
        bias = full_values(self.bias).index_add(0, self.group_of_feature[features], first)
        for weight, changed in (
            (self.piecewise, piecewise),
            (self.missing, missing),
            (self.bias, bias),
        ):
            set_values(weight, changed)
        self.encoding.edges[features] = edges.to(knots)

    def forward(self, values: Tensor) -> NumericRows:
        """Rows and standardized values; a missing value counts as the mean and is flagged."""
        scaled = self.standardizer(values)
        is_missing = (~values.isfinite()).float()
        others = torch.stack((scaled, is_missing), 2)[:, self.order]
        inputs = torch.cat((self.encoding(values, self.order), others), 2)
        weight = torch.cat((self.piecewise, self.linear[:, None], self.missing[:, None]), 1)
        if self.scale:
            scaled = self.scale(scaled)
            weight = weight * self.scale.factors[:, None, None]
        by_group = zip(
            inputs.flatten(1).split(self.inputs_by_group, 1),
            weight.index_select(0, self.order).flatten(0, 1).split(self.inputs_by_group),
            self.bias,
            strict=True,
        )
        rows = [torch.addmm(bias, x, w) for x, w, bias in by_group]
        if not rows:
            return NumericRows(scaled.new_zeros(len(scaled), 0, self.bias.shape[1]), scaled)
        return NumericRows(torch.stack(rows, 1), scaled)
