"""GEM's scores in memory, looked up by impression; what it must not know is refused."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import torch
from torch import Tensor

from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from training.knowledge.earlier import refuse_seen


@dataclass(frozen=True)
class Said:
    """What GEM said of a batch: logits, zero where it said nothing, and whether it did (B, O).

    `version` (B) numbers the GEM that said it, of `Teacher.versions`.
    """

    logits: Tensor
    there: Tensor
    version: Tensor


class Teacher:
    """Logits of GEM (K, O) by impression id, as of before GEM learned from them."""

    def __init__(self, lake: Lake, days: Sequence[date]) -> None:
        """Raises UserError where a row was scored by a GEM that had been trained on its day."""
        spec = lake.spec
        names = [f"logit_{name}" for name in spec.objectives]
        stored = arrow.snapshot(lake, contracts.knowledge(spec))
        columns = ["impression_id", "fm_version", "fm_trained_until", "day", *names]
        rows = stored.read(columns, day=days)
        refuse_seen(rows)
        ids = np.asarray(rows["impression_id"]).astype(str)
        order = np.argsort(ids)
        self.ids = ids[order]
        logits = [rows[name].to_numpy()[order] for name in names]
        self.logits = np.stack(logits, 1) if len(ids) else np.zeros((0, len(names)), np.float32)
        self.versions = sorted(pc.unique(rows["fm_version"]).to_pylist())
        self.version = np.searchsorted(self.versions, np.asarray(rows["fm_version"])[order])

    def shuffled(self, seed: int) -> "Teacher":
        """Each impression with what the same GEM said of another one: a control."""
        other = copy(self)
        mixed = np.random.default_rng(seed).permutation(len(self.ids))
        order = np.argsort(self.version, kind="stable")
        found = mixed[np.argsort(self.version[mixed], kind="stable")]
        other.logits = np.empty_like(self.logits)
        other.logits[order] = self.logits[found]
        return other

    def look_up(self, impressions: npt.NDArray[np.object_]) -> Said:
        """What was said of some impressions (B)."""
        if not len(self.ids):
            shape = (len(impressions), self.logits.shape[1])
            nothing = torch.zeros(shape)
            return Said(nothing, nothing.bool(), torch.zeros(len(impressions), dtype=torch.long))
        wanted = impressions.astype(str)
        at = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        logits = np.where((self.ids[at] == wanted)[:, None], self.logits[at], np.nan)
        return Said(
            torch.from_numpy(np.nan_to_num(logits)),
            torch.from_numpy(~np.isnan(logits)),
            torch.from_numpy(self.version[at]),
        )
