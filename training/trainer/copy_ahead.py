"""Batches on the device of the model; the next one is copied while a step computes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from training.data.batch import Batch
from training.data.tensor_fields import map_tensors


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the host and on the device, and the mean rows over all processes.

    On a CPU both are the same object. `copied` is an event after the copy.
    """

    host: Batch
    on_device: Batch
    mean_rows: float
    copied: torch.cuda.Event | None = None

    def wait(self) -> "DeviceBatch":
        """Let the work that follows on the device wait for the copy; the host goes on."""
        if self.copied:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.copied)

            def record(tensor: Tensor) -> Tensor:
                tensor.record_stream(stream)
                return tensor

            map_tensors(self.on_device, record)
        return self


class CopyAhead:
    """Copies batches from pinned memory on a stream of its own; a CPU reads them as they are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, batch: Batch, mean_rows: float) -> DeviceBatch:
        """Start the copy of a batch."""
        if self._stream is None:
            return DeviceBatch(batch, batch, mean_rows)
        pinned = batch.pin_memory()
        with torch.cuda.stream(self._stream):
            on_device = pinned.to(self.device, non_blocking=True)
            copied = self._stream.record_event()
        return DeviceBatch(batch, on_device, mean_rows, copied)

    def __call__(
        self, batches: Iterator[tuple[Batch, float]], position: int, segment: int
    ) -> Iterator[DeviceBatch]:
        """Yield batches in order; each is read and copied before the step on the one before it.

        No batch is read ahead across a multiple of `segment`, where checkpoints are written, so
        that no more batches were read there than trained on.

        Args:
            batches: Batches and their mean rows; reading one is a collective call.
            position: Number of the batches before the first one.
            segment: Steps between checkpoints.
        """
        current = self._next(batches)
        while current:
            position += 1
            ends_segment = position % segment == 0
            ahead = None if ends_segment else self._next(batches)
            yield current.wait()
            current = self._next(batches) if ends_segment else ahead

    def _next(self, batches: Iterator[tuple[Batch, float]]) -> DeviceBatch | None:
        following = next(batches, None)
        return self.copy(*following) if following else None
