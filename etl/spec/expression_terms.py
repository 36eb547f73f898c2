"""Parts of an expression on raw columns, as Spark SQL: their kinds, casts and operators."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sqlglot import exp

MAX_SQL_LENGTH = 50_000  # characters of the Spark SQL that is run
MAX_EXACT_INTEGER = 2**53  # integers from here on are not exact in double precision


class Kind(Enum):
    """What an expression returns, by its Spark SQL type."""

    TEXT = "STRING"
    NUMBER = "DOUBLE"
    BOOLEAN = "BOOLEAN"


@dataclass(frozen=True)
class Term:
    """A checked part of an expression, as Spark SQL on the struct `raw`.

    `literal` is the value of a text in quotes.
    """

    sql: str
    kind: Kind
    literal: str | None = None

    def cast(self, kind: Kind) -> str:
        """Spark SQL for the same value as another kind; raises ValueError if it has none."""
        if len(self.sql) > MAX_SQL_LENGTH:
            raise ValueError("the expression is too complex: compute parts of it before ingest")
        if kind is self.kind:
            return self.sql
        if self.kind is Kind.TEXT:
            return _cast_text(self, kind)
        if kind is not Kind.TEXT:
            raise ValueError(f"a {self.kind.name.lower()} is used as a {kind.name.lower()}")
        if self.kind is Kind.BOOLEAN:
            return f"CAST({self.sql} AS STRING)"
        return _number_as_text(self.sql)


def _cast_text(term: Term, kind: Kind) -> str:
    """A text as a number or a boolean; null where it is none. NaN is no number."""
    if term.literal is not None:
        _check_literal(term.literal, kind)
    if kind is Kind.BOOLEAN:
        return f"TRY_CAST({term.sql} AS BOOLEAN)"
    return f"nanvl(TRY_CAST({term.sql} AS DOUBLE), CAST(NULL AS DOUBLE))"


def _check_literal(text: str, kind: Kind) -> None:
    """Raise ValueError for a text in quotes that is no value of a kind."""
    if kind is Kind.BOOLEAN and text.lower() not in ("true", "false"):
        raise ValueError(f"'{text}' is used as a boolean: write true or false")
    if kind is Kind.NUMBER:
        try:
            float(text)
        except ValueError:
            raise ValueError(f"'{text}' is used as a number") from None


def _number_as_text(sql: str) -> str:
    """The text of a finite number; integers without a decimal point, so that they can be cast."""
    integer = f"CAST(CAST({sql} AS BIGINT) AS STRING)"
    is_integer = f"{sql} = rint({sql}) AND abs({sql}) < {MAX_EXACT_INTEGER}"
    is_finite = f"abs({sql}) < CAST('Infinity' AS DOUBLE)"
    return f"CASE WHEN {is_integer} THEN {integer} WHEN {is_finite} THEN CAST({sql} AS STRING) END"


@dataclass(frozen=True)
class Operation:
    """An operator or function: kinds of its arguments by name, of its result, and its Spark SQL."""

    arguments: Mapping[str, Kind]
    result: Kind
    sql: str


def _binary(kind: Kind, result: Kind, sql: str) -> Operation:
    return Operation({"this": kind, "expression": kind}, result, sql)


def _unary(kind: Kind, result: Kind, sql: str) -> Operation:
    return Operation({"this": kind}, result, sql)


TEXT, NUMBER, BOOLEAN = Kind.TEXT, Kind.NUMBER, Kind.BOOLEAN
OPERATIONS: Mapping[type[exp.Expr], Operation] = {
    exp.And: _binary(BOOLEAN, BOOLEAN, "({0} AND {1})"),
    exp.Or: _binary(BOOLEAN, BOOLEAN, "({0} OR {1})"),
    exp.Not: _unary(BOOLEAN, BOOLEAN, "(NOT {0})"),
    exp.Add: _binary(NUMBER, NUMBER, "({0} + {1})"),
    exp.Sub: _binary(NUMBER, NUMBER, "({0} - {1})"),
    exp.Mul: _binary(NUMBER, NUMBER, "({0} * {1})"),
    exp.Div: _binary(NUMBER, NUMBER, "try_divide({0}, {1})"),
    exp.Mod: _binary(NUMBER, NUMBER, "try_mod({0}, {1})"),
    exp.Neg: _unary(NUMBER, NUMBER, "(-{0})"),
    exp.Abs: _unary(NUMBER, NUMBER, "abs({0})"),
    exp.Ln: _unary(NUMBER, NUMBER, "ln({0})"),
    exp.Sqrt: _unary(NUMBER, NUMBER, "sqrt({0})"),
    exp.Floor: _unary(NUMBER, NUMBER, "CAST(floor({0}) AS DOUBLE)"),
    exp.Length: _unary(TEXT, NUMBER, "CAST(length({0}) AS DOUBLE)"),
    exp.Lower: _unary(TEXT, TEXT, "lower({0})"),
    exp.Upper: _unary(TEXT, TEXT, "upper({0})"),
    exp.Trim: _unary(TEXT, TEXT, "trim({0})"),
}
