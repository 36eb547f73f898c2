"""Segments of calibration: which items are new to a ranker."""

import numpy as np

from etl.spec import DataSpec
from etl.spec.sections import NEW_ITEM
from etl.tables.schemas import RESERVED_ITEM_INDICES
from ranking.inputs.segments import NEW, OLD, segment_values


def test_items_without_an_index_are_new_like_those_after_the_training(lake_spec: DataSpec) -> None:
    """A live candidate that was never seen has index 0, the same ad in the tables a late one."""
    spec = lake_spec.model_copy(update={"calibration_segments": (NEW_ITEM,)})
    first, num_items = RESERVED_ITEM_INDICES, RESERVED_ITEM_INDICES + 5
    new, known = [0, 1, first - 1, num_items, num_items + 9], [first, num_items - 1]
    values = segment_values(spec, {}, np.array([new + known]), num_items)
    assert values[NEW_ITEM].tolist() == [[NEW] * len(new) + [OLD] * len(known)]
