"""Values of expressions on raw columns in Python, each as Spark SQL returns it.

Texts are `str`, numbers `float`, booleans `bool`, and null is None. As in Spark, NaN equals itself
and is greater than other numbers.
"""

import functools
import math
import re
from collections.abc import Callable
from decimal import Decimal

MAX_EXACT_INTEGER = 2**53  # integers from here on are not exact in double precision
MAX_LONG, MIN_LONG = 2**63 - 1, -(2**63)

Value = str | float | bool | None
Function = Callable[..., Value]

TRUE_TEXTS, FALSE_TEXTS = {"t", "true", "y", "yes", "1"}, {"f", "false", "n", "no", "0"}
CONTROL_CHARACTERS = "".join(map(chr, range(0x21)))
DECIMAL_NUMBER = re.compile(
    r"[+-]?(NaN|Infinity|([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?[fFdD]?)"
)
HEX_NUMBER = re.compile(
    r"[+-]?0[xX]([0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+[fFdD]?"
)
SPECIAL_NUMBER = re.compile(r"[+-]?inf(inity)?|nan", re.IGNORECASE)


def null_if_any_null(function: Function) -> Function:
    """The function of values that are not null; null if one of them is."""

    @functools.wraps(function)
    def of_values(*values: Value) -> Value:
        return None if None in values else function(*values)

    return of_values


def double_of_text(text: str) -> float | None:
    """The double that a text is cast to, which may be NaN; null if it is none."""
    stripped = text.strip(CONTROL_CHARACTERS)
    if SPECIAL_NUMBER.fullmatch(stripped):
        return float(stripped)
    if HEX_NUMBER.fullmatch(stripped):
        return _hex_number(stripped.rstrip("fFdD"))
    if not DECIMAL_NUMBER.fullmatch(stripped):
        return None
    return float(stripped.rstrip("fFdD"))


@null_if_any_null
def number_of_text(text: str) -> float | None:
    """The number that a text is cast to; null if it is none, or NaN."""
    number = double_of_text(text)
    return None if number is None or math.isnan(number) else number


def _hex_number(text: str) -> float:
    try:
        return float.fromhex(text)
    except OverflowError:
        return -math.inf if text.startswith("-") else math.inf


def boolean_of_text(text: str | None) -> bool | None:
    """The boolean that a text is cast to; null if it is none."""
    if text is None:
        return None
    word = text.strip(CONTROL_CHARACTERS + "\x7f").lower()
    return True if word in TRUE_TEXTS else False if word in FALSE_TEXTS else None


@null_if_any_null
def text_of_boolean(value: bool) -> str:
    """`true` or `false`."""
    return "true" if value else "false"


def text_of_number(number: float | None) -> str | None:
    """The text of a finite number; integers without a decimal point, so that they can be cast."""
    if number is None or not math.isfinite(number):
        return None
    if number == math.floor(number) and abs(number) < MAX_EXACT_INTEGER:
        return str(int(number))
    sign, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    assert isinstance(exponent, int)
    text, magnitude = "".join(map(str, digits)), len(digits) + exponent - 1
    minus = "-" if sign else ""
    if not -3 <= magnitude < 7:
        return f"{minus}{text[0]}.{text[1:] or '0'}E{magnitude}"
    return f"{minus}{Decimal(repr(abs(number))):f}"


def and_(left: bool | None, right: bool | None) -> bool | None:
    """False if one is false, else null if one is null."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def or_(left: bool | None, right: bool | None) -> bool | None:
    """True if one is true, else null if one is null."""
    if left is True or right is True:
        return True
    return None if left is None or right is None else False


def _order(value: Value) -> tuple[bool, Value]:
    """What orders values of one kind; NaN is the greatest number."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return is_nan, 0.0 if is_nan else value


def is_same(left: Value, right: Value) -> bool:
    """Whether two values of one kind are equal, where null equals null."""
    return _order(left) == _order(right)


@null_if_any_null
def is_less(left: Value, right: Value) -> bool:
    """Whether one value precedes another of its kind, texts by their code points."""
    return _order(left) < _order(right)


@null_if_any_null
def is_equal(left: Value, right: Value) -> bool:
    """Whether two values of one kind are equal."""
    return is_same(left, right)


@null_if_any_null
def not_(value: bool) -> bool:
    """The opposite."""
    return not value


def is_among(value: Value, *values: Value) -> bool | None:
    """Whether a value equals one of others; null if it does not and one of them is null."""
    equal = [is_equal(value, each) for each in values]
    return True if True in equal else None if None in equal else False


def is_between(value: Value, low: Value, high: Value) -> Value:
    """Whether a value is neither below one nor above another."""
    return and_(not_(is_less(value, low)), not_(is_less(high, value)))  # type: ignore[arg-type]


def first_not_null(*values: Value) -> Value:
    """The first value that is not null."""
    return next((value for value in values if value is not None), None)


@null_if_any_null
def divide(dividend: float, divisor: float) -> float | None:
    """The quotient; null for a division by zero."""
    return None if divisor == 0 else dividend / divisor


@null_if_any_null
def remainder(dividend: float, divisor: float) -> float | None:
    """The remainder with the sign of the dividend; null for a division by zero."""
    if divisor == 0:
        return None
    return math.nan if math.isinf(dividend) else math.fmod(dividend, divisor)


@null_if_any_null
def natural_logarithm(number: float) -> float | None:
    """The natural logarithm; null for numbers up to zero."""
    return None if number <= 0 else math.log(number)


@null_if_any_null
def square_root(number: float) -> float:
    """The square root; NaN for negative numbers."""
    return math.nan if number < 0 else math.sqrt(number)


@null_if_any_null
def floor(number: float) -> float:
    """The integer below, within 64 bits."""
    if math.isnan(number):
        return 0.0
    return float(math.floor(min(max(number, float(MIN_LONG)), float(MAX_LONG))))


def substring(start: int, length: int | None) -> Function:
    """The function that cuts a text from a position on, 1 for the first or -1 for the last one."""

    @null_if_any_null
    def cut(text: str) -> str:
        first = start - 1 if start > 0 else len(text) + start if start < 0 else 0
        end = len(text) if length is None else first + length
        return text[max(first, 0) : max(end, 0)]

    return cut


def like(pattern: str) -> Function:
    """The function that matches a text with a pattern of `like`.

    What stands between two `%` is matched where it first occurs: no later place could match more.
    The atomic groups keep it there, so that the time grows linearly with the length of the text.
    """
    segments = [""]
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        if part == "%":
            segments.append("")
        else:
            segments[-1] += "." if part == "_" else re.escape(part[-1])
    first, *others = segments
    inner = "".join(f"(?>.*?{segment})" for segment in others[:-1])
    last = f".*{others[-1]}" if others else ""
    matcher = re.compile(first + inner + last, re.DOTALL)

    @null_if_any_null
    def matches(text: str) -> bool:
        return matcher.fullmatch(text) is not None

    return matches
