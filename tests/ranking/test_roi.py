"""Response curves are recovered, share what is common, and plans follow marginal return."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.array_types import Bools, Float64
from etl.errors import UserError
from gemline import main
from ranking.roi.campaign_days import read_campaign_days
from ranking.roi.campaign_limits import read_limits
from ranking.roi.curves import CampaignDays, ResponseCurves, fit_curves
from ranking.roi.plan import Limits, marginal_value, plan_budgets, step_limits
from ranking.roi.simulation import simulate_plan
from ranking.roi.value import value_per_conversion

SCALES = np.repeat([20.0, 2000.0], 12)
COUNT = len(SCALES)


def true_conversions(spend: Float64, level: Float64, room: Float64) -> Float64:
    """Expected conversions of a campaign with spends of `SCALES` as the reference."""
    ratio = spend / SCALES
    return np.asarray(np.exp(level) * ratio * (1 + np.exp(room)) / (ratio + np.exp(room)))


def market(seed: int, days: int, spread: float = 0.4) -> tuple[CampaignDays, Float64, Float64]:
    """Days of campaigns of two scales and three verticals, their levels and rooms."""
    rng = np.random.default_rng(seed)
    vertical = rng.integers(0, 3, COUNT)
    level = np.log(SCALES / 8) + 0.4 * rng.standard_normal(3)[vertical]
    level += 0.2 * rng.standard_normal(COUNT)
    room = 0.6 + 0.3 * rng.standard_normal(COUNT)
    spends = SCALES[:, None] * np.exp(spread * rng.standard_normal((COUNT, days)))
    expected = np.stack([true_conversions(spends[:, d], level, room) for d in range(days)], 1)
    campaign_days = CampaignDays(
        tuple(f"c{c:02d}" for c in range(COUNT)),
        vertical[:, None].astype(str),
        np.repeat(np.arange(COUNT), days),
        spends.ravel(),
        rng.poisson(expected).ravel().astype(float),
        np.ones(COUNT * days),
    )
    return campaign_days, level, room


def errors_of(curves: ResponseCurves, level: Float64, room: Float64) -> Float64:
    """Absolute errors of the log of conversions at 1.3 times the usual spend."""
    truth = np.log(true_conversions(1.3 * SCALES, level, room))
    return np.abs(curves.log_conversions(1.3 * SCALES)[0] - truth)


def test_curves_of_many_days_are_those_that_were_planted() -> None:
    days, level, room = market(0, days=400)
    errors = errors_of(fit_curves(days), level, room)
    assert errors[SCALES == 2000].max() < 0.02 and errors.max() < 0.12


def test_small_campaigns_start_from_what_others_teach() -> None:
    shared, alone = [], []
    for seed in range(8):
        days, level, room = market(seed, days=3)
        small = SCALES == 20
        shared.append(errors_of(fit_curves(days), level, room)[small].mean())
        alone.append(errors_of(fit_curves(days, shared=False), level, room)[small].mean())
    assert np.mean(shared) < 0.8 * np.mean(alone)


def test_intervals_cover_and_shrink_with_evidence() -> None:
    covered: list[Bools] = []
    widths: dict[int, list[float]] = {3: [], 30: []}
    for seed in range(12):
        for count, of_count in widths.items():
            days, level, room = market(seed, count)
            low, high = fit_curves(days).interval(SCALES)
            truth = true_conversions(SCALES, level, room)
            covered.append((low <= truth) & (truth <= high))
            of_count.append(float(np.log(high / low).mean()))
    assert 0.9 <= np.mean(covered) <= 0.99
    assert np.mean(widths[30]) < 0.5 * np.mean(widths[3])


def test_conversions_that_have_not_arrived_are_expected() -> None:
    days, level, room = market(1, days=60)
    rng = np.random.default_rng(0)
    arrived = rng.uniform(0.3, 1, len(days.spend))
    thinned = rng.binomial(days.conversions.astype(int), arrived).astype(float)
    late = fit_curves(replace(days, conversions=thinned, arrived=arrived))
    ignored = fit_curves(replace(days, conversions=thinned))
    large = SCALES == 2000
    assert errors_of(late, level, room)[large].mean() < 0.03
    assert errors_of(ignored, level, room)[large].mean() > 0.2


def test_campaigns_without_any_conversion_are_refused() -> None:
    days, _, _ = market(2, days=3)
    with pytest.raises(UserError, match="no campaign has a conversion"):
        fit_curves(replace(days, conversions=0 * days.conversions))


def some_curves(seed: int) -> tuple[ResponseCurves, Float64, Float64]:
    """Curves, values of a conversion, and current spends."""
    rng = np.random.default_rng(seed)
    curves = fit_curves(market(seed, days=5)[0])
    return curves, np.exp(rng.standard_normal(COUNT)), SCALES * np.exp(0.3 * rng.random(COUNT))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), step=st.floats(0.05, 0.9))
def test_no_transfer_between_two_campaigns_improves_a_plan(seed: int, step: float) -> None:
    curves, value, current = some_curves(seed % 4)
    limits = step_limits(current.sum(), current, step, 0 * current, np.inf + current)
    plan = plan_budgets(curves, value, current, limits)
    assert plan.spend.sum() == pytest.approx(current.sum())
    assert (plan.spend >= current * (1 - step) - 1e-6).all()
    assert (plan.spend <= current * (1 + step) + 1e-6).all()
    assert plan.value_after.sum() >= plan.value_before.sum() - 1e-9
    marginal = marginal_value(curves, value, plan.spend)
    can_give = plan.spend > limits.low * (1 + 1e-6)
    can_take = plan.spend < limits.high * (1 - 1e-6)
    if can_give.any() and can_take.any():
        assert marginal[can_take].max() <= marginal[can_give].min() * (1 + 1e-4)


def test_plans_do_not_depend_on_the_currency_and_avoid_risk() -> None:
    curves, value, current = some_curves(1)
    limits = Limits(current.sum(), 0.5 * current, 2 * current)
    plan = plan_budgets(curves, value, current, limits)
    other = plan_budgets(curves, 7.5 * value, current, limits)
    np.testing.assert_allclose(other.spend, plan.spend, rtol=1e-6)
    _, deviation = curves.log_conversions(current)
    careful = plan_budgets(curves, value, current, limits, risk=2.0)
    moved = np.log(careful.spend / plan.spend)
    assert np.corrcoef(moved, deviation)[0, 1] < -0.3


def test_a_very_risk_averse_plan_raises_the_surest_campaigns_first() -> None:
    curves, value, current = some_curves(1)
    limits = Limits(current.sum(), 0.5 * current, 2 * current)
    _, deviation = curves.log_conversions(current)
    with np.errstate(all="raise", under="ignore"):
        plan = plan_budgets(curves, value, current, limits, risk=1e5)
    assert plan.spend.sum() == pytest.approx(current.sum())
    assert plan.spend[deviation.argmin()] == pytest.approx(2 * current[deviation.argmin()])
    assert plan.spend[deviation.argmax()] == pytest.approx(0.5 * current[deviation.argmax()])


@pytest.mark.parametrize("risk", ["100000", "inf", "nan"])
def test_risks_that_no_plan_needs_are_refused(
    tmp_path: Path, risk: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_campaign_days(tmp_path / "days.csv", market(3, days=4)[0])
    flags = ["--campaign-days", str(file), "--out", str(tmp_path / "plan.csv"), "--risk", risk]
    with pytest.raises(SystemExit) as refusal:
        main(["roi", "plan", *flags])
    assert refusal.value.code == 2
    printed = capsys.readouterr()
    assert "risk" in printed.out + printed.err and not (tmp_path / "plan.csv").exists()


@pytest.mark.parametrize("share", [0.0, -0.2])
def test_a_campaign_without_incremental_conversions_gives_its_budget_to_others(
    share: float,
) -> None:
    curves, value, current = some_curves(1)
    worthless = np.where(np.arange(COUNT) == 4, share, 1.0) * value
    limits = Limits(current.sum(), 0.5 * current, 2 * current)
    plan = plan_budgets(curves, worthless, current, limits)
    assert plan.spend[4] == pytest.approx(0.5 * current[4])
    assert plan.spend.sum() == pytest.approx(current.sum())
    assert all(np.isfinite(column).all() for column in vars(plan).values())
    with pytest.raises(UserError, match="no campaign's conversions are worth anything"):
        plan_budgets(curves, share * value, current, limits)


def test_plans_that_explore_state_values_of_the_posterior() -> None:
    curves, value, current = some_curves(3)
    limits = Limits(current.sum(), 0.5 * current, 2 * current)
    drawn = curves.draw(np.random.default_rng(0))
    plan = plan_budgets(curves, value, current, limits, drawn=drawn)
    assert not np.allclose(plan.spend, plan_budgets(curves, value, current, limits).spend)
    low, high = curves.interval(plan.spend)
    np.testing.assert_allclose(plan.value_low, value * low)
    np.testing.assert_allclose(plan.value_high, value * high)
    assert (plan.value_low < plan.value_after).all() and (plan.value_after < plan.value_high).all()


def test_limits_that_no_plan_meets_are_refused() -> None:
    curves, value, current = some_curves(2)
    low, high = 0.9 * current, 1.1 * current
    with pytest.raises(UserError, match="raise the budget, or allow a larger step"):
        plan_budgets(curves, value, current, Limits(0.5 * current.sum(), low, high))
    with pytest.raises(UserError, match="lower the budget, or allow a larger step"):
        plan_budgets(curves, value, current, Limits(2 * current.sum(), low, high))
    with pytest.raises(UserError, match="campaign c00 may spend at least"):
        plan_budgets(curves, value, current, Limits(current.sum(), 3 * high, high))


def test_a_minimum_above_the_largest_step_is_refused_rather_than_the_step_exceeded() -> None:
    curves, value, current = some_curves(2)
    limits = step_limits(current.sum(), current, 0.2, np.full(COUNT, 30.0), np.inf + current)
    with pytest.raises(UserError, match=r"c00 may spend at least 30\.00 and at most 2"):
        plan_budgets(curves, value, current, limits)


def write_campaign_days(path: Path, days: CampaignDays, **columns: object) -> Path:
    count = len(days.spend) // COUNT
    rows = {
        "campaign": [days.campaigns[c] for c in days.campaign],
        "day": [f"2026-01-{d + 1:02d}" for _ in range(COUNT) for d in range(count)],
        "spend": days.spend,
        "conversions": days.conversions,
        "value": 12 * days.conversions,
        "vertical": [days.groups[c, 0] for c in days.campaign],
        "currency": ["EUR"] * len(days.spend),
    }
    table = {name: column for name, column in (rows | columns).items() if column is not None}
    pa_csv.write_csv(pa.table(table), path)
    return path


def test_the_command_writes_a_plan_with_its_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days, _, _ = market(3, days=7)
    file = write_campaign_days(tmp_path / "days.csv", days)
    command = ["--campaign-days", str(file), "--groups", "vertical"]
    assert main(["roi", "fit", *command]) == 0
    assert "marginal return" in capsys.readouterr().out
    assert main(["roi", "plan", *command, "--out", str(tmp_path / "plan.csv")]) == 0
    printed = capsys.readouterr().out
    plan = pa_csv.read_csv(tmp_path / "plan.csv").to_pydict()
    assert len(plan["campaign"]) == COUNT
    assert sum(plan["planned_spend"]) == pytest.approx(sum(plan["current_spend"]))
    assert all(reason in printed for reason in plan["reason"])
    raised = [
        (reason, planned > current)
        for reason, planned, current in zip(
            plan["reason"], plan["planned_spend"], plan["current_spend"], strict=True
        )
        if not reason.startswith("keep")
    ]
    assert raised and all(reason.startswith("raise") == more for reason, more in raised)
    assert "against the current budgets" in printed
    assert "simulated gain: P5" in printed and "chance of a loss" in printed
    gains = [np.array(plan[f"gain_p{percentile}"]) for percentile in (5, 50, 95)]
    assert (gains[0] <= gains[1]).all() and (gains[1] <= gains[2]).all()
    assert set(plan["returns"]) == {"attributed"} and set(plan["incremental_share"]) == {1}
    guide = (Path(__file__).parents[2] / "docs/guides/roi.md").read_text()
    for name in plan:
        assert f"`{name}`" in guide, name


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
        ({"arrived": lambda days: 0 * days.spend}, "arrived is the share of conversions so far"),
        ({"arrived": missing_first}, "arrived is missing or not finite"),
        ({"incremental_share": missing_first}, "incremental_share is missing or not"),
        (
            {"incremental_share": lambda d: np.linspace(0.5, 1, len(d.spend))},
            "campaign c00 has several values of incremental_share",
        ),
        ({"conversions": lambda d: ["x"] * len(d.spend)}, "conversions is not a number"),
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


def test_value_per_conversion_is_shrunk_and_incremental_where_measured(tmp_path: Path) -> None:
    days, _, _ = market(3, days=4)
    value = days.conversions * np.where(days.campaign == 12, 50, 10)
    share = np.where(days.campaign == 5, 0.5, 1.0)
    file = write_campaign_days(tmp_path / "d.csv", days, value=value, incremental_share=share)
    table = read_campaign_days(file, ("vertical",), None)
    assert 40 < table.value_per_conversion[12] < 50  # many conversions of its own
    assert table.incremental_value[5] == pytest.approx(table.value_per_conversion[5] / 2)
    with pytest.raises(UserError, match="no such file"):
        read_campaign_days(tmp_path / "none.csv", (), None)


@pytest.mark.parametrize("between", [0.0, 0.3, 1.0])
def test_intervals_of_the_value_of_a_conversion_cover_it(between: float) -> None:
    """Lognormal orders; campaigns of a few to some thousand conversions."""
    daily, num_days = np.repeat([0.5, 5, 50, 300], 10), 14
    campaign = np.repeat(np.arange(len(daily)), num_days)
    covered = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        true = 12 * np.exp(between * rng.standard_normal(len(daily)))
        conversions = rng.poisson(daily[campaign])
        orders = [rng.lognormal(-0.32, 0.8, n).sum() for n in conversions]
        mean, deviation = value_per_conversion(
            campaign, conversions.astype(float), true[campaign] * orders, len(daily)
        )
        covered.append(np.abs(np.log(true / mean)) < 1.96 * deviation)
    by_size = np.reshape(covered, (-1, 4, 10)).mean((0, 2))
    assert 0.92 <= np.mean(covered) <= 0.98 and by_size.min() > 0.88


def test_the_error_of_a_value_is_relative_to_its_own_campaign() -> None:
    """One that brings nothing beside one that brings 50 is not worth thousands by chance."""
    campaign, conversions = np.repeat([0, 1], 10), np.full(20, 1000.0)
    sums = np.random.default_rng(0).exponential(50, (20, 1000)).sum(1)
    for scale, largest in ((0.02, 0.1), (0.0, 1.5)):
        value = np.where(campaign == 0, scale, 1) * sums
        _, deviation = value_per_conversion(campaign, conversions, value, 2)
        assert deviation[0] < largest
        assert deviation[1] == pytest.approx(0.01, rel=0.2)  # of 10,000 exponential values


def test_an_uncertain_value_of_conversions_widens_the_intervals_of_a_plan() -> None:
    curves, value, current = some_curves(3)
    limits = Limits(current.sum(), 0.5 * current, 2 * current)
    certain = plan_budgets(curves, value, current, limits)
    plan = plan_budgets(curves, value, current, limits, value_deviation=np.full(COUNT, 0.2))
    np.testing.assert_allclose(plan.value_after, certain.value_after)
    errors = [np.log(p.value_high / p.value_low) / (2 * 1.959964) for p in (certain, plan)]
    np.testing.assert_allclose(errors[1] ** 2, errors[0] ** 2 + 0.04)


def test_a_plan_of_certain_curves_has_its_computed_gain_in_all_simulations() -> None:
    curves, value, current = some_curves(3)
    plan = plan_budgets(curves, value, current, Limits(current.sum(), 0.5 * current, 2 * current))
    gain = plan.value_after.sum() / plan.value_before.sum() - 1
    widths = []
    for scale in (0.0, 0.25, 1.0):
        scaled = replace(curves, covariance=scale * curves.covariance)
        simulation = simulate_plan(
            scaled, value, np.zeros(COUNT), current, plan.spend, np.random.default_rng(0)
        )
        p5, p50, p95 = simulation.total_percentiles()
        widths.append(p95 - p5)
        assert p50 == pytest.approx(gain, rel=0.3)
    assert widths[0] < 1e-4 < 20 * widths[1] and 1.5 * widths[1] < widths[2]


def test_simulated_conversions_have_the_variance_of_the_curves_dispersion() -> None:
    curves, value, current = some_curves(3)
    certain = replace(curves, covariance=0 * curves.covariance, dispersion=3.0)
    simulation = simulate_plan(
        certain, value, np.zeros(COUNT), current, current, np.random.default_rng(0)
    )
    mean, variance = simulation.conversions.mean(0), simulation.conversions.var(0)
    expected = np.exp(curves.log_conversions(current)[0])
    np.testing.assert_allclose(mean, expected, rtol=0.1)
    np.testing.assert_allclose(variance / mean, 3, rtol=0.2)
    assert simulation.loss_chance == 0 and not simulation.gains.any()


def test_plans_are_within_the_limits_of_campaigns(tmp_path: Path) -> None:
    days, _, _ = market(3, days=7)
    file = write_campaign_days(tmp_path / "days.csv", days)
    flags = ["--campaign-days", str(file), "--out", str(tmp_path / "plan.csv"), "--max-step", "0.5"]
    assert main(["roi", "plan", *flags]) == 0
    free = pa_csv.read_csv(tmp_path / "plan.csv").to_pydict()
    raised = int(np.argmax(np.array(free["planned_spend"]) / free["current_spend"]))
    name, current = free["campaign"][raised], free["current_spend"][raised]
    (tmp_path / "limits.csv").write_text(f"campaign,minimum,maximum\n{name},,{current}\n")
    assert main(["roi", "plan", *flags, "--limits", str(tmp_path / "limits.csv")]) == 0
    limited = pa_csv.read_csv(tmp_path / "plan.csv").to_pydict()
    assert limited["planned_spend"][raised] <= current * (1 + 1e-6)
    assert sum(limited["planned_spend"]) == pytest.approx(sum(free["planned_spend"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("campaign,minimum,maximum\na,5,4\n", "campaign a has a minimum of 5.00 above its maximum"),
        ("campaign,maximum\na,1\n", "campaign a has a minimum of 2.00 above its maximum of 1.00"),
        ("campaign,minimum\nz,1\n", "campaign z has no campaign days"),
        ("campaign,minimum\na,1\na,2\n", "campaign a has several rows"),
        ("campaign,minimum\na,-1\n", "minimum is negative"),
        ("campaign,minimum\na,x\n", "minimum is not a number"),
        ("campaign,low\na,1\n", "limits have the columns campaign, and minimum, maximum or both"),
    ],
)
def test_contradictory_limits_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "limits.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_limits(file, ("a", "b"), 2.0)


def test_campaigns_without_limits_have_the_common_minimum(tmp_path: Path) -> None:
    file = tmp_path / "limits.csv"
    file.write_text("campaign,minimum,maximum\na,,9\nb,3,\n")
    low, high = read_limits(file, ("a", "b", "c"), 2.0)
    assert low.tolist() == [2, 3, 2] and high.tolist() == [9, np.inf, np.inf]


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
