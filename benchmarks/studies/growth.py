"""`gemline bench growth`: what one more day costs in a lake of 30, 90 and 365 days.

Without `--work` the committed figures are printed. With it, a lake is aged by runs on small
simulated days: all steps that need no trained model, and the feature store. Days up to the first
compared age and shortly before the others are run one by one, the rest four weeks at a time. Each
step is measured; a study that is interrupted goes on after the last measured run.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any, NamedTuple

import tyro
from pydantic import Field

from benchmarks.harness import RESULTS, ROOT, SIMULATOR_SPEC, BenchmarkResult
from benchmarks.pipelines import run_steps_in_process
from benchmarks.studies.committed import StudyFolder, show_committed
from dags.advertiser_steps import audience_steps, roi_steps
from dags.pipeline import data_steps, statistics_step
from dags.steps import PipelinePaths, Step
from etl.spec import load_spec
from etl.spec.base import StrictModel
from etl.spec.units import DayRange

SIMULATOR = ROOT / "conf" / "simulator" / "growth.yaml"
FIRST_DAY = date(2025, 1, 1)
AGES = (30, 90, 365)  # days
MEASURED_DAYS = 7  # that end at an age: snapshots are made once a week
DAILY_RUNS = 9  # before an age: the first ones follow a longer run
LONGEST_RUN = 28  # days of a run of which no day is compared
MIN_CPU_SECONDS = 5.0  # steps below are too short to compare their CPU time
GOALS = {"worst_step_ratio": "<= 1.15"}
RESULT = RESULTS / "growth.json"


class GrowthArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    days: Annotated[int, tyro.conf.arg(help="age of the lake at the end"), Field(ge=1)] = AGES[-1]
    simulator: Annotated[
        Path | None,
        tyro.conf.arg(help="configuration of logs from 2025-01-01 on, instead of the study's"),
    ] = None
    spec: Annotated[Path | None, tyro.conf.arg(help="data spec, instead of the simulator's")] = None
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


class StepCost(StrictModel):
    """What a step cost in the run with which the lake reached an age in days.

    `cpu_seconds` are those of all its processes.
    """

    age: int
    step: str
    bytes_read: int
    cpu_seconds: float
    seconds: float


def bench_growth(args: GrowthArgs) -> None:
    """Bytes read and CPU of each step of a day, in lakes of 30, 90 and 365 days."""
    if args.work is None:
        show_committed("Growth of a lake", GOALS, RESULT, args.as_json)
        return
    work = args.work.resolve()
    spec = (args.spec or SIMULATOR_SPEC).resolve()
    paths = PipelinePaths(spec, str(work / "raw"), str(work / "lake"))
    costs = age_lake(paths, work / "costs.jsonl", args.days, args.simulator or SIMULATOR)
    result = summarize(costs, args.days)
    if args.days >= AGES[-1] and not (args.simulator or args.spec):
        result.save_study(RESULT, f"gemline bench growth --days {args.days} --work FOLDER")
    result.show(args.as_json)


def age_lake(paths: PipelinePaths, measured: Path, days: int, simulator: Path) -> list[StepCost]:
    """Run the days of simulated logs that `measured` lacks, one by one; returns all costs."""
    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[2]")
    from etl.commands import SimulateArgs, simulate
    from etl.runtime.spark import spark_session

    simulate(SimulateArgs(simulator=simulator, out=Path(paths.raw)))
    spark_session("bench growth")
    costs = _read_costs(measured)
    for ages in runs_of_study(max((cost.age for cost in costs), default=0), days):
        costs_of_run = list(run_days(paths, ages))
        with measured.open("a") as file:
            file.writelines(cost.model_dump_json() + "\n" for cost in costs_of_run)
        remove_earlier_stores(paths, day_of(ages[-1]))  # a run that is not recorded is repeated
        costs += costs_of_run
    return costs


def runs_of_study(age: int, days: int) -> list[range]:
    """The ages that a lake reaches by each run, from one age to another.

    Days that are compared have a run of their own, as have those before them.
    """
    runs = []
    while age < days:
        until_daily = min((a - DAILY_RUNS - age for a in AGES if a > age), default=LONGEST_RUN)
        is_daily = age < AGES[0] or until_daily <= 0
        length = 1 if is_daily else min(until_daily, LONGEST_RUN, days - age)
        runs.append(range(age + 1, age + 1 + length))
        age += length
    return runs


def _read_costs(path: Path) -> list[StepCost]:
    if not path.exists():
        return []
    return [StepCost.model_validate_json(line) for line in path.read_text().splitlines()]


def run_days(paths: PipelinePaths, ages: range) -> Iterator[StepCost]:
    """Run the steps of the days with which the lake reaches some ages; yields their costs."""
    first, last = day_of(ages[0]), day_of(ages[-1])
    for step in steps_of_days(paths, (first, last)):
        yield measure_cost(ages[-1], step.name, partial(run_steps_in_process, [step]))
    earlier = store_folder(paths, first - timedelta(days=1))
    data = earlier / "data.mdb"
    size = data.stat().st_size if data.exists() else 0
    cost = measure_cost(ages[-1], "feature store", partial(build_store, paths, last, earlier))
    yield cost.model_copy(update={"bytes_read": cost.bytes_read + size})  # mapped, not read


def steps_of_days(paths: PipelinePaths, days: DayRange) -> list[Step]:
    """The steps of a run that need no trained model."""
    spec, flags = load_spec(paths.spec), ("--days", f"{days[0]}:{days[1]}")
    data_until = ("--data-until", str(days[1]))
    return [
        *data_steps(spec, paths, flags),
        statistics_step(paths, flags),
        *audience_steps(spec, paths, flags, data_until),
        *roi_steps(spec, paths, flags, data_until),
    ]


def day_of(age: int) -> date:
    """The day with which the lake reaches an age."""
    return FIRST_DAY + timedelta(days=age - 1)


def store_folder(paths: PipelinePaths, day: date) -> Path:
    """The folder of the feature store with all days until one."""
    return Path(paths.lake, "_stores", str(day))


def build_store(paths: PipelinePaths, day: date, earlier: Path) -> None:
    """Build a feature store of all days until one, with the histories of an earlier store."""
    from etl.tables.lake import Lake
    from ranking.feature_store.materialize import HistoryLengths, build_feature_store

    lake = Lake(paths.lake, load_spec(paths.spec))
    lengths = HistoryLengths(sequence="behaviour", events=256)
    folder = store_folder(paths, day)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before it was recorded
    build_feature_store(lake, folder, lake.spec.day_end(day), lengths, [earlier]).close()


def remove_earlier_stores(paths: PipelinePaths, day: date) -> None:
    """Remove all feature stores but that of a day."""
    for folder in store_folder(paths, day).parent.iterdir():
        if folder.name != str(day):
            shutil.rmtree(folder)


def measure_cost(age: int, step: str, run: Callable[[], object]) -> StepCost:
    """Run a step in this process; returns what it cost."""
    start, cpu, read = time.perf_counter(), total_cpu_seconds(), total_bytes_read()
    run()
    return StepCost(
        age=age,
        step=step,
        bytes_read=total_bytes_read() - read,
        cpu_seconds=total_cpu_seconds() - cpu,
        seconds=time.perf_counter() - start,
    )


def total_bytes_read() -> int:
    """Bytes that Spark has read from files, and this process by system calls."""
    import psutil
    from pyspark.sql import SparkSession

    jvm: Any = SparkSession.active().sparkContext._jvm
    hadoop_files = jvm.org.apache.hadoop.fs.FileSystem
    by_spark = sum(of_scheme.getBytesRead() for of_scheme in hadoop_files.getAllStatistics())
    return int(by_spark + psutil.Process().io_counters().read_chars)


def total_cpu_seconds() -> float:
    """CPU seconds of this process, of the JVM and of Spark's Python workers."""
    import psutil

    process = psutil.Process()
    own = process.cpu_times()
    children = [child.cpu_times() for child in process.children(recursive=True)]
    of_children = (t.user + t.system + t.children_user + t.children_system for t in children)
    return float(own.user + own.system + sum(of_children))


def summarize(costs: list[StepCost], days: int) -> BenchmarkResult:
    """The cost of each step at each age, and the largest growth from the first age to the last.

    Steps that were not measured at each age, such as renamed ones, are left out.
    """
    ages = [age for age in AGES if age <= days] or [days]
    result = BenchmarkResult(
        "One more day, by the age of the lake in days",
        ("step", *(f"MB read at {age}" for age in ages), *(f"CPU s at {age}" for age in ages)),
    )
    by_step = {}
    for step in dict.fromkeys(cost.step for cost in costs):
        measured = [costs_at(costs, step, age) for age in ages]
        if not all(measured):
            continue
        by_step[step] = [MeanCost.of(rows) for rows in measured]
        megabytes = (f"{cost.megabytes:.2f}" for cost in by_step[step])
        cpu = (f"{cost.cpu_seconds:.2f}" for cost in by_step[step])
        result.rows.append((step, *megabytes, *cpu))
    ratios = growth_ratios({step: (c[0], c[-1]) for step, c in by_step.items() if len(ages) > 1})
    for name, ratio in ratios.items():
        result.record(f"{name.replace(' ', '_')}_ratio", ratio, "")
    reason = f"two ages are compared: run --days {AGES[1]} or more"
    result.record("worst_step_ratio", max(ratios.values(), default=None), reason)
    later = growth_ratios({step: (c[1], c[-1]) for step, c in by_step.items() if len(ages) > 2})
    reason = f"three ages are compared: run --days {AGES[2]} or more"
    result.record(f"worst_step_ratio_from_{AGES[1]}", max(later.values(), default=None), reason)
    return result


class MeanCost(NamedTuple):
    """The mean of the bytes and the median of the CPU seconds of a step on some days."""

    megabytes: float
    cpu_seconds: float

    @classmethod
    def of(cls, costs: list[StepCost]) -> "MeanCost":
        """That of the costs of each day."""
        megabytes = mean(cost.bytes_read for cost in costs) / 1e6
        return cls(megabytes, median(cost.cpu_seconds for cost in costs))


def growth_ratios(by_step: dict[str, tuple[MeanCost, MeanCost]]) -> dict[str, float]:
    """What steps cost at one age over what they cost at an earlier one, by step and resource."""
    ratios = {}
    for step, (earlier, last) in by_step.items():
        ratios[f"{step} bytes"] = last.megabytes / earlier.megabytes
        if last.cpu_seconds > MIN_CPU_SECONDS:
            ratios[f"{step} cpu"] = last.cpu_seconds / earlier.cpu_seconds
    return ratios


def costs_at(costs: list[StepCost], step: str, age: int) -> list[StepCost]:
    """The costs of a step on the measured days that end at an age."""
    ages = range(age - MEASURED_DAYS + 1, age + 1)
    return [cost for cost in costs if cost.step == step and cost.age in ages]
