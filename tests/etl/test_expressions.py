"""Expressions on raw columns: what they return, that no record fails them, and what is refused."""

import json
import math
import random
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.ingest.preview import preview_sources
from etl.ingest.reprocess import reprocess_quarantine
from etl.ingest.run import ingest
from etl.reports import parse_reports
from etl.spec import DataSpec, load_spec
from etl.spec.expression_values import Value
from etl.spec.expressions import RawExpression, parse_column, parse_condition
from etl.spec.report_sources import AuditSource
from etl.tables.lake import Lake
from gemline import main
from tests.conftest import LAST
from tests.etl.shop import SPEC
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAY = date(2026, 1, 2)
NOON = 1767355200
RECORD = {"name": "Ad_Click", "price": "250", "bot": "false", "user.id": "7", "none": None,
          "word": "ten", "empty": "", "ratio": "0.1", "quoted": "it's", "url": "x?c=${CLICK_ID}",
          "huge": "9007199254740993", "nan": "NaN", "comment": "ok"}  # fmt: skip
CONDITIONS: Mapping[str, bool | None] = {
    "name = 'Ad_Click'": True,
    "name IN ('a', 'Ad_Click') AND NOT bot": True,
    "lower(name) LIKE 'ad\\_%'": True,
    "word LIKE 't_n'": True,
    "url LIKE '%c=%{C%I_}'": True,
    "url LIKE '%c=%{C%I__}'": False,
    "url LIKE 'x?%%=%_'": True,
    "empty LIKE '%' AND empty NOT LIKE '_%'": True,
    "word LIKE 't\\_n'": False,  # no wildcard
    "name NOT LIKE 'Ad%' OR price > 100": True,
    "price > 99": True,  # as numbers: '250' < '99' as texts
    "price < '99'": True,  # as texts
    "price BETWEEN 250 AND 251": True,
    "price % 100 = 50 AND -price < 0": True,
    "word > 3": None,
    "word > 3 OR price / 0 > 1": None,
    "none IS NULL AND empty IS NOT NULL": True,
    "none = 'x'": None,
    "none <=> 'x'": False,
    "user.id = 7 AND `user.id` = '7'": True,
    "coalesce(none, word, name) = 'ten'": True,
    "nullif(empty, '') IS NULL": True,
    "bot IS TRUE": False,
    "none IS TRUE": False,
    "bot = false": True,
    "word = true": None,
    "abs(price - 300) = 50": True,
    "cast(price AS double) >= cast(ratio AS double)": True,
    "quoted = 'it\\'s'": True,
    "url LIKE '%${CLICK_ID}'": True,
    "url LIKE '%${env:HOME}%'": False,
    "url = 'x?c='": False,
    "huge = '9007199254740993'": True,
    "nan > 99": None,
    "comment = 'ok'": True,
    "NOT (none = 'x' OR name = 'y')": None,
    "name NOT IN ('a', 'b') AND none NOT IN ('a')": None,
}
COLUMNS: Mapping[str, str | None] = {
    "price / 100": "2.5",
    "price * 1e6": "250000000",  # no exponent: the text can be cast to an integer
    "price + ratio": "250.1",
    "word * 2": None,
    "concat(name, '-', price)": "Ad_Click-250",
    "name || none": None,
    "substring(name, 4, 5)": "Click",
    "case when price > 1000 then 'high' when price > 100 then 'mid' else 'low' end": "mid",
    "if(bot, 1, 2)": "2",
    "case when bot then 'x' end": None,
    "upper(trim(' a '))": "A",
    "length(word) + floor(ratio)": "3",
    "ln(0)": None,
    "sqrt(price * price)": "250",
    "price > 3": "true",
    "cast(bot AS string)": "false",
    "substring(name, -5)": "Click",
    "'${env:HOME}'": "${env:HOME}",
    "nullif(huge, 0)": "9007199254740993",
    "coalesce(none, huge, 0)": "9007199254740993",
    "coalesce(none, 0) + 1": "1",
    "if(bot, 'yes', 0)": "0",
    "case when bot then 1 else name end": "Ad_Click",
    "price / 3": "83.33333333333333",
    "price * 1e300": "2.5E302",
    "price * 1e-30": "2.5E-28",
    "1e308 * 1e10": None,
    "-0.0 * price": "0",
    "('1' || 9) + 9": "28",
}


def raw_rows(spark: SparkSession, *records: Mapping[str, object]) -> DataFrame:
    """Records with the struct `raw`, as readers return them."""
    names = sorted(set().union(*records))
    values = [[record.get(name) for name in names] for record in records]
    flat = spark.createDataFrame(values, ", ".join(f"`{name}` string" for name in names))
    return flat.select(F.struct("*").alias("raw"))


def test_expressions_return_what_spark_sql_returns_for_the_values(spark: SparkSession) -> None:
    conditions = [F.expr(parse_condition(text).sql).alias(text) for text in CONDITIONS]
    columns = [F.expr(parse_column(text).sql).alias(text) for text in COLUMNS]
    row = raw_rows(spark, RECORD).select(*conditions, *columns).first()
    assert row is not None
    assert row.asDict() == {**CONDITIONS, **COLUMNS}
    in_python = {text: parse_condition(text).evaluate(RECORD) for text in CONDITIONS}
    assert in_python | {text: parse_column(text).evaluate(RECORD) for text in COLUMNS} == {
        **CONDITIONS,
        **COLUMNS,
    }


def random_expression(rng: random.Random, depth: int) -> str:
    """An expression of any kind on the columns `a`, `b` and `c`."""
    if depth == 0:
        return rng.choice(["a", "b", "c", "'x'", "''", "3", "0", "1e300", "true", "null"])
    parts = [f"({random_expression(rng, depth - 1)})" for _ in range(3)]
    forms = [
        "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / {1}", "{0} % {1}", "-{0}", "abs({0})",
        "ln({0})", "sqrt({0})", "floor({0})", "length({0})", "lower({0})", "trim({0})",
        "upper({0})", "{0} <> {1}", "{0} >= 1", "{0} NOT LIKE '_'", "{0} IS TRUE",
        "substring({0}, 0, 2)",
        "{0} || {1}", "concat({0}, {1})", "coalesce({0}, {1}, {2})", "nullif({0}, {1})",
        "substring({0}, -2, 9)", "substring({0}, 2147483647)", "nullif({0}, 3)",
        "cast({0} AS double)", "cast({0} AS string)",
        "cast({0} AS boolean)", "{0} = {1}", "{0} <=> {1}", "{0} < 'm'", "{0} < 3",
        "{0} IN ({1}, {2})", "{0} BETWEEN {1} AND 3", "{0} LIKE '%x'", "{0} IS NULL",
        "{0} LIKE '_%1_%'",        "NOT {0}", "{0} AND {1}", "{0} OR {1}", "if({0}, {1}, {2})",
        "case when {0} then {1} end",
    ]  # fmt: skip
    return rng.choice(forms).format(*parts)


TEXTS = [
    None, "", " ", "0", "-1", "1e308", "-1e308", "NaN", "Infinity", "1.5", "9" * 20, "true",
    "f", "x", "ü💥", "2026-01-02", "`", "\\", "'", "%", "null", " 1 ", "1d", "-.5e-3", "+INF",
    "0x1p3", "1_0", "\x0btrue", "Straße", "İx", "12345678.5", "0.00012", "١", "3.", "-0.0",
]  # fmt: skip


def is_same_text(spark_text: str | None, python_text: Value) -> bool:
    """Whether two texts are equal, or numbers that differ in the last digit at most.

    Logarithms of Java and C may differ there, and Java 17 does not always print the fewest digits.
    """
    if spark_text == python_text or spark_text is None or not isinstance(python_text, str):
        return spark_text == python_text
    try:
        return math.isclose(float(spark_text), float(python_text), rel_tol=1e-15)
    except ValueError:
        return False


def test_expressions_return_the_same_in_python_as_in_spark_for_any_record(
    spark: SparkSession,
) -> None:
    rng = random.Random(7)
    expressions: dict[str, RawExpression] = {}
    while len(expressions) < 200:
        text = random_expression(rng, rng.randint(1, 3))
        try:
            expressions[text] = parse_column(text)
        except ValueError:  # a truth value where a number is expected
            continue
    records = [dict(zip("abc", rng.choices(TEXTS, k=3), strict=True)) for _ in range(100)]
    columns = [F.expr(each.sql).alias(f"c{i}") for i, each in enumerate(expressions.values())]
    results = raw_rows(spark, *records).select(*columns).collect()
    assert any(value is not None for row in results for value in row)
    different = [
        (text, record, value, expression.evaluate(record))
        for record, row in zip(records, results, strict=True)
        for (text, expression), value in zip(expressions.items(), row, strict=True)
        if not is_same_text(value, expression.evaluate(record))
    ]
    assert not different, different[:5]


def test_a_text_that_nearly_matches_a_pattern_takes_no_longer() -> None:
    is_like = parse_condition(f"a LIKE '{'%a' * 30}%b'")
    is_number = parse_condition("a > 0")
    assert is_like.evaluate({"a": "a" * 4096}) is False
    assert is_number.evaluate({"a": "1" * 4096 + "x"}) is None


REFUSED = {
    "count(*) > 1": "not supported",
    "java_method('java.lang.System', 'exit', '1') = ''": "not supported",
    "reflect('a', 'b') = 'c'": "not supported",
    "input_file_name() = 'x'": "not supported",
    "current_date = a": "not supported",
    "a IN (SELECT 1)": "write the values as a list",
    "(SELECT max(b) FROM t) = a": "not supported",
    "EXISTS (SELECT 1)": "not supported",
    "a = 1; DROP TABLE t": "not an expression of Spark SQL from character 5 on",
    "a RLIKE '('": "not supported",
    "explode(a) = 1": "not supported",
    "a = raise_error('x')": "not supported",
    "cast(a AS date) = b": "casts are to double, string or boolean",
    "a = 9007199254740993": "compare it as a text, '9007199254740993'",
    "a > b": "to compare numbers, write cast",
    "a BETWEEN b AND c": "to compare numbers, write cast",
    "a LIKE b": "the pattern of like is a text in quotes",
    r"a LIKE 'a\\b'": "a backslash precedes",
    r"a LIKE 'a\\'": "a backslash precedes",
    "a = 'it''s'": "two texts in quotes follow each other",
    "a IN (1, 'x')": "'x' is used as a number",
    "a = 9007199254740992": "compare it as a text",
    "substring(a, 1, 99999999999) = 'x'": "write start and length as integers",
    "substring(a) = 'x'": "write start and length as integers",
    "'1' || 9 + 9 = '28'": "write parentheses around",
    "`${env:HOME}` = 'x'": "cannot be the name of a column",
    "1) FROM t WHERE (a = 1": "is not one expression",
    "a, b": "not supported",
    "cast(a AS double FORMAT '9') = 1": "not supported",
    " OR ".join(["a=1"] * 180): "the expression is too complex",
    "a = 1 AND " + "(" * 300 + "b" + ")" * 300: "nested too deeply",
    "(a = 1) + 2 = 3": "a boolean is used as a number",
    "a +": "not an expression of Spark SQL",
    " ": "the expression is empty",
    "a = 1 b": "not supported",
    "substring(a, 1, b) = 'x'": "write start and length as integers",
    "trim(BOTH 'x' FROM a) = 'b'": "arguments that are not supported",
    " AND ".join(["a = 1"] * 400): "at most 2,000 characters",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_listed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[text].replace("(", "\\(")):
        parse_condition(text)


def test_columns_are_those_that_an_expression_reads() -> None:
    expression = parse_column("coalesce(user.id, `items[0].id`, 'x') || concat(a, a)")
    assert set(expression.columns) == {"user.id", "items[0].id", "a"}


def shop_spec(folder: Path, app: Mapping[str, Any]) -> DataSpec:
    """The shop's spec with other keys of the source `app`."""
    spec = yaml.safe_load(SPEC)
    keys = spec["sources"]["app"] | app
    spec["sources"]["app"] = {name: value for name, value in keys.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return load_spec(folder / "spec.yaml")


def events(number: int) -> list[dict[str, object]]:
    """Impressions of some users, each with a phone."""
    return [
        {"id": f"e{i}", "who": f"u{i % 3}", "what": "i", "page": "home", "action": "shown",
         "at": NOON + i, "phone": ("ios", "android")[i % 2]}
        for i in range(number)
    ]  # fmt: skip


def as_json(file: Path, records: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def as_csv(file: Path, records: list[dict[str, object]]) -> None:
    lines = [",".join(records[0]), *(",".join(map(str, r.values())) for r in records)]
    file.write_text("\n".join(lines) + "\n")


def as_parquet(file: Path, records: list[dict[str, object]]) -> None:
    pq.write_table(pa.Table.from_pylist(records), file)


WRITERS: Mapping[str, Callable[[Path, list[dict[str, object]]], None]] = {
    "json": as_json,
    "csv": as_csv,
    "parquet": as_parquet,
}


def ingested(
    folder: Path, spec: DataSpec, records: list[dict[str, object]], format_: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, int]]:
    """Events, quarantine and the totals of an ingest of some records."""
    (folder / "raw/app").mkdir(parents=True)
    WRITERS[format_](folder / "raw/app" / f"{DAY}.{format_}", records)
    lake = Lake(str(folder / "lake"), spec)
    totals = ingest(lake, str(folder / "raw"), (DAY, DAY))
    stored = sorted(rows(lake, "events"), key=lambda row: str(row["event_id"]))
    return stored, rows(lake, "quarantine"), totals


@pytest.mark.parametrize(
    "format_",
    ["json", *(pytest.param(name, marks=pytest.mark.proof) for name in ("csv", "parquet"))],
)
def test_skipped_records_and_computed_columns_change_nothing_else(
    spark: SparkSession, tmp_path: Path, format_: str
) -> None:
    source = {"format": format_, "path": f"app/{{day}}.{format_}"}
    plain_spec = shop_spec(tmp_path / "plain", source)
    plain = ingested(tmp_path / "plain", plain_spec, events(20), format_)
    # The same events in a log of several apps, with other names and units.
    others = [record | {"id": f"x{i}", "who": "other"} for i, record in enumerate(events(50))]
    mixed = [
        {"app": app, **record, "action": "SHOWN", "at": 1000 * int(str(record["at"]))}
        for app, records in (("game", others), ("shop", events(20)))
        for record in records
    ]
    random.Random(1).shuffle(mixed)
    expressions = {
        "where": "app = 'shop' AND at > 0",
        "select": {"action": "lower(action)", "seconds": "at / 1000"},
    }
    columns = yaml.safe_load(SPEC)["sources"]["app"]["columns"] | {"event_time": "seconds"}
    spec = shop_spec(tmp_path / "mixed", source | expressions | {"columns": columns})
    assert ingested(tmp_path / "mixed", spec, mixed, format_) == plain


def test_outcomes_of_skipped_impressions_are_skipped(spark: SparkSession, tmp_path: Path) -> None:
    wide = {"kind": "impression_log", "outcomes": [{"event": "click", "indicator": "clicked"}],
            "types": None, "where": "app <> 'game'", "select": {"clicked": "hits > 0"}}  # fmt: skip
    base = yaml.safe_load(SPEC)
    columns = base["sources"]["app"]["columns"]
    columns = {name: column for name, column in columns.items() if name != "type"}
    spec = shop_spec(tmp_path, {**wide, "columns": columns})
    records = [
        event | {"app": app, "hits": hits, "id": f"{app}{event['id']}"}
        for app in ("game", "shop")
        for event, hits in zip(events(4), (0, 1, 2, None), strict=True)
    ]
    stored, quarantined, _ = ingested(tmp_path, spec, records, "json")
    clicked = {row["event_id"] for row in stored if row["type"] == spec.event_codes["click"]}
    assert clicked == {"shope1:click", "shope2:click"}
    assert len(stored) == 4 + 2 and not quarantined


def test_skipped_files_may_lack_columns(spark: SparkSession, tmp_path: Path) -> None:
    source = {"format": "parquet", "path": "app/{day}*.parquet", "where": "app = 'shop'"}
    spec = shop_spec(tmp_path, source)
    (tmp_path / "raw/app").mkdir(parents=True)
    of_shop = [event | {"app": "shop"} for event in events(4)]
    as_parquet(tmp_path / "raw/app" / f"{DAY}-1.parquet", of_shop)
    as_parquet(tmp_path / "raw/app" / f"{DAY}-2.parquet", [{"app": "game", "level": 3}] * 9)
    lake = Lake(str(tmp_path / "lake"), spec)
    assert ingest(lake, str(tmp_path / "raw"), (DAY, DAY))["read"] == 4
    assert not rows(lake, "quarantine")


def test_a_condition_on_a_column_that_no_record_has_is_shown(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop_spec(tmp_path, {"where": "aplication = 'shop'"})
    (tmp_path / "raw/app").mkdir(parents=True)
    as_json(tmp_path / "raw/app" / f"{DAY}.json", events(5))
    command = ["spec", "check", str(tmp_path / "spec.yaml"), "--raw", str(tmp_path / "raw")]
    assert main(command) == 2
    assert "`where` skips every record" in " ".join(capsys.readouterr().out.split())


def test_names_that_differ_only_in_case_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    spec = shop_spec(tmp_path, {"where": "WHO = 'u1'"})
    with pytest.raises(UserError, match="the columns WHO, who differ only in case"):
        ingested(tmp_path, spec, events(2), "json")


def test_rows_of_reports_are_skipped(spark: SparkSession, raw: Path, lake_spec: DataSpec) -> None:
    audits = lake_spec.sources["audits"]
    assert isinstance(audits, AuditSource)
    half = audits.model_copy(update={"where": "share < 0.5", "select": {"campaign": "'one'"}})
    days = (LAST, LAST)
    all_rows = parse_reports(lake_spec, audits, str(raw), days).collect()
    skipped = [row for row in all_rows if row["share"] >= 0.5]
    found = parse_reports(lake_spec, half, str(raw), days).collect()
    assert 0 < len(skipped) < len(all_rows) == len(found)
    assert sum(row["reasons"] is None for row in found) == len(skipped)
    assert {row["campaign"] for row in found} == {"one"} and "is_selected" not in found[0]


@pytest.mark.parametrize("name", ["", "a`b", "user.id", "items[0]", "${env:HOME}"])
def test_names_of_computed_columns_are_plain(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="pattern"):
        shop_spec(tmp_path, {"select": {name: "'x'"}})


def test_records_that_cannot_be_read_are_quarantined_with_their_line(
    spark: SparkSession, tmp_path: Path
) -> None:
    spec = shop_spec(tmp_path, {"where": "app = 'shop'"}).model_copy(
        update={"max_bad_record_rate": 0.5}
    )
    (tmp_path / "raw/app").mkdir(parents=True)
    good = [json.dumps(record | {"app": "shop"}) for record in events(4)]
    skipped = json.dumps(events(1)[0] | {"app": "game", "at": "soon"})
    bad = json.dumps(events(1)[0] | {"app": "shop", "at": "soon"})
    lines = [skipped, good[0], "{no json", skipped, skipped, *good[1:], bad, skipped]
    (tmp_path / "raw/app" / f"{DAY}.json").write_text("\n".join(lines) + "\n")
    lake = Lake(str(tmp_path / "lake"), spec)
    totals = ingest(lake, str(tmp_path / "raw"), (DAY, DAY))
    quarantined = sorted((row["line"], row["reasons"]) for row in rows(lake, "quarantine"))
    assert quarantined == [(3, ["not a record"]), (9, ["no event time", "no ingest time"])]
    assert (totals["read"], totals["kept"]) == (6, 4)
    app, _ = preview_sources(spec, str(tmp_path / "raw"), 100)
    assert (app.records, app.skipped, app.quarantined) == (6, 4, 2)


def test_a_corrected_expression_releases_quarantined_records(
    spark: SparkSession, tmp_path: Path
) -> None:
    wrong = {"at": f"t{NOON}"}
    of_test = wrong | {"id": "b1", "phone": "test"}
    records = [*events(4), events(1)[0] | wrong | {"id": "b0"}, events(1)[0] | of_test]
    spec = shop_spec(tmp_path, {}).model_copy(update={"max_bad_record_rate": 0.5})
    _, quarantined, _ = ingested(tmp_path, spec, records, "json")
    assert len(quarantined) == 2
    columns = yaml.safe_load(SPEC)["sources"]["app"]["columns"] | {"event_time": "time"}
    expressions = {
        "select": {"time": "case when at like 't%' then substring(at, 2) else at end"},
        "where": "phone <> 'test'",
    }
    corrected = shop_spec(tmp_path, expressions | {"columns": columns})
    lake = Lake(str(tmp_path / "lake"), corrected)
    counts = reprocess_quarantine(lake, (DAY, DAY))
    assert counts == {"released": 1, "still quarantined": 0}
    assert sorted(row["event_id"] for row in rows(lake, "events")) == ["b0", "e0", "e1", "e2", "e3"]
    (metrics,) = rows(lake, "ingest_metrics")
    assert (metrics["read"], metrics["kept"], metrics["quarantined"]) == (5, 5, 0)
