"""What campaigns offer, and on which terms their ads compete."""

from typing import Annotated

from pydantic import Field

from etl.spec.base import ObjectiveName, Strict, SurfaceName

Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Terms(Strict):
    """The terms of a surface.

    An ad takes part if it is expected to pay at least `reserve`, and if the probability of the
    objective `quality` is at least `floor`. `values` is what an event of an objective is worth to
    the surface itself, beside what the campaign pays.
    """

    reserve: Money = 0.0
    quality: ObjectiveName | None = None
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    values: dict[ObjectiveName, Annotated[float, Field(allow_inf_nan=False)]] = {}


class Auction(Strict):
    """Item columns that tell what a campaign bids, and for which objective it pays."""

    bid: str
    goal: str
    pays_for: dict[str, ObjectiveName]
    terms: dict[SurfaceName, Terms] = {}
