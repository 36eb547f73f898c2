"""The stored logits of the teacher by impression, for models that learn from them.

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

from etl.tables import arrow, schemas
from etl.tables.lake import Lake
from training.teacher.embeddings import assert_teacher_is_earlier


@dataclass(frozen=True)
class TeacherLogits:
    """GEM's logits (B, O) of a batch, and a mask that is False if there is no prediction.

    `version_index` (B) is the position of the GEM that predicted in `TeacherPredictions.versions`.
    """

    logits: Tensor
    mask: Tensor
    version_index: Tensor


class TeacherPredictions:
    """Logits of GEM (K, O) by impression, each from before GEM learned from the impression."""

    def __init__(self, lake: Lake, days: Sequence[date], version: int | None = None) -> None:
        """Read `teacher_predictions` of some days, by default of the latest version.

        Raises:
            UserError: A row was predicted by a GEM that had been trained on its day.
        """
        spec = lake.spec
        names = [f"logit_{name}" for name in spec.objectives]
        stored = arrow.snapshot(lake, schemas.teacher_predictions(spec), version)
        columns = ["impression_id", "fm_version", "fm_trained_until", "day", *names]
        rows = stored.read(columns, day=days)
        assert_teacher_is_earlier(rows)
        ids = np.asarray(rows["impression_id"]).astype(str)
        order = np.argsort(ids)
        self.impression_ids = ids[order]
        logits = [rows[name].to_numpy()[order] for name in names]
        self.logits = np.stack(logits, 1) if len(ids) else np.zeros((0, len(names)), np.float32)
        self.versions = sorted(pc.unique(rows["fm_version"]).to_pylist())
        self.version_index = np.searchsorted(self.versions, np.asarray(rows["fm_version"])[order])

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
