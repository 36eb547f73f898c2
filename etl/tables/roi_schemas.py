"""The schemas of return on spend: billed spend, campaign days, and response curves."""

from etl.spec.model import DataSpec
from etl.spec.report_sources import SpendSource
from etl.tables.table_schema import TableSchema


def has_incremental_share(spec: DataSpec) -> bool:
    """Whether a source says which share of a campaign's conversions is due to it."""
    spend = [source for source in spec.sources.values() if isinstance(source, SpendSource)]
    return any(source.columns.incremental_share is not None for source in spend)


def _incremental_share(spec: DataSpec) -> dict[str, str]:
    return {"incremental_share": "double"} if has_incremental_share(spec) else {}


def campaign_spend(spec: DataSpec) -> TableSchema:
    """What a campaign was billed on a day, in the currency of the spec.

    `incremental_share` is there if a source names a column for it, and null in rows without one.
    """
    share = _incremental_share(spec)
    columns = {"campaign": "string", "spend": "double", **share, "day": "date"}
    required = {"no campaign": "campaign", "no spend": "spend"}
    rules = {"spend is negative or not finite": "spend >= 0 AND spend < 1e15"}
    for name in share:
        rules[f"{name} is negative or not a number"] = f"{name} >= 0 AND {name} < 1e15"
    order = ("campaign",)
    return TableSchema("campaign_spend", columns, ("day",), order, required, rules, user_rows=None)


def campaign_days(spec: DataSpec) -> TableSchema:
    """A campaign on a day: its spend, and the outcomes of the impressions that landed on it.

    `arrived` is the share of those on surfaces of the objective whose labels are final, and
    `conversions` and `value` are those of their labels, less late retractions; a further column for
    each of `roi.groups` has its most frequent value. `incremental_share` is there if a source names
    a column for it, and null on days without a result. `gemline roi fit` and `plan` read the table
    as a file.
    """
    share = _incremental_share(spec)
    columns = {
        "campaign": "string",
        **dict.fromkeys(("spend", "conversions", "value", "arrived"), "double"),
        "impressions": "bigint",
        "currency": "string",
        **share,
        **dict.fromkeys(spec.roi.groups if spec.roi else (), "string"),
        "day": "date",
    }
    required = {f"no {name}": name for name in columns if name not in share}
    return TableSchema("campaign_days", columns, ("day",), ("campaign",), required, user_rows=None)


def response_curves(spec: DataSpec) -> TableSchema:
    """The response curve of a campaign until `day`, and a plan with the same total spend.

    Conversions a day at a spend s are `conversions` at `current_spend`, times
    s (current_spend + half_saturation) / (current_spend (s + half_saturation)). `low` and `high`
    are the 95 % interval at the current spend; returns are value per unit of spend at the margin.
    `value_per_conversion` is that of an attributed conversion, times `incremental_share` where one
    is known.
    """
    share = _incremental_share(spec)
    numbers = (
        *("current_spend", "conversions", "low", "high", "half_saturation"),
        *("value_per_conversion", "marginal_return"),
        *("planned_spend", "planned_conversions", "planned_marginal_return"),
    )
    columns = {
        "campaign": "string",
        **dict.fromkeys(numbers, "double"),
        "currency": "string",
        **share,
        "reason": "string",
        "day": "date",
    }
    required = {f"no {name}": name for name in columns if name not in share}
    return TableSchema(
        "response_curves", columns, ("day",), ("campaign",), required, user_rows=None
    )


ROI_SCHEMAS = (campaign_spend, campaign_days, response_curves)
