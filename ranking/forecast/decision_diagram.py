"""The canonical form of a condition: two conditions have the same one if they are equivalent.

It is a reduced, ordered decision diagram over the attributes: a node has one attribute, and for
each set of its values what the rest of the condition is then; nodes that do not depend on their
attribute are left out. It depends on the values that attributes may have, not on any user.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from operator import itemgetter
from typing import TypeAlias

from etl.errors import UserError
from ranking.forecast.conditions import Condition, Domain, Junction, Not, Range, Value, Values

MAX_NODES = 2_000
Residual: TypeAlias = Condition | bool  # of a condition, once some attributes are known
Diagram: TypeAlias = Hashable


def canonical_form(condition: Condition | None, domain: Domain) -> Diagram:
    """The diagram of a condition as nested tuples, or a bool if no attribute matters.

    Raises:
        UserError: The diagram has too many nodes.
    """
    if condition is None:
        return True
    names = sorted({leaf.attribute for leaf in _leaves(condition)})
    return _DiagramBuilder(domain).build(condition, names)


class _DiagramBuilder:
    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.built: dict[tuple[Residual, int], Diagram] = {}

    def build(self, residual: Residual, names: Sequence[str]) -> Diagram:
        """The diagram of what is left of a condition, on the attributes `names`."""
        if isinstance(residual, bool):
            return residual
        key = residual, len(names)
        if key not in self.built:
            if len(self.built) >= MAX_NODES:
                raise UserError(
                    "the targeting combines too many attributes by `or` and `not`: leave some out"
                )
            self.built[key] = self._node(residual, names[0], names[1:])
        return self.built[key]

    def _node(self, residual: Condition, name: str, rest: Sequence[str]) -> Diagram:
        values = self.domain[name]
        if values is None:
            return self._numeric_node(residual, name, rest)
        leaves = [x for x in _leaves(residual) if isinstance(x, Values) and x.attribute == name]
        by_membership: dict[tuple[bool, ...], list[Value]] = {}
        for value in values:
            membership = tuple(value in leaf.allowed for leaf in leaves)
            by_membership.setdefault(membership, []).append(value)
        by_child: dict[Diagram, list[str]] = {}
        for equivalent in by_membership.values():
            child = self.build(_assign(residual, name, equivalent[0]), rest)
            by_child.setdefault(child, []).extend(map(str, equivalent))
        if len(by_child) == 1:
            return next(iter(by_child))
        edges = ((tuple(sorted(labels)), child) for child, labels in by_child.items())
        return name, tuple(sorted(edges, key=itemgetter(0)))

    def _numeric_node(self, residual: Condition, name: str, rest: Sequence[str]) -> Diagram:
        """A node whose intervals begin where its child changes; a missing number is in no range."""
        ranges = [x for x in _leaves(residual) if isinstance(x, Range) and x.attribute == name]
        starts = {-math.inf}
        for leaf in ranges:
            starts |= {leaf.low, math.nextafter(leaf.high, math.inf)}
        missing = self.build(_assign(residual, name, None), rest)
        intervals: list[tuple[float, Diagram]] = []
        for start in sorted(starts):
            child = self.build(_assign(residual, name, start), rest)
            if not intervals or intervals[-1][1] != child:
                intervals.append((start, child))
        if len(intervals) == 1 and intervals[0][1] == missing:
            return missing
        return name, missing, tuple(intervals)


def _leaves(condition: Condition) -> Iterator[Values | Range]:
    if isinstance(condition, Junction):
        for child in condition.children:
            yield from _leaves(child)
    elif isinstance(condition, Not):
        yield from _leaves(condition.child)
    else:
        yield condition


def _assign(condition: Condition, name: str, value: Value | float | None) -> Residual:
    """What is left of a condition if an attribute has a value, None if its number is missing."""
    if isinstance(condition, Not):
        child = _assign(condition.child, name, value)
        return not child if isinstance(child, bool) else Not(child)
    if isinstance(condition, Junction):
        return _assign_junction(condition, name, value)
    if condition.attribute != name:
        return condition
    if isinstance(condition, Values):
        return value in condition.allowed
    return value is not None and condition.low <= float(value) <= condition.high


def _assign_junction(condition: Junction, name: str, value: Value | float | None) -> Residual:
    decides = condition.operator == "or"  # the value of one child that decides the junction
    left: list[Condition] = []
    for child in condition.children:
        residual = _assign(child, name, value)
        if residual is decides:
            return decides
        if not isinstance(residual, bool):
            left.append(residual)
    if not left:
        return not decides
    return left[0] if len(left) == 1 else Junction(condition.operator, tuple(left))
