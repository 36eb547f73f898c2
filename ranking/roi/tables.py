"""The `response_curves` table: curves of the campaigns of a lake, and a plan of the same total."""

from datetime import date, timedelta

import numpy as np
import pyarrow as pa

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import DAY, date_range
from etl.tables import arrow, roi_schemas
from etl.tables.lake import Lake, arrow_schema
from ranking.roi.campaign_days import CampaignTable, campaign_table, usable_campaigns
from ranking.roi.curves import ResponseCurves, fit_curves
from ranking.roi.plan import BudgetPlan, explain, plan_budgets, saturation, step_limits

MAX_STEP = 0.2  # of the plan in the table, as a share of a campaign's current spend
MIN_CAMPAIGNS = 2


def require_roi(spec: DataSpec) -> None:
    """Raise UserError unless the spec declares campaigns."""
    if spec.roi is None:
        raise UserError(
            f"spec {spec.name} declares no campaigns: add `roi: {{campaign: ..., objective: ..., "
            "currency: ...}` and a source of kind spend; see docs/guides/roi.md"
        )


def write_response_curves(lake: Lake, until: date) -> str:
    """Replace the day of `response_curves` by curves and a plan of all campaigns until it.

    Without enough spend the day has no rows, and a daily run goes on.

    Returns:
        What was written, or why nothing was.
    """
    rows = _read_window(lake, until)
    usable = usable_campaigns(rows)
    campaigns = len(set(usable["campaign"].to_pylist()))
    if campaigns < MIN_CAMPAIGNS:
        _write_day(lake, until, None)
        return f"{campaigns} campaigns have spend on enough days until {until}: no curves yet"
    spec = lake.spec.roi
    assert spec
    try:
        table = campaign_table("table campaign_days", usable, spec.groups, spec.currency)
        curves = fit_curves(table.days)
        current, value = table.current, table.incremental_value
        unlimited, none = np.full(campaigns, np.inf), np.zeros(campaigns)
        limits = step_limits(float(current.sum()), current, MAX_STEP, none, unlimited)
        deviation = table.value_deviation
        plan = plan_budgets(curves, value, current, limits, value_deviation=deviation)
    except UserError as error:
        _write_day(lake, until, None)
        return f"no curves until {until}: {error}"
    _write_day(lake, until, _curve_rows(table, curves, plan, until))
    gain = float(plan.value_after.sum() / plan.value_before.sum()) - 1
    return f"curves of {campaigns} campaigns; a plan of the same total has value {gain:+.1%}"


def _curve_rows(
    table: CampaignTable, curves: ResponseCurves, plan: BudgetPlan, until: date
) -> pa.Table:
    current, count = table.current, len(curves.campaigns)
    low, high = curves.interval(current)
    return pa.table(
        {
            "campaign": list(curves.campaigns),
            "current_spend": current,
            "conversions": np.exp(curves.log_conversions(current)[0]),
            "low": low,
            "high": high,
            "half_saturation": saturation(curves)[1],
            "value_per_conversion": table.incremental_value,
            "marginal_return": plan.marginal_before,
            "planned_spend": plan.spend,
            "planned_conversions": np.exp(curves.log_conversions(plan.spend)[0]),
            "planned_marginal_return": plan.marginal_after,
            "currency": [table.currency] * count,
            "incremental_share": pa.array(table.incremental_share, mask=~table.is_incremental),
            "reason": [explain(name, plan, current, c) for c, name in enumerate(curves.campaigns)],
            "day": [until] * count,
        }
    )


def _write_day(lake: Lake, day: date, rows: pa.Table | None) -> None:
    """Replace a day of `response_curves`; without rows, curves of an earlier run are removed."""
    schema = roi_schemas.response_curves(lake.spec)
    if rows is None:
        if not lake.exists(schema.name):
            return
        rows = arrow_schema(schema).empty_table()
    versions = {"campaign_days": lake.version("campaign_days")}
    arrow.replace_rows(lake, schema, rows, f"day = '{day}'", versions)


def _read_window(lake: Lake, until: date) -> pa.Table:
    assert lake.spec.roi
    days = -(-lake.spec.roi.window // DAY)
    window = list(date_range(until - timedelta(days=days - 1), until))
    return arrow.snapshot(lake, roi_schemas.campaign_days(lake.spec)).read(day=window)
