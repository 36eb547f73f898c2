"""What a benchmark gives: a table for people, one line of JSON for programs."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table


def told(values: Sequence[float]) -> str:
    """The mean, and the deviation where there are several numbers."""
    spread = len(values) > 1 and not math.isnan(mean(values))
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if spread else "")


@dataclass
class Result:
    """Figures by key, and the table that shows them; one that can't be had is None, with why."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)

    def take(self, key: str, value: float | None, otherwise: str) -> None:
        """Take a figure; where it can't be had (None or NaN) it is None, and why stands beside."""
        if value is None or math.isnan(value):
            self.figures |= {key: None, f"{key}_reason": otherwise}
        else:
            self.figures[key] = round(value, 6)

    def show(self, as_json: bool) -> None:
        """Print the table; with `as_json` the figures as the last line."""
        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        Console(stderr=as_json).print(table)
        if as_json:
            print(json.dumps(self.figures))
