"""Drift of features: a day's statistics beside those of the days before it.

The population stability index (PSI) of two histograms is the sum over bins of
(p - q) ln(p / q), where p and q are the shares of the day and of the reference. Numbers are put
into ten ranges of the reference, categories into its twenty most frequent and the others, missing
values apart. By convention, 0.1 is a moderate and 0.25 a large change.

A weekday is the same all day, and hours differ between days with few impressions. So a feature has
drifted only if its index is twice that of each earlier day beside the other earlier days, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt
from rich.table import Table

from etl.errors import UserError
from etl.tables import feature_schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
REFERENCE_DAYS = 14
MIN_REFERENCE_DAYS = 4
MIN_ROWS = 500  # of a day and surface; with fewer, shares are noise
SMALL_PSI, LARGE_PSI = 0.01, 0.25
PSI_FACTOR = 2.0  # by which the index of a day exceeds those of all earlier days
MIN_VARYING = 30  # rows with other values that are to be expected of a feature that is constant
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


def feature_drift(lake: Lake, day: date) -> list[FeatureDrift]:
    """The drift of each feature and surface on a day: those with alarms first, then by `change`.

    The reference are the latest days before, at most REFERENCE_DAYS. Raises UserError if the day
    has no statistics.
    """
    by_day = read_histograms(lake, day)
    if day not in by_day:
        raise UserError(f"no statistics of {day}: run `gemline features statistics` for it")
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


FeatureKey = tuple[str, str | None]  # feature, surface


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
    enough = [other for other in earlier if other.num_rows >= MIN_ROWS]
    psi = reference_psi = None
    if len(enough) >= MIN_REFERENCE_DAYS and histogram.num_rows >= MIN_ROWS:
        psi = population_stability_index(merge(enough), histogram)
        reference_psi = max(
            population_stability_index(merge([*enough[:n], *enough[n + 1 :]]), other)
            for n, other in enumerate(enough)
        )
    reference = merge(earlier)
    usual_psi = PSI_FACTOR * (reference_psi or 0)
    has_drifted = psi is not None and psi > max(LARGE_PSI, usual_psi)
    unseen = unseen_share(reference, histogram)
    broken = _broken(histogram, enough) if psi is not None else None
    alarm = broken
    if not alarm and has_drifted:
        alarm = f"changed: its stability index is {psi:.2f}, at most {reference_psi:.2f} before"
    if not alarm and psi is not None and unseen is not None and unseen > UNSEEN_SHARE:
        alarm = f"{unseen:.0%} of its values are in categories that earlier days did not have"
    return FeatureDrift(
        *key,
        num_rows=histogram.num_rows,
        missing_share=histogram.missing_share,
        reference_missing_share=reference.missing_share,
        cardinality=histogram.num_bins,
        unseen_share=unseen,
        psi=psi,
        reference_psi=reference_psi,
        alarm=alarm,
        is_broken=broken is not None,
    )


def _broken(histogram: Histogram, earlier: Sequence[Histogram]) -> str | None:
    """What no earlier day was: null or constant."""
    most_missing = max(other.missing_share for other in earlier)
    if histogram.missing_share >= NULL_SHARE and most_missing < USUAL_MISSING_SHARE:
        return f"null in {histogram.missing_share:.1%} of rows, at most {most_missing:.1%} before"
    num_values = histogram.num_rows - histogram.num_missing
    expected = num_values * min(other.varying_share for other in earlier)
    if histogram.is_constant and expected >= MIN_VARYING:
        return f"constant, where earlier days let expect {expected:,.0f} rows with other values"
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
    """The rows of a histogram by group: missing, then ranges or categories of the reference."""
    if reference.least is None and len(reference.bins):
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
    counts[-1] += not_kept
    return np.append(counts, histogram.num_missing)


def unseen_share(reference: Histogram, histogram: Histogram) -> float | None:
    """The share of a day's values in categories that the reference lacks; None if unknown."""
    is_number = histogram.least is not None
    num_values = histogram.num_rows - histogram.num_missing
    if is_number or not num_values or not (reference.is_complete and histogram.is_complete):
        return None
    is_unseen = ~np.isin(histogram.bins, reference.bins)
    return float(histogram.counts[is_unseen].sum() / num_values)
