"""Drift of features: a day's statistics beside those of the days before it.

The population stability index (PSI) of two histograms is the sum over bins of
(p - q) ln(p / q), where p and q are the shares of the day and of the reference. Numbers are put
into ten ranges of the reference, categories into its twenty most frequent and the others, missing
values apart. By convention, 0.1 is a moderate and 0.25 a large change.

A weekday is the same all day, and hours differ between days with few impressions. So a feature has
drifted only if its index is twice that of each earlier day beside the other earlier days, too. The
same holds for the share of categories that no earlier day had.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import median

import numpy as np
import numpy.typing as npt
from rich.table import Table

from etl.errors import UserError
from etl.tables import feature_schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
FeatureKey = tuple[str, str | None]  # feature, surface
REFERENCE_DAYS = 14
MIN_REFERENCE_DAYS = 4
MIN_DAY_ROWS = 50  # of an earlier day; versions of items are few
MIN_ROWS = 500  # of a day, and of the reference, for an index
SMALL_PSI, LARGE_PSI = 0.01, 0.25
USUAL_FACTOR = 2.0  # by which a day exceeds all earlier days beside each other
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
    def is_constant(self) -> bool:
        """Whether all values are the same."""
        if self.least is not None:
            return self.least == self.greatest
        return self.num_bins == 1

    @property
    def varying_share(self) -> float:
        """The share of values that are not in the fullest bin."""
        num_values = self.num_rows - self.num_missing
        return 1 - int(self.counts.max(initial=0)) / num_values if num_values else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all bins were kept."""
        return self.num_bins == len(self.bins)


@dataclass(frozen=True)
class FeatureDrift:
    """A feature of a surface on a day, beside earlier days.

    Attributes:
        surface: None for an attribute of items, which is counted by the versions that landed.
        cardinality: The number of categories, or of bins of a number.
        unseen_share: The share of values in categories that no earlier day had; None for numbers,
            and if not all categories were kept.
        psi: The population stability index; None with too few rows.
        reference_psi: The largest index of an earlier day beside the other earlier days.
        alarm: What is wrong, if anything is.
        is_broken: Whether the feature became null or constant, which fails a check.
    """

    feature: str
    surface: str | None
    num_rows: int
    missing_share: float
    reference_missing_share: float
    cardinality: int
    unseen_share: float | None
    psi: float | None
    reference_psi: float | None
    alarm: str | None
    is_broken: bool

    @property
    def change(self) -> float:
        """The index of the day over the largest of an earlier day; 0 if there is none."""
        return (self.psi or 0.0) / max(self.reference_psi or 0.0, SMALL_PSI)

    @property
    def name(self) -> str:
        """The feature and its surface."""
        return f"{self.feature} ({self.surface or 'versions of items'})"


def drift_of_days(lake: Lake, days: tuple[date, date]) -> dict[date, list[FeatureDrift]]:
    """The drift on each day of a range that has statistics.

    Raises UserError if there is none.
    """
    table = snapshot(lake, feature_schemas.feature_statistics(lake.spec))
    stored = [day for day in table.days() if days[0] <= day <= days[1]]
    if not stored:
        raise UserError(
            f"no statistics of {days[0]} to {days[1]}: run `gemline features statistics` for them"
        )
    return {day: feature_drift(lake, day) for day in stored}


def feature_drift(lake: Lake, day: date) -> list[FeatureDrift]:
    """The drift of each feature and surface on a day: those with alarms first, then by `change`.

    The reference are the latest days before, at most REFERENCE_DAYS.
    """
    by_day = read_histograms(lake, day)
    earlier = [by_day[other] for other in sorted(by_day) if other < day]
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
            f"{drift.reference_missing_share:.1%}",
            f"{drift.cardinality:,}",
            "" if drift.unseen_share is None else f"{drift.unseen_share:.1%}",
            *("" if psi is None else f"{psi:.3f}" for psi in (drift.psi, drift.reference_psi)),
        )
    return table


def read_histograms(lake: Lake, day: date) -> Mapping[date, Mapping[FeatureKey, Histogram]]:
    """The histograms of a day and of its reference days."""
    table = snapshot(lake, feature_schemas.feature_statistics(lake.spec))
    days = [stored for stored in table.days() if stored <= day][-REFERENCE_DAYS - 1 :]
    surfaces = {code: name for name, code in lake.spec.surface_codes.items()}
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
    """A feature's statistics of a day beside those of earlier days."""
    days = [other for other in earlier if other.num_rows >= MIN_DAY_ROWS]
    usual = Usual.of_days(days) if len(days) >= MIN_REFERENCE_DAYS else None
    reference = usual.all_days if usual else merge(earlier)
    psi = None
    if min(histogram.num_rows, reference.num_rows) >= MIN_ROWS and usual:
        psi = population_stability_index(reference, histogram)
    broken = usual.describe_break(histogram) if usual else None
    unseen = unseen_share(reference, histogram)
    changed = usual.describe_change(psi, unseen) if usual and psi is not None else None
    return FeatureDrift(
        *key,
        num_rows=histogram.num_rows,
        missing_share=histogram.missing_share,
        reference_missing_share=reference.missing_share,
        cardinality=histogram.num_bins,
        unseen_share=unseen,
        psi=psi,
        reference_psi=usual.largest_psi if usual else None,
        alarm=broken or changed,
        is_broken=broken is not None,
    )


@dataclass(frozen=True)
class Usual:
    """What earlier days were like: together, the median day, and each beside the others.

    A day on which the feature was null or constant does not change the median.
    """

    all_days: Histogram
    missing_share: float
    varying_share: float
    largest_psi: float
    largest_unseen_share: float

    @classmethod
    def of_days(cls, days: Sequence[Histogram]) -> "Usual":
        """What some days, at least two, were like."""
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


def population_stability_index(reference: Histogram, day: Histogram) -> float:
    """How far the histogram of a day is from that of the reference; 0 where shares are equal.

    The share of half a row of the day is added to each group, so that empty ones do not make it
    infinite.
    """
    added = 0.5 / day.num_rows
    of_reference, of_day = (
        _grouped(reference, histogram) / histogram.num_rows + added
        for histogram in (reference, day)
    )
    return float(((of_day - of_reference) * np.log(of_day / of_reference)).sum())


def _grouped(reference: Histogram, histogram: Histogram) -> Float64:
    """The rows of a histogram by range or category of the reference, others and missing apart."""
    is_category = reference.least is None and len(reference.bins) > 0
    if is_category:
        kept = np.sort(reference.bins[np.argsort(-reference.counts, kind="stable")[:CATEGORIES]])
        of_bin = np.searchsorted(kept, histogram.bins)
        is_kept = np.append(kept, kept[-1] - 1)[of_bin] == histogram.bins
        group = np.where(is_kept, of_bin, len(kept))
        num_groups = len(kept) + 1
    else:
        # A range begins with the bin at which a further tenth of the reference's values is reached.
        before = np.cumsum(reference.counts) - reference.counts
        tenth = before * RANGES // max(int(reference.counts.sum()), 1)
        starts = reference.bins[np.diff(tenth, prepend=-1) > 0]
        group = np.maximum(np.searchsorted(starts, histogram.bins, "right") - 1, 0)
        num_groups = max(len(starts), 1)
    counts = np.bincount(group, histogram.counts, num_groups)
    not_kept = histogram.num_rows - histogram.num_missing - counts.sum()
    if is_category:
        counts[-1] += not_kept
        not_kept = 0
    return np.concatenate((counts, [not_kept, histogram.num_missing]))


def unseen_share(reference: Histogram, histogram: Histogram) -> float | None:
    """The share of a day's values in categories that the reference lacks; None if unknown."""
    num_values = histogram.num_rows - histogram.num_missing
    if histogram.least is not None or not num_values or not len(reference.bins):
        return None
    if not (reference.is_complete and histogram.is_complete):
        return None
    is_unseen = ~np.isin(histogram.bins, reference.bins)
    return float(histogram.counts[is_unseen].sum() / num_values)
