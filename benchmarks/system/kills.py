"""`gemline bench kills`: a pipeline that is repeatedly killed at random times and restarted."""

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tqdm import tqdm

from benchmarks.harness import ROOT, SIMULATOR_SPEC, BenchmarkResult
from benchmarks.pipelines import SMALL_SIMULATION, simulate_logs
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from etl.tables.lake import Lake

DAYS = "2026-01-01:2026-01-07"
MIN_DELAY_SECONDS, MAX_DELAY_SECONDS = 4.0, 25.0  # from start to kill


class KillsBenchArgs(StrictModel):
    """Arguments of the benchmark."""

    kills: Annotated[int, tyro.conf.arg(help="number of kills")] = 20
    seed: Annotated[int, tyro.conf.arg(help="seed of the kill times")] = 0
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: KillsBenchArgs) -> None:
    """Compare tables and predictions after many kills with those of an uninterrupted pipeline."""
    from etl.tables.lake import Lake

    rng, spec = random.Random(args.seed), load_spec(SIMULATOR_SPEC)  # noqa: S311
    with tempfile.TemporaryDirectory() as work:
        raw = Path(work, "raw")
        simulate_logs(raw, SMALL_SIMULATION)
        alone, killed = (Lake(str(Path(work, name)), spec) for name in ("alone", "killed"))
        _run_to_completion(alone, raw)
        kills = 0
        for _ in tqdm(range(args.kills), unit="kill"):
            delay = rng.uniform(MIN_DELAY_SECONDS, MAX_DELAY_SECONDS)
            kills += _start_and_kill(killed, raw, delay)
        _run_to_completion(killed, raw)
        different = differing_outputs(alone, killed)
    result = BenchmarkResult("Kills", ("what", "ours", "baseline", "goal"))
    result.figures["kills_survived"] = kills if not different else 0
    outcome = "all tables and predictions equal"
    if different:
        outcome = f"differ: {', '.join(different)}"
    result.rows.append((f"{kills} kills", outcome, "never killed", f"{args.kills} of {args.kills}"))
    result.show(args.as_json)


def differing_outputs(one: "Lake", other: "Lake") -> list[str]:
    """Tables and prediction files that differ."""
    from benchmarks.system.daily_runs import has_same_rows
    from etl.tables.schemas import table_registry

    tables = [name for name in table_registry(one.spec) if one.exists(name)]
    files = sorted(path.name for path in Path(one.root, "evaluations").iterdir())
    return [
        *(name for name in tables if not has_same_rows(one, other, name)),
        *(name for name in files if not _are_files_equal(one, other, name)),
    ]


def _are_files_equal(one: "Lake", other: "Lake", name: str) -> bool:
    import pyarrow.parquet as pq

    first, second = (pq.read_table(Path(lake.root, "evaluations", name)) for lake in (one, other))
    return bool(first.equals(second))


def _command(lake: "Lake", raw: Path) -> list[str]:
    where = ["--spec", str(SIMULATOR_SPEC), "--raw", str(raw), "--lake", lake.root, "--days", DAYS]
    return [sys.executable, "-m", "gemline", "run", *where, "--scale", "tiny"]


def _run_to_completion(lake: "Lake", raw: Path) -> None:
    process = subprocess.run(
        _command(lake, raw), cwd=ROOT, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise UserError(f"the pipeline failed: {process.stderr.strip().splitlines()[-1]}")


def _start_and_kill(lake: "Lake", raw: Path, seconds: float) -> bool:
    """Start the pipeline and kill it with its children; returns whether it was still running."""
    child = subprocess.Popen(
        _command(lake, raw), cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return True
    return False
