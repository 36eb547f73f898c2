"""What GEM said of a day before it learned it, beside what is known to have happened."""

from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import log_loss

from etl.spec.units import MICROS
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema
from gemline import main
from ranking.report import figures
from tests.conftest import FIRST, LAST
from tests.pipeline import rows
from training import health
from training.health import Measure
from training.knowledge.foretold import foretold, together
from training.trials import linked

DAYS = tuple(FIRST + timedelta(days=n) for n in range(9))


@pytest.fixture
def own(lake: Lake, tmp_path: Path) -> Lake:
    """The same tables, with logits that GEM might have told."""
    made = linked(lake, tmp_path / "lake")
    write_knowledge(made, [row for row in rows(lake, "impressions") if row["day"] > FIRST])
    return made


def write_knowledge(own: Lake, impressions: list[dict]) -> None:
    """Random logits of some impressions, as of a GEM that was trained until the day before."""
    contract, rng = contracts.knowledge(own.spec), np.random.default_rng(0)
    told = [
        {
            "impression_id": row["impression_id"], "fm_version": "v",
            "fm_trained_until": row["day"] - timedelta(days=1), "embedding": [],
            "day": row["day"], "bucket": row["bucket"],
        } | {f"logit_{name}": float(rng.normal(-2)) for name in own.spec.objectives}
        for row in impressions
    ]  # fmt: skip
    table = pa.Table.from_pylist(told, arrow_schema(contract))
    arrow.replace(own, contract, table, f"day >= '{FIRST}'", {})


@pytest.fixture
def a_week(lake: Lake, tmp_path: Path) -> Lake:
    """Seven days that are all like the first one."""
    made, contract = linked(lake, tmp_path / "week"), contracts.impressions(lake.spec)
    Path(made.root, contract.name).unlink()  # a link to the table of all tests
    shown = arrow.snapshot(lake, contract).read(day=DAYS[0]).to_pylist()
    week = [shifted(row, days) for row in shown for days in range(7)]
    table = pa.Table.from_pylist(week, arrow_schema(contract))
    arrow.replace(made, contract, table, f"day >= '{FIRST}'", {})
    write_knowledge(made, week)
    return made


def shifted(row: dict, days: int) -> dict:
    """An impression so many days later."""
    later = {
        name: value + days * 86_400 * MICROS["s"]
        for name, value in row.items()
        if name.startswith("ready_") or name == "event_ts"
    }  # fmt: skip
    day = row["day"] + timedelta(days=days)
    return row | later | {"day": day, "impression_id": f"{row['impression_id']}+{days}"}


@pytest.mark.parametrize("landed", [LAST, LAST - timedelta(days=1)])
def test_only_labels_that_were_final_count(own: Lake, landed: date) -> None:
    shown = {row["impression_id"]: row for row in rows(own, "impressions")}
    expected: dict[tuple, list[tuple[float, float]]] = {}
    for told in rows(own, "knowledge"):
        row = shown[told["impression_id"]]
        for name in own.spec.objectives:
            ready = row[f"ready_{name}"] <= own.spec.day_end(landed) * 1_000_000
            if row[f"label_{name}"] is not None and ready:
                key = row["day"], row["surface"], name
                p = 1 / (1 + np.exp(-told[f"logit_{name}"]))
                expected.setdefault(key, []).append((p, float(row[f"label_{name}"])))
    found = {(f.day, own.spec.surface_codes[f.surface], f.objective): f
             for f in foretold(own, landed)}  # fmt: skip
    assert found.keys() == expected.keys()
    for key, pairs in expected.items():
        p, y = np.array(pairs).T
        assert (found[key].rows, found[key].happened) == (len(y), y.sum())
        assert found[key].said == pytest.approx(p.sum(), rel=1e-5)
        if 0 < y.sum() < len(y):
            assert found[key].ne == pytest.approx(
                log_loss(y, p) / log_loss(y, np.full(len(y), y.mean())), rel=1e-5
            )
    assert any(day == landed for day, _, _ in found)


def test_surfaces_together_are_all_their_rows(own: Lake) -> None:
    click = [f for f in foretold(own, LAST) if (f.objective, f.day) == ("click", LAST)]
    whole = together(click)
    assert len(click) > 1
    assert (whole.rows, whole.said) == (sum(f.rows for f in click), sum(f.said for f in click))


def test_days_with_few_outcomes_are_not_drawn(own: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "<svg" in figures.by_day(foretold(own, LAST))
    monkeypatch.setattr(figures, "FEWEST_OUTCOMES", 10**9)
    assert figures.by_day(foretold(own, LAST)) == ""


def test_without_knowledge_nothing_was_foretold(lake: Lake, tmp_path: Path) -> None:
    assert foretold(linked(lake, tmp_path / "none"), LAST) == []


USUAL = (0.86, 0.88, 0.87, 0.85, 0.86, 0.88, 0.87, 0.86)


@pytest.mark.parametrize(
    ("value", "only_more", "strange"),
    [(0.87, True, False), (0.99, True, True), (0.6, True, False), (0.6, False, True)],
)
def test_a_day_unlike_those_before_is_strange(value: float, only_more: bool, strange: bool) -> None:
    measure = Measure("NE of click", DAYS, (*USUAL, value), 0.1, only_more)
    assert bool(measure.alarm) == strange
    assert not strange or f"{DAYS[-1]}" in str(measure.alarm)


def test_one_bad_day_hides_no_second_one_and_few_days_say_nothing() -> None:
    bad = (*USUAL[:4], 2.0, *USUAL[5:], 1.2)
    assert Measure("NE of click", DAYS, bad, 0.1).alarm
    assert Measure("NE of click", DAYS[:3], (0.8, 0.8, 9.0), 0.1).alarm is None


def test_predictions_that_turn_bad_stop_what_would_be_promoted(
    a_week: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = DAYS[6]
    where = ["--spec", str(spec_path), "--lake", a_week.root, "--days", str(last)]
    assert main(["train", "health", *where]) == 0
    contract = contracts.knowledge(a_week.spec)
    table = arrow.snapshot(a_week, contract).read(day=last)
    at = table.column_names.index("logit_long_view")
    logits = pa.array(np.full(len(table), 3.0, np.float32))
    turned = table.set_column(at, "logit_long_view", logits)
    arrow.replace(a_week, contract, turned, f"day = '{last}'", {})
    capsys.readouterr()
    assert main(["train", "health", *where]) == 2
    said = capsys.readouterr()
    assert "NE of long_view is" in said.err and f"on {last}" in said.err
    assert "ALARM: calibration of long_view" in said.out


def test_a_surface_that_lost_its_log_is_told_and_stops_nobody(own: Lake) -> None:
    watched = health.measures(own, LAST)
    assert {f"impressions on {name}" for name in own.spec.ad_surfaces} <= {m.name for m in watched}
    assert not any(m.stops for m in watched if m.name.startswith("impressions"))
    lost = Measure("impressions on feed", DAYS, (900, 1000, 950, 980, 1010, 940, 1020, 990, 0), 0.5)
    assert lost.alarm
