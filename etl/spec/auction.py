"""What campaigns offer, and on which terms their ads compete."""

from typing import Annotated

from pydantic import Field

from etl.spec.base import CategoryName, ObjectiveName, Strict, SurfaceName

MAX_MONEY = 1e12  # a larger bid is an error of units; sums of expected values stay finite
Money = Annotated[float, Field(ge=0, le=MAX_MONEY, allow_inf_nan=False)]
Worth = Annotated[float, Field(ge=-MAX_MONEY, le=MAX_MONEY, allow_inf_nan=False)]


class Terms(Strict):
    """The terms of a surface.

    An ad takes part if it is expected to pay at least `reserve`, and if the probability of the
    objective `quality` is at least `floor`. `values` is what an event of an objective is worth to
    the surface itself, beside what the campaign pays.
    """

    reserve: Money = 0.0
    quality: ObjectiveName | None = None
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    values: dict[ObjectiveName, Worth] = {}


class Auction(Strict):
    """Item columns that tell what a campaign bids, and for which objective it pays.

    `advertiser` is the item attribute that identifies the advertiser: ads of one advertiser do not
    set each other's price. Without it each ad counts as an advertiser of its own.
    """

    bid: str
    goal: str
    advertiser: CategoryName | None = None
    pays_for: dict[str, ObjectiveName]
    terms: dict[SurfaceName, Terms] = {}
