"""The values of outcomes: a log-normal distribution of each, given that the outcome occurs.

B examples, H hidden width, V objectives with values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from training.data.batch import Batch
from training.model.heads import ZilnDistribution
from training.model.numeric import RunningStandardizer

MAX_SHIFT = 4.0  # of the mean, in standard deviations of all values
LOG_SCALES = -2.0, 0.5  # bounds of the standard deviation, relative to that of all values
MIN_VARIANCE = 1e-6


class ValueHead(nn.Module):
    """Predicts values from the last hidden layer of a student (ZILN, 1912.07753).

    It predicts shift and scale relative to the running mean and variance of ln(value), so it needs
    no configuration per currency. Its loss does not reach the layers below, so that probabilities
    do not depend on it.
    `objective_index` has the columns of the objectives with values.
    """

    def __init__(self, hidden_dim: int, objective_index: Sequence[int]) -> None:
        super().__init__()
        self.objective_index = list(objective_index)
        self.log_values = RunningStandardizer(len(objective_index))
        self.linear = nn.Linear(hidden_dim, 2 * len(objective_index))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def distribution(self, hidden: Tensor) -> ZilnDistribution:
        """The distribution of the values (…, V) of a hidden layer (…, H)."""
        shift, log_scale = self.linear(hidden).chunk(2, -1)
        std = (self.log_values.variance + MIN_VARIANCE).sqrt()
        log_mean = self.log_values.mean + std * shift.clamp(-MAX_SHIFT, MAX_SHIFT)
        return ZilnDistribution(log_mean, std * log_scale.clamp(*LOG_SCALES).exp())

    def forward(self, hidden: Tensor) -> Tensor:
        """Logarithms of expected values (…, V), given that the outcomes occur.

        They are NaN for objectives of which no value has been learned.
        """
        distribution = self.distribution(hidden)
        log_values = distribution.log_mean + distribution.log_std.square() / 2
        return torch.where(self.log_values.count > 0, log_values, torch.nan)

    def loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The mean negative log-likelihood of the positive values of a batch; 0 without any."""
        is_positive = (batch.label_mask & (batch.labels > 0))[:, self.objective_index]
        values = torch.where(is_positive, batch.outcome_values[:, self.objective_index], 0.0)
        has_value = values > 0
        if self.training:
            self.log_values(torch.where(has_value, values, torch.nan).log())
        losses = self.distribution(hidden.detach()).negative_log_likelihood(values)
        return losses.sum() / has_value.sum().clamp(min=1)
