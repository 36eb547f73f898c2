"""The manifest of a checkpoint: enough to rebuild the model and to detect incompatible use."""

import hashlib
from datetime import date
from typing import Annotated

from pydantic import Field

from etl.spec.base import StrictModel
from training.config import TrainConfig
from training.data.batch import Batch, batch_digest

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]+\.safetensors$")]
DIGESTED_BATCHES = 100  # number of batches per day whose digests are stored


class Manifest(StrictModel):
    """The configuration, training progress and files of a checkpoint.

    Attributes:
        num_shards: Shards that the day is split into: the number of processes that started it.
        table_versions: Delta versions of the tables read for the day.
        trained_until: The day in training, or the last one if `complete`.
        batches: Steps on this day.
        steps: Steps on all days.
        rows: Examples of all steps.
        consumed_batches: Batches of each shard of the day that were trained on.
        first_batch_digests: SHA-256 of the first process's first batches of the day.
        state_dir: Folder of the tensors, next to the manifest.
        file_hashes: SHA-256 of each file in that folder.
    """

    spec_hash: str
    similarity_attributes: tuple[str, ...]
    event_types: tuple[str, ...]
    training: TrainConfig
    num_shards: int
    table_versions: dict[str, int]
    trained_from: date
    trained_until: date
    complete: bool
    batches: int
    steps: int
    rows: int = 0
    consumed_batches: tuple[int, ...] = ()
    first_batch_digests: tuple[str, ...] = ()
    state_dir: Annotated[str, Field(pattern=r"^[0-9a-f]*$")] = ""
    file_hashes: dict[FileName, Sha256] = {}

    @property
    def fm_version(self) -> str:
        """The version of this foundation model in the teacher prediction tables."""
        settings = hashlib.sha256(self.training.model_dump_json().encode()).hexdigest()[:6]
        return f"{self.trained_from:%Y%m%d}-{self.trained_until:%Y%m%d}-{settings}"

    def after_step(self, batch: Batch, rows: int) -> "Manifest":
        """The manifest after one more step on `rows` rows of all processes together."""
        digests = self.first_batch_digests
        if self.batches < DIGESTED_BATCHES:
            digests = (*digests, batch_digest(batch))
        return self.model_copy(
            update={
                "batches": self.batches + 1,
                "steps": self.steps + 1,
                "rows": self.rows + rows,
                "first_batch_digests": digests,
            }
        )

    def next_day(self, day: date, num_shards: int) -> "Manifest":
        """The manifest of the same model before the first batch of a day."""
        return self.model_copy(
            update={
                "trained_until": day,
                "complete": False,
                "num_shards": num_shards,
                "batches": 0,
                "consumed_batches": (),
                "first_batch_digests": (),
            }
        )

    def is_same_run(self, other: "Manifest") -> bool:
        """Whether both belong to the same training run, possibly at different steps."""
        progress = {"trained_until", "complete", "batches", "steps", "rows", "consumed_batches"}
        progress |= {"first_batch_digests", "num_shards", "state_dir", "file_hashes"}
        return self.model_dump(exclude=progress) == other.model_dump(exclude=progress)
