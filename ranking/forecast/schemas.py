"""Requests and responses of forecasts."""

from datetime import date
from typing import Annotated

from pydantic import Field

from etl.spec.base import StrictModel
from etl.spec.sections import MAX_MONEY

MAX_TEXT_LENGTH = 10_000
# Only bounded strings refuse lone surrogates, which cannot be encoded.
Text = Annotated[str, Field(max_length=MAX_TEXT_LENGTH)]
PositiveMoney = Annotated[float, Field(gt=0, le=MAX_MONEY, allow_inf_nan=False)]


class ForecastRequest(StrictModel):
    """A targeting, and the campaign to forecast, if any."""

    targeting: Text = ""
    """Condition on attributes, such as `country = 'US' and hour between 8 and 20`."""
    goal: Text | None = None
    """Goal of the campaign, one of `auction.goal_objectives`."""
    bid: PositiveMoney | None = None
    """What the campaign bids per event that it pays for."""
    budget: PositiveMoney | None = None
    """What the campaign spends at most in the flight."""
    frequency_cap: Annotated[int, Field(ge=1)] | None = None
    """Most impressions of a user in the flight."""
    in_target: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    """True classes of an audience to reach, of whose data providers the targeting names one."""
    first_day: date | None = None
    """First day of the flight; by default the day after the sample."""
    last_day: date | None = None
    """Last day of the flight; by default it is as long as the sample."""


class Interval(StrictModel):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def rounded(self, digits: int = 0) -> "Interval":
        """The interval with as many decimal places, or whole tens for -1."""
        value, low, high = (round(x, digits) for x in (self.value, self.low, self.high))
        return Interval(value=value, low=low, high=high)

    def at_most(self, other: "Interval") -> "Interval":
        """The interval with no bound above that of another."""
        return Interval(
            value=min(self.value, other.value),
            low=min(self.low, other.low),
            high=min(self.high, other.high),
        )


class CampaignForecast(StrictModel):
    """What a campaign would bring in the flight."""

    reach: Interval
    """Users with an impression of the campaign, of those in `users`."""
    reach_in_target: Interval | None
    """Of these, users who are truly in the target; null without `in_target`."""
    impressions: Interval
    """Impressions that it wins."""
    spend: Interval
    """What it pays."""
    events: dict[str, Interval]
    """Events of each objective."""
    cost_per_event: Interval | None
    """Spend per event of its goal; null without events."""
    participation: float
    """Share of the auctions in which the budget lets it take part."""


class Forecast(StrictModel):
    """The size of a segment in a flight, and what a campaign would win of it."""

    first_day: date
    last_day: date
    users: Interval
    """Users of the segment on the days of the window that stand for the flight."""
    impressions: Interval
    """Impressions of the segment in the flight."""
    in_target_rate: Interval | None
    """Share of the users who are truly in the target, by the audits of the provider's labels."""
    users_in_target: Interval | None
    """Users who are truly in the target; null without `in_target`."""
    users_by_sketch: Interval | None
    """Users of the segment in the whole window by theta sketches, where these can tell."""
    campaign: CampaignForecast | None
    """What the campaign of the request wins; null without one, or if it wins too few users."""
    answered_shards: float
    """Share of the shards that answered."""
    notes: tuple[str, ...]
    """What to know about this forecast."""
