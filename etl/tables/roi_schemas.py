"""The schemas of return on spend: billed spend, campaign days, and response curves."""

from etl.spec.model import DataSpec
from etl.tables.table_schema import TableSchema


def campaign_spend(_spec: DataSpec) -> TableSchema:
    """What a campaign was billed on a day, in the currency of the spec."""
    columns = {"campaign": "string", "spend": "double", "day": "date"}
    required = {"no campaign": "campaign", "no spend": "spend"}
    rules = {"spend is negative or not finite": "spend >= 0 AND spend < 1e15"}
    order = ("campaign",)
    return TableSchema("campaign_spend", columns, ("day",), order, required, rules, user_rows=None)


def campaign_days(spec: DataSpec) -> TableSchema:
    """A campaign on a day: its spend, and the outcomes of the impressions that landed on it.

    `arrived` is the share of these impressions whose labels are final, and `conversions` and
    `value` are those of their labels, less late retractions; a further column for each of
    `roi.groups` has its most frequent value. `gemline roi fit` and `plan` read the table as a file.
    """
    columns = {
        "campaign": "string",
        **dict.fromkeys(("spend", "conversions", "value", "arrived"), "double"),
        "impressions": "bigint",
        "currency": "string",
        **dict.fromkeys(spec.roi.groups if spec.roi else (), "string"),
        "day": "date",
    }
    required = {f"no {name}": name for name in columns}
    return TableSchema("campaign_days", columns, ("day",), ("campaign",), required, user_rows=None)


def response_curves(_spec: DataSpec) -> TableSchema:
    """The response curve of a campaign until `day`, and a plan with the same total spend.

    Conversions a day at a spend s are `conversions` at `current_spend`, times
    s (current_spend + half_saturation) / (current_spend (s + half_saturation)). `low` and `high`
    are the 95 % interval at the current spend; returns are value per unit of spend at the margin.
    """
    numbers = (
        *("current_spend", "conversions", "low", "high", "half_saturation"),
        *("value_per_conversion", "marginal_return"),
        *("planned_spend", "planned_conversions", "planned_marginal_return"),
    )
    columns = {
        "campaign": "string",
        **dict.fromkeys(numbers, "double"),
        "currency": "string",
        "reason": "string",
        "day": "date",
    }
    required = {f"no {name}": name for name in columns}
    return TableSchema(
        "response_curves", columns, ("day",), ("campaign",), required, user_rows=None
    )


ROI_SCHEMAS = (campaign_spend, campaign_days, response_curves)
