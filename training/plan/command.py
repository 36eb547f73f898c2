"""The command `gemline train plan`: estimates as a table, with a recommended scheme."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table

from etl.errors import UserError
from etl.spec.base import StrictModel
from training.plan.cost_model import (
    DENSE_BYTES,
    SCHEMES,
    Scenario,
    Scheme,
    StepEstimate,
    estimate_step,
    load_scenario,
)
from training.plan.layer_sharding import plan_layers


class PlanArgs(StrictModel):
    """Arguments of `gemline train plan`."""

    scenario: Annotated[Path, tyro.conf.arg(help="a YAML file such as conf/plans/exfm.yaml")]
    gpus: Annotated[str, tyro.conf.arg(help="numbers of GPUs to compare: 8,64,512,4096")]

    @property
    def gpu_counts(self) -> list[int]:
        """The numbers of GPUs. Raises UserError if they are not whole numbers."""
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", self.gpus):
            raise UserError(f"--gpus {self.gpus}: write whole numbers, as in 8,64,512,4096")
        return [int(count) for count in self.gpus.split(",")]


def plan(args: PlanArgs) -> None:
    """Estimate memory, step time and scaling on more GPUs, by sharding scheme of the tables."""
    from rich.console import Console

    table, recommendations = plan_table(load_scenario(args.scenario), args.gpu_counts)
    Console().print(table)
    for recommendation in recommendations:
        print(recommendation)


GB, MS = 1e9, 1e3
COLUMNS = ("GPUs", "tables", "GB", "compute", "to all", "copies", "reduce", "step", "k/s", "scale")


def plan_table(scenario: Scenario, gpus: Sequence[int]) -> tuple[Table, list[str]]:
    """Every sharding scheme on every number of GPUs, and a recommendation for each number.

    Scaling is the throughput of a GPU relative to the same scheme on the fewest GPUs. Raises
    UserError if GPUs cannot be divided into the scenario's groups.
    """
    hardware, group = scenario.hardware, scenario.workload.group_size
    caption = (
        f"times in ms of the slowest GPU; *: exceeds its {hardware.memory_gb:g} GB; k/s: thousand "
        f"examples per second; scale: throughput of a GPU relative to {min(gpus)} GPUs"
    )
    table = Table(title=scenario.name, caption=caption, box=SIMPLE_HEAD, padding=0)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    recommendations = []
    for count in gpus:
        if count > group and count % group:
            raise UserError(f"--gpus {count} is not a multiple of the group size {group}")
        schemes = SCHEMES if count > group else SCHEMES[:1]  # equal within one group
        estimates = {scheme: estimate_step(scenario, scheme, count) for scheme in schemes}
        for scheme, estimate in estimates.items():
            scale = estimate_step(scenario, scheme, min(gpus)).step / estimate.step
            table.add_row(*_table_row(scenario, count, scheme, estimate, scale))
        recommendations.append(f"{count} GPUs: {_recommendation(scenario, estimates)}")
        if scenario.workload.dense_layers_m:
            advice = dense_layer_advice(scenario, estimates, count)
            recommendations.append(f"{count} GPUs: {advice}")
    return table, recommendations


def dense_layer_advice(scenario: Scenario, estimates: dict[Scheme, StepEstimate], gpus: int) -> str:
    """Which dense layers to shard beside the tables of the scheme that takes the least memory."""
    hardware, work = scenario.hardware, scenario.workload
    layers = [1e6 * millions for millions in work.dense_layers_m]
    estimate = min(estimates.values(), key=lambda estimate: estimate.memory)
    memory = hardware.memory_gb * GB - estimate.memory + DENSE_BYTES * work.dense_params_m * 1e6
    plan = plan_layers(hardware, layers, gpus, memory)
    if plan is None:
        return "dense layers do not fit, even if all are sharded: use more GPUs"
    sharded = [str(i) for i, scheme in enumerate(plan.schemes) if scheme == "shard"]
    names = f"shard {', '.join(sharded)}" if sharded else "shard none"
    return (
        f"of {len(layers)} dense layers {names}, replicate the others: {plan.memory / GB:.1f} GB, "
        f"{MS * plan.seconds:.1f} ms of communication a step"
    )


def fits_memory(scenario: Scenario, estimate: StepEstimate) -> bool:
    """Whether the fullest GPU has enough memory."""
    return estimate.memory <= scenario.hardware.memory_gb * GB


def _table_row(
    scenario: Scenario, gpus: int, scheme: Scheme, estimate: StepEstimate, scale: float
) -> tuple[str, ...]:
    seconds = (
        estimate.compute,
        estimate.all_to_all,
        estimate.replica_sync,
        estimate.dense_all_reduce,
        estimate.step,
    )
    memory = f"{estimate.memory / GB:.0f}" + ("" if fits_memory(scenario, estimate) else "*")
    rate = gpus * scenario.workload.batch_per_gpu / estimate.step
    times = (f"{MS * s:.0f}" for s in seconds)
    return str(gpus), scheme, memory, *times, f"{rate / 1e3:,.1f}", f"{scale:.2f}"


def _recommendation(scenario: Scenario, estimates: dict[Scheme, StepEstimate]) -> str:
    """The fastest scheme that fits, compared with the others."""
    fitting = {
        scheme: estimate
        for scheme, estimate in estimates.items()
        if fits_memory(scenario, estimate)
    }
    if not fitting:
        least = min(estimate.memory for estimate in estimates.values()) / GB
        return f"no scheme fits; a GPU needs {least:,.0f} GB: use more GPUs or smaller tables"
    if len(estimates) == 1:
        group_size = scenario.workload.group_size
        return f"1D; all schemes are the same up to a group of {group_size} GPUs"
    best = min(fitting, key=lambda scheme: (fitting[scheme].step, fitting[scheme].memory))
    others = []
    for scheme, estimate in estimates.items():
        if scheme == best:
            continue
        if scheme in fitting:
            others.append(f"{scheme} takes {estimate.step / fitting[best].step:.2f} times as long")
        else:
            others.append(f"{scheme} does not fit")
    return f"{best}; {', '.join(others)}"
