"""Response curves are recovered and share what is common; files of campaign days are checked."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from etl.array_types import Bools, Float64
from etl.errors import UserError
from gemline import main
from ranking.roi.campaign_days import read_campaign_days
from ranking.roi.campaign_limits import read_limits
from ranking.roi.curves import CampaignDays, ResponseCurves, fit_curves
from tests.ranking.campaigns import COUNT, SCALES, market, true_conversions, write_campaign_days


def errors_of(curves: ResponseCurves, level: Float64, log_half: Float64) -> Float64:
    """Absolute errors of the log of conversions at 1.3 times the usual spend."""
    truth = np.log(true_conversions(1.3 * SCALES, level, log_half))
    return np.abs(curves.log_conversions(1.3 * SCALES)[0] - truth)


def test_curves_of_many_days_are_those_that_were_planted() -> None:
    days, level, log_half = market(0, days=400)
    errors = errors_of(fit_curves(days), level, log_half)
    assert errors[SCALES == 2000].max() < 0.02 and errors.max() < 0.12


def test_small_campaigns_start_from_what_others_teach() -> None:
    shared, alone = [], []
    for seed in range(8):
        days, level, log_half = market(seed, days=3)
        small = SCALES == 20
        shared.append(errors_of(fit_curves(days), level, log_half)[small].mean())
        alone.append(errors_of(fit_curves(days, shared=False), level, log_half)[small].mean())
    assert np.mean(shared) < 0.8 * np.mean(alone)


def test_intervals_cover_and_shrink_with_evidence() -> None:
    covered: list[Bools] = []
    widths: dict[int, list[float]] = {3: [], 30: []}
    for seed in range(12):
        for count, of_count in widths.items():
            days, level, log_half = market(seed, count)
            low, high = fit_curves(days).interval(SCALES)
            truth = true_conversions(SCALES, level, log_half)
            covered.append((low <= truth) & (truth <= high))
            of_count.append(float(np.log(high / low).mean()))
    assert 0.9 <= np.mean(covered) <= 0.99
    assert np.mean(widths[30]) < 0.5 * np.mean(widths[3])


def test_conversions_that_have_not_arrived_are_expected() -> None:
    days, level, log_half = market(1, days=60)
    rng = np.random.default_rng(0)
    arrived = rng.uniform(0.3, 1, len(days.spend))
    thinned = rng.binomial(days.conversions.astype(int), arrived).astype(float)
    late = fit_curves(replace(days, conversions=thinned, arrived=arrived))
    ignored = fit_curves(replace(days, conversions=thinned))
    large = SCALES == 2000
    assert errors_of(late, level, log_half)[large].mean() < 0.03
    assert errors_of(ignored, level, log_half)[large].mean() > 0.2


def test_campaigns_without_any_conversion_are_refused() -> None:
    days, _, _ = market(2, days=3)
    with pytest.raises(UserError, match="no campaign has a conversion"):
        fit_curves(replace(days, conversions=0 * days.conversions))


def missing_first(days: CampaignDays) -> list[float | None]:
    return [None, *[1.0] * (len(days.spend) - 1)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"spend": None}, "has no column spend; it has campaign, day"),
        ({"value": lambda days: -days.conversions}, "value is negative in some rows"),
        ({"currency": None}, "has no column currency: name the currency with --currency"),
        ({"currency": lambda d: [""] * len(d.spend)}, "currency is missing in some rows: fill it"),
        (
            {"currency": lambda d: ["EUR", ""] * (len(d.spend) // 2)},
            "currency is missing in some rows: fill it in, or name the currency with --currency",
        ),
        ({"campaign": lambda d: ["", *["b"] * (len(d.spend) - 1)]}, "campaign is missing in some"),
        ({"currency": lambda d: ["EUR", "USD"] * (len(d.spend) // 2)}, "has several currencies"),
        ({"spend": lambda days: 0 * days.spend}, "campaign c00 has 0 days with spend"),
        ({"arrived": lambda days: 0 * days.spend}, "c00 has 0 days with spend and conversions"),
        ({"arrived": lambda days: 2 + days.spend}, "arrived is the share of conversions so far"),
        ({"arrived": missing_first}, "arrived is missing in some rows"),
        ({"incremental_share": lambda d: -d.spend}, "incremental_share is negative in some"),
        (
            {
                "day": lambda d: ["2026-01-01", "2026-01-02"] * (len(d.spend) // 2),
                "incremental_share": lambda d: np.linspace(0.5, 1, len(d.spend)),
            },
            "campaign c00 has several values of incremental_share on 2026-01-02: give one",
        ),
        ({"conversions": lambda d: ["x"] * len(d.spend)}, "conversions is not a number"),
        ({"day": lambda d: ["01/05/2026"] * len(d.spend)}, "the day '01/05/2026' is not a date"),
        (
            {"day": lambda d: [*range(len(d.spend))]},
            "the day '0' is not a date: write days",
        ),
    ],
)
def test_wrong_files_are_refused_and_nothing_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    columns: dict[str, Callable[[CampaignDays], object] | None],
    message: str,
) -> None:
    days, _, _ = market(3, days=4)
    made = {name: make(days) if make else None for name, make in columns.items()}
    file = write_campaign_days(tmp_path / "days.csv", days, **made)
    out = tmp_path / "plan.csv"
    assert main(["roi", "plan", "--campaign-days", str(file), "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_rows_of_one_campaign_and_day_are_summed(tmp_path: Path) -> None:
    """A file with a row for each of two surfaces has the curves of the file without them."""
    days, _, _ = market(3, days=6)
    arrived = np.random.default_rng(0).uniform(0.5, 1, len(days.spend))
    file = write_campaign_days(tmp_path / "days.csv", days, arrived=arrived)
    expected = read_campaign_days(file, ("vertical",), None)
    table = pa_csv.read_csv(file)
    parts = []
    for share in (0.75, 0.25):
        part = table
        for name in ("spend", "conversions", "value"):
            column = pc.multiply(table[name].cast(pa.float64()), share)
            part = part.set_column(part.column_names.index(name), name, column)
        parts.append(part)
    pa_csv.write_csv(pa.concat_tables(parts), tmp_path / "split.csv")
    found = read_campaign_days(tmp_path / "split.csv", ("vertical",), None)
    np.testing.assert_allclose(found.current, expected.current)
    np.testing.assert_allclose(found.value_per_conversion, expected.value_per_conversion)
    np.testing.assert_allclose(fit_curves(found.days).mean, fit_curves(expected.days).mean)


def test_names_of_digits_are_read_as_they_are_written(tmp_path: Path) -> None:
    """007 and 7 are two campaigns, 1.10 and 1.1 two verticals, 0 is no currency of 000."""
    days, _, _ = market(3, days=4)
    names = ["007", "7", *(f"{c:03d}" for c in range(10, 8 + COUNT))]
    verticals = ["1.10", "1.1", *["2"] * (COUNT - 3), ""]
    file = write_campaign_days(
        tmp_path / "days.csv",
        days,
        campaign=[names[c] for c in days.campaign],
        vertical=[verticals[c] for c in days.campaign],
        currency=["000"] * len(days.spend),
    )
    found = read_campaign_days(file, ("vertical",), None)
    groups = dict(zip(found.days.campaigns, found.days.groups[:, 0].tolist(), strict=True))
    assert list(groups) == sorted(names) and found.currency == "000"
    assert [groups[name] for name in names] == [*verticals[:-1], "unknown"]
    (tmp_path / "limits.csv").write_text("campaign,maximum\n007,5\n")
    high = read_limits(tmp_path / "limits.csv", found.days.campaigns, 0.0).high
    assert high[0] == 5 and np.isinf(high[1:]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("c00", "Café").encode("latin-1"), "is not encoded in UTF-8"),
        (lambda text: text.encode("utf-16"), "is not encoded in UTF-8"),
        (lambda text: text.replace("value", "spend", 1).encode(), "has several columns spend"),
        (lambda text: text.replace("vertical", "day", 1).encode(), "has several columns day"),
    ],
)
def test_csv_of_another_encoding_or_with_repeated_columns_is_refused(
    tmp_path: Path, change: Callable[[str], bytes], message: str
) -> None:
    days, _, _ = market(3, days=4)
    file = write_campaign_days(tmp_path / "days.csv", days)
    file.write_bytes(change(file.read_text()))
    with pytest.raises(UserError, match=message):
        read_campaign_days(file, (), None)


@pytest.mark.parametrize("name", ["campaign", "day", "currency"])
def test_parquet_with_nulls_and_an_empty_option_are_refused(tmp_path: Path, name: str) -> None:
    days, _, _ = market(3, days=4)
    table = pa_csv.read_csv(write_campaign_days(tmp_path / "days.csv", days))
    with_null = pa.array([None, *table[name].to_pylist()[1:]], table[name].type)
    file = tmp_path / "days.parquet"
    pq.write_table(table.set_column(table.column_names.index(name), name, with_null), file)
    with pytest.raises(UserError, match=f"{name} is missing in some rows"):
        read_campaign_days(file, (), None)
    with pytest.raises(UserError, match="--currency is empty: name one, such as EUR"):
        read_campaign_days(tmp_path / "days.csv", (), " ")


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("us")])
def test_columns_of_dates_and_times_are_read_as_days(tmp_path: Path, kind: pa.DataType) -> None:
    days, _, _ = market(3, days=10)
    file = write_campaign_days(tmp_path / "days.csv", days)
    expected = read_campaign_days(file, (), None)
    table = pa_csv.read_csv(file)
    column = table["day"].cast(pa.timestamp("us"))
    later = pc.add(column, timedelta(hours=13)) if pa.types.is_timestamp(kind) else column
    position = table.column_names.index("day")
    pq.write_table(table.set_column(position, "day", later.cast(kind)), tmp_path / "d.parquet")
    found = read_campaign_days(tmp_path / "d.parquet", (), None)
    np.testing.assert_array_equal(found.current, expected.current)
    np.testing.assert_array_equal(found.days.spend, expected.days.spend)


def test_a_campaign_that_stopped_is_refused(tmp_path: Path) -> None:
    days, _, _ = market(3, days=10)
    is_late = np.tile(np.arange(10) >= 3, COUNT)
    spend = np.where(is_late & (days.campaign == 4), 0.0, days.spend)
    file = write_campaign_days(tmp_path / "days.csv", days, spend=spend)
    with pytest.raises(UserError, match="campaign c04 has no spend in the last 7 days"):
        read_campaign_days(file, (), None)
    is_late = np.tile(np.arange(10) >= 4, COUNT)
    spend = np.where(is_late & (days.campaign == 4), 0.0, days.spend)
    file = write_campaign_days(tmp_path / "days.csv", days, spend=spend)
    assert read_campaign_days(file, (), None).current[4] > 0


def test_the_group_of_a_campaign_is_its_most_frequent_known_one(tmp_path: Path) -> None:
    """A day with spend and without impressions has no group, wherever its row is."""
    days, _, _ = market(3, days=5)
    groups = np.array([days.groups[c, 0] for c in days.campaign], dtype=object)
    is_day = [np.arange(len(groups)) % 5 == day for day in range(5)]
    groups[is_day[0] | is_day[1]], groups[is_day[2]] = "unknown", None
    groups[days.campaign == 2] = "unknown"
    file = write_campaign_days(tmp_path / "d.csv", days, vertical=list(groups))
    expected = days.groups[:, 0].copy()
    found = read_campaign_days(file, ("vertical",), None).days.groups[:, 0]
    assert found[2] == "unknown"
    assert (np.delete(found, 2) == np.delete(expected, 2)).all()


def test_drawn_curves_share_the_errors_of_what_campaigns_have_in_common() -> None:
    """A campaign without days of its own would have the curve of its groups, right or wrong."""
    curves = fit_curves(market(0, days=3)[0])
    rng = np.random.default_rng(0)
    draws = np.array([curves.draw(rng).mean for _ in range(4000)]) - curves.mean
    found = np.einsum("dci,dej->ceij", draws, draws) / len(draws)
    expected = np.einsum("cia,eja->ceij", curves.shared_factor, curves.shared_factor)
    own = np.arange(len(curves.campaigns))
    expected[own, own] += curves.own_covariance
    np.testing.assert_allclose(expected[own, own], curves.covariance)
    deviation = np.sqrt(np.einsum("ccii->ci", expected))
    scale = np.einsum("ci,ej->ceij", deviation, deviation)
    assert np.abs(found - expected).max() < 0.1 * scale.max()
    small = np.flatnonzero(SCALES == 20)
    correlation = (expected / scale)[np.ix_(small, small)][..., 0, 0]
    assert np.median(correlation[~np.eye(len(small), dtype=bool)]) > 0.05
