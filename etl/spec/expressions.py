"""Expressions on the raw columns of a source: a subset of Spark SQL that cannot fail on a record.

Raw columns are texts. Where a number or a truth value is expected, a text is cast, and is null if
that fails; a division by zero is null. Only the nodes of a parsed expression that are listed here
are accepted, so that an expression reads nothing but its record.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import sqlglot
from pydantic import AfterValidator
from sqlglot import exp
from sqlglot.errors import SqlglotError

MAX_LENGTH = 2000  # characters of an expression
MAX_EXACT_INTEGER = 2**53  # larger integers are not exact in double precision
NUMBER_FORMAT = "0." + 17 * "#"  # integers have no decimal point, so that they can be cast to int


class Kind(Enum):
    """What an expression returns, by its Spark SQL type."""

    TEXT = "STRING"
    NUMBER = "DOUBLE"
    BOOLEAN = "BOOLEAN"


@dataclass(frozen=True)
class Term:
    """A checked part of an expression, as Spark SQL on the struct `raw`."""

    sql: str
    kind: Kind
    is_literal: bool = False

    def cast(self, kind: Kind) -> str:
        """Spark SQL for the same value as another kind; raises ValueError if that has no sense."""
        if kind is self.kind:
            return self.sql
        if self.kind is Kind.TEXT:
            return f"TRY_CAST({self.sql} AS {kind.value})"
        if kind is Kind.TEXT and self.kind is Kind.NUMBER:
            return f"format_number({self.sql}, '{NUMBER_FORMAT}')"
        if kind is Kind.TEXT:
            return f"CAST({self.sql} AS STRING)"
        raise ValueError(f"a {self.kind.name.lower()} is used as a {kind.name.lower()}")


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
    exp.DPipe: _binary(TEXT, TEXT, "concat({0}, {1})"),
}
COMPARISONS: Mapping[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.NullSafeEQ: "<=>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
EQUALITIES = (exp.EQ, exp.NEQ, exp.NullSafeEQ)
CASTS = {"DOUBLE": NUMBER, "TEXT": TEXT, "BOOLEAN": BOOLEAN}
# Properties that the parser gives nodes of Spark SQL; they do not change what is computed here.
NEUTRAL_PROPERTIES = {"typed", "safe", "coalesce"}
SUPPORTED = (
    "supported are and, or, not, =, <>, <, <=, >, >=, in, between, like, is null, + - * / %, ||, "
    "case, if, coalesce, nullif, concat, lower, upper, trim, length, substring, abs, floor, ln, "
    "sqrt and cast to double, string or boolean"
)


@dataclass(frozen=True)
class RawExpression:
    """A checked expression: its Spark SQL on the struct `raw`, and the raw columns it reads."""

    sql: str
    columns: tuple[str, ...]


@functools.cache
def parse_condition(text: str) -> RawExpression:
    """A condition; raises ValueError if the text is none of the supported subset of Spark SQL."""
    return _parse(text, BOOLEAN)


@functools.cache
def parse_column(text: str) -> RawExpression:
    """A computed column, as text; raises ValueError like `parse_condition`."""
    return _parse(text, TEXT)


def _check_condition(text: str) -> str:
    parse_condition(text)
    return text


def _check_column(text: str) -> str:
    parse_column(text)
    return text


Condition = Annotated[str, AfterValidator(_check_condition)]
ComputedColumn = Annotated[str, AfterValidator(_check_column)]


def _parse(text: str, kind: Kind) -> RawExpression:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"an expression has at most {MAX_LENGTH:,} characters, not {len(text):,}")
    try:
        tree = sqlglot.parse_one(text, read="spark")
    except SqlglotError as error:
        raise ValueError(_describe(error, text)) from None
    sql = _read(tree).cast(kind)
    columns = dict.fromkeys(map(_column_name, tree.find_all(exp.Column)))
    return RawExpression(sql, tuple(columns))


def _describe(error: SqlglotError, text: str) -> str:
    """Where the parser gave up."""
    details = getattr(error, "errors", None)
    if not details:
        return f"{text!r} is not an expression of Spark SQL"
    return f"not an expression of Spark SQL from character {details[0]['col']} on: {text!r}"


def _read(node: exp.Expr) -> Term:
    """A node and all nodes below it; raises ValueError for one that is not supported."""
    kind_of_node = type(node)
    if kind_of_node in OPERATIONS:
        return _read_operation(node, OPERATIONS[kind_of_node])
    if kind_of_node in COMPARISONS:
        return _read_comparison(node)
    if kind_of_node not in _READERS:
        raise ValueError(f"{node.sql('spark')!r} is not supported; {SUPPORTED}")
    return _READERS[kind_of_node](node)


def _arguments(node: exp.Expr, *names: str) -> list[exp.Expr]:
    """The arguments of a node with these names; raises ValueError if it has any other."""
    others = [
        name
        for name, value in node.args.items()
        if value and name not in names and name not in NEUTRAL_PROPERTIES
    ]
    if others or not all(isinstance(node.args.get(name), exp.Expr) for name in names):
        raise ValueError(f"{node.sql('spark')!r} has arguments that are not supported")
    return [node.args[name] for name in names]


def _read_operation(node: exp.Expr, operation: Operation) -> Term:
    values = _arguments(node, *operation.arguments)
    kinds = operation.arguments.values()
    sql = [_read(value).cast(kind) for value, kind in zip(values, kinds, strict=True)]
    return Term(operation.sql.format(*sql), operation.result)


def _read_comparison(node: exp.Expr) -> Term:
    left, right = map(_read, _arguments(node, "this", "expression"))
    if not isinstance(node, EQUALITIES):
        _check_order(node, (left, right))
    first, second = _as_one_kind((left, right))
    return Term(f"({first.sql} {COMPARISONS[type(node)]} {second.sql})", BOOLEAN)


def _check_order(node: exp.Expr, terms: Sequence[Term]) -> None:
    """Raise ValueError for an order of two columns, which may be meant as numbers or as texts."""
    if all(term.kind is TEXT and not term.is_literal for term in terms):
        raise ValueError(
            f"{node.sql('spark')!r} compares texts; to compare numbers, write cast(… as double)"
        )


def _as_one_kind(terms: Sequence[Term]) -> list[Term]:
    """The terms as numbers if one is a number, or as truth values if one is such a value."""
    kinds = {term.kind for term in terms}
    kind = next((kind for kind in (NUMBER, BOOLEAN) if kind in kinds), TEXT)
    return [Term(term.cast(kind), kind, term.is_literal) for term in terms]


def _read_literal(node: exp.Expr) -> Term:
    text = str(node.this)
    if node.is_string:
        return Term(exp.Literal.string(text).sql("spark"), TEXT, is_literal=True)
    number = float(text)
    if not math.isfinite(number) or (node.is_int and int(text) > MAX_EXACT_INTEGER):
        raise ValueError(f"{text} is not exact as a number: compare it as a text, '{text}'")
    return Term(f"{number!r}D", NUMBER, is_literal=True)


def _read_column(node: exp.Expr) -> Term:
    name = _column_name(node).replace("`", "``")
    return Term(f"raw.`{name}`", TEXT)


def _column_name(node: exp.Expr) -> str:
    """The raw column of a node, such as `user.id`."""
    parts = [
        node.args[level] for level in ("catalog", "db", "table", "this") if node.args.get(level)
    ]
    if not all(isinstance(part, exp.Identifier) for part in parts):
        raise ValueError(f"{node.sql('spark')!r} is not the name of a column")
    return ".".join(part.name for part in parts)


def _read_cast(node: exp.Expr) -> Term:
    kind = CASTS.get(node.args["to"].sql().upper())
    if kind is None or node.args.get("format"):
        raise ValueError(f"{node.sql('spark')!r}: casts are to double, string or boolean")
    return Term(_read(node.this).cast(kind), kind)


def _read_is(node: exp.Expr) -> Term:
    value, what = _arguments(node, "this", "expression")
    term = _read(value)
    if isinstance(what, exp.Null):
        return Term(f"({term.sql} IS NULL)", BOOLEAN)
    return Term(f"({term.cast(BOOLEAN)} <=> {_read(what).cast(BOOLEAN)})", BOOLEAN)


def _read_in(node: exp.Expr) -> Term:
    if node.args.get("query") or not node.expressions:
        raise ValueError(f"{node.sql('spark')!r}: write the values as a list, in ('a', 'b')")
    value, *values = _as_one_kind([_read(n) for n in (node.this, *node.expressions)])
    return Term(f"({value.sql} IN ({', '.join(term.sql for term in values)}))", BOOLEAN)


def _read_between(node: exp.Expr) -> Term:
    terms = [_read(part) for part in _arguments(node, "this", "low", "high")]
    _check_order(node, terms)
    value, low, high = _as_one_kind(terms)
    return Term(f"({value.sql} BETWEEN {low.sql} AND {high.sql})", BOOLEAN)


def _read_like(node: exp.Expr) -> Term:
    value, pattern = (_read(node.args[name]) for name in ("this", "expression"))
    if not pattern.is_literal:
        raise ValueError(f"{node.sql('spark')!r}: the pattern of like is a text in quotes")
    negation = "NOT " if node.args.get("negate") else ""
    return Term(f"({value.cast(TEXT)} {negation}LIKE {pattern.cast(TEXT)})", BOOLEAN)


def _read_coalesce(node: exp.Expr) -> Term:
    terms = _as_one_kind([_read(part) for part in (node.this, *node.expressions)])
    return Term(f"coalesce({', '.join(term.sql for term in terms)})", terms[0].kind)


def _read_nullif(node: exp.Expr) -> Term:
    first, second = _as_one_kind([_read(n) for n in _arguments(node, "this", "expression")])
    return Term(f"nullif({first.sql}, {second.sql})", first.kind)


def _read_concat(node: exp.Expr) -> Term:
    texts = [_read(part).cast(TEXT) for part in node.expressions]
    return Term(f"concat({', '.join(texts)})", TEXT)


def _read_substring(node: exp.Expr) -> Term:
    bounds = [node.args[name] for name in ("start", "length") if node.args.get(name)]
    if not all(isinstance(bound, exp.Literal) and bound.is_int for bound in bounds):
        raise ValueError(f"{node.sql('spark')!r}: write start and length as integers")
    sql = ", ".join([_read(node.this).cast(TEXT), *(bound.name for bound in bounds)])
    return Term(f"substring({sql})", TEXT)


def _read_case(node: exp.Expr) -> Term:
    """`case when …` and `if(…)`; without `else`, the value is null."""
    branches = [node] if isinstance(node, exp.If) else node.args["ifs"]
    otherwise = node.args.get("false") or node.args.get("default") or exp.Null()
    if isinstance(node, exp.Case) and node.this:
        raise ValueError(f"{node.sql('spark')!r}: write case when … = … then …")
    conditions = [_read(branch.this).cast(BOOLEAN) for branch in branches]
    *values, default = _as_one_kind([*(_read(b.args["true"]) for b in branches), _read(otherwise)])
    whens = (f"WHEN {c} THEN {v.sql}" for c, v in zip(conditions, values, strict=True))
    return Term(f"CASE {' '.join(whens)} ELSE {default.sql} END", default.kind)


_READERS = {
    exp.Paren: lambda node: _read(node.this),
    exp.Literal: _read_literal,
    exp.Boolean: lambda node: Term(str(node.this).upper(), BOOLEAN, is_literal=True),
    exp.Null: lambda _: Term("CAST(NULL AS STRING)", TEXT, is_literal=True),
    exp.Column: _read_column,
    exp.Cast: _read_cast,
    exp.TryCast: _read_cast,
    exp.Is: _read_is,
    exp.In: _read_in,
    exp.Between: _read_between,
    exp.Like: _read_like,
    exp.Coalesce: _read_coalesce,
    exp.Nullif: _read_nullif,
    exp.Concat: _read_concat,
    exp.Substring: _read_substring,
    exp.Case: _read_case,
    exp.If: _read_case,
}
