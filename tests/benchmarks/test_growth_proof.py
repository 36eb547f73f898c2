"""A lake that is aged by daily runs: what a step reads does not grow with the age of the lake."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
import yaml

from benchmarks.studies.growth import (
    MEASURED_DAYS,
    SIMULATOR,
    StepCost,
    costs_at,
    day_of,
    steps_of_days,
)
from dags.steps import PipelinePaths
from tests.dags.test_kills import kill_when

pytestmark = pytest.mark.proof

DAYS, KILLED_AFTER = 30, 3
# The last day of a week in which all windows lie within the lake: labels read nine days (maturity,
# two days of lateness and an hour of attribution, each rounded up), the other steps fewer.
STEADY_AGE = 16
# The mean age of the last week is 2.1 times that of the week that ends at STEADY_AGE: what a step
# reads of all days would grow by that. Logs of tables do, and are much of what a small day reads.
MAX_RATIO = 1.5
SMALL = {
    "days": DAYS + 1, "users": 60, "events_per_user_mean": 150, "max_events_per_user": 600,
    "posts": 300, "ads_start": 30, "advertisers": 10, "categories": 8,
}  # fmt: skip
# Of so few rows, interpreted plans are faster than compiled ones.
SPARK_DEFAULTS = """spark.sql.codegen.wholeStage false
spark.sql.codegen.factoryMode NO_CODEGEN
spark.sql.adaptive.enabled false
"""


@pytest.fixture(scope="module")
def costs(spec_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepCost]:
    """The costs of thirty days; the process was killed within the fourth and started again."""
    folder = tmp_path_factory.mktemp("growth")
    simulator, measured = folder / "simulator.yaml", folder / "work" / "costs.jsonl"
    simulator.write_text(yaml.safe_dump(yaml.safe_load(SIMULATOR.read_text()) | SMALL))
    (folder / "conf").mkdir()
    (folder / "conf" / "spark-defaults.conf").write_text(SPARK_DEFAULTS)
    command = ["bench", "growth", "--days", str(DAYS), "--simulator", str(simulator),
               "--spec", str(spec_path), "--work", str(folder / "work")]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONF_DIR", str(folder / "conf"))
        patch.setenv("GEMLINE_SPARK_MASTER", "local[2]")
        patch.delenv("JDK_JAVA_OPTIONS")  # thirty days of one process gain from the compiler
        kill_when(command, lambda: age_of(measured) >= KILLED_AFTER, delay=4, timeout=1800)
        assert age_of(measured) == KILLED_AFTER
        subprocess.run([sys.executable, "-m", "gemline", *command], check=True)
    return [StepCost.model_validate_json(line) for line in measured.read_text().splitlines()]


def age_of(measured: Path) -> int:
    """The last day whose costs are recorded."""
    lines = measured.read_text().splitlines() if measured.exists() else []
    return max((StepCost.model_validate_json(line).age for line in lines), default=0)


def test_each_step_of_each_day_is_measured_once(costs: list[StepCost], spec_path: Path) -> None:
    steps = steps_of_days(PipelinePaths(spec_path, "raw", "lake"), (day_of(1), day_of(1)))
    names = [*(step.name for step in steps), "feature store"]
    assert {"feature_statistics", "audience", "campaign_days"} <= set(names)
    expected = {(age, name): 1 for age in range(1, DAYS + 1) for name in names}
    assert Counter((cost.age, cost.step) for cost in costs) == expected


def test_no_step_reads_more_because_the_lake_is_older(costs: list[StepCost]) -> None:
    ratios = {}
    for step in {cost.step for cost in costs}:
        weeks = [costs_at(costs, step, age) for age in (STEADY_AGE, DAYS)]
        assert [len(week) for week in weeks] == [MEASURED_DAYS] * 2
        earlier, last = (mean(cost.bytes_read for cost in week) for week in weeks)
        ratios[step] = last / earlier
    assert max(ratios.values()) <= MAX_RATIO, ratios
