"""Requests to measure with: users and items of a lake."""

from datetime import date

import numpy as np

from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from ranking.online.request import Asked


def askers(lake: Lake, surface: str, day: date, candidates: int, n: int) -> list[Asked]:
    """`n` requests of users who were shown ads on a day, at its end, for so many ads of the lake.

    Each is drawn with replacement; the context is empty.
    """
    spec, rng = lake.spec, np.random.default_rng(0)
    shown = arrow.snapshot(lake, contracts.impressions(spec)).read(["user_id", "item_id"])
    users = shown["user_id"].unique().to_pylist()
    items = shown["item_id"].unique().to_pylist()
    as_of = spec.day_end(day)
    return [
        Asked(str(rng.choice(users)), surface, as_of, rng.choice(items, candidates).tolist(), {})
        for _ in range(n)
    ]
