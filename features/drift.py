"""Drift of features: a day's statistics compared with those of the days before it.

The population stability index (PSI) of two histograms is the sum over bins of
(p - q) ln(p / q), where p and q are the shares of the day and of the baseline. Numbers are put
into ten ranges of the baseline, categories into its twenty most frequent and the others, missing
values apart. By convention, 0.1 is a moderate and 0.25 a large change.

A weekday is the same all day, and hours differ between days with few impressions. So a feature has
drifted only if its index is also twice that of each earlier day compared with the other ones. The
same holds for the share of categories that no earlier day had.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import median

import numpy as np
from rich.table import Table

from etl.array_types import Float64, Int64
from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import DayRange
from etl.tables import feature_schemas
from etl.tables.arrow import Snapshot, snapshot
from etl.tables.lake import Lake

FeatureKey = tuple[str, str | None]  # feature, surface
BASELINE_DAYS = 14
MIN_BASELINE_DAYS = 4
MIN_DAY_ROWS = 50  # of an earlier day; versions of items are few
MIN_ROWS = 500  # of a day, and of the baseline, for an index
SMALL_PSI, LARGE_PSI = 0.01, 0.25
USUAL_FACTOR = 2.0  # by which a day exceeds all earlier days
MIN_EXPECTED = 30  # rows with another value that a null or constant feature usually has
NULL_SHARE = 0.99  # of missing values, from which a feature counts as null
USUAL_MISSING_SHARE = 0.9  # up to which a feature that becomes null is an alarm
RANGES = 10
CATEGORIES = 20
UNSEEN_SHARE = 0.2  # of rows with categories that no earlier day had


@dataclass(frozen=True)
class Histogram:
    """The statistics of a feature on one day, or on several together.

    `bins` (N), sorted, and `counts` (N) are those that were kept of `num_bins`. `least` and
    `greatest` are None for categories, and where all values are missing.
    """

    num_rows: int
    num_missing: int
    num_bins: int
    bins: Int64
    counts: Int64
    least: float | None = None
    greatest: float | None = None

    @property
    def missing_share(self) -> float:
        """The share of rows without a value."""
        return self.num_missing / max(self.num_rows, 1)

    @property
    def num_values(self) -> int:
        """The number of values; a row of several values has more than one."""
        return max(self.num_rows - self.num_missing, int(self.counts.sum()))

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same."""
        if self.least is not None:
            return self.least == self.greatest
        return self.num_bins == 1

    @property
    def varying_share(self) -> float:
        """The share of values that are not in the fullest bin."""
        fullest = int(self.counts.max(initial=0))
        return 1 - fullest / self.num_values if self.num_values else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all bins were kept."""
        return self.num_bins == len(self.bins)


@dataclass(frozen=True)
class FeatureDrift:
    """A feature of a surface on a day, compared with earlier days.

    Attributes:
        surface: None for an attribute of items, which is counted by the versions that landed.
        cardinality: The number of categories, or of bins of a number.
        unseen_share: The share of values in categories that no earlier day had; None for numbers,
            and if not all categories were kept.
        psi: The population stability index; None with too few rows.
        baseline_psi: The largest index of an earlier day compared with the other ones.
        alarm: What is wrong, if anything is.
        is_broken: Whether the feature became null or constant, which fails a check.
    """

    feature: str
    surface: str | None
    num_rows: int
    missing_share: float
    baseline_missing_share: float
    cardinality: int
    unseen_share: float | None
    psi: float | None
    baseline_psi: float | None
    alarm: str | None
    is_broken: bool

    @property
    def change(self) -> float:
        """The index of the day over the largest of an earlier day; 0 if there is none."""
        return (self.psi or 0.0) / max(self.baseline_psi or 0.0, SMALL_PSI)

    @property
    def name(self) -> str:
        """The feature and its surface."""
        return f"{self.feature} ({self.surface or 'versions of items'})"


def drift_of_days(lake: Lake, days: DayRange) -> dict[date, list[FeatureDrift]]:
    """The drift of each feature and surface on each day of a range that has statistics.

    Features with alarms come first, then those that changed most. Raises UserError if no day has
    statistics.
    """
    table = snapshot(lake, feature_schemas.feature_statistics(lake.spec))
    stored = [day for day in table.days() if day <= days[1]]
    compared = [day for day in stored if days[0] <= day]
    if not compared:
        raise UserError(
            f"no statistics of {days[0]} to {days[1]}: run `gemline features statistics` for them"
        )
    by_day = read_histograms(lake.spec, table, stored[-len(compared) - BASELINE_DAYS :])
    return {day: _drift_of_day(day, by_day) for day in compared}


def _drift_of_day(
    day: date, by_day: Mapping[date, Mapping[FeatureKey, Histogram]]
) -> list[FeatureDrift]:
    earlier = [by_day[other] for other in sorted(by_day) if other < day][-BASELINE_DAYS:]
    drifts = [
        compare_histograms(key, histogram, [of[key] for of in earlier if key in of])
        for key, histogram in by_day[day].items()
    ]
    return sorted(
        drifts, key=lambda d: (not d.is_broken, d.alarm is None, -d.change, d.feature, d.name)
    )


def drift_table(drifts: Sequence[FeatureDrift]) -> Table:
    """Features as a table of the console."""
    columns = ("feature", "surface", "rows", "missing", "before", "distinct", "unseen", "PSI")
    table = Table(*columns, "PSI before")
    for drift in drifts:
        table.add_row(
            drift.feature,
            drift.surface or "versions of items",
            f"{drift.num_rows:,}",
            f"{drift.missing_share:.1%}",
            f"{drift.baseline_missing_share:.1%}",
            f"{drift.cardinality:,}",
            "" if drift.unseen_share is None else f"{drift.unseen_share:.1%}",
            *("" if psi is None else f"{psi:.3f}" for psi in (drift.psi, drift.baseline_psi)),
        )
    return table


def read_histograms(
    spec: DataSpec, table: Snapshot, days: Sequence[date]
) -> Mapping[date, Mapping[FeatureKey, Histogram]]:
    """The histograms of some days of `feature_statistics`."""
    surfaces = {code: name for name, code in spec.surface_codes.items()}
    by_day: dict[date, dict[FeatureKey, Histogram]] = {}
    for row in table.read(day=days).to_pylist():
        bins, counts = np.array(row["bins"], np.int64), np.array(row["counts"], np.int64)
        order = np.argsort(bins)
        key = (row["feature"], surfaces.get(row["surface"]))
        by_day.setdefault(row["day"], {})[key] = Histogram(
            num_rows=row["num_rows"],
            num_missing=row["num_missing"],
            num_bins=row["num_bins"],
            bins=bins[order],
            counts=counts[order],
            least=row["least"],
            greatest=row["greatest"],
        )
    return by_day


def compare_histograms(
    key: FeatureKey, histogram: Histogram, earlier: Sequence[Histogram]
) -> FeatureDrift:
    """A feature's statistics of a day, compared with those of earlier days."""
    days = [other for other in earlier if other.num_rows >= MIN_DAY_ROWS]
    baseline = Baseline.of_days(days) if len(days) >= MIN_BASELINE_DAYS else None
    all_days = baseline.all_days if baseline else merge(earlier)
    unseen = unseen_share(all_days, histogram)
    psi = broken = changed = None
    if baseline:
        broken = baseline.describe_break(histogram)
        if min(histogram.num_rows, all_days.num_rows) >= MIN_ROWS:
            psi = population_stability_index(all_days, histogram)
            changed = baseline.describe_change(psi, unseen)
    return FeatureDrift(
        *key,
        num_rows=histogram.num_rows,
        missing_share=histogram.missing_share,
        baseline_missing_share=all_days.missing_share,
        cardinality=histogram.num_bins,
        unseen_share=unseen,
        psi=psi,
        baseline_psi=baseline.largest_psi if baseline else None,
        alarm=broken or changed,
        is_broken=broken is not None,
    )


@dataclass(frozen=True)
class Baseline:
    """Earlier days: all together, the median day, and each compared with the others.

    A day on which the feature was null or constant does not change the median.
    """

    all_days: Histogram
    missing_share: float
    varying_share: float
    largest_psi: float
    largest_unseen_share: float

    @classmethod
    def of_days(cls, days: Sequence[Histogram]) -> "Baseline":
        """The baseline of some days, at least two."""
        others = [merge([*days[:n], *days[n + 1 :]]) for n in range(len(days))]
        pairs = list(zip(others, days, strict=True))
        return cls(
            merge(days),
            median(day.missing_share for day in days),
            median(day.varying_share for day in days),
            max(population_stability_index(*pair) for pair in pairs),
            max(unseen_share(*pair) or 0.0 for pair in pairs),
        )

    def describe_break(self, day: Histogram) -> str | None:
        """Whether a day's feature became null or constant, in words."""
        num_values = day.num_rows - day.num_missing
        expected_values = day.num_rows * (1 - self.missing_share)
        was_known = self.missing_share < USUAL_MISSING_SHARE and expected_values >= MIN_EXPECTED
        if day.missing_share >= NULL_SHARE and was_known:
            return f"null in {day.missing_share:.1%} of rows, {self.missing_share:.1%} are usual"
        expected = num_values * self.varying_share
        if day.is_constant and expected >= MIN_EXPECTED:
            return f"constant, where about {expected:,.0f} rows with other values are usual"
        return None

    def describe_change(self, psi: float, unseen: float | None) -> str | None:
        """Whether a day's feature has another distribution or other categories, in words."""
        if psi > max(LARGE_PSI, USUAL_FACTOR * self.largest_psi):
            return (
                f"changed: its stability index is {psi:.2f}, at most {self.largest_psi:.2f} before"
            )
        if unseen and unseen > max(UNSEEN_SHARE, USUAL_FACTOR * self.largest_unseen_share):
            return f"{unseen:.0%} of its values are in categories that earlier days did not have"
        return None


def merge(histograms: Sequence[Histogram]) -> Histogram:
    """Several days as one."""
    all_bins = np.concatenate([h.bins for h in histograms] or [np.zeros(0, np.int64)])
    all_counts = np.concatenate([h.counts for h in histograms] or [np.zeros(0, np.int64)])
    bins, index = np.unique(all_bins, return_inverse=True)
    is_complete = all(h.is_complete for h in histograms)
    least = [h.least for h in histograms if h.least is not None]
    greatest = [h.greatest for h in histograms if h.greatest is not None]
    return Histogram(
        num_rows=sum(h.num_rows for h in histograms),
        num_missing=sum(h.num_missing for h in histograms),
        num_bins=len(bins) if is_complete else max(h.num_bins for h in histograms),
        bins=bins,
        counts=np.bincount(index, all_counts, len(bins)).astype(np.int64),
        least=min(least, default=None),
        greatest=max(greatest, default=None),
    )


def population_stability_index(baseline: Histogram, day: Histogram) -> float:
    """How far the histogram of a day is from that of the baseline; 0 where shares are equal.

    The share of half a row of the day is added to each group, so that empty ones do not make it
    infinite.
    """
    added = 0.5 / day.num_rows
    of_reference, of_day = (
        _grouped(baseline, histogram) / (histogram.num_values + histogram.num_missing) + added
        for histogram in (baseline, day)
    )
    return float(((of_day - of_reference) * np.log(of_day / of_reference)).sum())


def _grouped(baseline: Histogram, histogram: Histogram) -> Float64:
    """The values of a histogram by range or category of the baseline, others and missing apart."""
    is_category = baseline.least is None and len(baseline.bins) > 0
    if is_category:
        kept = np.sort(baseline.bins[np.argsort(-baseline.counts, kind="stable")[:CATEGORIES]])
        of_bin = np.searchsorted(kept, histogram.bins)
        is_kept = np.append(kept, kept[-1] - 1)[of_bin] == histogram.bins
        group = np.where(is_kept, of_bin, len(kept))
        num_groups = len(kept) + 1
    else:
        # A range begins with the bin at which a further tenth of the baseline's values is reached.
        before = np.cumsum(baseline.counts) - baseline.counts
        tenth = before * RANGES // max(int(baseline.counts.sum()), 1)
        starts = baseline.bins[np.diff(tenth, prepend=-1) > 0]
        group = np.maximum(np.searchsorted(starts, histogram.bins, "right") - 1, 0)
        num_groups = max(len(starts), 1)
    counts = np.bincount(group, histogram.counts, num_groups)
    not_kept = histogram.num_values - counts.sum()
    if is_category:
        counts[-1] += not_kept
        not_kept = 0
    return np.concatenate((counts, [not_kept, histogram.num_missing]))


def unseen_share(baseline: Histogram, histogram: Histogram) -> float | None:
    """The share of a day's values in categories that the baseline lacks; None if unknown."""
    if histogram.least is not None or not histogram.num_values or not len(baseline.bins):
        return None
    if not (baseline.is_complete and histogram.is_complete):
        return None
    is_unseen = ~np.isin(histogram.bins, baseline.bins)
    return float(histogram.counts[is_unseen].sum() / histogram.num_values)
