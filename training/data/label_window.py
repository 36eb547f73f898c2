"""The labels that a pass over the examples uses: those that become final in a time window.

A label is final once its maturity time (`label_mature_ts_…`) is before the end of the data, by the
same rule as in `etl.labels`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etl.spec.model import DataSpec
from etl.spec.units import DaySplit

if TYPE_CHECKING:  # needs numpy, which is not installed where runs are only planned
    from etl.array_types import Bools, Int64
    from training.data.batch import NegativeSampling


@dataclass(frozen=True)
class LabelWindow:
    """Labels that become final in [start, end), in epoch seconds.

    With `only_unlearned`, labels whose objective was learned from their row before `start` are left
    out; with window mixing, that may have been by the label of another window.

    Rows without a label in the window are skipped unless `include_unlabelled`, and so are rows of
    which `negative_sampling` keeps no label. Labels of auxiliary objectives are read only with
    `include_auxiliary`, which is for the training of GEM; they select no rows.

    `mixes_windows` is for training with window mixing, and for calibrations after it: a row has
    the label of one window of each objective. With `includes_swaps` batches have `swap_weights`.

    A label in the window that is null in the table is an error: it should be final. With
    `skips_null_labels` it is skipped.
    """

    start: int
    end: int
    only_unlearned: bool = False
    include_unlabelled: bool = False
    include_auxiliary: bool = False
    mixes_windows: bool = False
    includes_swaps: bool = False
    skips_null_labels: bool = False
    negative_sampling: NegativeSampling | None = None

    def contains(self, mature_ts: Int64) -> Bools:
        """Whether labels with these maturity times, in epoch seconds, become final in the window.

        The end is exclusive: a label that matures at the second at which the data ends is not final
        yet, because an outcome at that second would land on the next day.
        """
        return (mature_ts >= self.start) & (mature_ts < self.end)

    @classmethod
    def for_training(cls, split: DaySplit, spec: DataSpec) -> LabelWindow:
        """Labels that were final when the last training day ended."""
        return cls(0, spec.day_end(split.train_last))

    @classmethod
    def for_calibration(cls, split: DaySplit, spec: DataSpec) -> LabelWindow:
        """Labels that became final between training and calibration, which no model has learned."""
        assert split.calibration is not None
        return cls(
            spec.day_end(split.train_last), spec.day_end(split.calibration), only_unlearned=True
        )

    @classmethod
    def for_test(cls, split: DaySplit, spec: DataSpec) -> LabelWindow:
        """All labels that are final at the end of the last day with logs."""
        return cls(0, spec.day_end(split.data_until))


ALL_LABELS = LabelWindow(start=0, end=0, include_unlabelled=True)
FINAL_LABELS = LabelWindow(start=0, end=sys.maxsize, skips_null_labels=True)
