"""`gemline roi`: response curves of campaigns, and budgets that follow marginal return."""

import errno
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from etl.cli.runner import LakeArgs, holds_leases
from etl.commands import RawArgs
from etl.errors import UserError
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from etl.array_types import Float64
    from ranking.roi.campaign_days import CampaignTable
    from ranking.roi.curves import ResponseCurves
    from ranking.roi.plan import BudgetPlan
    from ranking.roi.simulation import PlanSimulation


class CurveArgs(StrictModel):
    """A file of campaign days, and what campaigns have in common."""

    campaign_days: Annotated[
        Path,
        tyro.conf.arg(
            help="CSV, Parquet or table folder with campaign, day, spend, conversions and value"
        ),
    ]
    groups: Annotated[
        tuple[str, ...], tyro.conf.arg(help="columns that campaigns share, such as vertical")
    ] = ()
    currency: Annotated[
        str | None, tyro.conf.arg(help="currency of spend and value; default: column currency")
    ] = None


class PlanArgs(CurveArgs):
    """The budget, and how far a plan may go."""

    out: Annotated[Path, tyro.conf.arg(help="CSV file that the plan is written to")]
    total: Annotated[
        float | None,
        Field(gt=0),
        tyro.conf.arg(help="daily budget of all campaigns; default: the current budgets"),
    ] = None
    max_step: Annotated[
        float,
        Field(gt=0, le=1),
        tyro.conf.arg(help="largest change of a campaign, as a share of its current budget"),
    ] = 0.2
    minimum: Annotated[
        float,
        Field(ge=0),
        tyro.conf.arg(help="lowest daily spend of a campaign without another one in --limits"),
    ] = 0.0
    limits: Annotated[
        Path | None,
        tyro.conf.arg(
            help="CSV or Parquet file with campaign, minimum and maximum daily spend, and current "
            "daily budget"
        ),
    ] = None
    risk: Annotated[
        float,
        Field(ge=0, le=10),
        tyro.conf.arg(help="standard deviations by which uncertain conversions are lowered"),
    ] = 0.0
    explore: Annotated[
        int | None,
        tyro.conf.arg(help="seed of Thompson sampling: plan with curves drawn from the posterior"),
    ] = None


def fit(args: CurveArgs) -> None:
    """Print the response curve of each campaign."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from ranking.roi.plan import marginal_value

    table, curves = _fit(args)
    marginal = marginal_value(curves, table.incremental_value, table.current)
    low, high = curves.interval(table.current)
    expected = np.exp(curves.log_conversions(table.current)[0])
    shown = Table(
        "campaign", f"{table.currency} a day", "conversions a day [95 %]", "marginal return"
    )
    for c, name in enumerate(curves.campaigns):
        interval = f"{expected[c]:.2f} [{low[c]:.2f}, {high[c]:.2f}]"
        shown.add_row(name, f"{table.current[c]:,.2f}", interval, f"{marginal[c]:.2f}")
    Console().print(shown)
    attributed = int((~table.is_incremental).sum())
    if attributed:
        print(
            f"returns of {attributed} campaigns are attributed, not incremental: they have no "
            "incremental_share"
        )


def plan(args: PlanArgs) -> None:
    """Write the daily budgets with the most expected value, and say why."""
    import numpy as np

    from ranking.roi.campaign_limits import read_limits
    from ranking.roi.plan import explain, plan_budgets, step_limits
    from ranking.roi.simulation import simulate_plan

    table, curves = _fit(args)
    value, error = table.incremental_value, table.value_deviation
    campaign_limits = read_limits(args.limits, curves.campaigns, args.minimum)
    current = campaign_limits.current_budgets(table.current)
    drawn = None
    if args.explore is not None:
        drawn = curves.draw(np.random.default_rng(args.explore))
    total = args.total or float(current.sum())
    limits = step_limits(total, current, args.max_step, campaign_limits.low, campaign_limits.high)
    budgets = plan_budgets(curves, value, current, limits, args.risk, drawn, error)
    simulation = simulate_plan(
        curves, value, error, current, budgets.spend, np.random.default_rng(0)
    )
    reasons = [explain(name, budgets, current, c) for c, name in enumerate(curves.campaigns)]
    _write_plan(args.out, table, current, budgets, simulation, reasons)
    print("\n".join(reasons))
    gain = budgets.value_after.sum() / budgets.value_before.sum() - 1
    print(
        f"plan: {total:,.2f} {table.currency} a day, expected value {gain:+.1%} against the "
        f"current budgets; written to {args.out}"
    )
    p5, p50, p95 = simulation.total_percentiles()
    print(
        f"simulated gain: P5 {p5:+.1%}, P50 {p50:+.1%}, P95 {p95:+.1%}; chance of a loss "
        f"{simulation.loss_chance:.1%}"
    )


def _write_plan(
    out: Path,
    table: "CampaignTable",
    current: "Float64",
    budgets: "BudgetPlan",
    simulation: "PlanSimulation",
    reasons: list[str],
) -> None:
    """Write the columns that docs/guides/roi.md describes as a CSV file.

    Raises UserError if the path is that of a folder, or cannot be written.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    from etl.tables.atomic_io import replace_file

    count = len(reasons)
    rows = pa.table({
        "campaign": list(table.days.campaigns), "currency": [table.currency] * count,
        "current_spend": current, "planned_spend": budgets.spend,
        "expected_value_before": budgets.value_before, "expected_value_after": budgets.value_after,
        "value_low": budgets.value_low, "value_high": budgets.value_high,
        "marginal_return_before": budgets.marginal_before,
        "marginal_return_after": budgets.marginal_after,
        **simulation.columns(),
        "returns": np.where(table.is_incremental, "incremental", "attributed"),
        "incremental_share": table.incremental_share,
        "reason": reasons,
    })  # fmt: skip
    try:
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with replace_file(out) as partial:
            pa_csv.write_csv(rows, partial)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"--out {out} cannot be written ({reason}): name a CSV file in a folder that you may "
            "write to"
        ) from None


@holds_leases("roi")
def load(args: RawArgs) -> None:
    """Load billed spend, and join it with the outcomes of the campaigns' impressions."""
    from etl.reports import SPEND_REPORTS, load_reports
    from etl.runtime.spark import spark_session
    from etl.tables.day_order import days_in_order
    from features.roi.campaign_days import build_campaign_days
    from ranking.roi.tables import require_roi

    require_roi(args.load_spec())
    lake = args.open_lake()
    with days_in_order(lake, "campaign_days", args.day_range):
        spark_session("roi")
        loaded = load_reports(lake, args.raw, args.day_range, SPEND_REPORTS)
        counts = loaded | build_campaign_days(lake, args.day_range)
    print("roi: " + ", ".join(f"{table} {rows:,} rows" for table, rows in counts.items()))


class ReportArgs(LakeArgs):
    """Arguments of `roi report`."""

    data_until: Annotated[date, tyro.conf.arg(help="last day of the campaign days")]


@holds_leases("roi")
def report(args: ReportArgs) -> None:
    """Fit the curves of a lake's campaigns and plan their budgets, for the pipeline's report."""
    from ranking.roi.tables import require_roi, write_response_curves

    require_roi(args.load_spec())
    print(f"roi: {write_response_curves(args.open_lake(), args.data_until)}")


def _fit(args: CurveArgs) -> "tuple[CampaignTable, ResponseCurves]":
    from ranking.roi.campaign_days import read_campaign_days
    from ranking.roi.curves import fit_curves

    table = read_campaign_days(args.campaign_days, args.groups, args.currency)
    return table, fit_curves(table.days)


COMMANDS = {"roi": {"load": load, "fit": fit, "plan": plan, "report": report}}
