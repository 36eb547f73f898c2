"""Sections of the spec: surfaces, events, objectives, histories, audiences, forecast, auction."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from typing_extensions import override

from etl.spec.base import (
    UNIQUE,
    CategoryName,
    EventAttributeReference,
    EventName,
    Name,
    NumericContextName,
    ObjectiveName,
    StrictModel,
    SurfaceName,
    TargetingName,
    declared_in,
)
from etl.spec.units import DAY, Duration, format_duration


class Surface(StrictModel):
    """A place where items are shown."""

    logged_as: str | None = None
    """Value of the surface in the logs; by default its name."""
    ads: bool = True
    """Whether the surface shows ads and gets a ranker; if not, its events are history only."""


class EventType(StrictModel):
    """A type of event. Exactly one type is the impression, which is what is ranked."""

    role: Literal["impression", "outcome", "retraction", "activity"] = "activity"
    """`impression`: what is ranked; `outcome`: what may follow it; `activity`: anything else.

    `retraction`: what takes an outcome back, such as a refund.
    """


class SequenceSpec(StrictModel):
    """A stream of a user's events that a model reads."""

    events: tuple[EventName, ...] | None = None
    """Types of events in the stream; by default all."""
    max_length: int = Field(default=256, ge=1)
    """How many of the latest events are read."""


HISTORY_ATTRIBUTE_CODES = 256  # values of an attribute of events in histories: one byte


class HistorySpec(StrictModel):
    """What events of histories have, and how much of a user's history compaction keeps."""

    attributes: Annotated[tuple[EventAttributeReference, ...], UNIQUE] = ()
    """Names of `attributes.event`, categorical ones of at most 256 rows.

    GEM reads them with each event: numbers in steps of 18 %.
    """
    max_events: int = Field(default=8192, ge=1)
    """How many of the latest events of a user are kept."""
    max_age: Duration = 400 * DAY
    """Maximum age of the events that are kept, at the end of the compacted days."""
    compact_every: Duration = 0
    """Histories are compacted once so many further days can be; by default they are not."""


RetainedTable = Literal[
    "examples",
    "impressions",
    "teacher_predictions",
    "user_teacher_embeddings",
    "scores",
    "feature_statistics",
    "audience_label_snapshots",
    "audits",
    "audience_counts",
    "quarantine",
    "excluded_events",
    "user_event_counts",
    "attributes_user_snapshots",
    "attributes_item_snapshots",
]
RETENTION_MARGIN_DAYS = 14  # beyond the days with open labels: two weekly snapshots


class Touchpoint(StrictModel):
    """A type of event to which later outcomes of the same user are attributed."""

    touch: EventName
    """Type of the event that the outcome is attributed to."""
    window: Duration | None = None
    """How long after the touch an outcome may follow, and the touch after its impression.

    By default the window of the objective; only the last touchpoint may have none.
    """
    key: Annotated[str, declared_in("attribution keys")] = "item"
    """What touch and outcome must share besides the user: `item`, or an attribute of the item.

    An attribute counts if it is known when the outcome is visible.
    """
    same_surface: bool = False
    """Whether touch and outcome must be on the same surface."""


class OutcomeLabel(StrictModel):
    """What the labels of objectives and of auxiliary objectives have in common.

    Outcomes that name no impression are attributed to the latest touch of the first touchpoint of
    `attribution` that has one.
    """

    event: EventName
    """Type of the event that makes the label 1."""
    window: Duration = Field(ge=1)
    """How long after the impression the event may follow."""
    attribution: tuple[Touchpoint, ...] = ()
    """Touchpoints, the preferred first; default: the latest impression of the same item."""
    unknown_impression: Literal["drop", "last_touch"] = "drop"
    """Whether outcomes that name an impression not in the logs are dropped or attributed.

    With `last_touch` an impression longer ago than `window` counts as unknown, too.
    """
    label_grace_period: Duration = 0
    """How long after its window closes a label waits for late records before it is final."""
    surfaces: tuple[SurfaceName, ...] | None = None
    """Surfaces on which impressions have the label; default: all with ads."""

    @property
    def label_maturity_seconds(self) -> int:
        """Seconds from the impression until its label is final."""
        return self.window + self.label_grace_period

    @property
    def summed_column(self) -> str | None:
        """The column of events whose sum over the outcomes is stored beside the label."""
        return None


class RetractionSpec(StrictModel):
    """How outcomes are retracted: by refunds, cancellations, or as invalid.

    A retraction names an outcome of its own user. One that is visible before the label is final
    cancels the outcome. A later one never changes the label; it lowers the net rate, by which the
    auction values the outcome.
    """

    event: EventName
    """Type of the event that takes an outcome back, with `role: retraction`."""
    within: Duration
    """How long after the label is final a retraction counts towards the net rate."""


class Objective(OutcomeLabel):
    """A label of each impression: whether an event follows it within a window.

    Models are trained on it and serve it. Outcomes that name no impression are attributed to the
    latest touch of the first touchpoint of `attribution` that has one.
    """

    extra_windows: tuple[Duration, ...] = ()
    """Shorter windows, each with a label of its own, as of the close of that window."""
    value: bool = False
    """Whether the sum of the outcomes' values is a label, too."""
    retracted_by: RetractionSpec | None = None
    """How outcomes are retracted; by default they are not."""

    @property
    @override
    def summed_column(self) -> str | None:
        """`value`, if the objective has values."""
        return "value" if self.value else None

    @field_validator("extra_windows")
    @classmethod
    def _check_extra_windows(
        cls, windows: tuple[int, ...], info: ValidationInfo
    ) -> tuple[int, ...]:
        longest = info.data.get("window")
        if longest and any(window >= longest for window in windows):
            raise ValueError(f"extra windows must be shorter than {format_duration(longest)}")
        return windows


class AuxiliaryObjective(OutcomeLabel):
    """A label that GEM learns beside the objectives, and that is never served.

    It teaches the layers that all heads share: how long an item was viewed, or outcomes that are
    too rare to be served.
    """

    target: Literal["event", "dwell"] = "event"
    """Whether the event follows the impression, or for how long the item was viewed where it does.

    The `dwell` of an impression is the sum of its events' dwells; GEM predicts ln(1 + seconds).
    """

    @property
    @override
    def summed_column(self) -> str | None:
        """`dwell_ms`, if it is what the objective learns."""
        return "dwell_ms" if self.target == "dwell" else None


class PositionBiasSpec(StrictModel):
    """The attribute that holds an impression's position, which is known only after ranking.

    Rankers learn its effect apart from all else, and serve probabilities for one position.
    """

    attribute: NumericContextName
    """Context attribute with the position of the impression, read from the logs."""
    served_position: Annotated[int, Field(ge=0)] = 0
    """Position for which probabilities are served: the first one, as the logs number it."""


UNKNOWN_LABEL = "unknown"  # of users whom a data provider does not know


class AudienceSpec(StrictModel):
    """A property of users that data providers state and an auditor measures, such as an age band.

    Audits report the shares of the true classes in campaigns; from these follows how good the
    labels of each provider are.
    """

    classes: Annotated[tuple[str, ...], UNIQUE] = Field(min_length=2)
    """True classes, of which each person has one."""
    providers: Annotated[tuple[Name, ...], UNIQUE] = Field(min_length=1)
    """Data providers that label users."""
    campaign: CategoryName
    """Item attribute that names the audited campaign of an ad."""
    window: Duration = Field(default=28 * DAY, ge=DAY)
    """How far back audits are used."""
    min_count: int = Field(default=20, ge=1)
    """Fewest users of a published or bought label, and audited impressions of a campaign."""


class RoiSpec(StrictModel):
    """Campaigns whose spend is billed, and what it is to bring."""

    campaign: CategoryName
    """Item attribute that names the campaign of an ad."""
    objective: ObjectiveName
    """Objective whose outcomes spend brings, with `value: true`."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    """Currency of spend and of the values of outcomes, such as `EUR`."""
    groups: Annotated[tuple[CategoryName, ...], UNIQUE] = ()
    """Item attributes that campaigns have in common, such as a vertical."""
    window: Annotated[Duration, Field(ge=DAY)] = 56 * DAY
    """How far back campaign days are used."""


class ForecastSpec(StrictModel):
    """What a forecast of reach and performance is made from, and what a targeting may name."""

    attributes: Annotated[tuple[TargetingName, ...], UNIQUE] = Field(min_length=1)
    """Attributes of users and of the context that a targeting may name, besides the surface."""
    window: Annotated[Duration, Field(ge=DAY)] = 7 * DAY
    """How many of the latest scored days are sampled; a flight is at most as long."""
    sample_rows: int = Field(default=1_000_000, ge=100)
    """How many impressions the sample has, about."""
    min_users: int = Field(default=50, ge=1)
    """Segments of fewer users are not reported."""


NEW_ITEM = "new_item"  # the calibration segment of items that a ranker has not learned

MAX_MONEY = 1e12  # a larger bid is an error of units; sums of expected values stay finite
Money = Annotated[float, Field(ge=0, le=MAX_MONEY, allow_inf_nan=False)]
SignedMoney = Annotated[float, Field(ge=-MAX_MONEY, le=MAX_MONEY, allow_inf_nan=False)]


class AuctionTerms(StrictModel):
    """The terms on which ads compete for a surface."""

    reserve: Money = 0.0
    """Minimum expected payment per impression for an ad to take part."""
    quality_objective: ObjectiveName | None = None
    """Objective whose probability `min_quality` bounds; by default there is no bound."""
    min_quality: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Minimum probability of `quality_objective` for an ad to take part."""
    objective_values: dict[ObjectiveName, SignedMoney] = {}
    """Value of an event of an objective to the surface, in addition to the campaign's payment."""


class AuctionSpec(StrictModel):
    """What campaigns bid, for which objective they pay, and on which terms ads compete."""

    bid: str
    """Raw column of items with the bid of the campaign, per event that it pays for."""
    goal: str
    """Raw column of items with the goal of the campaign."""
    target_roas: str | None = None
    """Raw column of items with the target ROAS: bids are predicted value / target, up to `bid`."""
    advertiser: CategoryName | None = None
    """Item attribute of the advertiser, whose ads do not price each other; default: one per ad."""
    goal_objectives: dict[str, ObjectiveName]
    """The objective that campaigns of each goal pay for, by the value of the column `goal`."""
    terms: dict[SurfaceName, AuctionTerms] = {}
    """Terms by surface; default: no reserve, no bound on quality, no value to the surface."""
