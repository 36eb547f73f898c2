"""In-target rates and reach: users of a segment who truly are of the wanted classes, by audits."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from etl.errors import UserError
from ranking.forecast.schemas import Interval
from ranking.forecast.sums import Estimate
from ranking.forecast.tables import ForecastTables
from ranking.forecast.targeting import Targeting


def in_target_rate(
    tables: ForecastTables, targeting: Targeting, classes: Sequence[str]
) -> Interval:
    """The in-target rate of a targeting by a provider's labels.

    Labels are taken to be as precise in the segment as among all audited impressions.

    Raises:
        UserError: The targeting does not name labels of one provider, or these are not measured.
    """
    box = targeting.allowed_values() or {}
    named = [name for name in box if name in tables.precisions]
    if len(named) != 1:
        known = ", ".join(tables.precisions) or "none is measured"
        raise UserError(
            "an in-target rate needs a targeting with the labels of one data provider; "
            f"attributes with measured labels: {known}"
        )
    (name,), by_class = named, tables.precisions[named[0]]
    unknown = sorted({*classes} - {*by_class})
    if unknown:
        raise UserError(f"no audited class is called {unknown[0]}; known: {', '.join(by_class)}")
    labels = sorted(map(str, box[name]))
    if not all(label in by_class[class_] for class_ in classes for label in labels):
        raise UserError(f"too few impressions have these labels of {name} to say how good they are")
    sizes = np.array([tables.model.users.expected({name: frozenset({x})}) for x in labels])
    rates = [_rate_of_classes(by_class, set(classes), label) for label in labels]
    value, low, high = (
        float(sizes @ [getattr(rate, bound) for rate in rates] / sizes.sum())
        for bound in ("value", "low", "high")
    )
    # The sizes are exact: more digits would reveal them.
    digits = 3 if sizes.sum() >= 1000 else 2
    return Interval(value=value, low=low, high=high).rounded(digits)


def _rate_of_classes(
    by_class: Mapping[str, Mapping[str, Estimate]], classes: set[str], label: str
) -> Estimate:
    """P(class in classes | label): bounded by those of its classes, and by those of all others."""
    wanted = [by_class[name][label] for name in classes]
    others = [rows[label] for name, rows in by_class.items() if name not in classes]
    return Estimate(
        min(sum(rate.value for rate in wanted), 1.0),
        max(sum(rate.low for rate in wanted), 1.0 - sum(rate.high for rate in others)),
        min(sum(rate.high for rate in wanted), 1.0 - sum(rate.low for rate in others)),
    )


def in_target_users(users: Interval, rate: Interval) -> Interval:
    """The in-target reach: a number of users times their in-target rate.

    Their errors are independent, so that relative ones add as squares.
    """
    if users.value <= 0 or rate.value <= 0:
        return Interval(value=0.0, low=0.0, high=(users.high * rate.high)).rounded()
    below = math.hypot(1 - users.low / users.value, 1 - rate.low / rate.value)
    above = math.hypot(users.high / users.value - 1, rate.high / rate.value - 1)
    value = users.value * rate.value
    low, high = value * max(1 - below, 0.0), value * (1 + above)
    return Interval(value=value, low=low, high=high).rounded().at_most(users)
