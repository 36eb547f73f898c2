"""Limits of the daily spend by campaign, and current budgets, from a file."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Float64
from etl.errors import UserError
from ranking.roi.campaign_days import read_rows

LIMITS = ("minimum", "maximum", "budget")


@dataclass(frozen=True)
class CampaignLimits:
    """Least and largest daily spend (C), and the current daily budget (C), NaN where not given."""

    low: Float64
    high: Float64
    budget: Float64

    def current_budgets(self, spend: Float64) -> Float64:
        """The current budgets (C): those that are given, else the daily spend."""
        return np.where(np.isnan(self.budget), spend, self.budget)


def read_limits(path: Path | None, campaigns: tuple[str, ...], minimum: float) -> CampaignLimits:
    """Limits and current budgets of campaigns, from a CSV or Parquet file.

    An empty cell, an absent column or campaign is no limit but `minimum`, that of all campaigns.

    Raises:
        UserError: A campaign is unknown, missing or named twice, a limit is no number or negative,
            a budget is 0, or a minimum is above the maximum.
    """
    count = len(campaigns)
    low, high, budget = np.full(count, minimum), np.full(count, np.inf), np.full(count, np.nan)
    if path is None:
        return CampaignLimits(low, high, budget)
    table = read_rows(path, ("campaign",))
    given = [name for name in LIMITS if name in table.column_names]
    if "campaign" not in table.column_names or not given:
        raise UserError(
            f"{path}: limits have the columns campaign, and minimum, maximum, budget or several of "
            f"them; it has {', '.join(table.column_names)}"
        )
    positions = _positions(path, table, campaigns)
    for name, limits in zip(LIMITS, (low, high, budget), strict=True):
        if name in given:
            values = _limits(path, table, name)
            is_given = ~np.isnan(values)
            limits[positions[is_given]] = values[is_given]
    if (budget == 0).any():
        raise UserError(
            f"{path}: campaign {campaigns[int((budget == 0).argmax())]} has a budget of 0, and "
            "plans change budgets by a share of them: leave the cell empty, or the campaign out"
        )
    if (low > high).any():
        c = int((low > high).argmax())
        raise UserError(
            f"{path}: campaign {campaigns[c]} has a minimum of {low[c]:,.2f} above its maximum of "
            f"{high[c]:,.2f}: change one of them"
        )
    return CampaignLimits(low, high, budget)


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
    if np.isinf(values).any():
        raise UserError(f"{path}: {name} is not finite in some rows: leave the cell empty")
    if (values < 0).any():
        raise UserError(f"{path}: {name} is negative in some rows")
    return np.asarray(values, dtype=np.float64)
