"""Which labels a pass over the examples is about: those that became final in a span of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # needs numpy; commands that only plan a run have none
    from training.data.thinning import Thinning


@dataclass(frozen=True)
class Ripened:
    """Labels that became final in [after, until), epoch seconds; the span of one training run.

    Rows without such a label are left out, unless `unlabelled` ones are wanted too; so are those of
    which `thinning` leaves nothing.
    """

    after: int
    until: int
    unlabelled: bool = False
    thinning: Thinning | None = None


EVERYTHING = Ripened(after=0, until=0, unlabelled=True)
