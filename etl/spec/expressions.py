"""Expressions on the raw columns of a source: a subset of Spark SQL that cannot fail on a record.

Raw columns are texts. Where a number or a boolean is expected, a text is cast, and is null if
that fails; a division by zero is null. Spark evaluates expressions on logs, and `evaluate` on the
records that a service is sent, with the same results.
"""

import functools
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

import sqlglot
from pydantic import AfterValidator
from sqlglot import exp
from sqlglot.errors import SqlglotError

from etl.spec.expression_nodes import column_name, read_node
from etl.spec.expression_terms import BOOLEAN, TEXT, Evaluation, Kind

MAX_LENGTH = 2000  # characters of an expression
MAX_NODES = 500  # of its syntax tree: what Spark parses and compiles must not grow without bound
PREFIX = "SELECT ("  # a column may have the name of a statement, such as `comment`


@dataclass(frozen=True)
class RawExpression:
    """A checked expression.

    Attributes:
        sql: Spark SQL on the struct `raw`.
        columns: The raw columns that it reads.
        evaluate: Returns its value for a record in Python, the same as in Spark.
    """

    sql: str
    columns: tuple[str, ...]
    evaluate: Evaluation = field(compare=False, repr=False)


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
        term = read_node(tree).cast(kind)
        term.cast(kind)  # checks the length of its SQL
    except RecursionError:
        raise ValueError(f"nested too deeply: {text!r}") from None
    columns = dict.fromkeys(map(column_name, tree.find_all(exp.Column)))
    return RawExpression(term.sql, tuple(columns), term.evaluate)


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
