"""Targetings: which rows they select, and what is refused."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from etl.errors import UserError
from ranking.forecast.conditions import Domain, TargetingError
from ranking.forecast.targeting import parse_targeting

DOMAIN: Domain = {
    "surface": ["feed", "reels"],
    "country": ["DE", "FR", "US"],
    "hour": list(range(24)),
    "signup_days": None,
}


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("country = 'US' and and", 20, "syntax error"),
        ("contry = 'US'", 1, "no attribute is called contry"),
        ("surface = 'feed' and country = 'USA'", 32, "did you mean 'US'"),
        ("hour between 20 and 8", 1, "is empty"),
        ("country > 'DE'", 11, "is not a number"),
        ("country between 1 and 2", 1, "have no order"),
        ("country = 'US' and hour < 5 and country = 'DE'", 33, "contradicts itself"),
        ("signup_days > 5 and hour < 5 and signup_days < 3", 34, "contradicts itself: no value of"),
        ("signup_days > 5 and (hour < 5 and signup_days <= 5)", 35, "no value of signup_days"),
        ("not country in ('DE', 'FR', 'US')", 5, "no value of country is left"),
        ("hour > 23", 1, "no value of hour"),
        (f"signup_days = {'9' * 400}", 15, "number is too large"),
        ("signup_days < 1e999", 15, "number is too large"),
        ("country = surface", 11, "a value is expected"),
        ("lower(country) = 'us'", 1, "an attribute is expected"),
        ("country like 'U%'", 9, "use and, or, not"),
        ("true) union select (1", 1, "one condition only"),
        ("1); drop table sample; select (2", 1, "one condition only"),
        ("x" * 3000, 2000, "at most 2,000"),
    ],
)
def test_a_targeting_that_cannot_be_used_is_refused_with_the_position(
    text: str, position: int, message: str
) -> None:
    with pytest.raises(TargetingError, match=message) as error:
        parse_targeting(text, DOMAIN)
    assert error.value.position == position


@pytest.mark.parametrize("depth", [101, 200, 300, 390, 480])
@pytest.mark.parametrize("nested", ["not ", "not (", "hour = 1 or not ("])
def test_conditions_that_are_nested_too_deeply_are_refused_with_a_position(
    nested: str, depth: int
) -> None:
    text = nested * depth + "country = 'US'" + ")" * (nested.count("(") * depth)
    with pytest.raises(TargetingError, match=r"nested more than 100 deep|at most 2,000") as error:
        parse_targeting(text, DOMAIN)
    assert error.value.position == (1 if len(text) <= 2000 else 2000)


def test_conditions_that_are_nested_less_deeply_are_read() -> None:
    targeting = parse_targeting("not " * 100 + "country = 'US'", DOMAIN)
    assert targeting.box() == {"country": frozenset({"US"})}


@pytest.mark.parametrize("mistake", ["contry = 'US'", "and country = 'US'"])
def test_positions_count_characters_also_after_letters_of_several_bytes(mistake: str) -> None:
    with pytest.raises(TargetingError) as error:
        parse_targeting(f"city = 'Zürich' and {mistake}", {**DOMAIN, "city": ["Zürich"]})
    assert error.value.position == 21


LEAVES_BY_ATTRIBUTE = (
    st.builds(
        lambda values, negated: f"country {'not ' * negated}in ({', '.join(map(repr, values))})",
        st.lists(st.sampled_from(["DE", "FR", "US"]), min_size=1, max_size=2, unique=True),
        st.booleans(),
    ),
    st.builds(lambda a, b: f"hour between {min(a, b)} and {max(a, b)}", *[st.integers(0, 23)] * 2),
    st.builds(
        lambda operator, bound: f"signup_days {operator} {bound}",
        st.sampled_from(["<", "<=", ">", ">=", "="]),
        st.integers(0, 9),
    ),
    st.sampled_from(["surface = 'feed'", "surface != 'feed'"]),
)
LEAVES = st.one_of(*LEAVES_BY_ATTRIBUTE)
TREES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.builds("not ({})".format, children),
        st.builds("({} and {})".format, children, children),
        st.builds("({} or {})".format, children, children),
    ),
    max_leaves=6,
)
ROWS = 300


def python_condition(text: str) -> str:
    """A targeting as a Python expression."""
    for name in ("country", "surface"):
        text = text.replace(f"{name} = ", f"{name} == ")
    text = text.replace("signup_days = ", "signup_days == ")
    words = text.split()
    for k, word in enumerate(words):
        if word == "between":
            words[k - 1 : k + 4] = [
                words[k - 1],
                "in",
                f"range({words[k + 1]},",
                f"1+{words[k + 3]})",
            ]
            return python_condition(" ".join(words).replace("range", "span"))
    return text.replace("span", "range")


def random_rows() -> pa.Table:
    """Rows of a sample with all users chosen, for the condition alone."""
    rng = np.random.default_rng(3)
    days = [None if k % 10 == 0 else float(k % 10) for k in range(ROWS)]
    return pa.table(
        {
            "surface": rng.choice(["feed", "reels"], ROWS),
            "country": rng.choice(["DE", "FR", "US"], ROWS),
            "hour": rng.integers(0, 24, ROWS),
            "signup_days": pa.array(days),
        }
    )


@given(st.permutations(LEAVES_BY_ATTRIBUTE).flatmap(lambda leaves: st.tuples(*leaves)))
def test_conditions_on_different_attributes_never_contradict_each_other(
    texts: tuple[str, ...],
) -> None:
    for text in (*texts, " and ".join(texts), " or ".join(texts)):
        assert parse_targeting(text, DOMAIN).condition is not None


@given(TREES)
def test_conditions_select_the_rows_that_python_selects(text: str) -> None:
    import duckdb

    try:
        targeting = parse_targeting(text, DOMAIN)
    except TargetingError as error:
        if "contradicts itself" in str(error) or "no value of" in str(error):
            reject()
        raise
    rows = random_rows()
    coded = {
        f"target_{name}": [
            value if known is None else list(known).index(value) for value in rows[name].to_pylist()
        ]
        for name, known in DOMAIN.items()
    }
    database = duckdb.connect()
    database.register("coded", pa.table(coded))
    condition, parameters = targeting.sql()
    selected = database.execute(f"SELECT {condition} FROM coded", parameters).fetchnumpy()
    code = compile(python_condition(text), "targeting", "eval")
    for found, row in zip(next(iter(selected.values())), rows.to_pylist(), strict=True):
        if row["signup_days"] is None:  # a missing number satisfies no comparison
            row["signup_days"] = float("nan")
        assert found == eval(code, {}, row)
        assert not found or row["country"] in targeting.possible_values("country")
        box = targeting.box()
        if box is not None:
            assert found == all(row[name] in allowed for name, allowed in box.items())


def values_at_all_points(text: str) -> list[bool]:
    """A targeting for each combination of values; numbers change it at whole ones only."""
    code = compile(python_condition(text), "targeting", "eval")
    days = [float("nan"), *np.arange(-0.5, 10, 0.5).tolist()]
    points = itertools.product(["feed", "reels"], ["DE", "FR", "US"], range(24), days)
    names = ("surface", "country", "hour", "signup_days")
    return [bool(eval(code, {}, dict(zip(names, point, strict=True)))) for point in points]


@settings(max_examples=50)
@given(TREES, TREES)
def test_targetings_have_one_canonical_form_if_they_are_equivalent_and_only_then(
    first: str, second: str
) -> None:
    texts = (first, second, f"not (not ({first}) and not ({second}))", f"{second} or {first}")
    try:
        forms = [parse_targeting(text, DOMAIN).canonical_form() for text in texts]
    except TargetingError as error:
        if "contradicts itself" in str(error) or "no value of" in str(error):
            reject()
        raise
    values = [values_at_all_points(text) for text in texts]
    for (form, value), (other_form, other) in itertools.combinations(
        zip(forms, values, strict=True), 2
    ):
        assert (form == other_form) == (value == other)


def test_a_targeting_whose_canonical_form_is_too_large_is_refused() -> None:
    names = [f"a{k}" for k in range(18)]
    domain: Domain = {name: list("abcdefgh") for name in names}
    odd = " or ".join(f"a{k} = 'a' and a{k + 9} = 'b'" for k in range(9))
    more = " or ".join(f"a{k} = 'c' and a{17 - k} = 'd'" for k in range(9))
    with pytest.raises(UserError, match="combines too many attributes by `or` and `not`"):
        parse_targeting(
            f"({odd} or {more}) and not (a0 = 'e' and a9 = 'f')", domain
        ).canonical_form()
