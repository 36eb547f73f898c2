"""The JSON bodies of requests and responses."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from etl.spec.sections import Money
from ranking.feature_store.request import repeated_candidate

Identifier = Annotated[str, Field(min_length=1, max_length=256)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
TimestampMs = Annotated[int, Field(ge=0, lt=1 << 48)]
# The bounds on length limit the cost of encoding. With a bound, Pydantic also refuses lone
# surrogates, which cannot be encoded.
MAX_TEXT_LENGTH = MAX_LIST_LENGTH = 4096
Text = Annotated[str, Field(max_length=MAX_TEXT_LENGTH)]
TextList = Annotated[list[Text], Field(max_length=MAX_LIST_LENGTH)]
AttributeValue = Text | FiniteFloat | list[FiniteFloat] | TextList | None
AttributeValues = dict[Text, AttributeValue]


def _distinct(candidates: list[str]) -> list[str]:
    repeated = repeated_candidate(candidates)
    if repeated is not None:
        raise PydanticCustomError(
            "repeated",
            "{item} is given twice: give each candidate once",
            {"item": repeated},
        )
    return candidates


class BodyModel(BaseModel):
    """A model that converts no types and rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


# Raw columns of a log by name, as the client would log them.
RawColumns = dict[Text, Text | bool | FiniteFloat | list[FiniteFloat] | TextList | None]


class RankRequestBody(BodyModel):
    """A request to rank distinct candidates; `context` is one for all, or one for each.

    In place of `context`, `record` may have the raw columns of the impression as the log `source`
    has them: attributes of the context are read and computed from them as ingest does. Without
    `source`, it is the only log of impressions.
    """

    user: Identifier
    surface: Identifier
    candidates: Annotated[
        list[Identifier],
        Field(min_length=1, max_length=10_000, json_schema_extra={"uniqueItems": True}),
        AfterValidator(_distinct),
    ]
    context: AttributeValues | list[AttributeValues] = {}
    record: RawColumns | None = None
    source: Identifier | None = None


class RankedCandidate(BodyModel):
    """A candidate and its rank (from 0), with its probabilities by objective.

    `price` is what its campaign pays if the event that it pays for occurs. `outcome_values` has the
    expected value of an outcome, given that it occurs, for objectives with values.
    """

    rank: int
    item: str
    expected_value: float
    price: float
    probabilities: dict[str, float]
    outcome_values: dict[str, float]


class ExcludedCandidate(BodyModel):
    """A candidate that takes no part in the auction, and the reason."""

    item: str
    reason: Literal[
        "unknown_item",
        "no_bid",
        "no_goal",
        "goal_not_served",
        "no_value",
        "below_reserve",
        "below_quality",
    ]


class RankResponse(BodyModel):
    """The version of the ranker, the ranking (best first) and the excluded candidates."""

    ranker_version: str
    ranking: list[RankedCandidate]
    excluded: list[ExcludedCandidate]


class EventPayload(BodyModel):
    """One event; `event_time` is in milliseconds since 1970, by default now.

    Of `context`, and of `attributes` that the spec declares under `attributes.event`, those that
    counters read are kept; others are ignored. `source` names the log of the event, where ids are
    unique only within a log; without it, an event is new if no log has its type and id.
    """

    event_id: Identifier
    user: Identifier
    item: Identifier
    surface: Identifier
    type: Identifier
    event_time: TimestampMs | None = None
    dwell_ms: FiniteFloat | None = None
    value: FiniteFloat | None = None
    context: AttributeValues = {}
    attributes: AttributeValues = {}
    source: Identifier | None = None


class EventsRequest(BodyModel):
    """Events to ingest, all or none of them."""

    events: Annotated[list[EventPayload], Field(min_length=1, max_length=1000)]


class EventsResponse(BodyModel):
    """The number of events that were new."""

    accepted: int


class UserAttributesRequest(BodyModel):
    """Attributes of a user, valid from `valid_from` (milliseconds since 1970), by default now."""

    user: Identifier
    valid_from: TimestampMs | None = None
    attributes: AttributeValues = {}


class ItemAttributesRequest(BodyModel):
    """Attributes, bid and goal of an item, valid from `valid_from` (ms since 1970), by default now.

    Omitted fields keep their values, `attributes` as a whole. A bid of 0 takes the item out of
    auctions, a `target_roas` of 0 removes the target.
    """

    item: Identifier
    valid_from: TimestampMs | None = None
    attributes: AttributeValues | None = None
    bid: Money | None = None
    goal: Text | None = None
    target_roas: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class HealthResponse(BodyModel):
    """Whether the process answers, or is ready to rank."""

    status: str


class WorkerStatus(BodyModel):
    """The loaded rankers and features of a worker, and load failures.

    `features_until` is the second up to which the feature store includes the tables, `labels_until`
    that by which the labels that the ranker of a surface has learned were final, and
    `label_age_seconds` how long ago that was. `newest_label_age_seconds` says how long ago the
    latest impression was whose label of an objective was learned. A surface in `ranker_errors`
    keeps its previous ranker, if it has one; so does the feature store.
    """

    spec_hash: str
    features_until: int
    ranker_versions: dict[str, str]
    labels_until: dict[str, int]
    label_age_seconds: dict[str, int]
    newest_label_age_seconds: dict[str, dict[str, int]]
    ranker_errors: dict[str, str]
    feature_store_error: str | None


class ErrorResponse(BodyModel):
    """An error message in one sentence."""

    error: str
