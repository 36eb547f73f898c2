"""GEM's knowledge in memory, looked up by impression; what it must not know is refused."""

from collections.abc import Sequence
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import torch
from torch import Tensor

from etl.errors import UserError
from etl.tables import arrow, contracts
from etl.tables.lake import Lake


class Teacher:
    """Logits of GEM (K, O) by impression id, as of before GEM learned from them."""

    def __init__(self, lake: Lake, days: Sequence[date]) -> None:
        """Raises UserError where a row was scored by a GEM that had been trained on its day."""
        spec = lake.spec
        names = [f"logit_{name}" for name in spec.objectives]
        stored = arrow.snapshot(lake, contracts.knowledge(spec))
        rows = stored.read(["impression_id", "fm_trained_until", "day", *names], day=days)
        seen = pc.any(pc.greater_equal(rows["fm_trained_until"], rows["day"])).as_py()
        if seen:
            raise UserError(
                "knowledge has rows whose GEM had been trained on their day; "
                "run `gemline knowledge` for those days again"
            )
        ids = np.asarray(rows["impression_id"]).astype(str)
        order = np.argsort(ids)
        self.ids = ids[order]
        logits = [rows[name].to_numpy()[order] for name in names]
        self.logits = np.stack(logits, 1) if len(ids) else np.zeros((0, len(names)), np.float32)

    def look_up(self, impressions: npt.NDArray[np.object_]) -> tuple[Tensor, Tensor]:
        """Logits (B, O), zero where GEM said nothing, and whether it did (B)."""
        if not len(self.ids):
            shape = (len(impressions), self.logits.shape[1])
            return torch.zeros(shape), torch.zeros(len(impressions), dtype=torch.bool)
        wanted = impressions.astype(str)
        at = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        there = self.ids[at] == wanted
        return torch.from_numpy(self.logits[at] * there[:, None]), torch.from_numpy(there)
