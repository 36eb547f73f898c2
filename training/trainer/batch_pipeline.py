"""Batches on the device of the model, with the look-ups of the next one started during a step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from training.data.batch import Batch
from training.data.tensor_fields import map_tensors
from training.distributed.lookup import StartedLookup


@dataclass(frozen=True)
class PreparedBatch:
    """A batch on the host and on the device, its look-up, and the mean rows over all processes.

    On a CPU both batches are the same object. `prepared` is an event after the copy and the start
    of the look-up.
    """

    host: Batch
    on_device: Batch
    mean_rows: float
    lookup: StartedLookup
    prepared: torch.cuda.Event | None = None

    def wait(self) -> "PreparedBatch":
        """Let the work that follows on the device wait for the preparation; the host goes on."""
        if self.prepared:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.prepared)

            def record(tensor: Tensor) -> Tensor:
                tensor.record_stream(stream)
                return tensor

            map_tensors(self.on_device, record)
        return self


StartLookup = Callable[[Batch, int], StartedLookup]


class BatchPipeline:
    """Prepares each batch before the step on the one before it, on a stream of its own on CUDA.

    As in TorchRec's TrainPipelineSparseDist, the copy of a batch from pinned memory and the
    exchange of the ids that it looks up overlap with a step. On a CPU the calls are the same,
    without the copy.
    """

    def __init__(self, device: torch.device, start_lookup: StartLookup) -> None:
        """`start_lookup` takes a batch on the device and its position; it is a collective call."""
        self.device, self.start_lookup = device, start_lookup
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def prepare(self, batch: Batch, mean_rows: float, position: int) -> PreparedBatch:
        """Start the copy and the look-up of a batch."""
        if self._stream is None:
            return PreparedBatch(batch, batch, mean_rows, self.start_lookup(batch, position))
        pinned = batch.pin_memory()
        with torch.cuda.stream(self._stream):
            on_device = pinned.to(self.device, non_blocking=True)
            lookup = self.start_lookup(on_device, position)
            prepared = self._stream.record_event()
        return PreparedBatch(batch, on_device, mean_rows, lookup, prepared)

    def __call__(
        self, batches: Iterator[tuple[Batch, float]], position: int, segment: int
    ) -> Iterator[PreparedBatch]:
        """Yield batches in order; each is read and prepared before the step on the one before it.

        No batch is read ahead across a multiple of `segment`, where checkpoints are written, so
        that no more batches were read and looked up there than trained on.

        Args:
            batches: Batches and their mean rows; reading one is a collective call.
            position: Number of the batches before the first one.
            segment: Steps between checkpoints.
        """
        current = self._first(batches, position)
        while current:
            position += 1
            ends_segment = position % segment == 0
            ahead = None if ends_segment else self._next(batches, position)
            yield current.wait()
            current = self._first(batches, position) if ends_segment else ahead

    def _first(self, batches: Iterator[tuple[Batch, float]], position: int) -> PreparedBatch | None:
        """The first batch of a day or after a checkpoint.

        Its look-up waits for their work on the device, which changes or copies what it reads.
        """
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        return self._next(batches, position)

    def _next(self, batches: Iterator[tuple[Batch, float]], position: int) -> PreparedBatch | None:
        following = next(batches, None)
        return self.prepare(*following, position) if following else None
