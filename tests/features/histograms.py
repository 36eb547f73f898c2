"""Histograms of categories, and statistics of them in a lake."""

from collections.abc import Sequence
from datetime import date, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.tables import arrow, feature_schemas
from etl.tables.lake import Lake, arrow_schema
from features.drift import Histogram


def histogram_of(codes: npt.ArrayLike) -> Histogram:
    """The histogram of categories; 0 is missing."""
    all_codes = np.asarray(codes, np.int64)
    bins, counts = np.unique(all_codes[all_codes > 0], return_counts=True)
    num_missing = int((all_codes == 0).sum())
    return Histogram(len(all_codes), num_missing, len(bins), bins, counts)


def write_statistics(lake: Lake, first_day: date, days: Sequence[npt.ArrayLike]) -> None:
    """Write `feature_statistics` with one feature, `ctx_x` on feed, from its codes on each day."""
    schema = feature_schemas.feature_statistics(lake.spec)
    for number, codes in enumerate(days):
        histogram, day = histogram_of(codes), first_day + timedelta(days=number)
        row = {
            "surface": lake.spec.surface_codes["feed"],
            "feature": "ctx_x",
            "num_rows": histogram.num_rows,
            "num_missing": histogram.num_missing,
            "num_bins": histogram.num_bins,
            "bins": histogram.bins.tolist(),
            "counts": histogram.counts.tolist(),
            "day": day,
        }
        table = pa.Table.from_pylist([row], arrow_schema(schema))
        arrow.replace_rows(lake, schema, table, f"day = '{day}'", {})
