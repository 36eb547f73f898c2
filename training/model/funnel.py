"""Outcomes that come only after others: click, then conversion. B batch, O objectives."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from etl.errors import UserError


class Funnel(nn.Module):
    """P(conversion) = P(click) P(conversion | click), learned on all rows (ESMM, 1804.07931).

    `after` names the objective that each of some comes after; what their heads give is then the
    logit of the conditional probability. Raises UserError for an unknown name or a circle.
    """

    def __init__(self, objectives: Sequence[str], after: Mapping[str, str]) -> None:
        super().__init__()
        unknown = sorted({*after, *after.values()} - set(objectives))
        if unknown:
            raise UserError(
                f"--model.after names {', '.join(unknown)}; objectives are {', '.join(objectives)}"
            )
        at = {name: column for column, name in enumerate(objectives)}
        self.steps = [(at[name], at[after[name]]) for name in _in_order(after)]

    def forward(self, logits: Tensor) -> Tensor:
        """Logits (B, O), conditional ones made unconditional."""
        columns = list(logits.unbind(1))
        for then, first in self.steps:
            columns[then] = both(columns[first], columns[then])
        return torch.stack(columns, 1)


def both(a: Tensor, b: Tensor) -> Tensor:
    """The logit of sigmoid(a) sigmoid(b), exact at any size: -ln(e^-a + e^-b + e^-(a+b))."""
    return -torch.logsumexp(torch.stack((-a, -b, -a - b)), 0)


def _in_order(after: Mapping[str, str]) -> list[str]:
    """What comes first, first."""
    found: list[str] = []
    for name in after:
        chain: list[str] = []
        while name in after and name not in found:
            if name in chain:
                raise UserError(f"--model.after goes in a circle: {' after '.join(chain)}")
            chain.append(name)
            name = after[name]
        found += reversed(chain)
    return found
