"""Base class of the spec's models, and types of names that another section must declare."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
)

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys; docstrings of attributes describe its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced; the new values are not validated.

        Cached properties are not copied, because they may depend on the replaced fields.

        Raises:
            TypeError: A key of `update` is not a field of the model.
        """
        fields = list(type(self).model_fields)
        for name in update or ():
            if name not in fields:
                hint = suggest_name(name, fields)
                raise TypeError(f"{type(self).__name__} has no field {name!r}; {hint}")
        copy = super().model_copy(update=update, deep=deep)
        for name in copy.__dict__.keys() - type(self).model_fields.keys():
            del copy.__dict__[name]
        return copy


Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]


def suggest_name(name: str, known: list[str]) -> str:
    """`did you mean 'click'?` where a known name is close, else all known names."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"


def declared_in(section: str) -> AfterValidator:
    """A validator that refuses names that `section` does not declare.

    The loader passes the names that each section declares as validation context, so a wrong
    reference is reported together with all other errors, whether or not that section is valid
    itself.
    """

    def check(name: str, info: ValidationInfo) -> str:
        known = (info.context or {}).get(section)
        if known is not None and name not in known:
            raise ValueError(f"{name!r} is not among the {section}; {suggest_name(name, known)}")
        return name

    return AfterValidator(check)


def _check_unique(names: tuple[str, ...]) -> tuple[str, ...]:
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(f"{', '.join(duplicates)} is listed twice")
    return names


UNIQUE = AfterValidator(_check_unique)


def not_reserved(reserved: Mapping[str, str]) -> AfterValidator:
    """A validator that refuses names in `reserved`, which maps each to the reason."""

    def check(name: str) -> str:
        if name in reserved:
            raise ValueError(f"{name!r} is reserved: {reserved[name]}; choose another name")
        return name

    return AfterValidator(check)


SurfaceName = Annotated[str, declared_in("surfaces")]
EventName = Annotated[str, declared_in("events")]
ObjectiveName = Annotated[str, declared_in("objectives")]
NumericContextName = Annotated[str, declared_in("numeric context attributes")]
KeyName = Annotated[str, declared_in("counter keys")]
DistinctColumnName = Annotated[str, declared_in("counter keys and categorical event attributes")]
NumberColumnName = Annotated[
    str, declared_in("dwell, value and numeric attributes of events and of the context")
]
EventAttributeReference = Annotated[str, declared_in("attributes of events")]
SegmentName = Annotated[str, declared_in("categorical attributes and new_item")]
CategoryName = Annotated[str, declared_in("categorical item attributes")]
TargetingName = Annotated[str, declared_in("attributes of users and of the context with one value")]
AudienceName = Annotated[str, declared_in("audiences")]
