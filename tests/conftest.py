"""Shared by all tests: one Spark session, one small simulated lake."""

import os
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch may do
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "conf" / "specs" / "simulator.yaml"
FIRST, LAST = date(2026, 1, 1), date(2026, 1, 4)


def short_spec() -> str:
    """The simulator's spec with labels that ripen within a day, and fewer counters."""
    text = SPEC.read_text().replace("window: 3d", "window: 1h").replace("buckets: 4", "buckets: 2")
    raw = yaml.safe_load(text)
    raw["counters"]["keys"] = [["user"], ["user", "category"], ["item"], ["surface"]]
    raw["counters"]["windows"] = ["1h", "1d"]
    raw["most_events_a_day"] = 250
    return yaml.safe_dump(raw, sort_keys=False)


# Plans for a few rows are interpreted, and have few tasks; other processes run as users have them.
FEW_ROWS = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.databricks.delta.snapshotPartitions": "1",
}


@pytest.fixture(scope="session")
def spark() -> Iterator[object]:
    from etl.session import spark_session

    session = spark_session("tests")
    for key, value in FEW_ROWS.items():
        session.conf.set(key, value)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def spec_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "short.yaml"
    path.write_text(short_spec())
    return path


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four days of a small simulated world, with every disorder."""
    from etl.sources.simulator.config import SimulatorConfig
    from etl.sources.simulator.simulate import simulate

    out = tmp_path_factory.mktemp("raw") / "logs"
    config = yaml.safe_load((ROOT / "conf/simulator/demo.yaml").read_text())
    small = {"days": 4, "users": 160, "events_per_user_mean": 90, "max_events_per_user": 900}
    few = {"posts": 300, "ads_start": 60, "ads_per_day": 15, "advertisers": 12}
    simulate(SimulatorConfig(**(config | small | few | {"malformed": 0.01})), out)
    return out


@pytest.fixture(scope="session")
def lake(spark: object, spec_path: Path, raw: Path, tmp_path_factory: pytest.TempPathFactory):
    """Tables of all four days, made as one range. Tests must not write to it."""
    from etl.spec import load_spec
    from etl.tables.lake import Lake
    from tests.pipeline import build_tables

    made = Lake(str(tmp_path_factory.mktemp("lake")), load_spec(spec_path))
    build_tables(made, raw, (FIRST, LAST))
    return made


@pytest.fixture(scope="session")
def lake_spec(spec_path: Path):
    from etl.spec import load_spec

    return load_spec(spec_path)
