"""Limits of the daily spend by campaign, from a file."""

from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Float64
from etl.errors import UserError
from ranking.roi.campaign_days import read_rows


def read_limits(
    path: Path | None, campaigns: tuple[str, ...], minimum: float
) -> tuple[Float64, Float64]:
    """Minimum and maximum daily spend (C) of campaigns, from a CSV or Parquet file.

    An empty cell, an absent column or campaign is no limit but `minimum`, that of all campaigns.

    Raises:
        UserError: A campaign is unknown, missing or named twice, a limit is no number or negative,
            or a minimum is above the maximum.
    """
    low, high = np.full(len(campaigns), minimum), np.full(len(campaigns), np.inf)
    if path is None:
        return low, high
    table = read_rows(path, ("campaign",))
    given = [name for name in ("minimum", "maximum") if name in table.column_names]
    if "campaign" not in table.column_names or not given:
        raise UserError(
            f"{path}: limits have the columns campaign, and minimum, maximum or both; it has "
            + ", ".join(table.column_names)
        )
    positions = _positions(path, table, campaigns)
    for name, limits in (("minimum", low), ("maximum", high)):
        if name in given:
            values = _limits(path, table, name)
            is_given = ~np.isnan(values)
            limits[positions[is_given]] = values[is_given]
    if (low > high).any():
        c = int((low > high).argmax())
        raise UserError(
            f"{path}: campaign {campaigns[c]} has a minimum of {low[c]:,.2f} above its maximum of "
            f"{high[c]:,.2f}: change one of them"
        )
    return low, high


def _positions(path: Path, table: pa.Table, campaigns: tuple[str, ...]) -> npt.NDArray[np.intp]:
    """The position of the campaign of each row."""
    names = table["campaign"].cast(pa.string()).to_pylist()
    known = {name: position for position, name in enumerate(campaigns)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(
            f"{path}: campaign {unknown[0] or '(empty)'} has no campaign days: remove its row"
        )
    repeated = [name for name, rows in Counter(names).items() if rows > 1]
    if repeated:
        raise UserError(f"{path}: campaign {repeated[0]} has several rows: keep one")
    return np.array([known[name] for name in names], dtype=np.intp)


def _limits(path: Path, table: pa.Table, name: str) -> Float64:
    """A column of limits; an empty cell is NaN."""
    column = table[name]
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if not (is_number or pa.types.is_null(column.type)):
        raise UserError(f"{path}: {name} is not a number in all rows")
    values = pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy()
    if (values < 0).any():
        raise UserError(f"{path}: {name} is negative in some rows")
    return np.asarray(values, dtype=np.float64)
