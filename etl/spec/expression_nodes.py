"""Nodes of a parsed expression as terms: each that is not listed here is refused.

What is run is written anew from the checked nodes, so that an expression reads nothing but its
record.
"""

import math
import re
from collections.abc import Mapping, Sequence

from sqlglot import exp

from etl.spec import expression_values as values
from etl.spec.expression_terms import (
    BOOLEAN,
    NUMBER,
    OPERATIONS,
    TEXT,
    Evaluation,
    Kind,
    Operation,
    Record,
    Term,
    evaluation,
)
from etl.spec.expression_values import MAX_EXACT_INTEGER, Function, Value

INT32 = range(-(2**31), 2**31)
COMPARISONS: Mapping[type[exp.Expr], tuple[str, Function]] = {
    exp.EQ: ("=", values.is_equal),
    exp.NEQ: ("<>", lambda left, right: values.not_(values.is_equal(left, right))),
    exp.NullSafeEQ: ("<=>", values.is_same),
    exp.LT: ("<", values.is_less),
    exp.LTE: ("<=", lambda left, right: values.not_(values.is_less(right, left))),
    exp.GT: (">", lambda left, right: values.is_less(right, left)),
    exp.GTE: (">=", lambda left, right: values.not_(values.is_less(left, right))),
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


def read_node(node: exp.Expr) -> Term:
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


def column_name(node: exp.Expr) -> str:
    """The raw column of a node, such as `user.id`."""
    levels = ("catalog", "db", "table", "this")
    parts = [node.args[level] for level in levels if node.args.get(level)]
    name = ".".join(part.name for part in parts)
    if not all(isinstance(part, exp.Identifier) for part in parts) or "$" in name:
        raise ValueError(f"{node.sql('spark')!r} cannot be the name of a column here")
    return name


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
    arguments = _arguments(node, *operation.arguments)
    if isinstance(node, exp.Add | exp.Sub):
        _check_no_child(node, exp.DPipe)
    kinds = operation.arguments.values()
    terms = [read_node(each).cast(kind) for each, kind in zip(arguments, kinds, strict=True)]
    sql = operation.sql.format(*(term.sql for term in terms))
    return Term(sql, operation.result, evaluation(operation.function, *terms))


def _check_no_child(node: exp.Expr, *kinds: type[exp.Expr]) -> None:
    """Raise ValueError for a mix of operators that bind equally in Spark, and not in the parser."""
    if any(type(child) in kinds for child in node.iter_expressions()):
        raise ValueError(f"{node.sql('spark')!r}: write parentheses around + and - next to ||")


def _read_pipe(node: exp.Expr) -> Term:
    _check_no_child(node, exp.Add, exp.Sub)
    return _concatenate([read_node(each) for each in _arguments(node, "this", "expression")])


def _concatenate(terms: Sequence[Term]) -> Term:
    texts = [term.cast(TEXT) for term in terms]
    join = values.null_if_any_null(lambda *parts: "".join(parts))
    return Term(f"concat({_sql_list(texts)})", TEXT, evaluation(join, *texts))


def _sql_list(terms: Sequence[Term]) -> str:
    return ", ".join(term.sql for term in terms)


def _read_comparison(node: exp.Expr) -> Term:
    operator, function = COMPARISONS[type(node)]
    left, right = map(read_node, _arguments(node, "this", "expression"))
    if not isinstance(node, EQUALITIES):
        _check_order(node, (left, right))
    first, second = _comparable((left, right))
    compare = evaluation(function, first, second)
    return Term(f"({first.sql} {operator} {second.sql})", BOOLEAN, compare)


def _check_order(node: exp.Expr, terms: Sequence[Term]) -> None:
    """Raise ValueError for an order of two columns, which may be meant as numbers or as texts."""
    if all(term.kind is TEXT and term.literal is None for term in terms):
        raise ValueError(
            f"{node.sql('spark')!r} compares texts; to compare numbers, write cast(… as double)"
        )


def _comparable(terms: Sequence[Term]) -> list[Term]:
    """The terms as numbers if one is a number, as booleans if one is a boolean, else as texts."""
    kinds = {term.kind for term in terms}
    kind = next((kind for kind in (NUMBER, BOOLEAN) if kind in kinds), TEXT)
    return [term.cast(kind) for term in terms]


def _alternatives(terms: Sequence[Term]) -> tuple[list[Term], Kind]:
    """Values of which one is returned, as they are: as texts if they are not of one kind."""
    kinds = {term.kind for term in terms}
    kind = kinds.pop() if len(kinds) == 1 else TEXT
    return [term.cast(kind) for term in terms], kind


def _constant(value: Value) -> Evaluation:
    return lambda _: value


def _read_literal(node: exp.Expr) -> Term:
    text = str(node.this)
    if node.is_string:
        # Spark replaces ${…} in the text of a statement by variables of the session.
        quoted = exp.Literal.string(text).sql("spark").replace("$", "\\u0024")
        return Term(quoted, TEXT, _constant(text), literal=text)
    number = float(text)
    if not math.isfinite(number) or (number >= MAX_EXACT_INTEGER and "e" not in text.lower()):
        raise ValueError(f"{text} is not exact as a number: compare it as a text, '{text}'")
    return Term(f"{number!r}D", NUMBER, _constant(number))


def _read_boolean(node: exp.Expr) -> Term:
    return Term(str(node.this).upper(), BOOLEAN, _constant(bool(node.this)))


def _read_null(_: exp.Expr) -> Term:
    return Term("CAST(NULL AS STRING)", TEXT, _constant(None))


def _read_column(node: exp.Expr) -> Term:
    name = column_name(node)

    def value_of(record: Record) -> Value:
        return record.get(name)

    quoted = name.replace("`", "``")
    return Term(f"raw.`{quoted}`", TEXT, value_of)


def _read_cast(node: exp.Expr) -> Term:
    _check_arguments(node, "this", "to")
    kind = CASTS.get(node.args["to"].sql().upper())
    if kind is None:
        raise ValueError(f"{node.sql('spark')!r}: casts are to double, string or boolean")
    return read_node(node.this).cast(kind)


def _read_is(node: exp.Expr) -> Term:
    value, what = _arguments(node, "this", "expression")
    term = read_node(value)
    if isinstance(what, exp.Null):
        is_null = evaluation(lambda each: each is None, term)
        return Term(f"({term.sql} IS NULL)", BOOLEAN, is_null)
    left, right = term.cast(BOOLEAN), read_node(what).cast(BOOLEAN)
    is_same = evaluation(values.is_same, left, right)
    return Term(f"({left.sql} <=> {right.sql})", BOOLEAN, is_same)


def _read_in(node: exp.Expr) -> Term:
    if node.args.get("query") or not node.expressions:
        raise ValueError(f"{node.sql('spark')!r}: write the values as a list, in ('a', 'b')")
    _check_arguments(node, "this", "expressions")
    terms = _comparable([read_node(part) for part in (node.this, *node.expressions)])
    is_among = evaluation(values.is_among, *terms)
    return Term(f"({terms[0].sql} IN ({_sql_list(terms[1:])}))", BOOLEAN, is_among)


def _read_between(node: exp.Expr) -> Term:
    terms = [read_node(part) for part in _arguments(node, "this", "low", "high")]
    _check_order(node, terms)
    value, low, high = terms = _comparable(terms)
    is_between = evaluation(values.is_between, *terms)
    return Term(f"({value.sql} BETWEEN {low.sql} AND {high.sql})", BOOLEAN, is_between)


def _read_like(node: exp.Expr) -> Term:
    _check_arguments(node, "this", "expression", "negate")
    value, pattern = (read_node(node.args[name]) for name in ("this", "expression"))
    if pattern.literal is None or not LIKE_PATTERN.fullmatch(pattern.literal):
        raise ValueError(
            f"{node.sql('spark')!r}: the pattern of like is a text in quotes, in which a backslash "
            "precedes %, _ or a backslash"
        )
    text, matches = value.cast(TEXT), values.like(pattern.literal)
    if node.args.get("negate"):
        does_not_match = evaluation(lambda each: values.not_(matches(each)), text)
        return Term(f"({text.sql} NOT LIKE {pattern.sql})", BOOLEAN, does_not_match)
    return Term(f"({text.sql} LIKE {pattern.sql})", BOOLEAN, evaluation(matches, text))


def _read_coalesce(node: exp.Expr) -> Term:
    _check_arguments(node, "this", "expressions")
    terms, kind = _alternatives([read_node(part) for part in (node.this, *node.expressions)])
    return Term(f"coalesce({_sql_list(terms)})", kind, evaluation(values.first_not_null, *terms))


def _read_nullif(node: exp.Expr) -> Term:
    value, other = map(read_node, _arguments(node, "this", "expression"))
    first, second = _comparable((value, other))

    def null_if(returned: Value, left: Value, right: Value) -> Value:
        return None if values.is_same(left, right) else returned

    sql = f"CASE WHEN NOT ({first.sql} <=> {second.sql}) THEN {value.sql} END"
    return Term(sql, value.kind, evaluation(null_if, value, first, second))


def _read_concat(node: exp.Expr) -> Term:
    _check_arguments(node, "expressions")
    return _concatenate([read_node(part) for part in node.expressions])


def _read_substring(node: exp.Expr) -> Term:
    _check_arguments(node, "this", "start", "length")
    bounds = [node.args[name] for name in ("start", "length") if node.args.get(name)]
    texts = [bound.sql() for bound in bounds]
    is_valid = all(INTEGER.fullmatch(text) and int(text) in INT32 for text in texts)
    if "start" not in node.args or not texts or not is_valid:
        raise ValueError(f"{node.sql('spark')!r}: write start and length as integers")
    start, length = (*map(int, texts), None)[:2]
    assert start is not None
    text = read_node(node.this).cast(TEXT)
    cut = evaluation(values.substring(start, length), text)
    return Term(f"substring({', '.join([text.sql, *texts])})", TEXT, cut)


def _read_case(node: exp.Expr) -> Term:
    """`case when …` and `if(…)`; without `else`, the value is null."""
    _check_arguments(node, "this", "ifs", "default", "true", "false")
    branches = [node] if isinstance(node, exp.If) else node.args["ifs"]
    otherwise = node.args.get("false") or node.args.get("default")
    if isinstance(node, exp.Case) and node.this:
        raise ValueError(f"{node.sql('spark')!r}: write case when … = … then …")
    conditions = [read_node(branch.this).cast(BOOLEAN) for branch in branches]
    results = [branch.args["true"] for branch in branches] + ([otherwise] if otherwise else [])
    terms, kind = _alternatives([read_node(result) for result in results])
    whens = [f"WHEN {c.sql} THEN {v.sql}" for c, v in zip(conditions, terms, strict=False)]
    default = f" ELSE {terms[-1].sql}" if otherwise else ""
    sql = f"CASE {' '.join(whens)}{default} END"
    return Term(sql, kind, _first_that_holds(conditions, terms))


def _first_that_holds(conditions: Sequence[Term], results: Sequence[Term]) -> Evaluation:
    """The result of the first true condition, else a further result if there is one, else null."""
    branches = [(c.evaluate, r.evaluate) for c, r in zip(conditions, results, strict=False)]
    otherwise = results[-1].evaluate if len(results) > len(conditions) else _constant(None)

    def value_of(record: Record) -> Value:
        for holds, result in branches:
            if holds(record):
                return result(record)
        return otherwise(record)

    return value_of


_READERS = {
    exp.Paren: lambda node: read_node(node.this),
    exp.Literal: _read_literal,
    exp.Boolean: _read_boolean,
    exp.Null: _read_null,
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
