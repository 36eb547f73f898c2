"""Which labels a pass over the examples is about: those that became final in a span of time.

Models learn of a request that is held out only when all labels of a row are final. Until then its
rows can be calibrated on: no part of a ranker has seen them (an embargo, Lopez de Prado 2018).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # needs numpy; commands that only plan a run have none
    from training.data.thinning import Thinning


@dataclass(frozen=True)
class Ripened:
    """Labels that became final in [after, until), epoch seconds; the span of one training run.

    Training learns the labels of a row that is held out together, when the last of them is final.
    Calibration has only rows of which training up to `after` has learned no label. Rows without
    such a label are left out, unless `unlabelled` ones are wanted too; so are those of which
    `thinning` leaves nothing.
    """

    after: int
    until: int
    purpose: Literal["evaluation", "training", "calibration"] = "evaluation"
    unlabelled: bool = False
    thinning: Thinning | None = None


EVERYTHING = Ripened(after=0, until=0, unlabelled=True)
