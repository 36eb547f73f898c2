"""A live request, and whether it can be ranked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etl.errors import UserError
from etl.spec.attributes import Categorical, Clock, Numeric
from etl.spec.model import DataSpec
from features.encoded import clock_of, number_of, row_of
from features.inputs import Group
from ranking.inputs import Ids

Context = Mapping[str, object]
MOST_CANDIDATES = 10_000


@dataclass(frozen=True)
class Asked:
    """A request: who, where, when (seconds), with what context, for which items (C).

    The context is told by the names of the spec, once for all candidates or for each of them.
    """

    user: str
    surface: str
    as_of: int
    candidates: Sequence[str]
    context: Context | Sequence[Context]

    @property
    def contexts(self) -> Sequence[Context]:
        """One for all, or one for each."""
        return [self.context] if isinstance(self.context, Mapping) else self.context


def check(spec: DataSpec, asked: Asked) -> None:
    """Raises UserError for what cannot be ranked."""
    if asked.surface not in spec.ad_surfaces:
        known = ", ".join(spec.ad_surfaces)
        raise UserError(f"no ads on surface {asked.surface!r}; known: {known}")
    if not asked.candidates:
        raise UserError("a request without candidates")
    if len(asked.candidates) > MOST_CANDIDATES:
        raise UserError(f"{len(asked.candidates):,} candidates; at most {MOST_CANDIDATES:,}")
    if len(asked.contexts) not in (1, len(asked.candidates)):
        raise UserError("a context for each candidate, or one for all")
    declared = spec.attributes.context
    unknown = sorted({name for told in asked.contexts for name in told} - set(declared))
    if unknown:
        raise UserError(f"the context has no {', '.join(unknown)}; it has {', '.join(declared)}")


def encoded(spec: DataSpec, group: Group, asked: Asked) -> tuple[Ids, np.ndarray]:
    """Rows of the categorical attributes of the context (C), and its numbers (C, F)."""
    n = len(asked.candidates)
    ids, numbers = {}, np.full((n, len(group.numbers)), np.nan, np.float32)
    for name, attribute in spec.attributes.context.items():
        column = f"x_{name}"
        if isinstance(attribute, Numeric):
            told = [_number(attribute, name, c.get(name)) for c in asked.contexts]
            numbers[:, group.numbers.index(column)] = told
        else:
            rows = [_row(spec, attribute, name, c.get(name), asked.as_of) for c in asked.contexts]
            ids[column] = np.broadcast_to(np.array(rows, np.int64), (n,))
    return ids, numbers


def _number(attribute: Numeric, name: str, value: object) -> float:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UserError(f"{name} of the context is {value!r}; it is a number")
    return number_of(attribute, None if value is None else float(value))


def _row(
    spec: DataSpec, attribute: Categorical | Clock, name: str, value: object, as_of: int
) -> int:
    if isinstance(attribute, Clock):
        return clock_of(attribute, as_of, spec.time_zone)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name} of the context is {value!r}; it is a string")
    return row_of(attribute, value)
