"""Processes with unequal batches take the same steps as one process on all rows."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import SIMULATOR_SPEC
from benchmarks.system.warm_start import SHAPE, manifest_of
from etl.spec import load_spec
from features.schema import ITEM_TABLE
from tests.training.many import run
from training.config import TrainConfig
from training.data.batch import Batch
from training.data.synthetic import random_batch
from training.distributed.process_group import process_group, synchronized_batches
from training.model.config import GemOptions, SequenceOptions
from training.trainer.state import TrainState, build_train_state
from training.trainer.step import Loss, masked_loss, train_step


@dataclass(frozen=True)
class Rows:
    """A batch with only the fields that the steps of this test read."""

    x: Tensor
    label_mask: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def as_padding(self) -> "Rows":
        return Rows(self.x, torch.zeros_like(self.label_mask))


def rows(seed: int, count: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return Rows(x, torch.rand(count, 2, generator=generator) < 0.7)


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def labels(x: Tensor) -> Tensor:
    return (x[:, :2] > 0).float()


def counted(state: TrainState) -> dict[str, Tensor]:
    """Running statistics of numbers, frequencies of items, and counts of look-ups."""
    state.all_reduce_counts()
    buffers = state.model.core.named_buffers()
    counters = "standardizer", "item_frequency"
    statistics = {name: b.clone() for name, b in buffers if any(c in name for c in counters)}
    return statistics | {name: x.clone() for name, x in state.item_rows.state_dict().items()}


def test_a_padding_batch_changes_no_statistics_and_no_counts() -> None:
    options = GemOptions(sequence=SequenceOptions(next_action_weight=0.1))
    config = TrainConfig(scale="tiny", item_table_rows=1024, model=options)
    with process_group():
        state = build_train_state(manifest_of(load_spec(SIMULATOR_SPEC), config))
        no_items = torch.zeros(0, dtype=torch.int64)
        last_days = state.last_access.last_days[ITEM_TABLE]
        state.item_rows.update(torch.arange(1024), last_days, no_items, 0)
        state.model.core.train()
        features = state.manifest.features
        batch, loss = random_batch(features, SHAPE), Loss.from_config(config, features)
        states = [counted(state)]
        for repeated in (batch, batch.as_padding(), batch):
            output = train_step(state.model, repeated, len(batch), state.optimizer, loss)
            assert output.logits.isfinite().all()
            states.append(counted(state))
    equal = [
        all(torch.equal(x, after[name]) for name, x in before.items())
        for before, after in itertools.pairwise(states)
    ]
    assert equal == [False, True, False] and len(states[0]) > 9
    assert any("item_frequency" in name and counts.any() for name, counts in states[1].items())


def save_gradients(
    rank: int, batches: list[list[Rows]], fallbacks: list[list[Rows]], folder: str
) -> None:
    """Run one of the processes and save its gradients."""
    init_method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method, rank=rank, world_size=len(batches))
    torch.save(gradients(batches[rank], fallbacks[rank]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def gradients(batches: list[Rows], fallbacks: list[Rows]) -> list[Tensor]:
    """The gradient of each step.

    DDP must be destroyed when this function returns: as the last owner of its process group it
    would wait for the group's threads while it holds the lock that they wait for.
    """
    ddp = DistributedDataParallel(model())
    steps = synchronized_batches(
        cast("Iterator[Batch]", iter(batches)), cast("Iterator[Batch]", iter(fallbacks))
    )
    gradients_of_steps = []
    for step, mean_rows in steps:
        batch = cast("Rows", step)
        ddp.zero_grad()
        masked_loss(ddp(batch.x), labels(batch.x), batch.label_mask, mean_rows).backward()
        gradients_of_steps.append(ddp.module.weight.grad.clone())
    return gradients_of_steps


@pytest.mark.parametrize(
    ("batches", "fallbacks"),
    [
        ([[rows(1, 5), rows(2, 3)], [rows(3, 4)]], [[], []]),
        ([[rows(1, 5)], []], [[], [rows(4, 2)]]),
    ],
    ids=["one process has fewer batches", "one process has none left after a restart"],
)
def test_each_step_is_that_of_one_process_on_all_rows(
    tmp_path: Path, batches: list[list[Rows]], fallbacks: list[list[Rows]]
) -> None:
    run(save_gradients, (batches, fallbacks, str(tmp_path)), len(batches))
    for rank in range(len(batches)):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert len(saved) == max(map(len, batches))
        for step, gradient in enumerate(saved):
            step_batches = [b[step] for b in batches if step < len(b)]
            x = torch.cat([batch.x for batch in step_batches])
            label_mask = torch.cat([batch.label_mask for batch in step_batches])
            single = model()
            masked_loss(single(x), labels(x), label_mask, len(x)).backward()
            torch.testing.assert_close(gradient, single.weight.grad)
