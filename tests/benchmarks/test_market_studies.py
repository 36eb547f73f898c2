"""`gemline bench roi` and `audience` on few worlds: what plans know, figures and goals."""

import json

import numpy as np
import pytest

from benchmarks.studies import audience, roi
from gemline import main
from ranking.roi.value import SHRINKAGE


def test_values_per_conversion_are_learned_from_the_days_alone() -> None:
    market = roi.Market.draw(0)
    known = roi.joined([market.week(number, market.budget) for number in range(2)])
    assert (known.incremental_value != market.value).all()
    conversions = np.bincount(known.days.campaign, known.days.conversions)
    is_frequent = conversions > 10 * SHRINKAGE
    assert is_frequent.any()
    np.testing.assert_allclose(
        known.incremental_value[is_frequent], market.value[is_frequent], rtol=0.25
    )


def test_no_curve_of_a_small_budget_is_better_than_the_posterior_with_known_groups() -> None:
    """The posterior is the limit of the benchmark: it learns curves, and has the least error."""
    errors = []
    for seed in range(10):
        market = roi.Market.draw(seed)
        week = roi.joined([market.week(0, market.budget)]).days
        errors.append(roi.first_week_errors(market, week))
        posterior, truth = (
            roi.GroupPosterior(market, week),
            np.log(market.conversions(market.budget)),
        )
        large = market.budget > 3_000
        learned, of_groups = posterior.log_conversions(1.0)[large], posterior.log_group[large]
        assert np.abs(learned - truth[large]).mean() < np.abs(of_groups - truth[large]).mean() / 5
    limit, shared, alone = (
        np.mean([row[f"error_{name}"] for row in errors]) for name in ("limit", "shared", "alone")
    )
    assert limit < shared < alone


@pytest.mark.parametrize(
    ("words", "goals"),
    [
        (["roi", "--worlds", "2"], roi.GOALS),
        (
            ["audience", "--worlds", "2", "--only", "estimates"],
            {name: goal for name, goal in audience.GOALS.items() if name != "count_growth"},
        ),
    ],
    ids=["roi", "audience"],
)
def test_figures_of_few_worlds_are_printed_with_their_goals(
    words: list[str],
    goals: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(roi, "WEEKS", 1)
    monkeypatch.setattr(audience, "CAMPAIGNS", (audience.GOAL_CAMPAIGNS,))
    assert main(["bench", *words, "--json"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out.splitlines()[-1])
    assert all(np.isfinite(figures[name]) for name in goals)
    assert all(goal in captured.err for goal in goals.values())
