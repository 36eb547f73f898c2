"""`gemline bench simulator`: how fast raw logs are made, on the `bench` configuration."""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import tyro

from benchmarks.result import Result
from etl.cli import read_mapping
from etl.spec.base import Strict

CONFIG = Path(__file__).parents[1] / "conf" / "simulator" / "bench.yaml"


class SimulatorBenchArgs(Strict):
    """Arguments of the benchmark."""

    repeats: int = 3
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: SimulatorBenchArgs) -> None:
    """Seconds to write a million simulated events, compressed, with their truth."""
    import pyarrow.parquet as pq

    from etl.sources.simulator.config import SimulatorConfig
    from etl.sources.simulator.simulate import simulate

    config = SimulatorConfig(**read_mapping(CONFIG))
    seconds = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            simulate(config, Path(folder, "raw"))
            seconds.append(time.perf_counter() - start)
            files = sorted(Path(folder, "raw", "truth").glob("*.parquet"))
            impressions = sum(pq.read_metadata(path).num_rows for path in files)
            size = sum(p.stat().st_size for p in Path(folder, "raw").rglob("*") if p.is_file())
    events = config.users * config.events_per_user_mean
    each = median(seconds) / events * 1e6
    result = Result(
        "The simulator", ("events, about", "ad impressions", "MB on disk", "s a million")
    )
    result.rows.append((f"{events:,}", f"{impressions:,}", f"{size / 1e6:.0f}", f"{each:.1f}"))
    result.figures = {"seconds_a_million_events": round(each, 2), "events": events}
    result.show(args.as_json)
