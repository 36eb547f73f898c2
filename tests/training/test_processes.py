"""Processes with unequal batches step together, and learn what one process would of all rows."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.training.many import run
from training.loop.loss import masked_loss
from training.parallel.processes import in_step


@dataclass(frozen=True)
class Rows:
    """The part of a batch that steps are counted by."""

    x: Tensor
    known: Tensor

    def __len__(self) -> int:
        return len(self.x)


def rows(seed: int, count: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator)
    return Rows(x, torch.rand(count, 2, generator=generator) < 0.7)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def labels(x: Tensor) -> Tensor:
    return (x[:, :2] > 0).float()


def work(rank: int, parts: list[list[Rows]], spares: list[list[Rows]], folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=len(parts))
    torch.save(gradients(parts[rank], spares[rank]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def gradients(part: list[Rows], spare: list[Rows]) -> list[Tensor]:
    """The gradient of each step.

    DDP ends with this function: as the last owner of its process group it would wait for the
    group's threads while it holds the lock that they wait for.
    """
    spread = DistributedDataParallel(model())
    found = []
    for batch, count in in_step(iter(part), iter(spare)):
        spread.zero_grad()
        masked_loss(spread(batch.x), labels(batch.x), batch.known, count).backward()
        found.append(spread.module.weight.grad.clone())
    return found


@pytest.mark.parametrize(
    ("parts", "spares"),
    [
        ([[rows(1, 5), rows(2, 3)], [rows(3, 4)]], [[], []]),
        ([[rows(1, 5)], []], [[], [rows(4, 2)]]),
    ],
    ids=["one runs out", "one has nothing left after a kill"],
)
def test_each_step_is_that_of_one_process_on_all_rows(
    tmp_path: Path, parts: list[list[Rows]], spares: list[list[Rows]]
) -> None:
    run(work, (parts, spares, str(tmp_path)), len(parts))
    for rank in range(len(parts)):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert len(found) == max(map(len, parts))
        for step, gradient in enumerate(found):
            there = [own[step] for own in parts if step < len(own)]
            x, known = (torch.cat([getattr(b, n) for b in there]) for n in ("x", "known"))
            whole = model()
            masked_loss(whole(x), labels(x), known, len(x)).backward()
            torch.testing.assert_close(gradient, whole.weight.grad)
