"""The oracle of the observable history: no look-ahead, between the truth and a constant."""

from dataclasses import replace
from datetime import date

import numpy as np
import pytest

from benchmarks.studies.observable_oracle import ObservableOracle, filtered_days
from benchmarks.studies.observed_log import ObservedDay
from benchmarks.studies.oracle_beliefs import Need, first_purchase_is_due
from etl.simulator.config import SECOND_MS, SimulatorConfig
from etl.simulator.simulate import simulate_days

CONFIG = SimulatorConfig(
    name="small", seed=3, start=date(2026, 1, 1), days=6, users=200, events_per_user_mean=300,
    max_events_per_user=1500, posts=800, ads_start=60, ads_per_day=12, advertisers=20,
    categories=16, duplicates=0.01, late=0.02, malformed=0.001,
)  # fmt: skip


@pytest.fixture(scope="module")
def run() -> tuple[ObservableOracle, ObservedDay, list[np.ndarray]]:
    """The oracle before the last day, that day's log, and [oracle, truth, labels] of days 3 on."""
    truth: dict[int, float] = {}
    oracle = log = None
    for day, (world, events, ground_truth) in enumerate(simulate_days(CONFIG)):
        truth.update(zip(ground_truth.impression, ground_truth.p_click, strict=True))
        oracle = oracle or ObservableOracle.of(world)
        log = ObservedDay.of(CONFIG, day, events, log)
        oracle.start_day(world.users.attributes, day)
        if day < CONFIG.days - 1:
            oracle.learn(log)
    columns = []
    for day, (log_of_day, predicted) in enumerate(filtered_days(CONFIG)):
        true = np.array([truth.get(i, np.nan) for i in log_of_day.impressions.impression])
        if day >= 3:
            columns.append(np.stack((predicted, true, log_of_day.impressions.is_click)))
    everything = np.concatenate(columns, 1)
    assert oracle is not None and log is not None
    return oracle, log, list(everything[:, ~np.isnan(everything[1])])


def cross_entropy(p: np.ndarray, q: np.ndarray) -> float:
    """Mean logloss of p where q are the true probabilities."""
    return float(-(q * np.log(p) + (1 - q) * np.log(1 - p)).mean())


def test_the_oracle_is_between_the_truth_and_a_constant(
    run: tuple[ObservableOracle, ObservedDay, list[np.ndarray]],
) -> None:
    predicted, true, _ = run[2]
    bound, constant = (
        cross_entropy(true, true),
        cross_entropy(np.full_like(true, true.mean()), true),
    )
    assert bound < cross_entropy(predicted, true) < bound + 0.6 * (constant - bound)
    assert predicted.mean() == pytest.approx(true.mean(), rel=0.15)
    assert predicted.min() > 0 and predicted.max() < 1


def test_later_events_do_not_change_a_prediction(
    run: tuple[ObservableOracle, ObservedDay, list[np.ndarray]],
) -> None:
    """Nor do the outcomes of the day, which are learned after it."""
    oracle, day, _ = run
    as_of = day.impressions.time_ms // SECOND_MS
    now = int(np.median(as_of))
    cut = ObservedDay(
        day.views.take(day.views.visible < now),
        replace(day.impressions, is_click=1 - day.impressions.is_click),
        day.purchases.take(day.purchases.visible < now),
    )
    complete, known = oracle.predict(day), oracle.predict(cut)
    np.testing.assert_array_equal(complete[as_of <= now], known[as_of <= now])
    assert (complete[as_of > now] != known[as_of > now]).any()


def test_beliefs_of_interests_are_closer_than_their_prior(
    run: tuple[ObservableOracle, ObservedDay, list[np.ndarray]],
) -> None:
    """And errors are as large as the beliefs say: the filter is calibrated."""
    oracle = run[0]
    *_, (world, _, _) = simulate_days(CONFIG)
    error = world.users.own_interest - oracle.beliefs.mean[:, :-1]
    expected = np.diagonal(oracle.beliefs.covariance, axis1=1, axis2=2)[:, :-1].mean()
    assert 0.7 * expected < (error**2).mean() < 1.3 * expected < 1.1
    clickiness = np.corrcoef(world.users.clickiness, oracle.beliefs.mean[:, -1])[0, 1]
    assert clickiness > 0.2


def test_need_follows_the_purchases() -> None:
    elapsed = np.array([0.01, 0.2, 0.6, 0.95, 0.5])
    has_bought = np.array([True, True, True, True, False])
    need = Need.of(elapsed, has_bought, np.full(5, 0.25))
    assert need.due[0] == 1 and need.due[3] > 0.99 and need.due[4] == 0.25
    assert need.due[1] < 1e-6 and need.otherwise[1] < 0 and need.due[2] < 0.01
    due = first_purchase_is_due(np.linspace(0, 2, 21), 0.4)
    assert ((due >= 0) & (due <= 0.4)).all() and (due[10:] == 0).all()
