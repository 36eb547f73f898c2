"""What the service is asked, and what it answers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Time = Annotated[int, Field(ge=0, lt=1 << 48)]
Value = str | Number | None
Context = dict[str, Value]


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


class RankingBody(Body):
    """A ranking, and the version of the ranker that made it."""

    ranker: str
    ranking: list[RankedBody]


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


class VersionBody(Body):
    """A version of a user or an item, valid from `valid_from` (ms) on, if not from now on."""

    name: Name
    valid_from: Time | None = None
    values: dict[str, str | Number | list[Number] | None] = {}
    bid: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    goal: str | None = None


class StateBody(Body):
    """What answers: the spec, what landed by when (s), the version of each surface's ranker."""

    spec: str
    features_until: int
    rankers: dict[str, str]


class ErrorBody(Body):
    """What is wrong, in one sentence."""

    error: str
