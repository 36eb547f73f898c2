"""Attributes of users, items, impressions and events: how each raw column is read."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from etl.spec.base import UNIQUE, Name, StrictModel, not_reserved
from etl.spec.counters import EVENT_NUMBERS

MAX_SIZE = 4096  # buckets of a bag: each is a number in memory
MAX_NGRAM = 8
Vocabulary = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_SIZE - 1), UNIQUE]


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


class MultiCategoricalAttribute(StrictModel):
    """Any number of values of many, such as the tags of an item.

    Models read the counts of the values by bucket, scaled to length 1, so that a linear layer
    returns a pooled embedding. The order of the values does not count, and a repeated value counts
    once.
    """

    type: Literal["multi_categorical"]
    """`multi_categorical`: a set of values, compared as text."""
    size: int = Field(default=64, ge=2, le=MAX_SIZE)
    """Buckets into which values are hashed; unused with a `vocabulary`."""
    vocabulary: Vocabulary | None = None
    """All known values, each with a bucket of its own; without it values are hashed."""
    separator: str | None = Field(default=None, min_length=1)
    """What stands between the values of a text, such as `|`; by default the column has lists."""
    column: str | None = None
    """Name of the raw column; by default the name of the attribute."""

    @property
    def width(self) -> int:
        """The number of buckets: unknown and the vocabulary, or the hashes."""
        return self.size if self.vocabulary is None else len(self.vocabulary) + 1


class TextAttribute(StrictModel):
    """A short text, such as a title or a query, as hashed n-grams.

    Models read the counts of the n-grams by bucket, scaled to length 1. Texts are in lower case,
    and words are what stands between spaces and punctuation.
    """

    type: Literal["text"]
    """`text`: a text, read as hashed n-grams."""
    size: int = Field(default=256, ge=2, le=MAX_SIZE)
    """Buckets into which n-grams are hashed."""
    analyzer: Literal["word", "char"] = "word"
    """`word`: n-grams of words; `char`: n-grams of characters, across words."""
    ngram_range: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(le=MAX_NGRAM)]] = (1, 1)
    """The smallest and the largest number of words or characters of an n-gram."""
    column: str | None = None
    """Name of the raw column; by default the name of the attribute."""

    @model_validator(mode="after")
    def _check_ngram_range(self) -> Self:
        if self.ngram_range[0] > self.ngram_range[1]:
            raise ValueError("ngram_range: the first number is at most the second")
        return self

    @property
    def width(self) -> int:
        """The number of buckets."""
        return self.size


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


LoggedAttribute: TypeAlias = (
    CategoricalAttribute
    | NumericAttribute
    | VectorAttribute
    | MultiCategoricalAttribute
    | TextAttribute
)
Attribute: TypeAlias = LoggedAttribute | LocalTimeAttribute
EventAttribute = Annotated[CategoricalAttribute | NumericAttribute, Field(discriminator="type")]
EntityAttribute = Annotated[LoggedAttribute, Field(discriminator="type")]
ContextAttribute = Annotated[Attribute, Field(discriminator="type")]
BagAttribute: TypeAlias = MultiCategoricalAttribute | TextAttribute
"""Attributes of which models read a vector of counts."""

COUNTER_KEYS = ("user", "item", "surface")  # besides attributes
# An attribute `x` becomes the column `user_x`, `item_x`, `ctx_x` or `event_x`, and an item's may be
# a counter key. No other column of these tables begins with `ctx_`, so names of context attributes
# are free.
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
RESERVED_EVENT_ATTRIBUTES = {
    "id": "the table events has a column `event_id`",
    "ts": "the table events has a column `event_ts`",
    **dict.fromkeys(EVENT_NUMBERS, "events have a column of this name"),
    **dict.fromkeys(COUNTER_KEYS, "counters have a key of this name"),
}
UserAttributeName = Annotated[Name, not_reserved(RESERVED_USER_ATTRIBUTES)]
ItemAttributeName = Annotated[Name, not_reserved(RESERVED_ITEM_ATTRIBUTES)]
EventAttributeName = Annotated[Name, not_reserved(RESERVED_EVENT_ATTRIBUTES)]


class Attributes(StrictModel):
    """Attributes that models read; those of users and items may change over time."""

    user: dict[UserAttributeName, EntityAttribute] = {}
    """Attributes of users, by name; their values come from the `attributes` source of users."""
    item: dict[ItemAttributeName, EntityAttribute] = {}
    """Attributes of items, by name; their values come from the `attributes` source of items."""
    context: dict[Name, ContextAttribute] = {}
    """Attributes of impressions, by name; their values are columns of the logs."""
    event: dict[EventAttributeName, EventAttribute] = {}
    """Attributes of events that no request knows, such as the quantity of a purchase, by name.

    Counters read them, and GEM those of `history.attributes`. Their values are columns of the logs.
    """
