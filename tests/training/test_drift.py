"""Prequential metrics of GEM by day, and the alarms that block a promotion."""

from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import log_loss

from benchmarks.studies.trials import symlinked_lake
from etl.spec.units import MICROS, date_range
from etl.tables import arrow, label_schemas, model_schemas
from etl.tables.lake import Lake, arrow_schema
from gemline import main
from ranking.report import figures
from tests.conftest import FIRST, LAST
from tests.pipeline import rows
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.evaluation import drift
from training.evaluation.drift import (
    DriftMetric,
    TeacherPrequential,
    combine,
    prequential_metrics,
    teacher_prequential,
)

DAYS = tuple(FIRST + timedelta(days=n) for n in range(9))
Row = dict[str, Any]


@pytest.fixture
def predicted_lake(lake: Lake, tmp_path: Path) -> Lake:
    """The same tables, with random teacher predictions."""
    linked = symlinked_lake(lake, tmp_path / "lake")
    write_predictions(linked, impression_rows(lake, FIRST + timedelta(days=1), LAST))
    return linked


def impression_rows(lake: Lake, first: date, last: date) -> list[Row]:
    """The impressions from a first to a last day."""
    impressions: list[Row] = rows(lake, "impressions")
    return [row for row in impressions if first <= row["day"] <= last]


def write_predictions(lake: Lake, impressions: list[Row]) -> None:
    """Random logits of some impressions, as of a GEM that was trained until the day before."""
    schema, rng = model_schemas.teacher_predictions(lake.spec), np.random.default_rng(0)
    predictions = [
        {
            "impression_id": row["impression_id"], "fm_version": "v",
            "fm_trained_until": row["day"] - timedelta(days=1),
            "day": row["day"], "bucket": row["bucket"],
        } | {f"logit_{name}": float(rng.normal(-2)) for name in lake.spec.objectives}
        for row in impressions
    ]  # fmt: skip
    table = pa.Table.from_pylist(predictions, arrow_schema(schema))
    arrow.replace_rows(lake, schema, table, f"day >= '{FIRST}'", {})


def own_impressions(lake: Lake, folder: Path) -> Lake:
    """The same tables by links, with an `impressions` table that is to be rewritten."""
    linked = symlinked_lake(lake, folder)
    Path(linked.root, "impressions").unlink()
    return linked


@pytest.fixture
def week_lake(lake: Lake, tmp_path: Path) -> Lake:
    """Seven days that are copies of the first one."""
    week, schema = own_impressions(lake, tmp_path / "week"), label_schemas.impressions(lake.spec)
    first_day = arrow.snapshot(lake, schema).read(day=DAYS[0]).to_pylist()
    impressions = [shifted(row, days) for row in first_day for days in range(7)]
    table = pa.Table.from_pylist(impressions, arrow_schema(schema))
    arrow.replace_rows(week, schema, table, f"day >= '{FIRST}'", {})
    write_predictions(week, impressions)
    return week


def shifted(row: Row, days: int) -> Row:
    """The same impression some days later."""
    times = {
        name: value + days * 86_400 * MICROS["s"]
        for name, value in row.items()
        if name.startswith("label_mature_ts_") or name == "event_ts"
    }
    day = row["day"] + timedelta(days=days)
    return row | times | {"day": day, "impression_id": f"{row['impression_id']}+{days}"}


@pytest.mark.parametrize("data_until", [LAST, LAST - timedelta(days=1)])
def test_only_labels_that_were_final_are_counted(predicted_lake: Lake, data_until: date) -> None:
    spec = predicted_lake.spec
    impressions = impression_rows(predicted_lake, FIRST, LAST)
    impression_by_id = {row["impression_id"]: row for row in impressions}
    expected: dict[tuple[date, int, str], list[tuple[float, float]]] = {}
    predictions: list[Row] = rows(predicted_lake, "teacher_predictions")
    for prediction in predictions:
        row = impression_by_id[prediction["impression_id"]]
        for name in spec.objectives:
            is_final = row[f"label_mature_ts_{name}"] < spec.day_end(data_until) * MICROS["s"]
            if row[f"label_{name}"] is not None and is_final:
                key = row["day"], row["surface"], name
                p = 1 / (1 + np.exp(-prediction[f"logit_{name}"]))
                expected.setdefault(key, []).append((p, float(row[f"label_{name}"])))
    actual = {
        (metrics.day, spec.surface_codes[metrics.surface], metrics.objective): metrics
        for metrics in teacher_prequential(predicted_lake, data_until)
    }
    assert actual.keys() == expected.keys()
    for key, pairs in expected.items():
        p, y = np.array(pairs).T
        assert (actual[key].rows, actual[key].positives) == (len(y), y.sum())
        assert actual[key].predicted == pytest.approx(p.sum(), rel=1e-5)
        if 0 < y.sum() < len(y):
            base_rate = np.full(len(y), y.mean())
            ne = log_loss(y, p) / log_loss(y, base_rate)
            assert actual[key].ne == pytest.approx(ne, rel=1e-5)
    assert any(day == data_until for day, _, _ in actual)


@pytest.mark.parametrize(("early_by_us", "is_final"), [(0, False), (1, True)])
def test_a_label_that_matures_when_the_data_ends_is_not_final(
    lake: Lake, tmp_path: Path, early_by_us: int, is_final: bool
) -> None:
    """Drift and training agree with `etl labels`, which compares with `<`."""
    own, schema = own_impressions(lake, tmp_path / "boundary"), label_schemas.impressions(lake.spec)
    data_until = LAST - timedelta(days=1)
    end = lake.spec.day_end(data_until)
    mature_ts = end * MICROS["s"] - early_by_us
    impressions = impression_rows(lake, FIRST + timedelta(days=1), data_until)
    for row in impressions:
        row["surface"] = lake.spec.surface_codes[lake.spec.surfaces_of("click")[0]]
        for name in lake.spec.objectives:
            row |= {f"label_{name}": 1, f"label_mature_ts_{name}": mature_ts}
    table = pa.Table.from_pylist(impressions, arrow_schema(schema))
    arrow.replace_rows(own, schema, table, f"day >= '{FIRST}'", {})
    write_predictions(own, impressions)

    assert bool(teacher_prequential(own, data_until)) == is_final
    reader = ExampleReader.latest(own)
    days = list(date_range(FIRST + timedelta(days=1), data_until))
    for only_unlearned in (False, True):
        window = LabelWindow(0, end, only_unlearned=only_unlearned)
        partitions = list(reader.partitions(days, range(lake.spec.buckets), window))
        assert bool(partitions) == is_final


def test_all_surfaces_have_the_rows_of_each_surface(predicted_lake: Lake) -> None:
    click = [
        metrics
        for metrics in teacher_prequential(predicted_lake, LAST)
        if (metrics.objective, metrics.day) == ("click", LAST)
    ]
    combined = combine(click)
    assert len(click) > 1
    assert combined.rows == sum(metrics.rows for metrics in click)
    assert combined.predicted == sum(metrics.predicted for metrics in click)


def test_days_with_few_positives_are_not_drawn(
    predicted_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "<svg" in figures.plot_prequential(teacher_prequential(predicted_lake, LAST))
    monkeypatch.setattr(figures, "MIN_POSITIVES", 10**9)
    assert figures.plot_prequential(teacher_prequential(predicted_lake, LAST)) == ""


def test_without_teacher_predictions_there_are_no_prequential_metrics(
    lake: Lake, tmp_path: Path
) -> None:
    assert teacher_prequential(symlinked_lake(lake, tmp_path / "none"), LAST) == []


USUAL = (0.86, 0.88, 0.87, 0.85, 0.86, 0.88, 0.87, 0.86)


@pytest.mark.parametrize(
    ("value", "increase_only", "drifts"),
    [(0.87, True, False), (0.99, True, True), (0.6, True, False), (0.6, False, True)],
)
def test_a_day_that_differs_from_earlier_days_is_drift(
    value: float, increase_only: bool, drifts: bool
) -> None:
    metric = DriftMetric("NE of click", DAYS, (*USUAL, value), 0.1, increase_only)
    assert bool(metric.alarm) == drifts
    assert not drifts or f"{DAYS[-1]}" in str(metric.alarm)


def test_one_bad_day_does_not_mask_a_second_one() -> None:
    values = (*USUAL[:4], 2.0, *USUAL[5:], 1.2)
    assert DriftMetric("NE of click", DAYS, values, 0.1).alarm


def test_no_alarm_is_raised_with_few_days() -> None:
    assert DriftMetric("NE of click", DAYS[:3], (0.8, 0.8, 9.0), 0.1).alarm is None


def test_drift_of_predictions_blocks_promotion(
    week_lake: Lake, spec_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = DAYS[6]
    command = ["train", "check-drift", "--spec", str(spec_path), "--lake", week_lake.root]
    assert main([*command, "--days", str(last)]) == 0
    schema = model_schemas.teacher_predictions(week_lake.spec)
    table = arrow.snapshot(week_lake, schema).read(day=last)
    column = table.column_names.index("logit_long_view")
    logits = pa.array(np.full(len(table), 3.0, np.float32))
    drifted = table.set_column(column, "logit_long_view", logits)
    arrow.replace_rows(week_lake, schema, drifted, f"day = '{last}'", {})
    capsys.readouterr()
    assert main([*command, "--days", str(last)]) == 2
    output = capsys.readouterr()
    assert "NE of long_view is" in output.err and f"on {last}" in output.err
    assert "ALARM: calibration of long_view" in output.out


def sums_of(day: date, positives: float) -> TeacherPrequential:
    """Sums of a day of 4,000 impressions on which 200 positives were predicted."""
    return TeacherPrequential(day, "feed", "conversion", 4000, positives, 200.0, 800.0)


def test_missing_positives_are_drift_of_the_calibration_alone() -> None:
    """Without conversions of its own, the newest day has no NE; that of the day before is usual."""
    usual = [sums_of(day, 195.0 + day.day % 3) for day in DAYS[:-1]]
    for positives in (0.0, 3.0):
        ne, calibration = prequential_metrics("conversion", [*usual, sums_of(DAYS[-1], positives)])
        assert ne.days[-1] == DAYS[-2] and ne.alarm is None
        assert calibration.days[-1] == DAYS[-1]
        assert f"on {DAYS[-1]}" in str(calibration.alarm)


def test_labels_of_one_class_are_no_drift_of_the_ne() -> None:
    """Where all labels are positive there is no NE, neither that day nor in later baselines."""
    usual = [sums_of(day, 3900.0 + day.day % 3)._replace(predicted=3900.0) for day in DAYS]
    for day in (0, len(DAYS) - 1):
        sums = list(usual)
        sums[day] = sums_of(DAYS[day], 4000.0)._replace(predicted=3900.0)
        ne, calibration = prequential_metrics("conversion", sums)
        assert DAYS[day] not in ne.days and np.isfinite(ne.values).all()
        assert ne.alarm is None and calibration.alarm is None
        assert calibration.days == DAYS


def test_an_old_bad_day_does_not_block_later_days() -> None:
    """The days after it have too few predicted and actual positives to be judged."""
    days = [FIRST + timedelta(days=n) for n in range(11)]
    usual = [sums_of(day, 195.0 + day.day % 3) for day in days[:8]]
    bad = sums_of(days[8], 900.0)
    assert any(metric.alarm for metric in prequential_metrics("conversion", [*usual, bad]))
    few = [sums_of(day, 5.0)._replace(predicted=5.0) for day in days[9:]]
    assert not list(prequential_metrics("conversion", [*usual, bad, *few]))


def test_a_surface_without_impressions_is_reported_but_blocks_no_promotion(
    predicted_lake: Lake,
) -> None:
    metrics = drift.drift_metrics(predicted_lake, LAST)
    surfaces = {f"impressions on {name}" for name in predicted_lake.spec.ad_surfaces}
    assert surfaces <= {metric.name for metric in metrics}
    assert not any(m.blocks_promotion for m in metrics if m.name.startswith("impressions"))
    counts = (900, 1000, 950, 980, 1010, 940, 1020, 990, 0)
    assert DriftMetric("impressions on feed", DAYS, counts, 0.5).alarm
