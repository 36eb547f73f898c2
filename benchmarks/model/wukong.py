"""Wukong alone: 26 fields, a table each, two layers, trained with the trainer's own parts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.model.limit import Step, speeds
from benchmarks.result import Result
from training.model.interaction.wukong import Shape, Wukong
from training.parallel.mesh import mesh_of
from training.parallel.processes import process_group
from training.parallel.sparse import TorchrecTables, adagrad, shard

FIELDS, VALUES, ZIPF = 26, 10_000, 1.3
DIM, LAYERS, ROWS, RANK, HIDDEN, BATCH = 16, 2, 16, 8, 64, 1024
BATCHES = 16
GOALS = {"static": 34_000, "attentive": 30_000}


class Ranker(nn.Module):
    """Wukong and an MLP of 64-64 on the rows of all fields: (F, B, d) to logits (B)."""

    def __init__(self, attentive: bool) -> None:
        super().__init__()
        shape = Shape(DIM, ROWS, ROWS, RANK, HIDDEN, attentive)
        self.wukong = Wukong(FIELDS, LAYERS, shape)
        self.head = nn.Sequential(
            nn.Linear(shape.rows * DIM, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """One logit an example."""
        return self.head(self.wukong(x).transpose(0, 1).flatten(1))[:, 0]


def measure(result: Result) -> None:
    """`wukong_examples_per_s`, `wukong_attentive_examples_per_s` and `wukong_limit_share`."""
    with process_group():
        steps = {name: step(name == "attentive") for name in GOALS}
        found = speeds(steps, BATCH, repeats=8)
    for name, goal in GOALS.items():
        key = "wukong" if name == "static" else f"wukong_{name}"
        result.take(f"{key}_examples_per_s", found[name].each, "")
        result.rows.append(found[name].row(f"Wukong, {name} projection", "examples", goal))
    result.take("wukong_limit_share", found["static"].each / found["static"].limit, "")


def step(attentive: bool) -> Step:
    """Training on the next of some batches, embeddings included."""
    torch.manual_seed(0)
    names = [f"field_{i}" for i in range(FIELDS)]
    tables = shard(TorchrecTables(dict.fromkeys(names, VALUES), DIM), mesh_of(1), adagrad(0.05))
    model = Ranker(attentive)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    share = torch.arange(1, VALUES + 1) ** -ZIPF
    ids = torch.multinomial(share, BATCHES * FIELDS * BATCH, replacement=True)
    ids = ids.view(BATCHES, FIELDS, BATCH)
    labels = (torch.rand(BATCHES, BATCH) < 0.2).float()
    number = 0

    def run() -> None:
        nonlocal number
        at, number = number % BATCHES, number + 1
        found = tables(dict(zip(names, ids[at], strict=True)))
        logits = model(torch.stack([found[name] for name in names]))
        loss = F.binary_cross_entropy_with_logits(logits, labels[at])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return run
