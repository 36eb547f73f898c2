"""What a candidate is worth: its bid times the probability of the event its campaign pays for."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etl.errors import UserError
from etl.spec.model import DataSpec

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranked:
    """A candidate in its place: `row` is its position in the request."""

    place: int
    row: int
    probabilities: tuple[float, ...]
    expected_value: float


def expected_value(
    spec: DataSpec, surface: str, p: Floats, bids: list[float], goals: list[str | None]
) -> Floats:
    """Bid x probability (B) of what each campaign pays for; p is (B, O).

    What the surface has no objective for is worth nothing there. Without an auction in the spec,
    the probability of the first objective of the surface. Raises UserError for a goal that the
    spec does not know.
    """
    objectives = list(spec.objectives)
    if spec.auction is None:
        served = next(o for o in objectives if surface in spec.surfaces_of(o))
        return p[:, objectives.index(served)]
    pays_for = spec.auction.pays_for
    unknown = sorted({str(goal) for goal in goals if goal not in pays_for})
    if unknown:
        raise UserError(f"unknown campaign goal {', '.join(unknown)}; known: {', '.join(pays_for)}")
    column = np.array([objectives.index(pays_for[str(goal)]) for goal in goals], int)
    worth = np.array([surface in spec.surfaces_of(name) for name in objectives])
    return np.asarray(bids, np.float64) * p[np.arange(len(p)), column] * worth[column]


def order(p: Floats, values: Floats) -> list[Ranked]:
    """Candidates by value, best first; equal values keep their order."""
    best = np.argsort(-values, kind="stable")
    return [
        Ranked(place, int(row), tuple(p[row]), float(values[row])) for place, row in enumerate(best)
    ]
