"""Raw gzip logs to examples: how fast, and where the time goes."""

import shutil
from pathlib import Path

from benchmarks.result import Result
from dags.line import Place, data_steps
from dags.local import run_line
from etl.cli import read_mapping
from etl.spec import load_spec
from etl.tables import arrow, contracts, records
from etl.tables.lake import Lake

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "conf" / "specs" / "simulator.yaml"
SIMULATOR = ROOT / "conf" / "simulator" / "bench.yaml"


def measure(result: Result, work: Path, days: int = 5) -> None:
    """`etl_events_per_s` and `etl_largest_step_share`."""
    from etl.sources.simulator.config import SimulatorConfig
    from etl.sources.simulator.simulate import simulate

    raw, lake = work / "raw", work / "lake"
    shutil.rmtree(lake, ignore_errors=True)
    simulate(SimulatorConfig(**read_mapping(SIMULATOR)), raw)
    spec = load_spec(SPEC)
    place = Place(SPEC, str(raw), str(lake))
    span = ("--days", f"2026-01-01:2026-01-{days:02}")
    run_line(spec, place, data_steps(place, span))
    flow = arrow.snapshot(Lake(str(lake), spec), contracts.flow(spec)).read(["read"])
    events = sum(flow["read"].to_pylist())
    seconds = dict(records.seconds(str(lake)))
    whole, (slowest, most) = sum(seconds.values()), max(seconds.items(), key=lambda item: item[1])
    result.take("etl_events_per_s", events / whole, "")
    result.take("etl_largest_step_share", most / whole, "")
    told = ", ".join(f"{name} {taken:.0f} s" for name, taken in seconds.items())
    result.rows.append(
        (f"raw gzip to examples, {events:,} records", f"{events / whole:,.0f} events/s", told,
         f"{slowest} {most / whole:.2f}", "<= 0.40")
    )  # fmt: skip
