"""`gemline bench growth`: what one more day costs in a lake of 30, 90 and 365 days.

Without `--work` the committed figures are printed. With it, a lake is aged by daily runs on small
simulated days: all steps that need no trained model, and the feature store. Each step is measured;
a run that is interrupted goes on after the last measured day.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

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

SIMULATOR = ROOT / "conf" / "simulator" / "growth.yaml"
FIRST_DAY = date(2026, 1, 1)
AGES = (30, 90, 365)  # days
MEASURED_DAYS = 7  # that end at an age: snapshots are made once a week
MIN_CPU_SECONDS = 5.0  # steps below are too short to compare their CPU time
GOALS = {"worst_step_ratio": "<= 1.15"}
RESULT = RESULTS / "growth.json"


class GrowthArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    days: Annotated[int, tyro.conf.arg(help="age of the lake at the end"), Field(ge=1)] = AGES[-1]
    simulator: Annotated[
        Path | None,
        tyro.conf.arg(help="configuration of logs from 2026-01-01 on, instead of the study's"),
    ] = None
    spec: Annotated[Path | None, tyro.conf.arg(help="data spec, instead of the simulator's")] = None
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


class StepCost(StrictModel):
    """What a step cost on the day with which the lake reached an age in days.

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
    for age in range(max((cost.age for cost in costs), default=0) + 1, days + 1):
        costs_of_day = list(run_day(paths, age))
        with measured.open("a") as file:
            file.writelines(cost.model_dump_json() + "\n" for cost in costs_of_day)
        remove_earlier_stores(paths, day_of(age))  # a day that is not recorded is measured again
        costs += costs_of_day
    return costs


def _read_costs(path: Path) -> list[StepCost]:
    if not path.exists():
        return []
    return [StepCost.model_validate_json(line) for line in path.read_text().splitlines()]


def run_day(paths: PipelinePaths, age: int) -> Iterator[StepCost]:
    """Run the steps of the day with which the lake reaches an age; yields their costs."""
    day = day_of(age)
    for step in steps_of_day(paths, day):
        yield measure_cost(age, step.name, partial(run_steps_in_process, [step]))
    previous = store_folder(paths, day - timedelta(days=1)) / "data.mdb"
    size = previous.stat().st_size if previous.exists() else 0
    cost = measure_cost(age, "feature store", partial(build_store, paths, day))
    yield cost.model_copy(update={"bytes_read": cost.bytes_read + size})  # mapped, not read


def steps_of_day(paths: PipelinePaths, day: date) -> list[Step]:
    """The steps of a daily run that need no trained model."""
    spec, flags = load_spec(paths.spec), ("--days", f"{day}:{day}")
    data_until = ("--data-until", str(day))
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


def build_store(paths: PipelinePaths, day: date) -> None:
    """Build a feature store of all days until one, with the histories of the day before."""
    from etl.tables.lake import Lake
    from ranking.feature_store.materialize import HistoryLengths, build_feature_store

    lake = Lake(paths.lake, load_spec(paths.spec))
    lengths = HistoryLengths(sequence="behaviour", events=256)
    previous, folder = store_folder(paths, day - timedelta(days=1)), store_folder(paths, day)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before it was recorded
    build_feature_store(lake, folder, lake.spec.day_end(day), lengths, [previous]).close()


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
    ratios = {}
    for step in dict.fromkeys(cost.step for cost in costs):
        measured = [costs_at(costs, step, age) for age in ages]
        if not all(measured):
            continue
        megabytes = [mean(cost.bytes_read for cost in rows) / 1e6 for rows in measured]
        cpu = [median(cost.cpu_seconds for cost in rows) for rows in measured]
        cells = (f"{value:.2f}" for value in (*megabytes, *cpu))
        result.rows.append((step, *cells))
        if len(ages) == 1:
            continue
        ratios[f"{step} bytes"] = megabytes[-1] / megabytes[0]
        if cpu[-1] > MIN_CPU_SECONDS:
            ratios[f"{step} cpu"] = cpu[-1] / cpu[0]
    for name, ratio in ratios.items():
        result.record(f"{name.replace(' ', '_')}_ratio", ratio, "")
    reason = f"two ages are compared: run --days {AGES[1]} or more"
    result.record("worst_step_ratio", max(ratios.values(), default=None), reason)
    return result


def costs_at(costs: list[StepCost], step: str, age: int) -> list[StepCost]:
    """The costs of a step on the measured days that end at an age."""
    ages = range(age - MEASURED_DAYS + 1, age + 1)
    return [cost for cost in costs if cost.step == step and cost.age in ages]
