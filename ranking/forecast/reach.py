"""Unique users of a segment by theta sketches: unions of values, intersections of attributes.

The set of users with a combination of values is an intersection only if at most one attribute is of
the context: a user may have seen an ad on a phone and another one at night, but none on a phone at
night.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import pyarrow as pa
from datasketches import compact_theta_sketch, theta_intersection, theta_union

from ranking.forecast.conditions import Box, Value
from ranking.forecast.sums import Estimate

STANDARD_DEVIATIONS = 2  # of the bounds of a sketch, about 95 %


@dataclass(frozen=True)
class UserSketches:
    """The sketch of each attribute's values; `user_attributes` are those of users."""

    sketches: Mapping[tuple[str, str], compact_theta_sketch]
    user_attributes: frozenset[str]

    def users(self, box: Box) -> Estimate | None:
        """The users of a combination of values; None if sketches cannot tell."""
        context = set(box) - self.user_attributes
        if not box or len(context) > 1:
            return None
        intersection = theta_intersection()
        for name, allowed in box.items():
            union = theta_union()
            for value in sorted(allowed, key=str):
                union.update(self.sketches[name, str(value)])
            intersection.update(union.get_result())
        found = intersection.get_result()
        low = found.get_lower_bound(STANDARD_DEVIATIONS)
        return Estimate(found.get_estimate(), low, found.get_upper_bound(STANDARD_DEVIATIONS))

    def users_with(self, name: str, value: Value) -> float:
        """The users with impressions of a value; 0 for one without a sketch."""
        sketch = self.sketches.get((name, str(value)))
        return float(sketch.get_estimate()) if sketch else 0.0


def read_sketches(rows: pa.Table, user_attributes: Collection[str]) -> UserSketches:
    """The sketches in rows of `forecast_sketches`."""
    names = zip(rows["attribute"].to_pylist(), rows["value"].to_pylist(), strict=True)
    sketches = map(compact_theta_sketch.deserialize, rows["sketch"].to_pylist())
    return UserSketches(dict(zip(names, sketches, strict=True)), frozenset(user_attributes))
