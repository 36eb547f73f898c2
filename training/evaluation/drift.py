"""Drift detection of continuous training: compares the latest day with the days before.

Every impression is predicted once by the GEM of the days before it (`teacher_predictions`), so its
prequential metrics need no held-out day. The monitored metrics are the normalized entropy (NE) and
calibration of each objective, and the impressions of each surface. A metric drifts if its distance
from the median of the days before exceeds several times their median absolute deviation (MAD),
which is robust to a single bad day.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from statistics import median
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Float64, Int64
from etl.spec.units import MICROS
from etl.tables import arrow, label_schemas, model_schemas
from etl.tables.arrow import Snapshot
from etl.tables.lake import Lake
from training.data.label_window import LabelWindow

BASELINE_DAYS = 14  # earlier days to compare with
MIN_BASELINE_DAYS = 4
PREQUENTIAL_DAYS = 60  # latest days that are read: more than BASELINE_DAYS, as some may not count
MIN_POSITIVES = 30  # positive labels of a surface on a day; with fewer, metrics are noise
MAD_THRESHOLD = 5.0  # deviations from the median, in MADs, that count as drift


class TeacherPrequential(NamedTuple):
    """Sums over the final labels of a day, surface and objective; logloss in nats.

    `predicted` is the sum of GEM's probabilities, `positives` that of the labels.
    """

    day: date
    surface: str
    objective: str
    rows: int
    positives: float
    predicted: float
    logloss: float

    @property
    def calibration(self) -> float:
        """Predicted over actual positives, of which at least one is counted."""
        return self.predicted / max(self.positives, 1.0)

    @property
    def ne(self) -> float:
        """Normalized entropy: logloss over the logloss of the day's own base rate."""
        rate = self.positives / self.rows
        entropy = -self.rows * (rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
        return float(self.logloss / entropy)


def combine(parts: Sequence[TeacherPrequential]) -> TeacherPrequential:
    """Add all parts, with the day, surface and objective of the first."""
    return parts[0]._replace(
        rows=sum(part.rows for part in parts),
        positives=sum(part.positives for part in parts),
        predicted=sum(part.predicted for part in parts),
        logloss=sum(part.logloss for part in parts),
    )


def teacher_prequential(lake: Lake, data_until: date) -> list[TeacherPrequential]:
    """Prequential sums by day, surface and objective, of labels final at the end of `data_until`.

    Of the latest PREQUENTIAL_DAYS days; empty if no teacher predictions were written.
    """
    if not lake.exists("teacher_predictions"):
        return []
    predictions = arrow.snapshot(lake, model_schemas.teacher_predictions(lake.spec))
    impressions = arrow.snapshot(lake, label_schemas.impressions(lake.spec))
    window = LabelWindow(0, lake.spec.day_end(data_until))
    first_day = data_until - timedelta(days=PREQUENTIAL_DAYS - 1)
    return [
        metrics
        for day in predictions.days()
        if day >= first_day
        for metrics in _day_metrics(lake, day, predictions, impressions, window)
    ]


def _day_metrics(
    lake: Lake, day: date, predictions: Snapshot, impressions: Snapshot, window: LabelWindow
) -> Iterator[TeacherPrequential]:
    columns, logits = ["impression_id", "surface"], ["impression_id"]
    for objective in lake.spec.objectives:
        columns += [f"label_{objective}", f"label_mature_ts_{objective}"]
        logits.append(f"logit_{objective}")
    rows = impressions.read(columns, day=day).join(
        predictions.read(logits, day=day), "impression_id", join_type="inner"
    )
    surface_names = {code: name for name, code in lake.spec.surface_codes.items()}
    for objective in lake.spec.objectives:
        final = with_final_labels(rows, objective, window)
        surface = final["surface"].to_numpy().astype(np.int64)
        label = final[f"label_{objective}"].to_numpy().astype(float)
        logit = final[f"logit_{objective}"].to_numpy().astype(float)
        counts, *sums = _sums_by_surface(surface, label, logit)
        for code in np.flatnonzero(counts):
            positives, predicted, logloss = (float(column[code]) for column in sums)
            yield TeacherPrequential(
                day=day,
                surface=surface_names[int(code)],
                objective=objective,
                rows=int(counts[code]),
                positives=positives,
                predicted=predicted,
                logloss=logloss,
            )


def with_final_labels(rows: pa.Table, objective: str, window: LabelWindow) -> pa.Table:
    """The rows with a logit and a label that becomes final in a window."""
    valid = pc.and_(rows[f"label_{objective}"].is_valid(), rows[f"logit_{objective}"].is_valid())
    rows = rows.filter(valid)
    mature_ts = rows[f"label_mature_ts_{objective}"].to_numpy() // MICROS["s"]
    return rows.filter(pa.array(window.contains(mature_ts)))


def _sums_by_surface(surface: Int64, label: Float64, logit: Float64) -> list[Float64]:
    """Rows, positives, predicted positives and logloss by surface code."""
    predicted = 1 / (1 + np.exp(-logit))
    logloss = label * np.logaddexp(0, -logit) + (1 - label) * np.logaddexp(0, logit)
    weights = np.ones_like(predicted), label, predicted, logloss
    return [np.bincount(surface, weight).astype(np.float64) for weight in weights]


@dataclass(frozen=True)
class DriftMetric:
    """A monitored metric: its values by day, the most recent last.

    A relative change below `min_relative_change` is not drift. With `increase_only` a smaller value
    is not drift either. With `blocks_promotion`, drift prevents the promotion of rankers that
    learned from this GEM.
    """

    name: str
    days: tuple[date, ...]
    values: tuple[float, ...]
    min_relative_change: float
    increase_only: bool = False
    blocks_promotion: bool = False

    @property
    def alarm(self) -> str | None:
        """A message if the most recent value drifted, else None."""
        *earlier, newest = self.values[-BASELINE_DAYS - 1 :]
        if len(earlier) < MIN_BASELINE_DAYS:
            return None
        usual = median(earlier)
        deviation = median(abs(value - usual) for value in earlier)
        tolerance = max(self.min_relative_change * usual, MAD_THRESHOLD * deviation)
        change = newest - usual if self.increase_only else abs(newest - usual)
        if change <= tolerance:
            return None
        return f"{self.name} is {newest:.3g} on {self.days[-1]}, usually {usual:.3g}"


def drift_metrics(lake: Lake, data_until: date) -> list[DriftMetric]:
    """All monitored metrics of the days up to `data_until`."""
    prequential = teacher_prequential(lake, data_until)
    by_objective = [
        metric
        for name in lake.spec.objectives
        for metric in prequential_metrics(name, [m for m in prequential if m.objective == name])
    ]
    return [*by_objective, *_impression_counts(lake, data_until)]


def prequential_metrics(
    objective: str, prequential: Sequence[TeacherPrequential]
) -> list[DriftMetric]:
    """NE and calibration of an objective by day, each summed over the surfaces with enough labels.

    For calibration either predicted or actual positives have to be enough, so that missing ones are
    drift. Labels of one class have no NE. A metric whose newest value is older than the day before
    the newest labels is left out.
    """
    of_ne = _by_day([m for m in prequential if MIN_POSITIVES <= m.positives < m.rows])
    of_calibration = _by_day(
        [m for m in prequential if max(m.positives, m.predicted) >= MIN_POSITIVES]
    )
    ne_days, calibration_days = (tuple(m.day for m in sums) for sums in (of_ne, of_calibration))
    ne = tuple(m.ne for m in of_ne)
    calibration = tuple(m.calibration for m in of_calibration)
    metrics = (
        DriftMetric(
            f"NE of {objective}", ne_days, ne, 0.1, increase_only=True, blocks_promotion=True
        ),
        DriftMetric(
            f"calibration of {objective}", calibration_days, calibration, 0.2, blocks_promotion=True
        ),
    )
    day_before_newest = max((m.day for m in prequential), default=date.max) - timedelta(days=1)
    return [metric for metric in metrics if metric.days and metric.days[-1] >= day_before_newest]


def _by_day(prequential: Sequence[TeacherPrequential]) -> list[TeacherPrequential]:
    """The sums over surfaces of each day, the newest last."""
    by_day: dict[date, list[TeacherPrequential]] = {}
    for metrics in prequential:
        by_day.setdefault(metrics.day, []).append(metrics)
    return [combine(by_day[day]) for day in sorted(by_day)]


def _impression_counts(lake: Lake, data_until: date) -> Iterator[DriftMetric]:
    impressions = arrow.snapshot(lake, label_schemas.impressions(lake.spec))
    days = tuple(day for day in impressions.days() if day <= data_until)[-BASELINE_DAYS - 1 :]
    counts = [_count_by_surface(impressions, day) for day in days]
    for name, code in lake.spec.surface_codes.items():
        values = tuple(float(count.get(code, 0)) for count in counts)
        if any(values):
            yield DriftMetric(f"impressions on {name}", days, values, 0.5)


def _count_by_surface(impressions: Snapshot, day: date) -> dict[int, int]:
    counted = pc.value_counts(impressions.read(["surface"], day=day)["surface"]).to_pylist()
    return {row["values"]: row["counts"] for row in counted}
