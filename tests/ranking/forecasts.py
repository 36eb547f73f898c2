"""A small simulated world, a sample of it, and the tables of a forecast by brute force."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasketches import update_theta_sketch

from benchmarks.studies.forecast_world import (
    CONTEXT,
    USER_ATTRIBUTES,
    ForecastWorld,
    sampled_days,
    world_spec,
)
from etl.spec.model import DataSpec
from ranking.forecast.conditions import Box
from ranking.forecast.expansion import SegmentSize
from ranking.forecast.forecaster import Forecaster
from ranking.forecast.pool import LocalShard
from ranking.forecast.reach import UserSketches
from ranking.forecast.schemas import ForecastRequest
from ranking.forecast.shard import Query, Shard
from ranking.forecast.tables import ForecastTables, SampledUsers, fit_model
from ranking.forecast.targeting import parse_targeting


def numeric_spec() -> DataSpec:
    """The spec of the simulated world, with a numeric attribute that a targeting may name."""
    fields = world_spec(sample_rows=2000, min_users=20).model_dump(mode="json", exclude_unset=True)
    fields["attributes"]["user"]["signup_days"] = {"type": "numeric"}
    fields["forecast"]["attributes"].append("signup_days")
    return DataSpec.model_validate(fields)


SPEC = numeric_spec()
EVERYTHING = 1e9  # a sample of as many rows


class World:
    """A small world, its sample, and the forecaster of it."""

    def __init__(self, seed: int, sample_rows: float, spec: DataSpec = SPEC) -> None:
        self.spec = spec
        self.world = ForecastWorld.draw(seed, 4000, 4.0)
        days = pa.array(self.world.user % 100 + 0.5)
        self.rows = self.world.rows().append_column("target_signup_days", days)
        rng = np.random.default_rng(seed + 100)
        share = min(1.0, sample_rows / self.rows.num_rows)
        chosen = rng.random(len(self.world.values)) < share
        sample = self.rows.filter(pa.array(chosen[self.world.user]))
        self.sample = sample.append_column("probability", pa.array(np.full(len(sample), share)))
        self.margins = brute_force_margins(self.rows)
        domain: dict[str, Sequence[str | int] | None] = {
            name: sorted(set(self.rows[f"target_{name}"].to_pylist()))
            for name in ("surface", *USER_ATTRIBUTES, *CONTEXT)
        }
        domain["signup_days"] = None
        users = SampledUsers.of(self.sample)
        self.tables = ForecastTables(
            spec,
            {"forecast_sample": 0},
            domain,
            tuple(sampled_days()),
            fit_model(spec, self.margins, domain, users),
            sketches_of(self.rows),
            self.world.daily_supply(),
            float(users.weights.mean()),
            {},
        )
        self.shard = Shard(spec, self.sample, domain)
        self.forecaster = Forecaster(self.tables, LocalShard(self.shard))

    def size(self, box: Box) -> SegmentSize:
        targeting = parse_targeting(text_of(box), self.tables.domain)
        sums = self.shard.sums(Query(*targeting.sql(), self.tables.window))
        return self.forecaster.segment_size(targeting, sums)

    def forecast(self, **fields: Any) -> Any:
        return asyncio.run(self.forecaster.forecast(ForecastRequest(**fields)))


def text_of(box: Box) -> str:
    return " and ".join(
        f"{name} in ({', '.join(map(repr, sorted(allowed, key=str)))})"
        for name, allowed in box.items()
    )


def brute_force_margins(rows: pa.Table) -> pa.Table:
    """The rows of `forecast_margins`, counted one pair of attributes after the other."""
    frame = rows.to_pandas()
    names = ["surface", "age", "gender", "country", "interest", "tier", "device", "hour"]
    found = []
    for i, a in enumerate(names):
        for b in names[i:]:
            keys = list(dict.fromkeys([f"target_{a}", f"target_{b}"]))
            of_users = {a, b} <= {"age", "gender", "country", "interest", "tier"}
            for values, group in frame.groupby(keys):
                value_a, value_b = values[0], values[-1]
                users = group.sampled_user.nunique() if of_users else None
                found.append((a, str(value_a), b, str(value_b), len(group), users))
    columns = ("attribute_a", "value_a", "attribute_b", "value_b", "impressions", "users")
    return pa.table(dict(zip(columns, zip(*found, strict=True), strict=True)))


def sketches_of(rows: pa.Table) -> UserSketches:
    """Sketches of the users of each value."""
    frame = rows.to_pandas()
    sketches = {}
    for name in ("surface", *USER_ATTRIBUTES, "device", "hour"):
        for value, group in frame.groupby(f"target_{name}"):
            sketch = update_theta_sketch()
            for key in group.sampled_user:
                sketch.update(int(key))
            sketches[name, str(value)] = sketch.compact()
    return UserSketches(sketches, frozenset(USER_ATTRIBUTES))
