"""The data spec, from which schemas, features, models and steps are derived."""

import hashlib
import json
from collections.abc import Collection
from datetime import date, datetime, time, timedelta
from functools import cached_property
from typing import Any
from zoneinfo import ZoneInfo

from pydantic import model_validator

from etl.errors import UserError
from etl.spec.attributes import COUNTER_KEYS, CategoricalAttribute, LocalTimeAttribute
from etl.spec.consistency import consistency_problems
from etl.spec.declarations import SpecDeclarations
from etl.spec.effects import KeyPath, effect_of, flatten_keys
from etl.spec.units import DAY

LATER_SOURCE_KEYS = (
    *("table", "partition_column", "where", "select"),
    *("touch", "touch_key", "touch_window"),
)
LATER_COLUMN_KEYS = ("touch", "touch_key")
SHORT_LABEL_WINDOW_SECONDS = 3600  # leaving out the labels of a day's last hour loses little data


class SpecConsistencyError(ValueError):
    """Sections of a spec contradict each other; holds the location of each problem and its text."""

    def __init__(self, problems: list[tuple[KeyPath, str]]) -> None:
        super().__init__("; ".join(f"{'.'.join(path)}: {text}" for path, text in problems))
        self.problems = problems


class DataSpec(SpecDeclarations):
    """One user's data: logs, surfaces, events, objectives, attributes and how ads compete.

    The order of surfaces and event types is that of their codes (etl/tables/code_registry.py).
    """

    @model_validator(mode="after")
    def _check_consistency(self) -> "DataSpec":
        problems = list(consistency_problems(self))
        if problems:
            raise SpecConsistencyError(problems)
        return self

    def require_ad_surface(self, surface: str) -> None:
        """Raise UserError unless a surface is in the spec and carries ads."""
        if surface not in self.ad_surfaces:
            raise UserError(f"no ads on surface {surface!r}; known: {', '.join(self.ad_surfaces)}")

    def allow_missing_sources(self, names: Collection[str]) -> "DataSpec":
        """The same spec with some sources optional; raises UserError for unknown names."""
        unknown = sorted(set(names) - set(self.sources))
        if unknown:
            raise UserError(
                f"spec {self.name} has no source {unknown[0]!r}; known: {', '.join(self.sources)}"
            )
        if not names:
            return self
        dump = self.model_dump()
        for name in names:
            dump["sources"][name]["optional"] = True
        return type(self).model_validate(dump)

    @cached_property
    def days_until_mature(self) -> int:
        """After how many further days of logs the labels of a day can be used."""
        is_slow = self.label_maturity_seconds > SHORT_LABEL_WINDOW_SECONDS
        return self.label_maturity_days if is_slow else 0

    @cached_property
    def ranker_lag_days(self) -> int:
        """Days from the last day on which rankers train to the latest day with logs.

        The day after it is for calibration, and the labels of the one after that, the test day, are
        mature.
        """
        return self.days_until_mature + 2

    @cached_property
    def label_delay_days(self) -> int:
        """Days after its landing day on which a label of an impression becomes final at the latest.

        An impression may be ingested after its landing day, and be visible so much later.
        """
        return max(self.label_maturity_days + 1, self.visibility_delay_days)

    @cached_property
    def visibility_delay_days(self) -> int:
        """Days after its landing day on which an event becomes visible at the latest."""
        slowest_source = max(log.delay for log in self.log_sources.values())
        return -(-(self.allowed_lateness + slowest_source) // DAY) + 1

    @cached_property
    def item_counter_keys(self) -> dict[str, CategoricalAttribute]:
        """The attributes of items that are parts of counter keys, by name."""
        return {
            part: attribute
            for part in self.counters.key_parts
            if isinstance(attribute := self.attributes.item.get(part), CategoricalAttribute)
        }

    @cached_property
    def user_counter_keys(self) -> dict[str, CategoricalAttribute]:
        """The attributes of users that are parts of counter keys, by name.

        A name that is also a key of items means that of the item.
        """
        others = {*COUNTER_KEYS, *self.item_counter_keys}
        return {
            part: attribute
            for part in self.counters.key_parts
            if isinstance(attribute := self.attributes.user.get(part), CategoricalAttribute)
            and part not in others
        }

    @cached_property
    def context_counter_keys(self) -> dict[str, CategoricalAttribute | LocalTimeAttribute]:
        """The attributes of the context that are parts of counter keys, by name.

        A name that is also a key of items or users means that of the item or the user.
        """
        others = {*COUNTER_KEYS, *self.item_counter_keys, *self.user_counter_keys}
        return {
            part: attribute
            for part in self.counters.key_parts
            if isinstance(
                attribute := self.attributes.context.get(part),
                CategoricalAttribute | LocalTimeAttribute,
            )
            and part not in others
        }

    @cached_property
    def distinct_event_attributes(self) -> tuple[str, ...]:
        """The attributes of events whose distinct values are counted."""
        return tuple(part for part in self.counters.key_parts if part in self.attributes.event)

    def day_start(self, day: date) -> int:
        """Epoch second at which a day begins in `time_zone`."""
        return int(datetime.combine(day, time(), ZoneInfo(self.time_zone)).timestamp())

    def day_end(self, day: date) -> int:
        """Epoch second at which the next day begins in `time_zone`."""
        return self.day_start(day + timedelta(days=1))

    def day_of(self, second: int) -> date:
        """The day of an epoch second in `time_zone`."""
        return datetime.fromtimestamp(second, ZoneInfo(self.time_zone)).date()

    def last_day_before(self, second: int) -> date:
        """The day of the last second before an epoch second: the last day of data until then."""
        return self.day_of(second - 1)

    def is_day_end(self, second: int) -> bool:
        """Whether a day ends at an epoch second in `time_zone`."""
        return self.day_end(self.last_day_before(second)) == second

    @cached_property
    def ingest_settings(self) -> dict[str, Any]:
        """The sections that determine how raw records are read.

        Keys of later releases are left out if they are not set, so that a new release does not
        ingest all days again.
        """
        sections = {"sources", "surfaces", "attributes", "max_bad_record_rate"}
        settings = self.model_dump(mode="json", include=sections)
        if not self.attributes.event:
            del settings["attributes"]["event"]
        for source in settings["sources"].values():
            del source["owner"]
            columns = source.get("columns", {})
            for outcome in source.get("outcomes", ()):
                if not outcome["attributes"]:
                    del outcome["attributes"]
            for keys, later in ((source, LATER_SOURCE_KEYS), (columns, LATER_COLUMN_KEYS)):
                for key in later:
                    if not keys.get(key):
                        keys.pop(key, None)
        return settings

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits that change with each key that affects tables, and with the codes."""
        keys = flatten_keys(self.model_dump(mode="json"))
        facts = {
            "keys": {".".join(path): value for path, value in keys if effect_of(path).is_hashed},
            "surfaces": list(self.surfaces),
            "events": list(self.events),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
