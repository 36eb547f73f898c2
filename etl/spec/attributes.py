"""Attributes of users, items and impressions: how models read each raw column."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from etl.spec.base import Name, StrictModel, not_reserved


class CategoricalAttribute(StrictModel):
    """One value of many, read through an embedding table whose row 0 is a missing value."""

    type: Literal["categorical"] = "categorical"
    """`categorical`: a value of a finite set, compared as text."""
    size: int = Field(default=64, ge=2)
    """Rows of the embedding table into which values are hashed; unused with a `vocabulary`."""
    vocabulary: tuple[str, ...] | None = None
    """All known values, each with a row of its own; without it values are hashed."""
    column: str | None = None
    """Name of the raw column; by default the name of the attribute."""

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding table: missing, then (unknown and the vocabulary) or the hashes."""
        return self.size if self.vocabulary is None else len(self.vocabulary) + 2


class NumericAttribute(StrictModel):
    """A number."""

    type: Literal["numeric"]
    """`numeric`: a number."""
    transform: Literal["none", "log"] = "none"
    """`log`: models read sign(x) · ln(1 + abs(x)); `none`: they read x."""
    column: str | None = None
    """Name of the raw column; by default the name of the attribute."""


class VectorAttribute(StrictModel):
    """A list of numbers, such as the embedding of a creative."""

    type: Literal["vector"]
    """`vector`: a list of numbers."""
    width: int = Field(ge=1)
    """Length of the list."""
    column: str | None = None
    """Name of the raw column; by default the name of the attribute."""


class LocalTimeAttribute(StrictModel):
    """A part of the local time of the impression, which needs no column in the log."""

    type: Literal["clock"]
    """`clock`: derived from the time of the impression, in `time_zone`."""
    part: Literal["hour", "weekday"]
    """Which part of the local time models read."""

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding table: missing, then the hours or the weekdays."""
        return 25 if self.part == "hour" else 8


UserAttribute = Annotated[CategoricalAttribute | NumericAttribute, Field(discriminator="type")]
ItemAttribute = Annotated[
    CategoricalAttribute | NumericAttribute | VectorAttribute, Field(discriminator="type")
]
ContextAttribute = Annotated[
    CategoricalAttribute | NumericAttribute | LocalTimeAttribute, Field(discriminator="type")
]
Attribute: TypeAlias = (
    CategoricalAttribute | NumericAttribute | VectorAttribute | LocalTimeAttribute
)

COUNTER_KEYS = ("user", "item", "surface")  # besides attributes
# An attribute `x` becomes the column `user_x`, `item_x` or `ctx_x`, and an item's may be a counter
# key. No other column of these tables begins with `ctx_`, so names of context attributes are free.
RESERVED_USER_ATTRIBUTES = {
    "id": "tables have a column `user_id`",
    "known_since": "the table examples has a column `user_known_since`",
}
RESERVED_ITEM_ATTRIBUTES = {
    "id": "tables have a column `item_id`",
    "index": "tables have a column `item_index`",
    "known_since": "the table examples has a column `item_known_since`",
    **dict.fromkeys(COUNTER_KEYS, "counters have a key of this name"),
}
UserAttributeName = Annotated[Name, not_reserved(RESERVED_USER_ATTRIBUTES)]
ItemAttributeName = Annotated[Name, not_reserved(RESERVED_ITEM_ATTRIBUTES)]


class Attributes(StrictModel):
    """Attributes that models read; those of users and items may change over time."""

    user: dict[UserAttributeName, UserAttribute] = {}
    """Attributes of users, by name; their values come from the `attributes` source of users."""
    item: dict[ItemAttributeName, ItemAttribute] = {}
    """Attributes of items, by name; their values come from the `attributes` source of items."""
    context: dict[Name, ContextAttribute] = {}
    """Attributes of impressions, by name; their values are columns of the logs."""
