"""The schemas of forecasts: a sample of impressions, counts by pairs of values, sketches."""

from dataclasses import dataclass

from etl.event_time import day_start_sql
from etl.spec.attributes import (
    Attribute,
    CategoricalAttribute,
    LocalTimeAttribute,
    NumericAttribute,
)
from etl.spec.model import DataSpec
from etl.tables.table_schema import TableSchema, UserRows

SURFACE = "surface"  # a targeting may always name it
UNKNOWN_VALUE = "unknown"  # of categorical attributes that are missing


@dataclass(frozen=True)
class ProviderLabel:
    """What a data provider states of users: an attribute that a targeting may name."""

    audience: str
    provider: str


def provider_labels(spec: DataSpec) -> dict[str, ProviderLabel]:
    """The labels of all data providers, by the name of the attribute: `age_band_acme`."""
    return {
        f"{audience}_{provider}": ProviderLabel(audience, provider)
        for audience, declared in spec.audiences.items()
        for provider in declared.providers
    }


def targeting_attributes(spec: DataSpec) -> dict[str, Attribute | ProviderLabel | None]:
    """Attributes that a targeting may name, in their order; None for the surface."""
    assert spec.forecast
    declared: dict[str, Attribute] = {**spec.attributes.context, **spec.attributes.user}
    named = {name: declared[name] for name in spec.forecast.attributes}
    return {SURFACE: None, **named, **provider_labels(spec)}


def user_categories(spec: DataSpec) -> list[str]:
    """Categories of users that a targeting may name: attributes, and labels of providers."""
    assert spec.forecast
    users = spec.attributes.user
    named = (n for n in spec.forecast.attributes if isinstance(users.get(n), CategoricalAttribute))
    return [*named, *provider_labels(spec)]


def targeting_sql_type(attribute: Attribute | ProviderLabel | None) -> str:
    """Spark SQL type of the value that a targeting names."""
    if isinstance(attribute, LocalTimeAttribute):
        return "int"
    return "double" if isinstance(attribute, NumericAttribute) else "string"


def forecast_sample(spec: DataSpec) -> TableSchema:
    """One impression of a sampled user: all impressions of these users in the window are here.

    `sampled_user` is a hash of the user, `probability` that with which the user was sampled, and
    `value` the expected value of the ad shown, `value_above` that of the next better ad of its
    request: a campaign gets the place with a value from `value` on and below `value_above`, which
    is null for the best ad. `p_…` are the means of the calibrated probabilities of the request's
    ads. `day` is the last day of the window.
    """
    columns = {
        "sampled_user": "bigint",
        "probability": "double",
        "impression_day": "date",
        **{
            f"target_{name}": targeting_sql_type(attribute)
            for name, attribute in targeting_attributes(spec).items()
        },
        "value": "double",
        "value_above": "double",
        **{f"p_{name}": "double" for name in spec.objectives},
        "day": "date",
    }
    optional = ("value_above", *(f"target_{name}" for name in targeting_attributes(spec)))
    required = {f"no {name}": name for name in columns if name not in optional}
    rules = {"probability is not in (0, 1]": "probability > 0 AND probability <= 1"}
    return TableSchema(
        "forecast_sample", columns, ("day",), ("sampled_user",), required, rules,
        user_rows=UserRows("sampled_user", day_start_sql(spec, "impression_day")),
    )  # fmt: skip


def forecast_margins(_spec: DataSpec) -> TableSchema:
    """Impressions in the window with two values, and users where both are attributes of users.

    Pairs of a value with itself count that value alone.
    """
    columns = {
        "attribute_a": "string",
        "value_a": "string",
        "attribute_b": "string",
        "value_b": "string",
        "impressions": "bigint",
        "users": "bigint",
        "day": "date",
    }
    order = ("attribute_a", "value_a", "attribute_b", "value_b")
    required = {f"no {name}": name for name in columns if name != "users"}
    return TableSchema("forecast_margins", columns, ("day",), order, required, user_rows=None)


def forecast_sketches(_spec: DataSpec) -> TableSchema:
    """A theta sketch of the users who had impressions with a value in the window."""
    columns = {"attribute": "string", "value": "string", "sketch": "binary", "day": "date"}
    required = {f"no {name}": name for name in columns}
    order = ("attribute", "value")
    return TableSchema("forecast_sketches", columns, ("day",), order, required, user_rows=None)


def forecast_supply(_spec: DataSpec) -> TableSchema:
    """Impressions of a surface that landed on a day."""
    columns = {"surface": "string", "impressions": "bigint", "day": "date"}
    required = {f"no {name}": name for name in columns}
    return TableSchema("forecast_supply", columns, ("day",), ("surface",), required, user_rows=None)


FORECAST_SCHEMAS = (forecast_sample, forecast_margins, forecast_sketches, forecast_supply)
