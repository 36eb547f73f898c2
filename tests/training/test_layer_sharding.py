"""Schemes of dense layers by dynamic programming, against all combinations."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT
from training.plan.command import plan_table
from training.plan.cost_model import DENSE_BYTES, Hardware, load_scenario
from training.plan.layer_sharding import (
    LAYER_SCHEMES,
    MEMORY_STEPS,
    gathered_bytes,
    layer_cost,
    plan_layers,
)

HARDWARE = Hardware(memory_gb=80, tflops=100, intra_node_gb_s=200, inter_node_gb_s=25)
GPUS = 16


def fastest(layers: list[float], budget: float) -> float | None:
    """The least seconds of all combinations whose bytes fit a budget."""
    seconds = []
    for schemes in product(LAYER_SCHEMES, repeat=len(layers)):
        costs = [layer_cost(HARDWARE, n, GPUS, s) for n, s in zip(layers, schemes, strict=True)]
        if sum(cost.memory for cost in costs) <= budget:
            seconds.append(sum(cost.seconds for cost in costs))
    return min(seconds, default=None)


@given(
    st.lists(st.floats(1e5, 1e8), min_size=1, max_size=7), st.floats(0.02, 1.2)
)  # fmt: skip
def test_no_combination_that_fits_is_faster(layers: list[float], share: float) -> None:
    """Up to the steps in which memory is counted, each of which a layer may fill only in part."""
    memory = share * DENSE_BYTES * sum(layers) + gathered_bytes(layers)
    budget = memory - gathered_bytes(layers)
    plan = plan_layers(HARDWARE, layers, GPUS, memory)
    coarse = fastest(layers, budget * (1 - len(layers) / MEMORY_STEPS))
    if plan is None:
        assert coarse is None
        return
    exact = fastest(layers, budget)
    assert plan.memory <= budget and exact is not None
    assert exact <= plan.seconds * (1 + 1e-9)
    assert coarse is None or plan.seconds <= coarse * (1 + 1e-9)


def test_layers_are_replicated_where_there_is_room_and_sharded_where_there_is_none() -> None:
    layers = [1e7, 5e8, 1e7]
    roomy = plan_layers(HARDWARE, layers, GPUS, 80e9)
    assert roomy and roomy.schemes == ("replicate",) * 3
    tight = plan_layers(HARDWARE, layers, GPUS, 3e9)
    assert tight and tight.schemes == ("replicate", "shard", "replicate")
    assert plan_layers(HARDWARE, layers, GPUS, 1e9) is None
    alone = plan_layers(HARDWARE, layers, 1, 80e9)
    assert alone and alone.seconds == 0


def test_the_plan_names_the_layers_to_shard() -> None:
    scenario = load_scenario(ROOT / "conf/plans/exfm.yaml")
    workload = scenario.workload.model_copy(update={"dense_layers_m": (10.0, 980.0, 10.0)})
    _, lines = plan_table(scenario.model_copy(update={"workload": workload}), [256, 512])
    assert [line.partition(":")[0] for line in lines] == ["256 GPUs"] * 2 + ["512 GPUs"] * 2
    assert all("of 3 dense layers shard" in line for line in lines[1::2])
