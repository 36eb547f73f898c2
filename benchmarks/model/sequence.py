"""Stacks of sequence layers on eight long histories: events a second, and what they cost.

SiLU is HSTU's layer without a feed-forward net; softmax has one of 64. Windows see their own chunk
of 64 and the one before; the pyramid's second level keeps the last 128 events and one for every
four of those before.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.model.clock import SIDE, Step, cpu_seconds, flops_of, multiply
from benchmarks.result import Result
from training.model.config import SequenceOptions
from training.model.sequence.layers import HstuLayer, TransformerLayer
from training.model.sequence.level import Encoded, Level, Sizes

LENGTHS = (1024, 980, 900, 850, 760, 650, 524, 400)
WIDTH, HEADS, LAYERS, WINDOW = 64, 2, 2, 64
GOALS = {"": 49_000, "softmax_": 50_000, "window_": 85_000, "pyramid_": 100_000}
Stack = Callable[[Tensor, Tensor], Tensor]


class Layers(nn.Module):
    """Layers of one kind, one after the other."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, events: Tensor, offsets: Tensor) -> Tensor:
        """(N, W) to (N, W)."""
        for layer in self.layers:
            events = layer(events, offsets)
        return events


class Pyramid(nn.Module):
    """Two levels, the second shorter."""

    def __init__(self) -> None:
        super().__init__()
        options = SequenceOptions(layer="hstu", shorten=4, keep=128)
        sizes = Sizes(WIDTH, HEADS, WINDOW, max(LENGTHS), WIDTH, 0)
        self.levels = nn.ModuleList(Level(number, options, sizes) for number in range(LAYERS))

    def forward(self, events: Tensor, offsets: Tensor) -> Tensor:
        """(N, W) to (M, W)."""
        found = Encoded(events, offsets, torch.ones(len(events)))
        for level in self.levels:
            found = level(found, None)
        return found.events


def stacks() -> dict[str, nn.Module]:
    """By the name of their figure."""
    return {
        "": Layers(lambda: HstuLayer(WIDTH, HEADS, None, max(LENGTHS))),
        "softmax_": Layers(lambda: TransformerLayer(WIDTH, HEADS, None, WIDTH)),
        "window_": Layers(lambda: HstuLayer(WIDTH, HEADS, WINDOW, max(LENGTHS))),
        "pyramid_": Pyramid(),
    }


def measure(result: Result) -> None:
    """`sequence_events_per_s`, and the same of `softmax`, `window` and `pyramid`."""
    torch.manual_seed(0)
    steps = {name: step(stack) for name, stack in stacks().items()}
    seconds = cpu_seconds(steps | {"limit": multiply()}, rounds=9)
    flops = {name: flops_of(run) for name, run in steps.items()}
    rate = 2 * SIDE**3 / seconds["limit"]
    for name, goal in GOALS.items():
        each, limit = sum(LENGTHS) / seconds[name], sum(LENGTHS) * rate / flops[name]
        result.take(f"sequence_{name}events_per_s", each, "")
        result.rows.append(
            (f"sequence, {name.strip('_') or 'SiLU'}", f"{each:,.0f} events/s",
             f"{limit:,.0f} at {rate / 1e9:.0f} GFLOP/s", f"{each / limit:.2f}", f">= {goal:,}")
        )  # fmt: skip


def step(stack: nn.Module) -> Step:
    """Forward and backward."""
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    events = torch.randn(sum(LENGTHS), WIDTH, requires_grad=True)
    grad = None

    def run() -> None:
        nonlocal grad
        out = stack(events, offsets)
        grad = torch.randn_like(out) if grad is None else grad
        out.backward(grad)

    return run
