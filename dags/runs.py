"""What a run works on: its days and the table versions that it reads, as the run before it told."""

from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any

from pydantic import ConfigDict, Field

from etl.spec.base import Strict
from etl.spec.units import parse_days


class Run(Strict):
    """Tables are made of the days `first` to `last`; GEM has not learned those from `new` on.

    `absent` are sources whose files were not complete, by day; `tables` tells of each table that
    was made its version, its rows of these days and a hash of its contract. Runs are stored in
    asset events: what another release put into them is ignored.
    """

    model_config = ConfigDict(extra="ignore")

    first: date
    new: date
    last: date
    absent: dict[date, tuple[str, ...]] = Field(default_factory=dict)
    tables: dict[str, dict[str, int | str]] = Field(default_factory=dict)

    @property
    def days(self) -> str:
        """All days, as a flag tells them."""
        return f"{self.first}:{self.last}"

    @property
    def new_days(self) -> str:
        """Those that GEM has not learned, as a flag tells them."""
        return f"{self.new}:{self.last}"

    @property
    def sources_absent(self) -> str:
        """Sources that lack a day, as a flag tells them."""
        return ",".join(sorted({name for names in self.absent.values() for name in names}))

    @property
    def pins(self) -> str:
        """The versions to read tables at, as a flag tells them."""
        return "{" + ", ".join(f"{n}: {told['version']}" for n, told in self.tables.items()) + "}"


def told(events: Mapping[Any, Iterable[Any]]) -> Run | None:
    """What asset events tell together, the newest of each asset; None where there are none."""
    extras = [list(of_asset)[-1].extra for of_asset in events.values()]
    if not extras:
        return None
    runs = [Run.model_validate(extra) for extra in extras]
    tables = {name: table for run in runs for name, table in run.tables.items()}
    return runs[0].model_copy(update={"tables": tables})


def run_of(events: Mapping[Any, Iterable[Any]], dag_run: Any, params: Mapping[str, Any]) -> Run:
    """What a run works on: as asset events tell, else by its partition, else by its parameter.

    Raises ValueError where it has none of them.
    """
    found = told(events)
    if found:
        return found
    key = getattr(dag_run, "partition_key", None) or params.get("days")
    if not key:
        raise ValueError("this run has no day: trigger it with a partition key, or params.days")
    first, last = parse_days(key)
    return Run(first=first, new=first, last=last)
