"""The targeting language: conditions on attributes with and, or, not, in and between.

A targeting is written as the WHERE clause of SQL, and parsed by DuckDB's parser. Only the nodes
below are accepted; the condition that runs is written anew, with all values as parameters.
"""

import functools
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import duckdb

from ranking.forecast.conditions import (
    Box,
    Condition,
    Domain,
    Junction,
    Not,
    Range,
    TargetingError,
    Value,
    Values,
    possible_values,
    to_box,
)
from ranking.forecast.decision_diagram import Diagram, canonical_form

MAX_LENGTH = 2000  # characters of a targeting
MAX_DEPTH = 100  # of conditions within conditions, which are read recursively
PREFIX = "SELECT 1 FROM t WHERE (\n"
COMPARISONS = {
    "COMPARE_EQUAL": "=",
    "COMPARE_NOTEQUAL": "!=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
}
_parser = threading.local()


@dataclass(frozen=True)
class Targeting:
    """A parsed targeting; without a condition it is everyone.

    `domain` has the values of each attribute in the window, and None for numeric ones.
    """

    condition: Condition | None
    domain: Domain

    def sql(self) -> tuple[str, tuple[float, ...]]:
        """The condition on columns `target_…`, and its parameters: positions in the domain."""
        parameters: list[float] = []
        if self.condition is None:
            return "true", ()
        return self._to_sql(self.condition, parameters), tuple(parameters)

    def box(self) -> Box | None:
        """The allowed values by attribute, if the targeting allows exactly their combinations.

        An attribute of which all values are allowed is left out: it changes no answer.
        """
        named = self.allowed_values()
        if named is None:
            return None
        return {name: v for name, v in named.items() if len(v) < len(self.domain[name] or ())}

    def possible_values(self, name: str) -> frozenset[Value]:
        """The values of an attribute that the impressions of the targeting may have."""
        if self.condition is None:
            return frozenset(self.domain[name] or ())
        return possible_values(self.condition, name, self.domain)

    def allowed_values(self) -> Box | None:
        """`box` with the attributes of which all values are allowed."""
        if self.condition is None:
            return {}
        return to_box(self.condition, self.domain)

    def canonical_form(self) -> Diagram:
        """What is equal for equivalent targetings only."""
        return canonical_form(self.condition, self.domain)

    def _to_sql(self, condition: Condition, parameters: list[float]) -> str:
        if isinstance(condition, Junction):
            parts = (self._to_sql(child, parameters) for child in condition.children)
            return f"({f' {condition.operator} '.join(parts)})"
        if isinstance(condition, Not):
            return f"NOT {self._to_sql(condition.child, parameters)}"
        column = f"target_{condition.attribute}"
        if isinstance(condition, Range):
            parameters += [condition.low, condition.high]
            return f"coalesce({column} BETWEEN ? AND ?, false)"
        known = self.domain[condition.attribute] or ()
        codes = [code for code, value in enumerate(known) if value in condition.allowed]
        ranges = _consecutive(codes)  # DuckDB compares ranges faster than lists
        parameters += [bound for pair in ranges for bound in pair]
        return f"({' OR '.join([f'{column} BETWEEN ? AND ?'] * len(ranges)) or 'false'})"


def parse_targeting(text: str, domain: Domain, listed: Domain | None = None) -> Targeting:
    """Parse a targeting on the attributes and values of `domain`.

    Args:
        text: The targeting.
        domain: The values of each attribute in the window.
        listed: Those that may be named; by default all.

    Raises:
        TargetingError: The text is not a targeting, names what is not listed, or contradicts
            itself.
    """
    if len(text) > MAX_LENGTH:
        raise TargetingError(f"it has {len(text):,} characters, at most {MAX_LENGTH:,}", MAX_LENGTH)
    if not text.strip():
        return Targeting(None, domain)
    try:
        condition = _Reader(domain, listed or domain).read(_parse_where(text))
    except RecursionError:
        raise _too_deep() from None
    targeting = Targeting(condition, domain)
    targeting.allowed_values()  # raises for contradictions
    return targeting


def _too_deep() -> TargetingError:
    text = f"conditions are nested more than {MAX_DEPTH} deep: remove parentheses and not"
    return TargetingError(text, 1)


def _parse_where(text: str) -> dict[str, Any]:
    """DuckDB's syntax tree of a condition."""
    if not hasattr(_parser, "connection"):
        _parser.connection = duckdb.connect()
    statement = f"{PREFIX}{text}\n)"
    (serialized,) = _parser.connection.execute(
        "SELECT json_serialize_sql(?)", [statement]
    ).fetchone()
    tree = _with_characters(json.loads(serialized), statement.encode())
    if "position" in tree:
        position = min(max(int(tree["position"]) - len(PREFIX), 0), len(text)) + 1
        raise TargetingError(str(tree["error_message"]), position)
    statements = tree.get("statements", [])
    select = statements[0]["node"] if len(statements) == 1 else {}
    where = select.pop("where_clause", None)
    if where is None or _without_locations(select) != _empty_select():
        raise TargetingError("write one condition only, such as country = 'US'", 1)
    return dict(where)


def _with_characters(node: Any, statement: bytes) -> Any:
    """A syntax tree with positions in characters; DuckDB counts the bytes of the statement."""
    if isinstance(node, dict):
        return {
            name: len(statement[: int(child)].decode(errors="ignore"))
            if name in ("query_location", "position")
            else _with_characters(child, statement)
            for name, child in node.items()
        }
    if isinstance(node, list):
        return [_with_characters(child, statement) for child in node]
    return node


@functools.cache
def _empty_select() -> dict[str, Any]:
    """The syntax tree around a condition."""
    (serialized,) = _parser.connection.execute(
        "SELECT json_serialize_sql(?)", [f"{PREFIX}true\n)"]
    ).fetchone()
    select = json.loads(serialized)["statements"][0]["node"]
    select.pop("where_clause")
    return dict(_without_locations(select))


def _without_locations(node: Any) -> Any:
    if isinstance(node, dict):
        names = (name for name in node if not name.startswith("query_location"))
        return {name: _without_locations(node[name]) for name in names}
    return [_without_locations(child) for child in node] if isinstance(node, list) else node


@dataclass(frozen=True)
class _Reader:
    """Reads the accepted nodes of a syntax tree; values that are not `listed` do not exist."""

    domain: Domain
    listed: Domain

    def read(self, node: Mapping[str, Any], depth: int = 0) -> Condition:
        kind = node["type"]
        if depth > MAX_DEPTH:
            raise _too_deep()
        if kind in ("CONJUNCTION_AND", "CONJUNCTION_OR"):
            operator = "and" if kind == "CONJUNCTION_AND" else "or"
            children = (self.read(child, depth + 1) for child in node["children"])
            return Junction(operator, tuple(children))
        if kind == "OPERATOR_NOT":
            return Not(self.read(node["children"][0], depth + 1))
        if kind in ("COMPARE_IN", "COMPARE_NOT_IN"):
            name = self._attribute(node["children"][0])
            values = [self._value(name, child) for child in node["children"][1:]]
            found = self._one_of(name, values, _position(node["children"][0]))
            return found if kind == "COMPARE_IN" else Not(found)
        if kind == "COMPARE_BETWEEN":
            name = self._attribute(node["input"])
            low, high = self._number(node["lower"]), self._number(node["upper"])
            if low > high:
                text = f"between {low:g} and {high:g} is empty: write the lower bound first"
                raise TargetingError(text, _position(node["input"]))
            return self._between(name, low, high, _position(node["input"]))
        if kind in COMPARISONS:
            return self._comparison(node, COMPARISONS[kind])
        raise TargetingError("use and, or, not, in, between and comparisons", _position(node))

    def _comparison(self, node: Mapping[str, Any], operator: str) -> Condition:
        name, position = self._attribute(node["left"]), _position(node["left"])
        if operator in ("=", "!="):
            equal = self._one_of(name, [self._value(name, node["right"])], position)
            return equal if operator == "=" else Not(equal)
        bound = self._number(node["right"])
        low, high = {
            "<": (-math.inf, math.nextafter(bound, -math.inf)),
            "<=": (-math.inf, bound),
            ">": (math.nextafter(bound, math.inf), math.inf),
            ">=": (bound, math.inf),
        }[operator]
        return self._between(name, low, high, position)

    def _one_of(self, name: str, values: Sequence[Any], position: int) -> Condition:
        if self.domain[name] is not None:
            return Values(name, frozenset(values), position)
        ranges = tuple(Range(name, float(v), float(v), position) for v in values)
        return ranges[0] if len(ranges) == 1 else Junction("or", ranges)

    def _between(self, name: str, low: float, high: float, position: int) -> Condition:
        known = self.domain[name]
        if known is None:
            return Range(name, low, high, position)
        if any(isinstance(value, str) for value in known):
            raise TargetingError(f"values of {name} have no order: use =, != or in", position)
        is_listed = any(low <= float(v) <= high for v in self.listed[name] or ())
        allowed = [v for v in known if low <= float(v) <= high] if is_listed else []
        return Values(name, frozenset(allowed), position)

    def _attribute(self, node: Mapping[str, Any]) -> str:
        if node["type"] != "COLUMN_REF" or len(node["column_names"]) != 1:
            raise TargetingError("an attribute is expected here", _position(node))
        name = str(node["column_names"][0]).lower()
        if name not in self.domain:
            known = ", ".join(self.domain)
            raise TargetingError(f"no attribute is called {name}; known: {known}", _position(node))
        return name

    def _value(self, name: str, node: Mapping[str, Any]) -> Value | float:
        """A literal that the attribute may have."""
        literal, known = _literal(node), self.listed[name]
        if known is None:
            return self._number(node)
        if literal in known:
            return known[known.index(literal)]  # 8 where 8.0 is written
        close = get_close_matches(str(literal), list(map(str, known)), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"values: {_sample_of(known)}"
        raise TargetingError(f"too few users have {name} = {literal!r}; {hint}", _position(node))

    def _number(self, node: Mapping[str, Any]) -> float:
        literal = _literal(node)
        if isinstance(literal, str):
            raise TargetingError(f"{literal!r} is not a number", _position(node))
        number = float(str(literal))  # infinite if it has too many digits
        if math.isinf(number):
            raise TargetingError("this number is too large", _position(node))
        return number


def _literal(node: Mapping[str, Any]) -> str | int | float:
    if node["type"] != "VALUE_CONSTANT":
        raise TargetingError("a value is expected here: texts in 'quotes'", _position(node))
    kind, text = node["literal"]["kind"], node["literal"].get("text", "")
    if kind == "STRING":
        return str(text)
    if kind == "INTEGER":
        return int(text)
    if kind == "NUMERIC":
        return float(text)
    raise TargetingError("a text or a number is expected here", _position(node))


def _position(node: Mapping[str, Any]) -> int:
    return max(int(node["query_location"]) - len(PREFIX), 0) + 1


def _sample_of(values: Sequence[Value]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"{shown}, … ({len(values)})" if len(values) > 8 else shown


def _consecutive(codes: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as ranges, both bounds included."""
    ranges: list[tuple[int, int]] = []
    for code in codes:
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], code
        else:
            ranges.append((code, code))
    return ranges
