"""Stacks of sequence layers on eight long histories: events a second, and what they cost.

SiLU is HSTU's layer without a feed-forward net; softmax has one of 64. Windows see their own chunk
of 64 and the one before; the pyramid's second level keeps the last 128 events and one for every
four of those before.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.model.limit import Step, speeds
from benchmarks.result import Result
from training.model.config import SequenceOptions
from training.model.sequence.layers import HstuLayer, TransformerLayer
from training.model.sequence.level import Encoded, Level, Sizes

LENGTHS = (1024, 980, 900, 850, 760, 650, 524, 400)
WIDTH, HEADS, LAYERS, WINDOW = 64, 2, 2, 64
GOALS = {"": 49_000, "softmax_": 50_000, "window_": 85_000, "pyramid_": 100_000}


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
    found = speeds(steps, sum(LENGTHS))
    for name, goal in GOALS.items():
        result.take(f"sequence_{name}events_per_s", found[name].each, "")
        what = f"sequence, {name.strip('_') or 'SiLU'}"
        result.rows.append(found[name].row(what, "events", goal))


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
