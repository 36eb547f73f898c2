"""Conditions on attributes, and the combinations of values that they allow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from etl.errors import UserError

Value: TypeAlias = str | int
Box: TypeAlias = dict[str, frozenset[Value]]
Domain: TypeAlias = Mapping[str, Sequence[Value] | None]


class TargetingError(UserError):
    """A targeting that cannot be used; `position` counts characters from 1."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(f"targeting, character {position}: {message}")
        self.position = position


@dataclass(frozen=True)
class Values:
    """An attribute with values has one of `allowed`."""

    attribute: str
    allowed: frozenset[Value]
    position: int


@dataclass(frozen=True)
class Range:
    """A number lies between two bounds, both included."""

    attribute: str
    low: float
    high: float
    position: int


@dataclass(frozen=True)
class Not:
    """The negation of a condition."""

    child: "Condition"


@dataclass(frozen=True)
class Junction:
    """All of the conditions hold (`and`), or one of them (`or`)."""

    operator: str
    children: tuple["Condition", ...]


Condition: TypeAlias = Values | Range | Not | Junction


def to_box(condition: Condition, domain: Domain) -> Box | None:
    """The values by attribute that a condition allows; None if it is not of this form.

    Raises:
        TargetingError: Conditions that must all hold allow no value of an attribute.
    """
    if isinstance(condition, Values):
        if not condition.allowed:
            text = f"no value of {condition.attribute} satisfies this"
            raise TargetingError(text, condition.position)
        return {condition.attribute: condition.allowed}
    if isinstance(condition, Range):
        return None
    if isinstance(condition, Not):
        return _complement(condition, domain)
    boxes = [to_box(child, domain) for child in condition.children]
    if condition.operator == "or":
        return _union(boxes)
    return _intersection(boxes, condition)


def possible_values(condition: Condition, name: str, domain: Domain) -> frozenset[Value]:
    """The values of an attribute that rows may have that satisfy a condition, whatever its form."""
    every = frozenset(domain[name] or ())
    if isinstance(condition, Junction):
        parts = [possible_values(child, name, domain) for child in condition.children]
        is_and = condition.operator == "and"
        return frozenset.intersection(*parts) if is_and else frozenset.union(*parts)
    box = to_box(condition, domain) or {}
    return box.get(name, every)


def _complement(condition: Not, domain: Domain) -> Box | None:
    box = to_box(condition.child, domain)
    if box is None or len(box) != 1:
        return None
    ((name, allowed),) = box.items()
    left = frozenset(domain[name] or ()) - allowed
    if not left:
        raise TargetingError(f"no value of {name} is left", _first_position(condition))
    return {name: left}


def _union(boxes: Sequence[Box | None]) -> Box | None:
    known = [box for box in boxes if box is not None]
    names = {name for box in known for name in box}
    if len(known) < len(boxes) or len(names) != 1:
        return None
    (name,) = names
    return {name: frozenset().union(*(box[name] for box in known))}


def _intersection(boxes: Sequence[Box | None], condition: Junction) -> Box | None:
    """All boxes hold; contradictions are found even beside conditions of other forms."""
    common: Box = {}
    for box, child in zip(boxes, condition.children, strict=True):
        for name, allowed in (box or {}).items():
            common[name] = common.get(name, allowed) & allowed
            if not common[name]:
                raise _contradiction(name, _first_position(child))
    _require_overlap(_required_ranges(condition))
    return None if any(box is None for box in boxes) else common


def _required_ranges(condition: Condition) -> list[Range]:
    """The ranges that must all hold."""
    if isinstance(condition, Junction) and condition.operator == "and":
        return [found for child in condition.children for found in _required_ranges(child)]
    return [condition] if isinstance(condition, Range) else []


def _require_overlap(ranges: Sequence[Range]) -> None:
    """Raise TargetingError if no number of an attribute is in all of its ranges."""
    low: dict[str, float] = {}
    high: dict[str, float] = {}
    for one in ranges:
        name = one.attribute
        low[name] = max(low.get(name, one.low), one.low)
        high[name] = min(high.get(name, one.high), one.high)
        if low[name] > high[name]:
            raise _contradiction(name, one.position)


def _contradiction(name: str, position: int) -> TargetingError:
    text = f"the targeting contradicts itself: no value of {name} satisfies this too"
    return TargetingError(text, position)


def _first_position(condition: Condition) -> int:
    if isinstance(condition, Not):
        return _first_position(condition.child)
    if isinstance(condition, Junction):
        return min(map(_first_position, condition.children))
    return condition.position
