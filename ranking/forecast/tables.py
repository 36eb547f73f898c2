"""The tables of a forecast as it reads them: values of attributes, counts, sketches, supply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from etl.array_types import Float64
from etl.errors import UserError
from etl.spec.attributes import LocalTimeAttribute, NumericAttribute
from etl.spec.model import DataSpec
from etl.tables import arrow, audience_schemas, forecast_schemas
from etl.tables.forecast_schemas import (
    provider_labels,
    targeting_attributes,
    user_categories,
)
from etl.tables.lake import Lake, last_commit_metadata
from ranking.forecast.conditions import Domain, Value
from ranking.forecast.log_linear import LogLinearModel, fit_log_linear, pair_counts
from ranking.forecast.reach import UserSketches, read_sketches
from ranking.forecast.sums import Estimate

SAMPLE = "forecast_sample"
OTHER_TABLES = ("forecast_margins", "forecast_sketches", "forecast_supply")


@dataclass(frozen=True)
class ForecastTables:
    """The tables of one build.

    Attributes:
        versions: Their versions.
        domain: The values of each attribute in the window.
        window: The sampled days.
        model: Expected sizes of segments.
        sketches: Users by value.
        supply: Impressions by surface and day.
        mean_weight: How many users a sampled user stands for on average.
        precisions: By attribute of a provider's labels, by class and label, P(class | label).
    """

    spec: DataSpec
    versions: Mapping[str, int]
    domain: Domain
    window: tuple[date, ...]
    model: LogLinearModel
    sketches: UserSketches
    supply: Mapping[str, Mapping[date, float]]
    mean_weight: float
    precisions: Mapping[str, Mapping[str, Mapping[str, Estimate]]]

    @cached_property
    def logs_end(self) -> date:
        """The last day with logs: the window ends before it if later days are not scored yet."""
        return max(self.window[-1], *(max(days) for days in self.supply.values() if days))

    @cached_property
    def listed_values(self) -> Domain:
        """The values of each attribute that `min_users` users have, None for numbers.

        Others are not named in answers, and refused as values that nobody has.
        """
        assert self.spec.forecast
        least = self.spec.forecast.min_users
        return {
            name: known and [value for value in known if self._users_with(name, value) >= least]
            for name, known in self.domain.items()
        }

    def _users_with(self, name: str, value: Value) -> float:
        counted = self.model.users.expected({name: frozenset({value})})
        return self.sketches.users_with(name, value) if counted is None else counted


def require_forecast(spec: DataSpec) -> None:
    """Raise UserError unless the spec declares a forecast."""
    if spec.forecast is None:
        raise UserError(
            f"spec {spec.name} declares no forecast: name the attributes of a targeting in "
            "`forecast: {attributes: [...]}`; see docs/guides/forecasts.md"
        )


def table_versions(lake: Lake) -> dict[str, int]:
    """The versions of the forecast's tables that the latest build wrote.

    The sample is written last, and its commit records the versions of the others. Versions that
    have the same rows are those of the current spec, which an upgrade may have changed.

    Raises:
        UserError: There is no build yet.
    """
    require_forecast(lake.spec)
    if not lake.exists(SAMPLE):
        raise UserError(f"{lake.root} has no forecast: run `gemline forecast build` first")
    table = lake.open(SAMPLE)
    inputs = last_commit_metadata(table)["inputs"]
    others = {name: _newest_with_rows_of(lake, name, inputs[name]) for name in OTHER_TABLES}
    return {SAMPLE: table.version()} | others


def _newest_with_rows_of(lake: Lake, name: str, version: int) -> int:
    """The latest version of a table if nothing was written since a version; else that version."""
    latest = lake.open(name)
    if version == latest.version():
        return version
    written = DeltaTable(lake.table_uri(name), version=version)
    is_same = last_commit_metadata(latest) == last_commit_metadata(written)
    return latest.version() if is_same else version


def table_id(lake: Lake, name: str) -> str:
    """The id of a table: another one once the table was removed and created again."""
    return str(lake.open(name).metadata().id)


def read_sample(lake: Lake, version: int, shard: tuple[int, int] = (0, 1)) -> pa.Table:
    """The rows of a shard (number, of how many) of `forecast_sample`, by a hash of the user."""
    rows = arrow.snapshot(lake, forecast_schemas.forecast_sample(lake.spec), version).read()
    number, shards = shard
    keys = rows["sampled_user"].to_numpy()
    return rows.filter(pa.array(keys % shards == number)) if shards > 1 else rows


def read_tables(lake: Lake, sample: pa.Table, versions: Mapping[str, int]) -> ForecastTables:
    """The other tables of a build; the errors of its model are estimated from the sample."""
    spec = lake.spec
    contracts = {schema(spec).name: schema(spec) for schema in forecast_schemas.FORECAST_SCHEMAS}
    margins, sketches, supply = (
        arrow.snapshot(lake, contracts[name], versions[name]).read() for name in OTHER_TABLES
    )
    by_surface: dict[str, dict[date, float]] = {}
    for row in supply.to_pylist():
        by_surface.setdefault(row["surface"], {})[row["day"]] = float(row["impressions"])
    users = SampledUsers.of(sample)
    domain = _domain_of(spec, margins)
    return ForecastTables(
        spec,
        versions,
        domain,
        tuple(sorted(pc.unique(sample["impression_day"]).to_pylist())),
        fit_model(spec, margins, domain, users),
        read_sketches(sketches, (*spec.attributes.user, *provider_labels(spec))),
        by_surface,
        float(users.weights.mean()),
        read_precisions(lake),
    )


def quality_version(lake: Lake) -> tuple[str, int] | None:
    """The id and version of `audience_quality`, which changes when it has new rates."""
    name = audience_schemas.audience_quality(lake.spec).name
    if not lake.spec.audiences or not lake.exists(name):
        return None
    return table_id(lake, name), lake.version(name)


def read_precisions(lake: Lake) -> dict[str, dict[str, dict[str, Estimate]]]:
    """P(class | label) of each provider's labels, of the latest day of each audience.

    Providers that the spec no longer declares are left out.
    """
    if quality_version(lake) is None:
        return {}
    rows = arrow.snapshot(lake, audience_schemas.audience_quality(lake.spec)).read().to_pylist()
    latest: dict[str, date] = {}
    for row in rows:
        latest[row["audience"]] = max(row["day"], latest.get(row["audience"], date.min))
    names = {(of.audience, of.provider): name for name, of in provider_labels(lake.spec).items()}
    found: dict[str, dict[str, dict[str, Estimate]]] = {}
    for row in rows:
        name = names.get((row["audience"], row["provider"]))
        if name is None or row["day"] < latest[row["audience"]]:
            continue
        by_class = found.setdefault(name, {})
        estimate = Estimate(row["precision"], row["low"], row["high"])
        by_class.setdefault(row["true_class"], {})[row["label"]] = estimate
    return found


def read_domain(lake: Lake, versions: Mapping[str, int]) -> Domain:
    """The values of each attribute in the window, in order; None for numbers."""
    schema = forecast_schemas.forecast_margins(lake.spec)
    return _domain_of(lake.spec, arrow.snapshot(lake, schema, versions[schema.name]).read())


def _domain_of(spec: DataSpec, margins: pa.Table) -> Domain:
    single = margins.filter(
        pc.and_(
            pc.equal(margins["attribute_a"], margins["attribute_b"]),
            pc.equal(margins["value_a"], margins["value_b"]),
        )
    )
    domain: dict[str, Sequence[Value] | None] = {}
    for name, attribute in targeting_attributes(spec).items():
        if isinstance(attribute, NumericAttribute):
            domain[name] = None
            continue
        texts = single.filter(pc.equal(single["attribute_a"], name))["value_a"].to_pylist()
        is_time = isinstance(attribute, LocalTimeAttribute)
        domain[name] = sorted(map(int, texts)) if is_time else sorted(texts)
    return domain


@dataclass(frozen=True)
class SampledUsers:
    """One row of the sample for each user (N), with 1 / probability and the number of rows."""

    rows: pa.Table
    weights: Float64
    impressions: Float64

    @classmethod
    def of(cls, sample: pa.Table) -> "SampledUsers":
        """The users of rows of `forecast_sample`."""
        _, first, counts = np.unique(
            sample["sampled_user"].to_numpy(), return_index=True, return_counts=True
        )
        rows = sample.take(pa.array(first))
        return cls(rows, 1.0 / rows["probability"].to_numpy(), counts.astype(float))


def fit_model(
    spec: DataSpec, margins: pa.Table, domain: Domain, sampled: SampledUsers
) -> LogLinearModel:
    """The log-linear model of rows of `forecast_margins`."""
    discrete = {name: values for name, values in domain.items() if values is not None}
    of_users = {name: v for name, v in discrete.items() if name in user_categories(spec)}
    impressions = pair_counts(margins, "impressions", discrete)
    users = pair_counts(margins, "users", of_users)
    if not of_users:  # everyone is one segment
        users = replace(users, total=float(sampled.weights.sum()))
    values = {
        name: np.array([users.rows[name][v] for v in sampled.rows[f"target_{name}"].to_pylist()])
        for name in of_users
    }
    return fit_log_linear(impressions, users, values, sampled.weights, sampled.impressions)
