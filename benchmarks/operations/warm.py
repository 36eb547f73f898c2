"""From the end of imports to the end of the first step of a second batch size, blocks compiled.

Cold begins with an empty cache, warm with the one that a cold run has left.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.result import Result

ROOT = Path(__file__).parents[2]
ROUNDS = 2
START = """
import json, time
begun = time.monotonic()
from benchmarks.operations.start import start
imported = time.monotonic()
start()
print("SECONDS", json.dumps([imported - begun, time.monotonic() - imported]))
"""


def measure(result: Result) -> None:
    """`warm_start_ratio`, and the seconds of imports beside it."""
    found: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            for state in found:
                found[state].append(_seconds(Path(cache)))
    imports = median(seconds for runs in found.values() for seconds, _ in runs)
    cold, warm = (median(seconds for _, seconds in found[state]) for state in ("cold", "warm"))
    result.take("warm_start_ratio", cold / warm, "")
    result.take("warm_start_imports_s", imports, "")
    told = f"{warm:.1f} s warm; imports {imports:.1f} s"
    result.rows.append(
        ("start, compiled", told, f"{cold:.1f} s cold", f"{cold / warm:.1f}", ">= 5")
    )


def _seconds(cache: Path) -> tuple[float, float]:
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", START], env=env, cwd=ROOT, check=True, capture_output=True, text=True
    )
    (told,) = (line for line in done.stdout.splitlines() if line.startswith("SECONDS"))
    imports, start = json.loads(told.removeprefix("SECONDS"))
    return imports, start
