"""Changes of the counters of a spec, which `gemline bench features` compares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.studies.model_changes import DataSet

Counters = Mapping[str, Any]  # the section `counters` of a spec


@dataclass(frozen=True)
class CounterChange:
    """Options of `counters` that replace those of a spec, and others that are added to its lists.

    Attributes:
        replaced: Options and their new values.
        added: Options and the values that are added to theirs.
    """

    replaced: Counters = field(default_factory=dict)
    added: Mapping[str, list[Any]] = field(default_factory=dict)

    def apply(self, counters: Counters) -> dict[str, Any]:
        """The changed section."""
        lists = {name: [*counters.get(name, ()), *values] for name, values in self.added.items()}
        return {**counters, **self.replaced, **lists}


def aggregations(event: str, column: str, *functions: str) -> CounterChange:
    """Functions of a column of the events of a type, in addition to a spec's."""
    listed = [{"function": name, "column": column, "event": event} for name in functions]
    return CounterChange(added={"aggregations": listed})


DEFAULT = "default"  # the counters of the spec
SIMULATED_EVENTS = ["ad_impression", "ad_click", "conversion", "post_view", "post_purchase"]
CHANGES: dict[str, dict[DataSet, CounterChange]] = {
    "without decayed counts": {"kuairand": CounterChange({"half_lives": []})},
    "without the time since the last": {"kuairand": CounterChange({"time_since_last": []})},
    "without mean dwells": {"kuairand": CounterChange({"aggregations": []})},
    "decayed counts": {"simulated": CounterChange({"half_lives": ["1h", "1d"]})},
    "time since the last": {"simulated": CounterChange({"time_since_last": SIMULATED_EVENTS})},
    "mean dwells": {"simulated": aggregations("post_view", "dwell", "mean")},
    "sums and largest dwells": {
        "simulated": aggregations("post_view", "dwell", "sum", "max"),
        "kuairand": aggregations("view", "dwell", "sum", "max"),
    },
    "last dwells": {
        "simulated": aggregations("post_view", "dwell", "last"),
        "kuairand": aggregations("view", "dwell", "last"),
    },
    "distinct items": {
        "simulated": aggregations("post_view", "item", "distinct_count"),
        "kuairand": aggregations("click", "item", "distinct_count"),
    },
    "distinct users": {
        "simulated": aggregations("ad_click", "user", "distinct_count"),
        "kuairand": aggregations("click", "user", "distinct_count"),
    },
    "keys of the hour": {
        "simulated": CounterChange(added={"keys": [["hour"], ["user", "hour"]]}),
        "kuairand": CounterChange(added={"keys": [["hour"], ["user", "hour"], ["item", "hour"]]}),
    },
    "keys of users' attributes": {
        "simulated": CounterChange(
            added={"keys": [["age_band", "category"], ["country", "item"], ["age_band", "item"]]}
        ),
        "kuairand": CounterChange(
            added={"keys": [["user_active_degree", "tag"], ["user_active_degree", "item"]]}
        ),
    },
    "another window": {
        "simulated": CounterChange({"windows": ["1h", "1d", "3d", "7d"]}),
        "kuairand": CounterChange({"windows": ["1h", "1d", "7d", "30d"]}),
    },
}
