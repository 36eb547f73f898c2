"""Plans follow marginal return within limits, and simulations of them have their uncertainty."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.csv as pa_csv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from gemline import main
from ranking.roi.campaign_days import read_campaign_days
from ranking.roi.campaign_limits import read_limits
from ranking.roi.plan import BudgetLimits, marginal_value, plan_budgets, step_limits
from ranking.roi.simulation import simulate_plan
from tests.ranking.campaigns import COUNT, market, some_curves, write_campaign_days


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
    limits = BudgetLimits(current.sum(), 0.5 * current, 2 * current)
    plan = plan_budgets(curves, value, current, limits)
    other = plan_budgets(curves, 7.5 * value, current, limits)
    np.testing.assert_allclose(other.spend, plan.spend, rtol=1e-6)
    _, deviation = curves.log_conversions(current)
    careful = plan_budgets(curves, value, current, limits, risk=2.0)
    moved = np.log(careful.spend / plan.spend)
    assert np.corrcoef(moved, deviation)[0, 1] < -0.3


def test_a_very_risk_averse_plan_raises_the_surest_campaigns_first() -> None:
    curves, value, current = some_curves(1)
    limits = BudgetLimits(current.sum(), 0.5 * current, 2 * current)
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


@pytest.mark.parametrize("out", ["", "days.csv/plan.csv", "days.csv/plans/plan.csv"])
def test_a_plan_is_not_written_to_a_folder_or_below_a_file(
    tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_campaign_days(tmp_path / "days.csv", market(3, days=4)[0])
    flags = ["--campaign-days", str(file), "--out", str(tmp_path / out)]
    assert main(["roi", "plan", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--out {tmp_path / out} cannot be written (")
    assert [path.name for path in tmp_path.iterdir()] == ["days.csv"]


@pytest.mark.parametrize("share", [0.0, -0.2])
def test_a_campaign_without_incremental_conversions_gives_its_budget_to_others(
    share: float,
) -> None:
    curves, value, current = some_curves(1)
    worthless = np.where(np.arange(COUNT) == 4, share, 1.0) * value
    limits = BudgetLimits(current.sum(), 0.5 * current, 2 * current)
    plan = plan_budgets(curves, worthless, current, limits)
    assert plan.spend[4] == pytest.approx(0.5 * current[4])
    assert plan.spend.sum() == pytest.approx(current.sum())
    assert all(np.isfinite(column).all() for column in vars(plan).values())
    with pytest.raises(UserError, match="no campaign's conversions are worth anything"):
        plan_budgets(curves, share * value, current, limits)


def test_plans_that_explore_state_values_of_the_posterior() -> None:
    curves, value, current = some_curves(3)
    limits = BudgetLimits(current.sum(), 0.5 * current, 2 * current)
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
        plan_budgets(curves, value, current, BudgetLimits(0.5 * current.sum(), low, high))
    with pytest.raises(UserError, match="lower the budget, or allow a larger step"):
        plan_budgets(curves, value, current, BudgetLimits(2 * current.sum(), low, high))
    with pytest.raises(UserError, match="campaign c00 may spend at least"):
        plan_budgets(curves, value, current, BudgetLimits(current.sum(), 3 * high, high))


def test_a_minimum_above_the_largest_step_is_refused_rather_than_the_step_exceeded() -> None:
    curves, value, current = some_curves(2)
    limits = step_limits(current.sum(), current, 0.2, np.full(COUNT, 30.0), np.inf + current)
    with pytest.raises(UserError, match=r"c00 may spend at least 30\.00 and at most 2"):
        plan_budgets(curves, value, current, limits)


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


def test_a_plan_of_certain_curves_has_its_computed_gain_in_all_simulations() -> None:
    curves, value, current = some_curves(3)
    plan = plan_budgets(
        curves, value, current, BudgetLimits(current.sum(), 0.5 * current, 2 * current)
    )
    gain = plan.value_after.sum() / plan.value_before.sum() - 1
    widths = []
    for scale in (0.0, 0.25, 1.0):
        scaled = replace(
            curves,
            own_covariance=scale * curves.own_covariance,
            shared_factor=np.sqrt(scale) * curves.shared_factor,
        )
        simulation = simulate_plan(
            scaled, value, np.zeros(COUNT), current, plan.spend, np.random.default_rng(0)
        )
        p5, p50, p95 = simulation.total_percentiles()
        widths.append(p95 - p5)
        assert p50 == pytest.approx(gain, rel=0.3)
    assert widths[0] < 1e-4 < 20 * widths[1] and 1.5 * widths[1] < widths[2]


def test_simulated_conversions_have_the_variance_of_the_curves_dispersion() -> None:
    curves, value, current = some_curves(3)
    certain = replace(
        curves,
        own_covariance=0 * curves.own_covariance,
        shared_factor=0 * curves.shared_factor,
        dispersion=3.0,
    )
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
        ("campaign,budget\na,0\n", "campaign a has a budget of 0"),
        ("campaign,low\na,1\n", "limits have the columns campaign, and minimum, maximum, budget"),
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
    limits = read_limits(file, ("a", "b", "c"), 2.0)
    assert limits.low.tolist() == [2, 3, 2] and limits.high.tolist() == [9, np.inf, np.inf]
    assert np.isnan(limits.budget).all()


def test_no_plan_exceeds_the_step_from_a_stated_budget(tmp_path: Path) -> None:
    """Budgets were just lowered to a fifth, of which the mean spend of the week knows nothing."""
    file = write_campaign_days(tmp_path / "days.csv", market(3, days=7)[0])
    table = read_campaign_days(file, (), None)
    names, limits = table.days.campaigns, tmp_path / "limits.csv"
    budgets = 0.2 * table.current
    rows = [f"{name},{budget}" for name, budget in zip(names, budgets, strict=True)]
    limits.write_text("\n".join(["campaign,budget", *rows]))
    flags = ["--campaign-days", str(file), "--limits", str(limits), "--max-step", "0.5"]
    assert main(["roi", "plan", *flags, "--out", str(tmp_path / "plan.csv")]) == 0
    plan = pa_csv.read_csv(tmp_path / "plan.csv").to_pydict()
    np.testing.assert_allclose(plan["current_spend"], budgets)
    planned = np.array(plan["planned_spend"])
    assert (planned <= 1.5 * budgets * (1 + 1e-6)).all() and (planned > 1.2 * budgets).any()
    assert planned.sum() == pytest.approx(budgets.sum())
