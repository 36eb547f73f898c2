"""Attributes of users, items and impressions: what a column means to a model."""

from typing import Annotated, Literal

from pydantic import Field

from etl.spec.base import Name, Strict


class Categorical(Strict):
    """A value out of many. Without a vocabulary it is hashed into `size` rows; row 0 is missing."""

    type: Literal["categorical"] = "categorical"
    size: int = Field(default=64, ge=2)
    vocabulary: tuple[str, ...] | None = None
    column: str | None = None

    @property
    def rows(self) -> int:
        """Rows of the embedding table: missing, then (unknown and the vocabulary) or the hashes."""
        return self.size if self.vocabulary is None else len(self.vocabulary) + 2


class Numeric(Strict):
    """A number; `log` keeps the sign and compresses the size, ln(1 + |x|)."""

    type: Literal["numeric"]
    transform: Literal["none", "log"] = "none"
    column: str | None = None


class Vector(Strict):
    """A list of `width` numbers, such as a creative embedding."""

    type: Literal["vector"]
    width: int = Field(ge=1)
    column: str | None = None


class Clock(Strict):
    """A part of the local time of the impression; it has no column in the log."""

    type: Literal["clock"]
    part: Literal["hour", "weekday"]

    @property
    def rows(self) -> int:
        """Rows of the embedding table: missing, then the hours or the weekdays."""
        return 25 if self.part == "hour" else 8


UserAttribute = Annotated[Categorical | Numeric, Field(discriminator="type")]
ItemAttribute = Annotated[Categorical | Numeric | Vector, Field(discriminator="type")]
ContextAttribute = Annotated[Categorical | Numeric | Clock, Field(discriminator="type")]


class Attributes(Strict):
    """Attributes by what they describe; those of users and items may change over time."""

    user: dict[Name, UserAttribute] = {}
    item: dict[Name, ItemAttribute] = {}
    context: dict[Name, ContextAttribute] = {}
