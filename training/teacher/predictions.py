"""The stored predictions of the teacher by impression, for models that learn from them.

B examples, K stored impressions, O objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import torch
from torch import Tensor

from etl.array_types import Float32, Int64
from etl.tables import arrow, model_schemas
from etl.tables.lake import Lake
from training.evaluation.predictions import Predictions
from training.teacher.embeddings import assert_teacher_is_earlier

MIN_PROBABILITY = 1e-7


@dataclass(frozen=True)
class TeacherLogits:
    """A teacher's logits (B, O) of a batch, and a mask that is False if there is no prediction.

    `version_index` (B) is the position in `TeacherPredictions.versions` of the one that predicted.
    """

    logits: Tensor
    mask: Tensor
    version_index: Tensor


@dataclass
class TeacherPredictions:
    """A teacher's predictions by impression, each from before it learned from the impression.

    Attributes:
        impression_ids: Impressions (K), sorted.
        logits: Logits (K, O); NaN where the teacher does not predict an objective.
        versions: The versions of the teacher.
        version_index: The position in `versions` of the one that predicted an impression (K).
    """

    impression_ids: npt.NDArray[np.str_]
    logits: Float32
    versions: list[str]
    version_index: Int64

    @classmethod
    def of_gem(
        cls, lake: Lake, days: Sequence[date], version: int | None = None
    ) -> "TeacherPredictions":
        """Read `teacher_predictions` of some days, by default of the latest version.

        Raises:
            UserError: A row was predicted by a GEM that had been trained on its day.
        """
        names = [f"logit_{name}" for name in lake.spec.objectives]
        stored = arrow.snapshot(lake, model_schemas.teacher_predictions(lake.spec), version)
        columns = ["impression_id", "fm_version", "fm_trained_until", "day", *names]
        rows = stored.read(columns, day=days)
        assert_teacher_is_earlier(rows)
        ids = np.asarray(rows["impression_id"]).astype(str)
        order = np.argsort(ids)
        logits = [rows[name].to_numpy()[order] for name in names]
        versions = sorted(pc.unique(rows["fm_version"]).to_pylist())
        return cls(
            ids[order],
            np.stack(logits, 1) if len(ids) else np.zeros((0, len(names)), np.float32),
            versions,
            np.searchsorted(versions, np.asarray(rows["fm_version"])[order]),
        )

    @classmethod
    def none(cls, lake: Lake, versions: list[str]) -> "TeacherPredictions":
        """No predictions, of some versions."""
        logits = np.zeros((0, len(lake.spec.objectives)), np.float32)
        return cls(np.zeros(0, np.str_), logits, versions, np.zeros(0, np.int64))

    @classmethod
    def of_model(cls, predictions: Predictions, version: str) -> "TeacherPredictions":
        """Predictions of another model, made before it learned from each impression."""
        ids = predictions.impression_ids.astype(str)
        order = np.argsort(ids)
        probabilities = torch.from_numpy(predictions.probabilities[order])
        logits = torch.logit(probabilities, eps=MIN_PROBABILITY).float().numpy()
        return cls(ids[order], logits, [version], np.zeros(len(ids), np.int64))

    def lookup(self, impression_ids: npt.NDArray[np.object_]) -> TeacherLogits:
        """The predictions for some impressions (B)."""
        if not len(self.impression_ids):
            logits = torch.zeros(len(impression_ids), self.logits.shape[1])
            no_version = torch.zeros(len(impression_ids), dtype=torch.long)
            return TeacherLogits(logits, logits.bool(), no_version)
        ids = impression_ids.astype(str)
        position = np.searchsorted(self.impression_ids, ids)
        position = np.minimum(position, len(self.impression_ids) - 1)
        is_stored = (self.impression_ids[position] == ids)[:, None]
        stored_logits = np.where(is_stored, self.logits[position], np.nan)
        return TeacherLogits(
            torch.from_numpy(np.nan_to_num(stored_logits)),
            torch.from_numpy(~np.isnan(stored_logits)),
            torch.from_numpy(self.version_index[position]),
        )
