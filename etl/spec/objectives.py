"""Objectives: what makes a label, and to which impression an outcome is attributed."""

from typing import Annotated, Literal

from pydantic import ValidationInfo, field_validator

from etl.spec.base import EventName, Strict, SurfaceName, declared_in
from etl.spec.units import Duration, format_duration


class Touch(Strict):
    """A kind of event to which an outcome is attributed that follows it within `window`, if any.

    Both are of the same user and item, or value of the item attribute `key`; with `same_surface`
    of the same surface, too.
    """

    touch: EventName
    window: Duration | None = None
    key: Annotated[str, declared_in("attribution keys")] = "item"
    same_surface: bool = False


class Objective(Strict):
    """Whether `event` follows an impression within `window`.

    Labels of the shorter windows `also_within` are kept beside it, each as it was when its window
    had closed. Outcomes that name no impression are attributed to the latest touch of the first
    kind in `attribution` that has one (without kinds, to the latest impression of the same item).
    Outcomes that name an impression which is not known are dropped, or attributed likewise. A label
    is final `settle` after its window has closed.
    """

    event: EventName
    window: Duration
    also_within: tuple[Duration, ...] = ()
    attribution: tuple[Touch, ...] = ()
    unknown_impression: Literal["drop", "last_touch"] = "drop"
    settle: Duration = 0
    surfaces: tuple[SurfaceName, ...] | None = None
    value: bool = False

    @field_validator("also_within")
    @classmethod
    def _shorter(cls, windows: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        longest = info.data.get("window")
        if longest and any(window >= longest for window in windows):
            raise ValueError(f"these windows are shorter ones than {format_duration(longest)}")
        return windows

    @property
    def ripens_after(self) -> int:
        """Seconds from the impression until its label is final."""
        return self.window + self.settle
