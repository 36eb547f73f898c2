"""Expressions on the raw columns of a source: a subset of Spark SQL that cannot fail on a record.

Raw columns are texts. Where a number or a boolean is expected, a text is cast, and is null if
that fails; a division by zero is null. Only the nodes of a parsed expression that are listed here
are accepted, so that an expression reads nothing but its record.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import sqlglot
from pydantic import AfterValidator
from sqlglot import exp
from sqlglot.errors import SqlglotError

from etl.spec.expression_terms import (
    BOOLEAN,
    MAX_EXACT_INTEGER,
    NUMBER,
    OPERATIONS,
    TEXT,
    Kind,
    Operation,
    Term,
)

MAX_LENGTH = 2000  # characters of an expression
MAX_NODES = 500  # of its syntax tree: what Spark parses and compiles must not grow without bound
INT32 = range(-(2**31), 2**31)
PREFIX = "SELECT ("  # a column may have the name of a statement, such as `comment`
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
LIKE_PATTERN = re.compile(r"([^\\]|\\[%_\\])*", re.DOTALL)
INTEGER = re.compile(r"-?\d+")
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
    """A condition; raises ValueError if the text is not in the supported subset of Spark SQL."""
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
    if not text.strip():
        raise ValueError("the expression is empty")
    try:
        tree = _syntax_tree(text)
        sql = Term(_read(tree).cast(kind), kind).cast(kind)
    except RecursionError:
        raise ValueError(f"nested too deeply: {text!r}") from None
    columns = dict.fromkeys(map(_column_name, tree.find_all(exp.Column)))
    return RawExpression(sql, tuple(columns))


def _syntax_tree(text: str) -> exp.Expr:
    """The parsed expression; raises ValueError if the text is none, or has too many nodes."""
    try:
        select = sqlglot.parse_one(f"{PREFIX}{text}\n)", read="spark")
        tokens = sqlglot.tokenize(text, read="spark")
    except SqlglotError as error:
        raise ValueError(_describe(error, text)) from None
    if any(a.token_type.name == b.token_type.name == "STRING" for a, b in pairwise(tokens)):
        raise ValueError("two texts in quotes follow each other; a quote in a text is \\'")
    other = {name for name, value in select.args.items() if value} - {"expressions"}
    if not isinstance(select, exp.Select) or other or len(select.expressions) != 1:
        raise ValueError(f"{text!r} is not one expression")
    tree: exp.Expr = select.expressions[0]
    if sum(1 for _ in tree.walk()) > MAX_NODES:
        raise ValueError("the expression is too complex: compute parts of it before ingest")
    return tree


def _describe(error: SqlglotError, text: str) -> str:
    """The message for a text that cannot be parsed, with the position of the error."""
    details = getattr(error, "errors", None)
    if not details:
        return f"{text!r} is not an expression of Spark SQL"
    is_in_first_line = details[0]["line"] == 1 and details[0]["col"] <= len(PREFIX) + len(text)
    where = f" from character {details[0]['col'] - len(PREFIX)} on" if is_in_first_line else ""
    return f"not an expression of Spark SQL{where}: {text!r}"


def _read(node: exp.Expr) -> Term:
    """A node and all nodes below it; raises ValueError for one that is not supported."""
    kind_of_node = type(node)
    if kind_of_node in OPERATIONS:
        return _read_operation(node, OPERATIONS[kind_of_node])
    if kind_of_node in COMPARISONS:
        return _read_comparison(node)
    if kind_of_node not in _READERS:
        raise ValueError(
            f"{node.sql('spark')!r} is not supported; {SUPPORTED}. A column with another name than "
            "letters, digits and _ is written in backquotes"
        )
    return _READERS[kind_of_node](node)


def _check_arguments(node: exp.Expr, *allowed: str) -> None:
    """Raise ValueError if a node has an argument besides the allowed ones."""
    given = {name for name, value in node.args.items() if value and not name.startswith("_")}
    if given - {*allowed} - NEUTRAL_PROPERTIES:
        raise ValueError(f"{node.sql('spark')!r} has arguments that are not supported")


def _arguments(node: exp.Expr, *names: str) -> list[exp.Expr]:
    """The arguments of a node, which has all of these names and no other."""
    _check_arguments(node, *names)
    if not all(isinstance(node.args.get(name), exp.Expr) for name in names):
        raise ValueError(f"{node.sql('spark')!r} lacks an argument")
    return [node.args[name] for name in names]


def _read_operation(node: exp.Expr, operation: Operation) -> Term:
    values = _arguments(node, *operation.arguments)
    if isinstance(node, exp.Add | exp.Sub):
        _check_no_child(node, exp.DPipe)
    kinds = operation.arguments.values()
    sql = [_read(value).cast(kind) for value, kind in zip(values, kinds, strict=True)]
    return Term(operation.sql.format(*sql), operation.result)


def _check_no_child(node: exp.Expr, *kinds: type[exp.Expr]) -> None:
    """Raise ValueError for a mix of operators that bind equally in Spark, and not in the parser."""
    if any(type(child) in kinds for child in node.iter_expressions()):
        raise ValueError(f"{node.sql('spark')!r}: write parentheses around + and - next to ||")


def _read_pipe(node: exp.Expr) -> Term:
    _check_no_child(node, exp.Add, exp.Sub)
    left, right = (_read(value).cast(TEXT) for value in _arguments(node, "this", "expression"))
    return Term(f"concat({left}, {right})", TEXT)


def _read_comparison(node: exp.Expr) -> Term:
    left, right = map(_read, _arguments(node, "this", "expression"))
    if not isinstance(node, EQUALITIES):
        _check_order(node, (left, right))
    first, second = _comparable((left, right))
    return Term(f"({first} {COMPARISONS[type(node)]} {second})", BOOLEAN)


def _check_order(node: exp.Expr, terms: Sequence[Term]) -> None:
    """Raise ValueError for an order of two columns, which may be meant as numbers or as texts."""
    if all(term.kind is TEXT and term.literal is None for term in terms):
        raise ValueError(
            f"{node.sql('spark')!r} compares texts; to compare numbers, write cast(… as double)"
        )


def _comparable(terms: Sequence[Term]) -> list[str]:
    """The terms as numbers if one is a number, as booleans if one is a boolean, else as texts."""
    kinds = {term.kind for term in terms}
    kind = next((kind for kind in (NUMBER, BOOLEAN) if kind in kinds), TEXT)
    return [term.cast(kind) for term in terms]


def _alternatives(terms: Sequence[Term]) -> tuple[list[str], Kind]:
    """Values of which one is returned, as they are: as texts if they are not of one kind."""
    kinds = {term.kind for term in terms}
    kind = kinds.pop() if len(kinds) == 1 else TEXT
    return [term.cast(kind) for term in terms], kind


def _read_literal(node: exp.Expr) -> Term:
    text = str(node.this)
    if node.is_string:
        # Spark replaces ${…} in the text of a statement by variables of the session.
        quoted = exp.Literal.string(text).sql("spark").replace("$", "\\u0024")
        return Term(quoted, TEXT, literal=text)
    number = float(text)
    if not math.isfinite(number) or (number >= MAX_EXACT_INTEGER and "e" not in text.lower()):
        raise ValueError(f"{text} is not exact as a number: compare it as a text, '{text}'")
    return Term(f"{number!r}D", NUMBER)


def _read_column(node: exp.Expr) -> Term:
    name = _column_name(node).replace("`", "``")
    return Term(f"raw.`{name}`", TEXT)


def _column_name(node: exp.Expr) -> str:
    """The raw column of a node, such as `user.id`."""
    levels = ("catalog", "db", "table", "this")
    parts = [node.args[level] for level in levels if node.args.get(level)]
    name = ".".join(part.name for part in parts)
    if not all(isinstance(part, exp.Identifier) for part in parts) or "$" in name:
        raise ValueError(f"{node.sql('spark')!r} cannot be the name of a column here")
    return name


def _read_cast(node: exp.Expr) -> Term:
    _check_arguments(node, "this", "to")
    kind = CASTS.get(node.args["to"].sql().upper())
    if kind is None:
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
    _check_arguments(node, "this", "expressions")
    value, *values = _comparable([_read(part) for part in (node.this, *node.expressions)])
    return Term(f"({value} IN ({', '.join(values)}))", BOOLEAN)


def _read_between(node: exp.Expr) -> Term:
    terms = [_read(part) for part in _arguments(node, "this", "low", "high")]
    _check_order(node, terms)
    value, low, high = _comparable(terms)
    return Term(f"({value} BETWEEN {low} AND {high})", BOOLEAN)


def _read_like(node: exp.Expr) -> Term:
    _check_arguments(node, "this", "expression", "negate")
    value, pattern = (_read(node.args[name]) for name in ("this", "expression"))
    if pattern.literal is None or not LIKE_PATTERN.fullmatch(pattern.literal):
        raise ValueError(
            f"{node.sql('spark')!r}: the pattern of like is a text in quotes, in which a backslash "
            "precedes %, _ or a backslash"
        )
    negation = "NOT " if node.args.get("negate") else ""
    return Term(f"({value.cast(TEXT)} {negation}LIKE {pattern.sql})", BOOLEAN)


def _read_coalesce(node: exp.Expr) -> Term:
    _check_arguments(node, "this", "expressions")
    values, kind = _alternatives([_read(part) for part in (node.this, *node.expressions)])
    return Term(f"coalesce({', '.join(values)})", kind)


def _read_nullif(node: exp.Expr) -> Term:
    value, other = map(_read, _arguments(node, "this", "expression"))
    first, second = _comparable((value, other))
    return Term(f"CASE WHEN NOT ({first} <=> {second}) THEN {value.sql} END", value.kind)


def _read_concat(node: exp.Expr) -> Term:
    _check_arguments(node, "expressions")
    texts = [_read(part).cast(TEXT) for part in node.expressions]
    return Term(f"concat({', '.join(texts)})", TEXT)


def _read_substring(node: exp.Expr) -> Term:
    _check_arguments(node, "this", "start", "length")
    bounds = [node.args[name] for name in ("start", "length") if node.args.get(name)]
    texts = [bound.sql() for bound in bounds]
    is_valid = all(INTEGER.fullmatch(text) and int(text) in INT32 for text in texts)
    if "start" not in node.args or not texts or not is_valid:
        raise ValueError(f"{node.sql('spark')!r}: write start and length as integers")
    return Term(f"substring({', '.join([_read(node.this).cast(TEXT), *texts])})", TEXT)


def _read_case(node: exp.Expr) -> Term:
    """`case when …` and `if(…)`; without `else`, the value is null."""
    _check_arguments(node, "this", "ifs", "default", "true", "false")
    branches = [node] if isinstance(node, exp.If) else node.args["ifs"]
    otherwise = node.args.get("false") or node.args.get("default")
    if isinstance(node, exp.Case) and node.this:
        raise ValueError(f"{node.sql('spark')!r}: write case when … = … then …")
    conditions = [_read(branch.this).cast(BOOLEAN) for branch in branches]
    results = [branch.args["true"] for branch in branches] + ([otherwise] if otherwise else [])
    values, kind = _alternatives([_read(result) for result in results])
    whens = [f"WHEN {c} THEN {v}" for c, v in zip(conditions, values, strict=False)]
    default = f" ELSE {values[-1]}" if otherwise else ""
    return Term(f"CASE {' '.join(whens)}{default} END", kind)


_READERS = {
    exp.Paren: lambda node: _read(node.this),
    exp.Literal: _read_literal,
    exp.Boolean: lambda node: Term(str(node.this).upper(), BOOLEAN),
    exp.Null: lambda _: Term("CAST(NULL AS STRING)", TEXT),
    exp.DPipe: _read_pipe,
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
