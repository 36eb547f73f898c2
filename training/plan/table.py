"""A plan as a table, and which way of spreading the tables to choose."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from etl.errors import UserError
from training.plan.estimate import SCHEMES, Estimate, Scheme, estimate
from training.plan.scenario import Scenario

GB, MS = 1e9, 1e3
COLUMNS = ("GPUs", "tables", "GB", "compute", "to all", "copies", "reduce", "step", "k/s", "scale")


def planned(scenario: Scenario, gpus: Sequence[int]) -> tuple[Table, list[str]]:
    """Every way on every number of GPUs, and a sentence of advice for each number.

    Scaling is the throughput of a GPU over that on the fewest GPUs, the same way. Raises UserError
    where GPUs cannot be cut into the scenario's groups.
    """
    hardware, group = scenario.hardware, scenario.workload.group
    caption = (
        f"ms of the slowest GPU; * more than its {hardware.memory_gb:g} GB; thousand examples a "
        f"second; scale: a GPU's speed over that of {min(gpus)}"
    )
    table = Table(title=scenario.name, caption=caption, box=SIMPLE_HEAD, padding=0)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    advice = []
    for count in gpus:
        if count > group and count % group:
            raise UserError(f"--gpus {count} is no multiple of the group of {group}")
        ways = SCHEMES if count > group else SCHEMES[:1]
        found = {scheme: estimate(scenario, scheme, count) for scheme in ways}
        for scheme, one in found.items():
            first = estimate(scenario, scheme, min(gpus))
            table.add_row(*_row(scenario, count, scheme, one, first.step / one.step))
        advice.append(f"{count} GPUs: {_advised(scenario, found)}")
    return table, advice


def fits(scenario: Scenario, one: Estimate) -> bool:
    """Whether the fullest GPU holds what it must."""
    return one.memory <= scenario.hardware.memory_gb * GB


def _row(
    scenario: Scenario, gpus: int, scheme: Scheme, one: Estimate, scale: float
) -> tuple[str, ...]:
    seconds = (one.compute, one.exchange, one.replicate, one.reduce, one.step)
    memory = f"{one.memory / GB:.0f}" + ("" if fits(scenario, one) else "*")
    rate = gpus * scenario.workload.batch / one.step
    times = (f"{MS * s:.0f}" for s in seconds)
    return str(gpus), scheme, memory, *times, f"{rate / 1e3:,.1f}", f"{scale:.2f}"


def _advised(scenario: Scenario, found: dict[Scheme, Estimate]) -> str:
    fitting = {scheme: one for scheme, one in found.items() if fits(scenario, one)}
    if not fitting:
        least = min(one.memory for one in found.values()) / GB
        return f"none fits; a GPU would have to hold {least:,.0f} GB: use more, or smaller tables"
    if len(found) == 1:
        return f"1D; all ways are one up to a group of {scenario.workload.group}"
    best = min(fitting, key=lambda scheme: (fitting[scheme].step, fitting[scheme].memory))
    told = [
        f"{scheme} takes {one.step / fitting[best].step:.2f} times as long"
        if scheme in fitting
        else f"{scheme} does not fit"
        for scheme, one in found.items()
        if scheme != best
    ]
    return f"{best}; {', '.join(told)}"
