"""`make proof`: runs the slow tests file by file and records the results.

A part that passed is not run again until the source changes: results are kept in work/proof/ below
the hash of the source. When all parts have run, the record is written to
benchmarks/results/proof.json; the README shows its summary. Tests that were skipped, for want of a
tool or a device, are counted in both.
"""

import hashlib
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "proof.json"
PROPERTY_TESTS = "property tests, ten times the examples"
ALONE = "tests that run alone, a sample"
NUM_ALONE = 30
# Files that the results do not depend on.
NOT_SOURCE = re.compile(r"docs/|benchmarks/results/|.*\.md$")


@dataclass(frozen=True)
class Part:
    """The result of one part: a file of tests, or all property tests.

    `skipped` is the number of skipped tests by their reason.
    """

    name: str
    passed: bool
    seconds: float
    skipped: dict[str, int] = field(default_factory=dict)


def source_hash() -> str:
    """A hash of all files of the working tree that the results depend on."""
    listed = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    digest = hashlib.sha256()
    for name in sorted(set(listed)):
        file = ROOT / name
        if file.is_file() and not NOT_SOURCE.match(name):
            digest.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def part_names() -> list[str]:
    """All parts, by duration in the last record; parts that it lacks come first."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.proof" in path.read_text()
    ]
    last_parts = json.loads(RESULT.read_text())["parts"] if RESULT.is_file() else []
    seconds = {part["name"]: part["seconds"] for part in last_parts}
    return sorted([*files, PROPERTY_TESTS, ALONE], key=lambda name: seconds.get(name, 0))


def run_part(name: str, state: Path) -> Part:
    """Run one part in its own process, on the tables that all parts share."""
    env = os.environ | {"GEMLINE_TEST_WORLD": str(state / "world")}
    runs = [[name, "-m", "proof", "-s"]]
    if name == PROPERTY_TESTS:
        env |= {"GEMLINE_HYPOTHESIS": "proof"}
        runs = [["tests", "-m", "hypothesis and not proof"]]
    if name == ALONE:
        runs = [[test] for test in sample_of_tests()]
    print(f"== {name}", flush=True)
    start = time.monotonic()
    passed, skipped, report = True, Counter[str](), state / "report.xml"
    for arguments in runs:
        report.unlink(missing_ok=True)
        passed &= _pytest([*arguments, f"--junitxml={report}"], env).returncode == 0
        skipped += skipped_tests(report) if report.is_file() else Counter()
    return Part(name, passed, round(time.monotonic() - start, 1), dict(skipped))


def skipped_tests(report: Path) -> Counter[str]:
    """The number of skipped tests by their reason, of a JUnit report of pytest."""
    skips = ElementTree.parse(report).iter("skipped")
    return Counter(skip.get("message", "") for skip in skips if skip.get("type") == "pytest.skip")


def sample_of_tests() -> list[str]:
    """Some tests that `make test` runs, others for each commit: each has to pass by itself."""
    listed = _pytest(["tests", "-m", "not proof", "--collect-only"], dict(os.environ)).stdout
    tests = [line for line in listed.splitlines() if "::" in line]
    return random.Random(_git("rev-parse", "HEAD")).sample(tests, NUM_ALONE)


def _pytest(arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    is_listing = "--collect-only" in arguments
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=env, check=False, text=True, capture_output=is_listing
    )


def run_parts(state: Path) -> Iterator[Part]:
    """The results of all parts; the parts that have not passed yet are run."""
    for name in part_names():
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
    """The machine that the proof runs on."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = model[1] if model else platform.machine()
    return {"cores": os.cpu_count(), "memory_gib": round(memory), "processor": processor}


def summary(record: dict[str, Any]) -> str:
    """The sentence about a record that the README shows."""
    parts = record["parts"]
    failed = [part["name"] for part in parts if not part["passed"]]
    verdict = f"failed in {', '.join(failed)}" if failed else "passed"
    minutes = round(record["seconds"] / 60)
    num_skipped = sum(sum(part.get("skipped", {}).values()) for part in parts)
    skipped = f", {num_skipped} tests skipped" if num_skipped else ""
    return (
        f"The last `make proof`, on {record['date']} at commit {record['commit'][:7]}, {verdict}: "
        f"{len(parts)} parts in {minutes} minutes{skipped} "
        f"([record](benchmarks/results/{RESULT.name}))."
    )


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, text=True, capture_output=True
    ).stdout


def main() -> int:
    """Run the remaining parts and write the record; returns 1 where a part failed."""
    source = source_hash()
    state = ROOT / "work" / "proof" / source
    for other in state.parent.glob("*"):
        if other != state:
            shutil.rmtree(other)
    state.mkdir(parents=True, exist_ok=True)
    parts = list(run_parts(state))
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
