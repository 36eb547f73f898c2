"""Net rates: the share of outcomes that are not retracted after their labels were final."""

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from etl.tables import label_schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from ranking.scoring.offset_updates import SEGMENT_HALF_LIFE, refresh_net_rates
from ranking.scoring.offsets import (
    BASE_NET_RATE,
    CalibrationOffsets,
    LabeledRows,
)
from ranking.scoring.predictions import batch_segments
from ranking.scoring.scorer import SCORE_ROWS
from ranking.trainer.label_days import days_with_labels
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader

MAX_AGE = 6 * SEGMENT_HALF_LIFE  # of outcomes that a new ranker learns: older ones weigh 2 %


def first_window(end: int) -> LabelWindow:
    """The window of a ranker's first net rates: earlier outcomes would have decayed by now."""
    return LabelWindow(max(0, end - MAX_AGE), end)


def refresh_from_retractions(
    offsets: CalibrationOffsets, reader: ExampleReader, num_items: int, window: LabelWindow
) -> CalibrationOffsets:
    """Offsets whose net rates have learned the outcomes that can no longer be retracted.

    These are the positives whose time for a retraction (`within`) ended in the window.
    """
    spec = reader.lake.spec
    if not spec.retraction_types:
        return offsets
    rows = {
        name: outcomes_to_learn(reader, num_items, name, window)
        for name, objective in spec.objectives.items()
        if objective.retracted_by
    }
    return refresh_net_rates(offsets, rows, window.end - window.start)


def outcomes_to_learn(
    reader: ExampleReader, num_items: int, objective: str, window: LabelWindow
) -> LabeledRows:
    """The positives of an objective whose time for a retraction ended in a window.

    Their labels are 1 for those that were not retracted.
    """
    spec = reader.lake.spec
    retraction = spec.objectives[objective].retracted_by
    assert retraction is not None
    within = retraction.within
    column = list(spec.objectives).index(objective)
    final = LabelWindow(max(0, window.start - within), max(0, window.end - within))
    days = days_with_labels(reader, final)
    retracted = _retracted_impressions(reader.lake, objective, within, window)
    labels, segments = [np.zeros(0, np.float32)], []
    for batch in reader.batches(days, final, SCORE_ROWS, Shuffle(None)):
        is_positive = (batch.label_mask & (batch.labels > 0))[:, column].numpy()
        ids = batch.impression_ids[is_positive]
        labels.append((~np.isin(ids, retracted)).astype(np.float32))
        values = batch_segments(batch, spec, num_items)
        segments.append({name: value[is_positive] for name, value in values.items()})
    net = np.concatenate(labels)
    empty = np.zeros(0, np.int64)
    by_segment = {
        name: np.concatenate([empty, *(values[name] for values in segments)])
        for name in spec.calibration_segments
    }
    return LabeledRows(np.full(len(net), BASE_NET_RATE), net, by_segment)


def _retracted_impressions(
    lake: Lake, objective: str, within: int, window: LabelWindow
) -> npt.NDArray[np.object_]:
    """The impressions all of whose counted outcomes were retracted within the time for it."""
    table, spec = snapshot(lake, label_schemas.late_retractions(lake.spec)), lake.spec
    earliest = window.start - within
    days = [
        day
        for day in table.days()
        if spec.day_end(day) > earliest and spec.day_start(day) < window.end
    ]
    columns = ["impression_id", "objective", "retracted_ts", "label_mature_ts", "outcomes_left"]
    rows = table.read(columns, day=days)
    in_time = pc.less_equal(pc.subtract(rows["retracted_ts"], rows["label_mature_ts"]), within)
    is_retracted = pc.and_(
        pc.equal(rows["objective"], objective), pc.equal(rows["outcomes_left"], 0)
    )
    return np.asarray(rows.filter(pc.and_(in_time, is_retracted))["impression_id"])
