"""Training throughput of Wukong and of sequence layers, compared with the machine's roofline.

Wukong: 26 fields with a table each and two layers, trained with the trainer's own parts.

Sequence layers: stacks on eight long histories. SiLU is HSTU's layer, without a feed-forward
network; softmax has one of width 64. In windowed layers an event attends to itself and to the 64
events before it; the second pyramid level keeps the last 128 events and merges older ones by four.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness import BenchmarkResult, interleaved_median_seconds
from training.distributed.process_group import build_mesh, process_group
from training.distributed.sharding import TorchrecTables, rowwise_adagrad_params, shard_tables
from training.model.config import SequenceOptions
from training.model.interaction.wukong import Wukong, WukongShape
from training.model.sequence.layers import HstuLayer, TransformerLayer
from training.model.sequence.pyramid import EncodedEvents, EncoderSizes, PyramidLevel

StepFunction = Callable[[], object]
GEMM_SIZE = 1024


@dataclass(frozen=True)
class Speed:
    """Units per second, and their limit at the machine's GEMM rate."""

    units_per_second: float
    roofline: float
    gemm_flops_per_second: float

    def table_row(self, what: str, unit: str, goal: float) -> tuple[str, ...]:
        """The row of a benchmark's table."""
        limit = f"{self.roofline:,.0f} at {self.gemm_flops_per_second / 1e9:.0f} GFLOP/s"
        share = f"{self.units_per_second / self.roofline:.2f}"
        return what, f"{self.units_per_second:,.0f} {unit}/s", limit, share, f">= {goal:,}"


def cpu_seconds(variants: Mapping[str, StepFunction], rounds: int) -> dict[str, float]:
    """Median CPU seconds of this process, after one warm-up round."""
    interleaved_median_seconds(variants, 1)
    return interleaved_median_seconds(variants, rounds, time.process_time)


def measure_speeds(
    steps: dict[str, StepFunction], units: int, repeats: int = 1
) -> dict[str, Speed]:
    """Speeds of steps of `units` units each, timed in turn with a matrix product.

    FLOPs of a step are those of its matrix products, two per multiply-add, forward and backward.
    """
    a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE)

    def repeated(step: StepFunction) -> StepFunction:
        return lambda: [step() for _ in range(repeats)]

    variants = {name: repeated(step) for name, step in (steps | {"gemm": lambda: a @ b}).items()}
    total_seconds = cpu_seconds(variants, rounds=9)
    seconds = {name: total / repeats for name, total in total_seconds.items()}
    gemm_rate = 2 * GEMM_SIZE**3 / seconds["gemm"]
    return {
        name: Speed(units / seconds[name], units * gemm_rate / count_flops(step), gemm_rate)
        for name, step in steps.items()
    }


def count_flops(step: StepFunction) -> int:
    """FLOPs of the matrix products of a step that is not compiled; custom kernels have none."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


FIELDS, VALUES_PER_FIELD, ZIPF = 26, 10_000, 1.3
EMBEDDING_DIM, WUKONG_LAYERS, FM_ROWS, RANK, HIDDEN, BATCH_ROWS = 16, 2, 16, 8, 64, 1024
BATCHES = 16
WUKONG_GOALS = {"static": 34_000, "attentive": 30_000}
HISTORY_LENGTHS = (1024, 980, 900, 850, 760, 650, 524, 400)
WIDTH, HEADS, SEQUENCE_LAYERS, WINDOW = 64, 2, 2, 64
SEQUENCE_GOALS = {"": 49_000, "softmax_": 50_000, "window_": 85_000, "pyramid_": 100_000}


class WukongModel(nn.Module):
    """Wukong and an MLP on the embeddings of all fields: (F, B, d) to logits (B)."""

    def __init__(self, input_dependent_projection: bool) -> None:
        super().__init__()
        shape = WukongShape(
            EMBEDDING_DIM, FM_ROWS, FM_ROWS, RANK, HIDDEN, input_dependent_projection
        )
        self.wukong = Wukong(FIELDS, [shape] * WUKONG_LAYERS)
        self.head = nn.Sequential(
            nn.Linear(shape.out_rows * EMBEDDING_DIM, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """One logit per example."""
        logits: Tensor = self.head(self.wukong(x).transpose(0, 1).flatten(1))[:, 0]
        return logits


def measure_wukong(result: BenchmarkResult) -> None:
    """`wukong_examples_per_s`, `wukong_attentive_examples_per_s` and `wukong_limit_share`."""
    with process_group():
        steps = {name: make_wukong_step(name == "attentive") for name in WUKONG_GOALS}
        speeds = measure_speeds(steps, BATCH_ROWS, repeats=8)
    for name, goal in WUKONG_GOALS.items():
        key = "wukong" if name == "static" else f"wukong_{name}"
        result.record(f"{key}_examples_per_s", speeds[name].units_per_second, "")
        result.rows.append(speeds[name].table_row(f"Wukong, {name} projection", "examples", goal))
    static = speeds["static"]
    result.record("wukong_limit_share", static.units_per_second / static.roofline, "")


def make_wukong_step(input_dependent_projection: bool) -> StepFunction:
    """A training step on the next of BATCHES batches, embedding tables included."""
    torch.manual_seed(0)
    names = [f"field_{i}" for i in range(FIELDS)]
    tables = shard_tables(
        TorchrecTables(dict.fromkeys(names, VALUES_PER_FIELD), EMBEDDING_DIM),
        build_mesh(1),
        rowwise_adagrad_params(0.05),
    )
    model = WukongModel(input_dependent_projection)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    frequency = torch.arange(1, VALUES_PER_FIELD + 1) ** -ZIPF
    ids = torch.multinomial(frequency, BATCHES * FIELDS * BATCH_ROWS, replacement=True)
    ids = ids.view(BATCHES, FIELDS, BATCH_ROWS)
    labels = (torch.rand(BATCHES, BATCH_ROWS) < 0.2).float()
    batches = itertools.cycle(range(BATCHES))

    def run() -> None:
        batch = next(batches)
        embeddings = tables(dict(zip(names, ids[batch], strict=True)))
        logits = model(torch.stack([embeddings[name] for name in names]))
        loss = F.binary_cross_entropy_with_logits(logits, labels[batch])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return run


class LayerStack(nn.Module):
    """A stack of equal layers."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(SEQUENCE_LAYERS))

    def forward(self, events: Tensor, offsets: Tensor) -> Tensor:
        """(N, W) to (N, W)."""
        for layer in self.layers:
            events = layer(events, offsets)
        return events


class Pyramid(nn.Module):
    """Two levels of a pyramid; the second has fewer events."""

    def __init__(self) -> None:
        super().__init__()
        options = SequenceOptions(layer="hstu", pyramid_stride=4, pyramid_keep_recent=128)
        sizes = EncoderSizes(WIDTH, HEADS, WINDOW, max(HISTORY_LENGTHS), WIDTH, 0)
        self.levels = nn.ModuleList(
            PyramidLevel(number, options, sizes) for number in range(SEQUENCE_LAYERS)
        )

    def forward(self, events: Tensor, offsets: Tensor) -> Tensor:
        """(N, W) to (M, W)."""
        encoded = EncodedEvents(events, offsets, torch.ones(len(events)))
        for level in self.levels:
            encoded = level(encoded, None)
        return encoded.events


def layer_stacks() -> dict[str, nn.Module]:
    """The measured stacks, by metric prefix."""
    return {
        "": LayerStack(lambda: HstuLayer(WIDTH, HEADS, None, max(HISTORY_LENGTHS))),
        "softmax_": LayerStack(lambda: TransformerLayer(WIDTH, HEADS, None, WIDTH)),
        "window_": LayerStack(lambda: HstuLayer(WIDTH, HEADS, WINDOW, max(HISTORY_LENGTHS))),
        "pyramid_": Pyramid(),
    }


def measure_sequence(result: BenchmarkResult) -> None:
    """`sequence_events_per_s`, and the same for `softmax`, `window` and `pyramid`."""
    torch.manual_seed(0)
    steps = {name: make_sequence_step(stack) for name, stack in layer_stacks().items()}
    speeds = measure_speeds(steps, sum(HISTORY_LENGTHS))
    for name, goal in SEQUENCE_GOALS.items():
        result.record(f"sequence_{name}events_per_s", speeds[name].units_per_second, "")
        title = f"sequence, {name.strip('_') or 'SiLU'}"
        result.rows.append(speeds[name].table_row(title, "events", goal))


def make_sequence_step(stack: nn.Module) -> StepFunction:
    """A forward and a backward pass of a stack."""
    offsets = torch.tensor([0, *torch.tensor(HISTORY_LENGTHS).cumsum(0).tolist()])
    events = torch.randn(sum(HISTORY_LENGTHS), WIDTH, requires_grad=True)
    grad = None

    def run() -> None:
        nonlocal grad
        out = stack(events, offsets)
        grad = torch.randn_like(out) if grad is None else grad
        out.backward(grad)

    return run
