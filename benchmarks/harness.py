"""The result of a benchmark (a table, and metrics as JSON), timing, and files of the repository."""

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from etl.errors import UserError

ROOT = Path(__file__).parents[1]
SIMULATOR_SPEC = ROOT / "conf" / "specs" / "simulator.yaml"
KUAIRAND_SPEC = ROOT / "conf" / "specs" / "kuairand.yaml"
DEMO_SIMULATOR = ROOT / "conf" / "simulator" / "demo.yaml"
BENCH_SIMULATOR = ROOT / "conf" / "simulator" / "bench.yaml"
RESULTS = ROOT / "benchmarks" / "results"  # study results that the documentation shows


if TYPE_CHECKING:
    from benchmarks.studies.seeded_estimates import SeededEstimate
    from training.evaluation.predictions import ConfidenceInterval


def interleaved_median_seconds(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each variant, timed in turn so that slow phases affect all of them.

    The order alternates between rounds, so that none gains from always being the second.
    Callers warm up the variants first. With `time.process_time` as the clock, the result is CPU
    seconds of this process.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, run in list(variants.items())[:: -1 if number % 2 else 1]:
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: median(values) for name, values in seconds.items()}


def require_known(names: Sequence[str], known: Iterable[str]) -> None:
    """Raises UserError for a name in --only that no part has."""
    known = tuple(known)
    for name in names:
        if name not in known:
            raise UserError(f"--only {name} is no part of this benchmark: use {', '.join(known)}")


def format_mean_std(values: Sequence[float]) -> str:
    """The mean, and the standard deviation if there are several values."""
    has_std = len(values) > 1 and not math.isnan(mean(values))
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if has_std else "")


def commit() -> str:
    """The commit of this checkout, abbreviated; empty outside a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def commits_of(trained_at: Iterable[str]) -> str:
    """The different commits of texts "DATE COMMIT", in order of the first date of each."""
    return ", ".join(dict.fromkeys(text.partition(" ")[2] for text in sorted(trained_at)))


@dataclass
class BenchmarkResult:
    """Metrics by key, and a table of them; an unavailable metric is None with a reason."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)

    def record(self, key: str, value: float | None, reason: str) -> None:
        """Record a metric; None or NaN is recorded as None, with `reason` under `{key}_reason`."""
        if value is None or math.isnan(value):
            self.figures |= {key: None, f"{key}_reason": reason}
        else:
            self.figures[key] = round(value, 6)

    def as_table(self) -> Table:
        """The table, to print."""
        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        return table

    def show(self, as_json: bool) -> None:
        """Print the table; with `as_json`, the metrics as the last line."""
        Console(stderr=as_json).print(self.as_table())
        if as_json:
            print(json.dumps(self.figures))

    def save_study(
        self,
        path: Path,
        command: str,
        ne_differences: "Mapping[str, ConfidenceInterval | SeededEstimate] | None" = None,
        estimates: Mapping[str, tuple[float, float, float]] | None = None,
        trained_at: Iterable[str] = (),
    ) -> None:
        """Save the table and figures as a study, with its intervals in units of 1e-4.

        `trained_at` are the dates and commits of its trainings, where these are recorded.
        """
        from ranking.report.study import StudyResult

        StudyResult(
            title=self.title,
            command=command,
            columns=tuple(self.columns),
            rows=tuple(self.rows),
            commit=commits_of(trained_at) or commit(),
            figures=self.figures,
            intervals={
                name: (1e4 * interval.value, 1e4 * interval.low, 1e4 * interval.high)
                for name, interval in (ne_differences or {}).items()
            },
            estimates=dict(estimates or {}),
        ).save(path)
