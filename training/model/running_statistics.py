"""Running statistics of what training reads, on several processes of the batches of all of them."""

from collections.abc import Sequence

from torch import Tensor, nn


class RunningStatistics(nn.Module):
    """A module whose buffers are statistics of what training reads.

    On several processes each updates them with its own batch of a step. Then the increments over
    `base`, the buffers before the step, are summed over the processes, and all set their buffers to
    the base and that sum. With one process, `base` is None.
    """

    base: dict[str, Tensor] | None = None

    def start_step(self) -> None:
        """Keep the buffers as the base of the step."""
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
