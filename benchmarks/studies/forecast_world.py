"""A simulated week of ad impressions with every user and impression known, and the week after it.

N users, I impressions of a week. Attributes of users depend on each other, also in threes; the
number of impressions of a user is heavy-tailed; days of the week and a trend change the supply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import SIMULATOR_SPEC
from etl.array_types import Float64, Int64
from etl.cli.runner import read_yaml_mapping
from etl.spec.load import sort_keys
from etl.spec.model import DataSpec
from ranking.forecast.conditions import Box

SURFACES = ("feed", "messaging", "reels")
USER_ATTRIBUTES = {"age": 6, "gender": 2, "country": 40, "interest": 25, "tier": 4}
CONTEXT = {"device": 4, "hour": 24}
MONDAY = date(2026, 3, 2)  # of the sampled week
WEEK = 7
WEEKDAYS = np.array([1.0, 0.96, 0.95, 0.98, 1.08, 1.25, 1.3])  # supply by weekday
DAILY_GROWTH = 0.006
HISTORY_WEEKS = 5  # of daily supply before the sampled week
PAST_NOISE = 0.03  # standard deviation of the logarithm of a day's supply


def world_spec(sample_rows: int, min_users: int = 50) -> DataSpec:
    """The simulator's spec with the attributes of the world."""
    spec: dict[str, Any] = dict(read_yaml_mapping(SIMULATOR_SPEC))
    spec["attributes"] = spec["attributes"] | {
        "user": {name: {"type": "categorical", "size": 64} for name in USER_ATTRIBUTES},
        "context": {
            "position": {"type": "numeric"},
            "device": {"type": "categorical", "size": 16},
            "hour": {"type": "clock", "part": "hour"},
        },
    }
    spec["calibration_segments"] = []
    spec["audiences"] = {}
    audience_kinds = ("audience_labels", "audits")
    spec["sources"] = {
        name: source
        for name, source in spec["sources"].items()
        if source["kind"] not in audience_kinds
    }
    spec["forecast"] = {
        "attributes": [*USER_ATTRIBUTES, *CONTEXT],
        "window": "7d",
        "sample_rows": sample_rows,
        "min_users": min_users,
    }
    return DataSpec.model_validate(sort_keys(spec))  # as the workers load it


@dataclass(frozen=True)
class ForecastWorld:
    """Users by their values (N, A), and the impressions of a week.

    Attributes:
        rng: Draws what follows.
        values: The value of each user's attributes, in the order of `USER_ATTRIBUTES`.
        activity: Expected impressions of each user in a week of level 1 (N).
        user: The user of each impression (I).
        context: By name, the value of each impression (I): `day`, `surface`, `device`, `hour`.
    """

    rng: np.random.Generator
    values: Int64
    activity: Float64
    user: Int64
    context: Mapping[str, Int64]

    @classmethod
    def draw(cls, seed: int, users: int, impressions_per_user: float = 11.0) -> "ForecastWorld":
        """A world of some users."""
        rng = np.random.default_rng(seed)
        values = _draw_users(rng, users)
        activity = np.exp(rng.normal(0.0, 0.8, users) + 0.1 * values[:, 0])
        activity *= impressions_per_user / activity.mean()
        user, context = _draw_week(rng, values, activity, week=0)
        return cls(rng, values, activity, user, context)

    def next_week(self) -> "ForecastWorld":
        """The impressions of the same users in the week after."""
        user, context = _draw_week(self.rng, self.values, self.activity, week=1)
        return ForecastWorld(self.rng, self.values, self.activity, user, context)

    def user_counts(self, box: Box) -> Int64:
        """How many impressions with the values of a segment each user (N) has."""
        is_user = np.ones(len(self.values), bool)
        for name in {*box} & {*USER_ATTRIBUTES}:
            codes = self.values[:, list(USER_ATTRIBUTES).index(name)]
            is_user &= np.isin(codes, [_code(value) for value in box[name]])
        if {*box} <= {*USER_ATTRIBUTES}:
            return np.where(is_user, self._impressions_of_users, 0)
        found = is_user[self.user]
        for name in {*box} - {*USER_ATTRIBUTES}:
            found &= np.isin(self.context[name], [_code(value) for value in box[name]])
        counts: Int64 = np.bincount(self.user[found], minlength=len(self.values))
        return counts

    @cached_property
    def _impressions_of_users(self) -> Int64:
        counts: Int64 = np.bincount(self.user, minlength=len(self.values))
        return counts

    def _column(self, name: str) -> Int64:
        if name not in USER_ATTRIBUTES:
            return self.context[name]
        of_users: Int64 = self.values[:, list(USER_ATTRIBUTES).index(name)]
        return of_users[self.user]

    @cached_property
    def user_keys(self) -> Int64:
        """A key of each user (N)."""
        keys: Int64 = np.random.default_rng(7).integers(-(2**62), 2**62, len(self.values))
        assert len(np.unique(keys)) == len(keys)
        return keys

    def rows(self) -> pa.Table:
        """The impressions as rows that `features.forecast.build` samples.

        Each impression is a request of one place, with a cost that depends on its surface.
        """
        size = len(self.user)
        columns: dict[str, Any] = {
            "sampled_user": self.user_keys[self.user],
            "impression_day": pa.array([sampled_days()[k] for k in range(WEEK)]).take(
                pa.array(self.context["day"])
            ),
            "target_surface": _texts(SURFACES, self.context["surface"]),
        }
        for name, size_of in USER_ATTRIBUTES.items():
            columns[f"target_{name}"] = _texts(_names(name, size_of), self._column(name))
        columns["target_device"] = _texts(_names("device", 4), self.context["device"])
        columns["target_hour"] = self.context["hour"].astype(np.int32)
        columns["value"] = np.exp(self.rng.normal(-5.0, 0.6, size))
        columns["value_above"] = pa.nulls(size, pa.float64())
        for name, mean in (("long_view", 0.3), ("click", 0.05), ("conversion", 0.005)):
            columns[f"p_{name}"] = mean * self.rng.uniform(0.5, 1.5, size)
        return pa.table(columns)

    def daily_supply(self) -> dict[str, dict[date, float]]:
        """Impressions of each surface by day: of the weeks before with noise, and of this one."""
        days = sampled_days()
        now = np.zeros((len(SURFACES), WEEK))
        np.add.at(now, (self.context["surface"], self.context["day"]), 1)
        share = now.sum(1) / now.sum()
        supply = {name: dict(zip(days, now[k], strict=True)) for k, name in enumerate(SURFACES)}
        level = now.sum() / week_levels(0).sum()
        for back in range(1, HISTORY_WEEKS + 1):
            levels = level * week_levels(-back)
            for weekday in range(WEEK):
                day = days[weekday] - timedelta(weeks=back)
                total = levels[weekday] * np.exp(PAST_NOISE * self.rng.standard_normal())
                for k, name in enumerate(SURFACES):
                    supply[name][day] = float(total * share[k])
        return supply


def sampled_days() -> list[date]:
    """The days of the sampled week."""
    return [MONDAY + timedelta(days=k) for k in range(WEEK)]


def week_levels(week: int) -> Float64:
    """The supply of the days of a week, counted from the sampled one, relative to its Monday."""
    return np.asarray(WEEKDAYS * np.exp(DAILY_GROWTH * (WEEK * week + np.arange(WEEK))))


def _draw_users(rng: np.random.Generator, users: int) -> Int64:
    """Values (N, A): interests depend on age, gender and country, and on pairs of them."""
    age = rng.choice(6, users, p=(0.15, 0.22, 0.22, 0.18, 0.13, 0.10))
    gender = rng.integers(0, 2, users)
    country = rng.choice(40, users, p=_zipf(40, 1.3))
    interest = _dependent(
        rng, _zipf(25, 0.7), (age, 6, 0.7), (gender, 2, 0.5), (country, 40, 0.3),
        (age * 40 + country, 240, 0.15),
    )  # fmt: skip
    tier = _dependent(rng, np.array([0.4, 0.3, 0.2, 0.1]), (country, 40, 0.6), (age, 6, 0.3))
    return np.stack([age, gender, country, interest, tier], 1).astype(np.int64)


def _dependent(
    rng: np.random.Generator, shares: Float64, *effects: tuple[Any, int, float]
) -> Int64:
    """Values (N) whose log shares are shifted by effects: (value, how many, standard deviation)."""
    logits = np.log(shares)[None]
    for value, number, deviation in effects:
        logits = logits + rng.normal(0.0, deviation, (number, len(shares)))[value]
    gumbel = rng.gumbel(size=logits.shape)
    return np.asarray((logits + gumbel).argmax(1))


def _draw_week(
    rng: np.random.Generator, values: Int64, activity: Float64, week: int
) -> tuple[Int64, Mapping[str, Int64]]:
    """The user and the context of each impression of a week."""
    levels = week_levels(week)
    counts = rng.poisson(activity * levels.mean() / week_levels(0).mean())
    user = np.repeat(np.arange(len(values)), counts)
    age = values[user, 0]
    size = len(user)
    day = rng.choice(WEEK, size, p=levels / levels.sum())
    surface = (rng.random(size)[:, None] > np.array([0.5, 0.65])[None]).sum(1)
    shift = np.array([0.7, 0.65, 0.55, 0.45, 0.4, 0.35])[age]
    device = np.where(rng.random(size) < shift, 0, rng.choice([1, 2, 3], size, p=(0.6, 0.3, 0.1)))
    hour = (rng.normal(19 - age, 5, size)).astype(np.int64) % 24
    return user, {"day": day, "surface": surface, "device": device, "hour": hour}


def _zipf(number: int, exponent: float) -> Float64:
    shares = 1.0 / np.arange(1, number + 1) ** exponent
    return np.asarray(shares / shares.sum())


def _names(attribute: str, number: int) -> list[str]:
    return [f"{attribute}{k:02d}" for k in range(number)]


def _texts(names: Any, codes: Int64) -> pa.Array:
    return pa.array(list(names)).take(pa.array(codes))


def _code(value: str | int) -> int:
    """The number that stands for a value."""
    if isinstance(value, int):
        return value
    return SURFACES.index(value) if value in SURFACES else int(value[-2:])


def draw_boxes(rng: np.random.Generator, number: int, context: bool = False) -> list[Box]:
    """Targetings of one to four attributes, with one to three values of each."""
    sizes = USER_ATTRIBUTES | ({"device": CONTEXT["device"]} if context else {})
    boxes: list[Box] = []
    for _ in range(number):
        order = int(rng.choice([1, 2, 3, 4], p=(0.1, 0.3, 0.4, 0.2)))
        box: Box = {}
        for name in rng.choice(list(sizes), order, replace=False):
            many = min(sizes[name] - 1, int(rng.choice([1, 1, 1, 2, 3])))
            codes = rng.choice(sizes[name], many, replace=False)
            box[str(name)] = frozenset(f"{name}{k:02d}" for k in codes)
        boxes.append(box)
    return boxes


def targeting_text(box: Box) -> str:
    """A targeting in the query language."""
    return " and ".join(
        f"{name} in ({', '.join(repr(value) for value in sorted(allowed, key=str))})"
        for name, allowed in box.items()
    )
