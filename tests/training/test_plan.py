"""The cost model: identities of its formulas, and throughputs that 2508.03854 reports."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from gemline import main
from tests.conftest import ROOT
from training.plan.command import plan_table
from training.plan.cost_model import (
    SCHEMES,
    Scenario,
    Scheme,
    TableLayout,
    all_to_all_seconds,
    estimate_step,
    imbalance,
    load_scenario,
    ring_all_reduce_seconds,
    table_bytes_per_gpu,
)

PAPER = ROOT / "conf" / "plans" / "exfm.yaml"
# Examples per second in 2508.03854.
FITTED: dict[tuple[Scheme, int], float] = {
    ("2D", 256): 1.76e5,
    ("2D", 512): 3.56e5,
    ("2D", 1024): 6.76e5,
    ("1D", 512): 3.37e5,
    ("1D", 1024): 5.61e5,
}
PREDICTED: dict[tuple[Scheme, int], float] = {("2D", 2048): 1.34e6, ("2D", 4096): 2.53e6}


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


def changed(scenario: Scenario, **changes: object) -> Scenario:
    workload = scenario.workload.model_copy(update=changes)
    return scenario.model_copy(update={"workload": workload})


@pytest.mark.parametrize(("scheme", "gpus"), [*FITTED, *PREDICTED])
def test_throughputs_are_those_of_the_paper(paper: Scenario, scheme: Scheme, gpus: int) -> None:
    """The scenario is fitted to the first five; the other two are predictions."""
    rate = gpus * paper.workload.batch_per_gpu / estimate_step(paper, scheme, gpus).step
    tolerance = 0.03 if (scheme, gpus) in FITTED else 0.04
    assert rate == pytest.approx((FITTED | PREDICTED)[scheme, gpus], rel=tolerance)


@given(st.integers(0, 6), st.integers(1, 4))
def test_replicas_take_the_memory_of_the_formula(doublings: int, size: int) -> None:
    """2D takes S (M - 1) / T more than 1D (2508.03854); sharded 2D takes the same."""
    scenario = load_scenario(PAPER)
    work = changed(scenario, table_gb=100.0 * size, group_size=64).workload
    gpus = 64 * 2**doublings
    bytes_1d, bytes_2d, bytes_sharded = (
        table_bytes_per_gpu(work, TableLayout.from_scheme(scheme, gpus, 64)) for scheme in SCHEMES
    )
    replicas, total = gpus // 64, work.table_gb * 1e9
    assert bytes_2d - bytes_1d == pytest.approx(total * (replicas - 1) / gpus)
    assert bytes_sharded == pytest.approx(bytes_1d)


@given(st.integers(1, 64))
def test_within_one_group_all_schemes_cost_the_same(gpus: int) -> None:
    scenario = load_scenario(PAPER)
    steps = {estimate_step(scenario, scheme, gpus).step for scheme in SCHEMES}
    assert len(steps) == 1


@given(st.integers(1, 4096), st.floats(0, 1))
def test_imbalance_is_at_least_the_share_of_the_largest_shard(group: int, share: float) -> None:
    work = changed(load_scenario(PAPER), largest_shard=share).workload
    load = imbalance(work, TableLayout(group, group, is_fully_sharded=False))
    assert load >= 1 and load / group >= share - 1e-12


def test_a_group_within_a_node_does_not_use_the_network(paper: Scenario) -> None:
    """A single GPU does not communicate."""
    hardware = paper.hardware.model_copy(update={"inter_node_gb_s": 1e-9})
    work = paper.workload
    assert all_to_all_seconds(hardware, work, TableLayout.from_scheme("1D", 8, 256)) < 1
    assert all_to_all_seconds(hardware, work, TableLayout.from_scheme("1D", 1, 256)) == 0
    assert ring_all_reduce_seconds(hardware, 1e12, 1) == 0


def test_the_cost_of_replica_sync_is_inverse_to_its_interval(paper: Scenario) -> None:
    every_step, every_eighth = (
        estimate_step(changed(paper, sync_every=n), "2D", 2048).replica_sync for n in (1, 8)
    )
    assert every_step == pytest.approx(8 * every_eighth)


def test_the_fastest_scheme_that_fits_is_recommended(paper: Scenario) -> None:
    _, lines = plan_table(paper, (256, 4096))
    assert lines[0] == "256 GPUs: 1D; all schemes are the same up to a group of 256 GPUs"
    steps = {scheme: estimate_step(paper, scheme, 4096).step for scheme in SCHEMES}
    assert lines[1].startswith(f"4096 GPUs: {min(steps, key=lambda s: steps[s])}; ")
    assert f"1D takes {steps['1D'] / min(steps.values()):.2f} times as long" in lines[1]
    full = changed(paper, table_gb=18_000, group_size=256)
    assert "2D does not fit" in plan_table(full, (2048,))[1][0]
    too_large = plan_table(changed(paper, table_gb=1e6), (8,))[1]
    assert "no scheme fits; a GPU needs" in too_large[0]


def test_the_command_prints_recommendations_and_refuses_invalid_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["train", "plan", "--scenario", str(PAPER), "--gpus"]
    assert main([*command, "8,64,512,4096"]) == 0
    assert "4096 GPUs: 2D sharded; 1D takes" in capsys.readouterr().out
    assert main([*command, "300"]) == 2
    assert "--gpus 300 is not a multiple of the group size 256" in capsys.readouterr().err
    assert main([*command, "8,no"]) == 2
    assert "--gpus 8,no: write whole numbers" in capsys.readouterr().err


def test_a_scenario_with_errors_is_refused_with_their_locations(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(PAPER.read_text().replace("comm_overlap: 0.5", "comm_overlap: 2"))
    with pytest.raises(
        UserError, match=r"bad.yaml: hardware.comm_overlap: .*less than or equal to 1"
    ):
        load_scenario(bad)
    with pytest.raises(UserError, match="no such file; shipped scenarios are in conf/plans"):
        load_scenario(tmp_path / "none.yaml")
