"""Counters as models read them: logarithms of the counts, and of the rates of outcomes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etl.spec.model import DataSpec
from etl.tables.contracts import counter_columns

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class CounterInputs:
    """Positions of outcome counters, and of the impression counter of the same key and window."""

    outcomes: tuple[int, ...]
    shown: tuple[int, ...]
    names: tuple[str, ...]

    def __call__(self, counts: Float32) -> Float32:
        """Counts (B, C) to ln(1 + n) and ln((k + 0.1) / (n + 1)): (B, C + rates)."""
        happened, shown = counts[:, self.outcomes], counts[:, self.shown]
        rates = np.log((happened + 0.1) / (shown + 1.0))
        return np.concatenate((np.log1p(counts), rates), axis=1, dtype=np.float32)


def counter_inputs(spec: DataSpec) -> CounterInputs:
    """The counters of a spec; rates only where its impressions are counted too."""
    columns, events = counter_columns(spec), spec.counters.events
    outcomes, shown = [], []
    if spec.impression in events:
        for start in range(0, len(columns), len(events)):
            for offset, event in enumerate(events):
                if spec.events[event].role == "outcome":
                    outcomes.append(start + offset)
                    shown.append(start + events.index(spec.impression))
    names = (*columns, *(f"rate_{columns[i]}" for i in outcomes))
    return CounterInputs(tuple(outcomes), tuple(shown), names)
