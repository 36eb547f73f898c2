"""The base of every model of the spec, and names that must be declared elsewhere in it."""

from difflib import get_close_matches
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationInfo


class Strict(BaseModel):
    """A frozen model that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]


def suggestion(name: str, known: list[str]) -> str:
    """`; did you mean 'click'?` where one is close, else the known names."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"


def declared_in(section: str) -> AfterValidator:
    """A validator that a name is declared in `section`.

    The loader passes the names that each section declares as validation context, so a wrong
    reference is reported beside every other error, whether or not that section is valid itself.
    """

    def check(name: str, info: ValidationInfo) -> str:
        known = (info.context or {}).get(section)
        if known is not None and name not in known:
            raise ValueError(f"{name!r} is not among the {section}; {suggestion(name, known)}")
        return name

    return AfterValidator(check)


SurfaceName = Annotated[str, declared_in("surfaces")]
EventName = Annotated[str, declared_in("events")]
ObjectiveName = Annotated[str, declared_in("objectives")]
KeyName = Annotated[str, declared_in("counter keys")]
CategoryName = Annotated[str, declared_in("categorical item attributes")]
