"""How many of the impressions that a student trains on its teacher has predicted."""

import logging
from collections.abc import Sequence
from datetime import date

import numpy as np

from etl.tables import arrow, schemas
from etl.tables.lake import Lake
from training.teacher.predictions import TeacherPredictions

MIN_PREDICTED_SHARE = 0.5
log = logging.getLogger(__name__)


def warn_of_missing_predictions(
    lake: Lake, surfaces: Sequence[str], days: Sequence[date], teacher: TeacherPredictions
) -> None:
    """Log a warning if a teacher has predicted few of the impressions of surfaces on some days."""
    counts = _predicted_by_day(lake, surfaces, days, teacher)
    predicted, total = np.sum(list(counts.values()), axis=0)
    if predicted >= MIN_PREDICTED_SHARE * total:
        return
    missing = [f"{day}" for day, (found, rows) in counts.items() if rows and not found]
    log.warning(
        "%s: GEM has predicted %.0f%% of the impressions from %s to %s%s; the student learns the "
        "others from labels alone",
        ", ".join(surfaces), 100 * predicted / total, days[0], days[-1],
        f" (none on {', '.join(missing)})" if missing else "",
    )  # fmt: skip


def _predicted_by_day(
    lake: Lake, surfaces: Sequence[str], days: Sequence[date], teacher: TeacherPredictions
) -> dict[date, tuple[int, int]]:
    """The numbers of predicted impressions and of all impressions of surfaces, by day."""
    examples = arrow.snapshot(lake, schemas.examples(lake.spec))
    codes = [lake.spec.surface_codes[name] for name in surfaces]
    counts = {}
    for day in days:
        rows = examples.read(["impression_id", "surface"], day=day)
        ids = np.asarray(rows["impression_id"])[np.isin(rows["surface"], codes)]
        counts[day] = int(teacher.lookup(ids).mask.any(1).sum()), len(ids)
    return counts
