"""`gemline bench kills`: the line, killed at random moments and started again each time."""

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import pyarrow.parquet as pq
import tyro
from tqdm import tqdm

from benchmarks.demo import ROOT, SPEC, write_logs
from benchmarks.operations.backfill import same
from benchmarks.result import Result
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.base import Strict
from etl.tables.lake import Lake
from etl.told import all_contracts

WORLD = {"users": 150, "events_per_user_mean": 80, "max_events_per_user": 600, "days": 7}
DAYS = "2026-01-01:2026-01-07"
SOONEST, LATEST = 4.0, 25.0  # seconds after a start


class KillsBenchArgs(Strict):
    """Arguments of the benchmark."""

    kills: Annotated[int, tyro.conf.arg(help="how many")] = 20
    seed: Annotated[int, tyro.conf.arg(help="of their moments")] = 0
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: KillsBenchArgs) -> None:
    """Tables and predictions after many kills beside those of a line that was left alone."""
    moments, spec = random.Random(args.seed), load_spec(SPEC)  # noqa: S311
    with tempfile.TemporaryDirectory() as work:
        raw = Path(work, "raw")
        write_logs(raw, WORLD)
        alone, killed = (Lake(str(Path(work, name)), spec) for name in ("alone", "killed"))
        _finish(alone, raw)
        done = 0
        for _ in tqdm(range(args.kills), unit="kill"):
            done += _kill(killed, raw, moments.uniform(SOONEST, LATEST))
        _finish(killed, raw)
        apart = differing(alone, killed)
    result = Result("Kills", ("what", "ours", "beside", "goal"))
    result.figures["kills_survived"] = done if not apart else 0
    told = f"differ: {', '.join(apart)}" if apart else "all tables and predictions equal"
    result.rows.append((f"{done} kills", told, "never killed", f"{args.kills} of {args.kills}"))
    result.show(args.as_json)


def differing(one: Lake, other: Lake) -> list[str]:
    """Tables and files of predictions that are not the same."""
    tables = [name for name in all_contracts(one.spec) if one.exists(name)]
    files = sorted(path.name for path in Path(one.root, "evaluations").iterdir())
    return [
        *(name for name in tables if not same(one, other, name)),
        *(name for name in files if not _same_file(one, other, name)),
    ]


def _same_file(one: Lake, other: Lake, name: str) -> bool:
    first, second = (pq.read_table(Path(lake.root, "evaluations", name)) for lake in (one, other))
    return bool(first.equals(second))


def _command(lake: Lake, raw: Path) -> list[str]:
    where = ["--spec", str(SPEC), "--raw", str(raw), "--lake", lake.root, "--days", DAYS]
    return [sys.executable, "-m", "gemline", "run", *where, "--scale", "tiny"]


def _finish(lake: Lake, raw: Path) -> None:
    done = subprocess.run(_command(lake, raw), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the line did not go on: {done.stderr.strip().splitlines()[-1]}")


def _kill(lake: Lake, raw: Path, seconds: float) -> bool:
    """Start the line, and kill it and its children; whether it still ran then."""
    child = subprocess.Popen(
        _command(lake, raw), cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        child.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return True
