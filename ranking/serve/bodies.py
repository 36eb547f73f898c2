"""Bodies of requests and responses."""

from typing import Annotated, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from etl.spec.auction import Money

Name = Annotated[str, Field(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Time = Annotated[int, Field(ge=0, lt=1 << 48)]
Value = str | Number | None
Context = dict[str, Value]
Values = dict[str, str | Number | list[Number] | None]


class Body(BaseModel):
    """Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class RankBody(Body):
    """A request to rank: its user, its surface, a context for all candidates or for each."""

    user: Name
    surface: Name
    candidates: Annotated[list[Name], Field(min_length=1, max_length=10_000)]
    context: Context | list[Context] = {}


class RankedBody(Body):
    """A candidate in its place, with probabilities by objective.

    `price` is what its campaign pays if the event happens that it pays for.
    """

    place: int
    item: str
    expected_value: float
    price: float
    probabilities: dict[str, float]


class ExcludedBody(Body):
    """A candidate that takes no part in the auction, and why."""

    item: str
    reason: Literal[
        "unknown_item", "no_bid", "no_goal", "goal_not_served", "below_reserve", "below_quality"
    ]


class RankingBody(Body):
    """A ranking, the version of the ranker that made it, and the candidates that are left out."""

    ranker: str
    ranking: list[RankedBody]
    excluded: list[ExcludedBody]


class EventBody(Body):
    """One event; `event_time` in milliseconds since 1970, if it is not now."""

    event_id: Name
    user: Name
    item: Name
    surface: Name
    type: Name
    event_time: Time | None = None
    dwell_ms: Number | None = None


class EventsBody(Body):
    """Events, taken all or none."""

    events: Annotated[list[EventBody], Field(min_length=1, max_length=1000)]


class TakenBody(Body):
    """How many events were new."""

    taken: int


class UserBody(Body):
    """Attributes of a user, valid from `valid_from` (ms) on, if not from now on."""

    name: Name
    valid_from: Time | None = None
    values: Values = {}


class ItemBody(Body):
    """Attributes of an item and what is bid for it, valid from `valid_from` (ms) on, or from now.

    What is left out stays as it was, `values` as a whole. A bid of 0 takes an item out of auctions.
    """

    name: Name
    valid_from: Time | None = None
    values: Values | None = None
    bid: Money | None = None
    goal: str | None = None


class StatusBody(Body):
    """Whether the process answers."""

    status: str


class StateBody(Body):
    """What a worker serves with, and what is wrong.

    The spec, the second by which its features had landed, the version of each surface's ranker; why
    the ranker that a surface's pointer names is not served, or newer features are not.
    """

    spec: str
    features_until: int
    rankers: dict[str, str]
    ranker_faults: dict[str, str]
    features_fault: str | None


class ErrorBody(Body):
    """What is wrong, in one sentence."""

    error: str


def error_response(
    status: int, sentence: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """A response that says what is wrong."""
    return JSONResponse({"error": sentence}, status, headers)
