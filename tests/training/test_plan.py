"""The plan on paper: formulas that hold by definition, and figures that a paper reports."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from gemline import main
from tests.conftest import ROOT
from training.plan.estimate import SCHEMES, Layout, estimate, exchange, held, imbalance, ring
from training.plan.scenario import Scenario, load_scenario
from training.plan.table import planned

PAPER = ROOT / "conf" / "plans" / "exfm.yaml"
FITTED = {("2D", 256): 1.76e5, ("2D", 512): 3.56e5, ("2D", 1024): 6.76e5, ("1D", 512): 3.37e5,
          ("1D", 1024): 5.61e5}  # fmt: skip
TOLD = {("2D", 2048): 1.34e6, ("2D", 4096): 2.53e6}  # 2508.03854, examples a second


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


def changed(scenario: Scenario, **changes: object) -> Scenario:
    workload = scenario.workload.model_copy(update=changes)
    return scenario.model_copy(update={"workload": workload})


@pytest.mark.parametrize(("scheme", "gpus"), [*FITTED, *TOLD])
def test_throughputs_are_those_of_the_paper(paper: Scenario, scheme, gpus: int) -> None:
    """Sizes are fitted to the first five; the two others are foretold."""
    rate = gpus * paper.workload.batch / estimate(paper, scheme, gpus).step
    close = 0.03 if (scheme, gpus) in FITTED else 0.04
    assert rate == pytest.approx((FITTED | TOLD)[scheme, gpus], rel=close)


@given(st.integers(0, 6), st.integers(1, 4))
def test_replicas_cost_the_memory_of_the_formula(doublings: int, size: int) -> None:
    """S (M - 1) / T more than one copy on all (2508.03854); nothing where they are sharded."""
    scenario = load_scenario(PAPER)
    work = changed(scenario, table_gb=100.0 * size, group=64).workload
    gpus = 64 * 2**doublings
    one, two, three = (held(work, Layout.of(scheme, gpus, 64)) for scheme in SCHEMES)
    replicas, stored = gpus // 64, work.table_gb * 1e9
    assert two - one == pytest.approx(stored * (replicas - 1) / gpus)
    assert three == pytest.approx(one)


@given(st.integers(1, 64))
def test_within_one_group_all_ways_are_one(gpus: int) -> None:
    scenario = load_scenario(PAPER)
    steps = {estimate(scenario, scheme, gpus).step for scheme in SCHEMES}
    assert len(steps) == 1


@given(st.integers(1, 4096), st.floats(0, 1))
def test_no_planner_splits_the_largest_shard(group: int, share: float) -> None:
    work = changed(load_scenario(PAPER), largest_shard=share).workload
    found = imbalance(work, Layout(group, group, False))
    assert found >= 1 and found / group >= share - 1e-12


def test_a_group_of_neighbours_exchanges_nothing_with_others(paper: Scenario) -> None:
    """On one node bytes move inside it; alone nothing moves at all."""
    hardware = paper.hardware.model_copy(update={"outside": 1e-9})
    work = paper.workload
    assert exchange(hardware, work, Layout.of("1D", 8, 256)) < 1
    assert exchange(hardware, work, Layout.of("1D", 1, 256)) == 0
    assert ring(hardware, 1e12, 1) == 0


def test_less_often_synced_costs_less(paper: Scenario) -> None:
    often, seldom = (estimate(changed(paper, sync_every=n), "2D", 2048).replicate for n in (1, 8))
    assert often == pytest.approx(8 * seldom)


def test_what_fits_and_is_fastest_is_advised(paper: Scenario) -> None:
    _, advice = planned(paper, (256, 4096))
    assert advice[0] == "256 GPUs: 1D; all ways are one up to a group of 256"
    steps = {scheme: estimate(paper, scheme, 4096).step for scheme in SCHEMES}
    assert advice[1].startswith(f"4096 GPUs: {min(steps, key=lambda s: steps[s])}; ")
    assert f"1D takes {steps['1D'] / min(steps.values()):.2f} times as long" in advice[1]
    full = changed(paper, table_gb=18_000, group=256)
    assert "2D does not fit" in planned(full, (2048,))[1][0]
    none = planned(changed(paper, table_gb=1e6), (8,))[1]
    assert "none fits; a GPU would have to hold" in none[0]


def test_the_command_and_what_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["train", "plan", "--scenario", str(PAPER), "--gpus"]
    assert main([*ask, "8,64,512,4096"]) == 0
    assert "4096 GPUs: 2D sharded; 1D takes" in capsys.readouterr().out
    assert main([*ask, "300"]) == 2
    assert "--gpus 300 is no multiple of the group of 256" in capsys.readouterr().err
    assert main([*ask, "8,no"]) == 2
    assert "--gpus 8,no: write whole numbers" in capsys.readouterr().err
    bad = tmp_path / "bad.yaml"
    bad.write_text(PAPER.read_text().replace("overlap: 0.5", "overlap: 2"))
    with pytest.raises(UserError, match=r"bad.yaml: hardware.overlap: .*less than or equal to 1"):
        load_scenario(bad)
    with pytest.raises(UserError, match="shipped ones lie in conf/plans"):
        load_scenario(tmp_path / "none.yaml")
