"""Running statistics of what training reads, on several processes of the batches of all of them."""

from collections.abc import Sequence

from torch import Tensor, nn


class RunningCounts(nn.Module):
    """A module whose buffers count what training reads.

    On several processes each adds its own batch of a step to `base`, the buffers before the step.
    Then what was added is summed over the processes, and the base plus that sum are the buffers of
    all. With one process, `base` is None.
    """

    base: dict[str, Tensor] | None = None

    def start_step(self) -> None:
        """Keep the buffers, to know what the step adds."""
        self.base = {name: x.clone() for name, x in self.named_buffers(recurse=False)}

    def increments(self) -> list[Tensor]:
        """What the batch of this process added, as tensors that can be summed."""
        raise NotImplementedError

    def add(self, increments: Sequence[Tensor]) -> None:
        """Set the buffers to the base and the increments of all processes."""
        raise NotImplementedError

    def maxima(self) -> list[Tensor]:
        """Buffers of which the largest value of all processes counts."""
        return []

    def _base(self, name: str) -> Tensor:
        if self.base is None:
            raise RuntimeError("no step was started")
        return self.base[name]
