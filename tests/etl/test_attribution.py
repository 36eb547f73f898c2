"""Attribution equals a brute-force reference that checks every pair of events."""

import json
import random
import shutil
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from etl.attributes import load_attributes
from etl.attribution import attribute_outcomes, outcomes_without_impression
from etl.ingest.run import ingest
from etl.labels import DATA_UNTIL_FILE, label_impressions
from etl.spec import DataSpec, load_spec
from etl.spec.sections import Objective, Touchpoint
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake, arrow_schema
from tests.etl.shop import SPEC
from tests.pipeline import rows

pytestmark = pytest.mark.spark

VIEW_WINDOW, CLICK_WINDOW = "10m", "40m"
FIRST_DAY, DAYS = date(2026, 1, 1), 14
EARLIER = FIRST_DAY, FIRST_DAY + timedelta(days=1)
Row = dict[str, Any]


def random_events(spec: DataSpec, n: int, rng: random.Random) -> list[Row]:
    """Events of few users and items within an hour; some land late, some name an impression."""
    events = []
    for i in range(n):
        event_type = rng.choice(["shown", "shown", "click", "buy"])
        second = rng.randrange(3600)
        named = f"e{rng.randrange(n)}" if rng.random() < 0.3 else None
        events.append(
            {
                "event_id": f"e{i}",
                "log": "log",
                "user_id": f"u{rng.randrange(3)}",
                "item_id": f"i{rng.randrange(3)}",
                "surface": rng.choice([1, 2]),
                "type": spec.event_codes[event_type],
                "event_type": event_type,
                "event_ts": second * 10**6,
                "visible_ts": second + rng.choice([0, 0, 0, 700]),
                "impression_id": f"e{i}" if event_type == "shown" else named,
                "value": 1.0,
            }
        )
    return events


def frame(shop: Lake, events: list[Row]) -> DataFrame:
    schema = arrow_schema(schemas.events(shop.spec))
    rows = [{k: v for k, v in event.items() if k != "event_type"} for event in events]
    table = pa.Table.from_pylist(rows, schema)
    return SparkSession.active().createDataFrame(table)


def reference_attribution(events: list[Row], outcome: Row, objective: Objective) -> str | None:
    """The impression to which an outcome is attributed, by brute force over all events."""
    impressions = {e["event_id"]: e for e in events if e["event_type"] == "shown"}
    named: str | None = outcome["impression_id"]
    if named and objective.unknown_impression == "drop":
        return named
    if named in impressions and may_count(impressions[named], outcome, objective.window):
        return named
    for touchpoint in objective.attribution:
        touch = latest_touch(events, outcome, touchpoint)
        if touch:
            return touch[-1]
    return None


def latest_touch(
    events: list[Row], outcome: Row, touchpoint: Touchpoint
) -> tuple[int, str, str] | None:
    """Time, event ID and impression ID of the latest touch of an outcome."""
    touches = []
    for event in events:
        if event["event_type"] != touchpoint.touch or not may_touch(event, outcome, touchpoint):
            continue
        impression = event["impression_id"]
        if impression is None:
            view = touchpoint.model_copy(update={"touch": "shown"})
            last_view = latest_touch(events, event, view)
            impression = last_view and last_view[-1]
        if impression is not None:
            touches.append((event["event_ts"], event["event_id"], impression))
    return max(touches, default=None)


def too_late(events: list[Row], attributed: dict[str, str | None], window: int) -> Iterator[str]:
    """Outcomes that follow their impression by more than a window, in seconds."""
    seconds = {event["event_id"]: event["event_ts"] // 10**6 for event in events}
    for outcome, impression in attributed.items():
        if impression in seconds and seconds[outcome] - seconds[impression] > window:
            yield outcome


def may_count(impression: Row, outcome: Row, window: int) -> bool:
    """Whether an outcome is visible after an impression, and at most `window` seconds later."""
    elapsed = outcome["event_ts"] - impression["event_ts"]
    return bool(impression["visible_ts"] <= outcome["visible_ts"] and elapsed <= window * 10**6)


def may_touch(event: Row, outcome: Row, touchpoint: Touchpoint) -> bool:
    """Whether an outcome may be attributed to an event of the touchpoint's type."""
    keys = ["user_id", "item_id", *(["surface"] if touchpoint.same_surface else [])]
    elapsed = outcome["event_ts"] - event["event_ts"]
    is_in_window = 0 <= elapsed <= (touchpoint.window or 10**9) * 10**6
    is_visible = event["visible_ts"] <= outcome["visible_ts"]
    return all(event[key] == outcome[key] for key in keys) and is_in_window and bool(is_visible)


@pytest.mark.parametrize("unknown", ["drop", "last_touch"])
@pytest.mark.parametrize("same_surface", [False, True])
@pytest.mark.parametrize("num_touchpoints", [1, 2])
def test_attribution_prefers_clicks_to_views_within_their_windows(
    shop: Lake, unknown: str, same_surface: bool, num_touchpoints: int
) -> None:
    touches = [
        {"touch": "click", "window": CLICK_WINDOW},
        {"touch": "shown", "window": VIEW_WINDOW},
    ][:num_touchpoints]
    objective = Objective.model_validate(
        {
            "event": "buy",
            "window": "4m",
            "attribution": [t | {"same_surface": same_surface} for t in touches],
            "unknown_impression": unknown,
        }
    )
    events = random_events(shop.spec, 400, random.Random(unknown + str(same_surface)))
    found = attribute_outcomes(shop, frame(shop, events), [objective]).collect()
    purchases = [event for event in events if event["event_type"] == "buy"]
    expected = {e["event_id"]: reference_attribution(events, e, objective) for e in purchases}
    attributed = {row["event_id"]: row["impression_id"] for row in found}
    assert len(found) == len(attributed)
    for late in too_late(events, attributed | expected, objective.window):
        attributed.pop(late, None)  # whether they are attributed makes no difference
        expected.pop(late)
    assert attributed == {id_: imp for id_, imp in expected.items() if imp is not None}
    assert 10 < len(attributed) < len(purchases)


def test_an_outcome_that_names_an_id_of_two_impressions_is_attributed_once(shop: Lake) -> None:
    """Its value would count twice in the label of each."""
    base = {"log": "log", "user_id": "u", "item_id": "i", "surface": 1, "impression_id": "again"}
    events = [
        base
        | {"event_id": f"{event_type}{second}", "event_type": event_type, "value": 2.0}
        | {"type": shop.spec.event_codes[event_type], "event_ts": second * 10**6}
        | {"visible_ts": second}
        for event_type, second in (("shown", 0), ("shown", 60), ("buy", 120))
    ]
    objective = Objective.model_validate(
        {"event": "buy", "window": "4m", "unknown_impression": "last_touch"}
    )
    found = attribute_outcomes(shop, frame(shop, events), [objective]).collect()
    assert [(row["event_id"], row["impression_id"]) for row in found] == [("buy120", "again")]


def test_outcomes_of_unknown_impressions_are_counted(shop: Lake) -> None:
    events = random_events(shop.spec, 300, random.Random(5))
    all_events = frame(shop, events)
    buys = all_events.filter(f"type = {shop.spec.event_codes['buy']}")
    impressions = {e["event_id"] for e in events if e["event_type"] == "shown"}
    named = [e["impression_id"] for e in events if e["event_type"] == "buy" and e["impression_id"]]
    unknown = sum(name not in impressions for name in named)
    assert outcomes_without_impression(shop.spec, all_events, buys).count() == unknown > 0


def long_log(spec: DataSpec, days: int, n: int, rng: random.Random) -> list[Row]:
    """Events over many days, each landing on its day; some name one of the 50 events before."""
    events = []
    for number, event in enumerate(random_events(spec, n, rng)):
        day = FIRST_DAY + timedelta(days=number * days // n)
        second = spec.day_start(day) + event["event_ts"] // 10**6
        times = {"event_ts": second * 10**6, "ingest_ts": second * 10**6, "visible_ts": second}
        if event["event_type"] != "shown" and event["impression_id"]:
            times["impression_id"] = f"e{max(0, number - rng.randrange(50))}"
        user = f"u{rng.randrange(30)}"  # with so few events that old touches are the latest
        events.append(event | times | {"user_id": user, "day": day, "bucket": 0})
    return events


def late_impression(spec: DataSpec, first_day: int) -> list[Row]:
    """A purchase after two clicks, of which the later one belongs to an impression of `first_day`.

    It is almost four days old; a newer impression lands after that click, together with the other.
    """
    day, hour = first_day * 24, 3600
    timed = [  # type, hour of the event, hour in which it lands
        ("shown", day + 14, day + 14),
        ("shown", day + 106, day + 122),
        ("click", day + 107, day + 123),
        ("click", day + 108, day + 108),
        ("buy", day + 109, day + 124),
    ]
    start, events = spec.day_start(FIRST_DAY), []
    for number, (event_type, occurred, arrived) in enumerate(timed):
        id_ = f"late-{first_day}-{number}"
        events.append(
            {
                "event_id": id_,
                "log": "log",
                "user_id": f"late-{first_day}",
                "item_id": "i0",
                "surface": 1,
                "type": spec.event_codes[event_type],
                "event_type": event_type,
                "event_ts": (start + occurred * hour) * 10**6,
                "ingest_ts": (start + arrived * hour) * 10**6,
                "visible_ts": start + arrived * hour,
                "impression_id": id_ if event_type == "shown" else None,
                "value": 1.0,
                "day": FIRST_DAY + timedelta(hours=arrived),
                "bucket": 0,
            }
        )
    return events


@pytest.mark.parametrize(
    ("window", "touches", "unknown"),
    [
        ("2d", "[{touch: click, window: 6d}, {touch: shown, window: 1d}]", "last_touch"),
        ("4d", "[{touch: click}]", "drop"),
    ],
)
@pytest.mark.usefixtures("spark")
def test_a_later_run_writes_the_labels_that_one_run_over_all_days_writes(
    tmp_path: Path, window: str, touches: str, unknown: str
) -> None:
    buy = f"{{event: buy, window: {window}, attribution: {touches}, unknown_impression: {unknown}}}"
    text = SPEC.replace("objectives:", f"allowed_lateness: 1d\nobjectives: {{buy: {buy}}} #")
    (tmp_path / "spec.yaml").write_text(text)
    lake = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    events = long_log(lake.spec, DAYS, 800, random.Random(1))
    days = FIRST_DAY, FIRST_DAY + timedelta(days=DAYS - 1)
    events += [e for day in range(DAYS - 5) for e in late_impression(lake.spec, day)]
    where = spark_io.day_range_predicate(*days)
    spark_io.replace_partitions(lake, schemas.events(lake.spec), frame(lake, events), where, {})
    label_impressions(lake, days)
    of_all_days = rows(lake, "impressions")
    label_impressions(lake, (days[1], days[1]))
    assert rows(lake, "impressions") == of_all_days
    labels = [row["label_buy"] for row in of_all_days]
    assert labels.count(1) > 20
    assert labels.count(0) > 20


@pytest.mark.usefixtures("spark")
def test_final_labels_of_earlier_days_do_not_read_later_days(tmp_path: Path) -> None:
    """Whether events of later days are others, also late outcomes in the windows, or are gone."""
    text = SPEC.replace("objectives:", "allowed_lateness: 1d\nobjectives:")
    (tmp_path / "spec.yaml").write_text(text)
    lake = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    spec, events = lake.spec, long_log(load_spec(tmp_path / "spec.yaml"), 8, 400, random.Random(2))
    days = FIRST_DAY, FIRST_DAY + timedelta(days=7)
    where = spark_io.day_range_predicate(*days)
    spark_io.replace_partitions(lake, schemas.events(spec), frame(lake, events), where, {})
    label_impressions(lake, days)
    labels = rows(lake, "impressions")
    assert {0, 1} <= {row["label_click"] for row in labels if row["day"] <= EARLIER[1]}

    last_read = EARLIER[1] + timedelta(days=spec.label_maturity_days + spec.visibility_delay_days)
    later = [event for event in events if event["day"] > last_read]
    shown = [e for e in events if e["event_type"] == "shown" and e["day"] <= EARLIER[1]]
    clicks = [
        {**late, "event_type": "click", "type": spec.event_codes["click"],
         "impression_id": of["event_id"], "event_ts": of["event_ts"] + 10**6}
        for late, of in zip(later, shown, strict=False)
    ]  # fmt: skip
    assert len(clicks) > 40
    where = spark_io.day_range_predicate(last_read + timedelta(days=1), days[1])
    spark_io.replace_partitions(lake, schemas.events(spec), frame(lake, clicks), where, {})
    data_until = Path(lake.root, *DATA_UNTIL_FILE)
    data_until.unlink()  # the last days have no events any more
    label_impressions(lake, EARLIER)
    assert rows(lake, "impressions") == labels
    for folder in Path(lake.root, "events").glob("day=*"):
        if folder.name > f"day={last_read}":
            shutil.rmtree(folder)
    data_until.unlink()
    label_impressions(lake, EARLIER)
    assert rows(lake, "impressions") == labels


DELAYED_IMPRESSIONS = """sources:
  shown: {kind: event_log, format: json, path: "shown/{day}.json", time_unit: s, delay: 3d,
          columns: {event_id: id, user: who, item: what, surface: page, event_time: at}}
"""


@pytest.mark.usefixtures("spark")
def test_labels_of_delayed_impressions_are_written_on_the_day_on_which_these_are_visible(
    tmp_path: Path,
) -> None:
    text = SPEC.replace("objectives:", "allowed_lateness: 0s\nobjectives:")
    (tmp_path / "spec.yaml").write_text(text.replace("sources:", DELAYED_IMPRESSIONS))
    lake = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    days = [FIRST_DAY + timedelta(days=number) for number in range(5)]
    events = long_log(lake.spec, len(days), 100, random.Random(1))
    events = [e | {"visible_ts": e["visible_ts"] + 3 * 86_400} for e in events]
    for day in days:
        of_day = frame(lake, [event for event in events if event["day"] == day])
        where = spark_io.day_range_predicate(day, day)
        spark_io.replace_partitions(lake, schemas.events(lake.spec), of_day, where, {})
        label_impressions(lake, (day, day))
    by_day = rows(lake, "impressions")
    has_label = {
        day: {r["label_click"] for r in by_day if r["day"] == day} != {None} for day in days
    }
    assert list(has_label.values()) == [True, True, False, False, False]
    label_impressions(lake, (days[0], days[-1]))
    assert rows(lake, "impressions") == by_day


BRANDED_SPEC = (
    SPEC.replace(
        "objectives:",
        "objectives: {buy: {event: buy, window: 1h, attribution: [{touch: shown, key: brand}]}} #",
    ).replace("attributes: {", "attributes: {item: {brand: {type: categorical}}, ")
    + """
  products:
    {kind: attributes, entity: item, format: json, path: "products/{day}.json", key: sku}
"""
)


@pytest.mark.usefixtures("spark")
def test_an_attribute_that_lands_after_an_outcome_does_not_change_its_label(tmp_path: Path) -> None:
    """Items of a brand that is known from the end of the second of three days."""
    (tmp_path / "spec.yaml").write_text(BRANDED_SPEC)
    spec = load_spec(tmp_path / "spec.yaml")
    days = [FIRST_DAY + timedelta(days=number) for number in range(3)]
    for number, day in enumerate(days):
        noon = spec.day_start(day) + 12 * 3600
        base = {"who": "u", "page": "home", "phone": "ios"}
        shown = base | {"id": f"i{number}", "what": "hat", "action": "shown", "at": noon}
        bought = base | {"id": f"b{number}", "what": "cap", "at": noon + 60}
        brands = [{"sku": sku, "brand": "x"} for sku in ("hat", "cap") if number == 1]
        brands.append({"sku": "other", "brand": "y"})
        for log, records in (("app", [shown]), ("sales", [bought]), ("products", brands)):
            path = tmp_path / "raw" / log / f"{day}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
    by_day, at_once = (Lake(str(tmp_path / name), spec) for name in ("by_day", "at_once"))
    labels = []
    for lake, first, last in [(by_day, day, day) for day in days] + [(at_once, days[0], days[-1])]:
        ingest(lake, str(tmp_path / "raw"), (first, last))
        load_attributes(lake, str(tmp_path / "raw"), (first, last))
        label_impressions(lake, (first, last))
        labels.append({row["impression_id"]: row["label_buy"] for row in rows(lake, "impressions")})
    assert labels == [{"i0": 0}, {"i0": 0, "i1": 0}, *[{"i0": 0, "i1": 0, "i2": 1}] * 2]
