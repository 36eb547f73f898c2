"""Parts of an expression on raw columns: their kinds, casts and operators.

Each part is Spark SQL for logs, and a function in Python with the same values for the records that
a service is sent.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from sqlglot import exp

from etl.spec import expression_values as values
from etl.spec.expression_values import MAX_EXACT_INTEGER, Function, Value, null_if_any_null

MAX_SQL_LENGTH = 50_000  # characters of the Spark SQL that is run

Record = Mapping[str, str | None]  # raw columns by name; what is not named is null
Evaluation = Callable[[Record], Value]


class Kind(Enum):
    """What an expression returns, by its Spark SQL type."""

    TEXT = "STRING"
    NUMBER = "DOUBLE"
    BOOLEAN = "BOOLEAN"


@dataclass(frozen=True)
class Term:
    """A checked part of an expression.

    Attributes:
        sql: Spark SQL on the struct `raw`.
        kind: What it returns.
        evaluate: Returns the value of a record.
        literal: The value of a text in quotes.
    """

    sql: str
    kind: Kind
    evaluate: Evaluation
    literal: str | None = None

    def cast(self, kind: Kind) -> "Term":
        """The same value as another kind; raises ValueError if it has none."""
        if len(self.sql) > MAX_SQL_LENGTH:
            raise ValueError("the expression is too complex: compute parts of it before ingest")
        if kind is self.kind:
            return self
        if self.kind is Kind.TEXT:
            return _cast_text(self, kind)
        if kind is not Kind.TEXT:
            raise ValueError(f"a {self.kind.name.lower()} is used as a {kind.name.lower()}")
        if self.kind is Kind.BOOLEAN:
            sql = f"CAST({self.sql} AS STRING)"
            return Term(sql, kind, evaluation(values.text_of_boolean, self))
        return Term(_number_as_text(self.sql), kind, evaluation(values.text_of_number, self))


def evaluation(function: Function, *arguments: Term) -> Evaluation:
    """The function of the values of some terms; one or two need no further call per level."""
    evaluations = [argument.evaluate for argument in arguments]
    if len(evaluations) == 1:
        (first,) = evaluations
        return lambda record: function(first(record))
    if len(evaluations) == 2:
        first, second = evaluations
        return lambda record: function(first(record), second(record))
    return lambda record: function(*[evaluate(record) for evaluate in evaluations])


def _cast_text(term: Term, kind: Kind) -> Term:
    """A text as a number or a boolean; null where it is none. NaN is no number."""
    if term.literal is not None:
        _check_literal(term.literal, kind)
    if kind is Kind.BOOLEAN:
        sql = f"TRY_CAST({term.sql} AS BOOLEAN)"
        return Term(sql, kind, evaluation(values.boolean_of_text, term))
    sql = f"nanvl(TRY_CAST({term.sql} AS DOUBLE), CAST(NULL AS DOUBLE))"
    return Term(sql, kind, evaluation(values.number_of_text, term))


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
    """An operator or function: the kinds of its arguments by name and of its result.

    `sql` is a template of its Spark SQL, `function` returns its value in Python.
    """

    arguments: Mapping[str, Kind]
    result: Kind
    sql: str
    function: Function


def _binary(kind: Kind, result: Kind, sql: str, function: Function) -> Operation:
    return Operation({"this": kind, "expression": kind}, result, sql, function)


def _unary(kind: Kind, result: Kind, sql: str, function: Function) -> Operation:
    return Operation({"this": kind}, result, sql, function)


@null_if_any_null
def _length(text: str) -> float:
    return float(len(text))


@null_if_any_null
def _trim(text: str) -> str:
    return text.strip(" ")


TEXT, NUMBER, BOOLEAN = Kind.TEXT, Kind.NUMBER, Kind.BOOLEAN
OPERATIONS: Mapping[type[exp.Expr], Operation] = {
    exp.And: _binary(BOOLEAN, BOOLEAN, "({0} AND {1})", values.and_),
    exp.Or: _binary(BOOLEAN, BOOLEAN, "({0} OR {1})", values.or_),
    exp.Not: _unary(BOOLEAN, BOOLEAN, "(NOT {0})", values.not_),
    exp.Add: _binary(NUMBER, NUMBER, "({0} + {1})", null_if_any_null(operator.add)),
    exp.Sub: _binary(NUMBER, NUMBER, "({0} - {1})", null_if_any_null(operator.sub)),
    exp.Mul: _binary(NUMBER, NUMBER, "({0} * {1})", null_if_any_null(operator.mul)),
    exp.Div: _binary(NUMBER, NUMBER, "try_divide({0}, {1})", values.divide),
    exp.Mod: _binary(NUMBER, NUMBER, "try_mod({0}, {1})", values.remainder),
    exp.Neg: _unary(NUMBER, NUMBER, "(-{0})", null_if_any_null(operator.neg)),
    exp.Abs: _unary(NUMBER, NUMBER, "abs({0})", null_if_any_null(abs)),
    exp.Ln: _unary(NUMBER, NUMBER, "ln({0})", values.natural_logarithm),
    exp.Sqrt: _unary(NUMBER, NUMBER, "sqrt({0})", values.square_root),
    exp.Floor: _unary(NUMBER, NUMBER, "CAST(floor({0}) AS DOUBLE)", values.floor),
    exp.Length: _unary(TEXT, NUMBER, "CAST(length({0}) AS DOUBLE)", _length),
    exp.Lower: _unary(TEXT, TEXT, "lower({0})", null_if_any_null(str.lower)),
    exp.Upper: _unary(TEXT, TEXT, "upper({0})", null_if_any_null(str.upper)),
    exp.Trim: _unary(TEXT, TEXT, "trim({0})", _trim),
}
