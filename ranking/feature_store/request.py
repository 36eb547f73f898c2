"""A request to rank, whether it fits the spec, and the encoding of its context."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from etl.errors import UserError
from etl.spec.attributes import LocalTimeAttribute
from etl.spec.model import DataSpec
from etl.tables.declared_columns import logged_context_attributes
from features.encoding.scalar import encode_local_time
from features.schema import FeatureGroup
from ranking.feature_store.encoded_attributes import (
    AttributeValues,
    EncodedAttributes,
    encode_attributes,
)

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
    context: AttributeValues | Sequence[AttributeValues] = field(default_factory=dict)
    as_of: int | None = None

    @property
    def contexts(self) -> Sequence[AttributeValues]:
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
    check_context_names(spec, {name for context in request.contexts for name in context})


def repeated_candidate(candidates: Sequence[str]) -> str | None:
    """A candidate that is given twice, and would raise its own price; None if there is none."""
    counts = Counter(candidates)
    return counts.most_common(1)[0][0] if len(counts) < len(candidates) else None


def check_context_names(spec: DataSpec, names: Collection[str], of: str = "") -> None:
    """Raise UserError if a spec lacks attributes of the context; the message begins with `of`."""
    _check_names("the context", spec.attributes.context, names, of)


def check_event_attribute_names(spec: DataSpec, names: Collection[str], of: str) -> None:
    """Raise UserError if a spec lacks attributes of events; the message begins with `of`."""
    _check_names("the event", spec.attributes.event, names, of)


def _check_names(owner: str, declared: Collection[str], names: Collection[str], of: str) -> None:
    unknown = sorted(set(names) - set(declared))
    if unknown:
        known = ", ".join(declared) or "none"
        raise UserError(f"{of}{owner} has no {', '.join(unknown)}; it has {known}")


def encode_context(
    spec: DataSpec, group: FeatureGroup, request: RankRequest, as_of: int
) -> EncodedAttributes:
    """Encode the context of a request, with one row, or with one for each candidate."""
    encoded = encode_attributes(logged_context_attributes(spec), group, "ctx", request.contexts)
    for name, attribute in spec.attributes.context.items():
        if isinstance(attribute, LocalTimeAttribute):
            column = list(group.categorical).index(f"ctx_{name}")
            encoded.ids[:, column] = encode_local_time(attribute, as_of, spec.time_zone)
    return encoded
