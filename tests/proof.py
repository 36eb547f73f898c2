"""`make proof`: the tests that are slow because they are real, file by file, and their record.

A part that passed is not run again until the source changes: the state of a run lies in
work/proof/ below the hash of the source. When all parts have run, their results are written to
benchmarks/results/proof.json; the README shows their summary.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "proof.json"
PROPERTIES = "property tests, ten times the examples"
# A change of these proves nothing new.
NO_SOURCE = re.compile(r"docs/|benchmarks/results/|.*\.md$")


@dataclass(frozen=True)
class Part:
    """The result of one part: a file of tests, or all property tests."""

    name: str
    passed: bool
    seconds: float


def source_hash() -> str:
    """A hash of all files of the working tree that decide what is proved."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    found = hashlib.sha256()
    for name in sorted(set(listed)):
        file = ROOT / name
        if file.is_file() and not NO_SOURCE.match(name):
            found.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


def names_of_parts() -> list[str]:
    """All parts, the cheapest of the last record first; parts that it lacks before them."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.proof" in path.read_text()
    ]
    last = json.loads(RESULT.read_text())["parts"] if RESULT.is_file() else []
    cost = {part["name"]: part["seconds"] for part in last}
    return sorted([*files, PROPERTIES], key=lambda name: cost.get(name, 0))


def run_part(name: str, state: Path) -> Part:
    """Run one part in a process of its own, on the tables that all parts share."""
    env = os.environ | {"GEMLINE_TEST_WORLD": str(state / "world")}
    words = [name, "-m", "proof", "-s"]
    if name == PROPERTIES:
        env |= {"GEMLINE_HYPOTHESIS": "proof"}
        words = ["tests", "-m", "hypothesis and not proof"]
    print(f"== {name}", flush=True)
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=env)
    return Part(name, done.returncode == 0, round(time.monotonic() - begin, 1))


def parts_of(state: Path) -> Iterator[Part]:
    """The results of all parts; those that passed before are read, the others are run."""
    for name in names_of_parts():
        record = state / f"{name.replace('/', '.')}.json"
        if record.is_file():
            part = Part(**json.loads(record.read_text()))
            print(f"== {name}: passed before, in {part.seconds:.0f} s", flush=True)
        else:
            part = run_part(name, state)
            if part.passed:
                record.write_text(json.dumps(asdict(part)))
        yield part


def machine() -> dict[str, object]:
    """What the proof ran on."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = model[1] if model else platform.machine()
    return {"cores": os.cpu_count(), "memory_gib": round(memory), "processor": processor}


def summary(record: dict[str, Any]) -> str:
    """The sentence on a record that the README shows."""
    parts = record["parts"]
    failed = [part["name"] for part in parts if not part["passed"]]
    verdict = f"failed in {', '.join(failed)}" if failed else "passed"
    minutes = round(record["seconds"] / 60)
    return (
        f"The last `make proof`, on {record['date']} at commit {record['commit'][:7]}, {verdict}: "
        f"{len(parts)} parts in {minutes} minutes "
        f"([record](benchmarks/results/{RESULT.name}))."
    )


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, text=True, capture_output=True
    ).stdout


def main() -> int:
    """Run what is left of the proof, and write its record; 1 where a part failed."""
    source = source_hash()
    state = ROOT / "work" / "proof" / source
    for other in state.parent.glob("*"):
        if other != state:
            shutil.rmtree(other)  # of another source
    state.mkdir(parents=True, exist_ok=True)
    parts = list(parts_of(state))
    total = sum(part.seconds for part in parts)
    record: dict[str, Any] = {
        "commit": _git("rev-parse", "HEAD").strip(),
        "source": source,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine(),
        "passed": all(part.passed for part in parts),
        "seconds": round(total),
        "parts": [asdict(part) for part in parts],
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(summary(record))
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
