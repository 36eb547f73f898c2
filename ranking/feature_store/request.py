"""A request to rank, whether it fits the spec, and the encoding of its context.

C candidates, F numeric features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from etl.errors import UserError
from etl.spec.attributes import CategoricalAttribute, LocalTimeAttribute, NumericAttribute
from etl.spec.model import DataSpec
from features.encoding.scalar import encode_categorical, encode_local_time, encode_numeric
from features.schema import FeatureGroup
from ranking.inputs.arrays import CategoricalIds

RequestContext = Mapping[str, object]
MAX_CANDIDATES = 10_000


@dataclass(frozen=True)
class RankRequest:
    """A request to rank candidates (C) for a user on a surface.

    Attributes:
        user: The id of the user.
        surface: A surface of the spec that carries ads.
        candidates: The ids of the items to rank.
        context: Context attributes by their names in the spec: one mapping for all candidates, or
            a list with one for each.
        as_of: The time of the request in seconds since 1970; None is now.
    """

    user: str
    surface: str
    candidates: Sequence[str]
    context: RequestContext | Sequence[RequestContext] = field(default_factory=dict)
    as_of: int | None = None

    @property
    def contexts(self) -> Sequence[RequestContext]:
        """The contexts: one for all candidates, or one for each (C)."""
        return [self.context] if isinstance(self.context, Mapping) else self.context


def validate_request(spec: DataSpec, request: RankRequest) -> None:
    """Raise UserError if a request does not fit the spec, or has too many candidates or none."""
    spec.require_ad_surface(request.surface)
    num_candidates = len(request.candidates)
    if not num_candidates:
        raise UserError("a request without candidates")
    if num_candidates > MAX_CANDIDATES:
        raise UserError(f"{num_candidates:,} candidates; at most {MAX_CANDIDATES:,}")
    if len(request.contexts) not in (1, num_candidates):
        raise UserError("give one context for all candidates, or a context for each candidate")
    declared = spec.attributes.context
    names = {name for context in request.contexts for name in context}
    unknown = sorted(names - set(declared))
    if unknown:
        raise UserError(f"the context has no {', '.join(unknown)}; it has {', '.join(declared)}")


def encode_context(
    spec: DataSpec, group: FeatureGroup, request: RankRequest, as_of: int
) -> tuple[CategoricalIds, np.ndarray]:
    """Encode the context: ids (C) of each categorical attribute, and numbers (C, F)."""
    count = len(request.candidates)
    ids: CategoricalIds = {}
    numbers = np.full((count, len(group.numeric)), np.nan, np.float32)
    for name, attribute in spec.attributes.context.items():
        column = f"ctx_{name}"
        values = [context.get(name) for context in request.contexts]
        if isinstance(attribute, NumericAttribute):
            encoded = [_encode_number(attribute, name, value) for value in values]
            numbers[:, group.numeric.index(column)] = encoded
        elif isinstance(attribute, LocalTimeAttribute):
            ids[column] = np.full(count, encode_local_time(attribute, as_of, spec.time_zone))
        else:
            categories = [_encode_category(attribute, name, value) for value in values]
            ids[column] = np.broadcast_to(np.array(categories, np.int64), (count,))
    return ids, numbers


def _encode_number(attribute: NumericAttribute, name: str, value: object) -> float:
    if value is None:
        return encode_numeric(attribute, None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} of the context is {value!r}; it is a number")
    return encode_numeric(attribute, float(value))


def _encode_category(attribute: CategoricalAttribute, name: str, value: object) -> int:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name} of the context is {value!r}; it is a string")
    return encode_categorical(attribute, value)
