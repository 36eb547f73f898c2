"""Fixtures of all tests: one Spark session per worker, one small simulated world for all."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

from etl.spec import DataSpec, load_spec
from etl.tables.lake import Lake
from tests.small_pipeline import SmallPipeline, write_small_pipeline
from tests.workers import OneSparkWorker, in_scheduling_order
from tests.world import World, copy_of, unchanged

os.environ.setdefault("OMP_NUM_THREADS", "2")
if "PYTEST_XDIST_WORKER" in os.environ:  # also for the processes that tests start
    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[1]")
os.environ.setdefault("GEMLINE_SPARK_MEMORY", "3g")
# The short JVMs of other processes gain less from the optimizing compiler than it takes. Without it
# their code cache has 48 MB by default, which Spark fills within seconds: nothing is compiled then.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")
os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which torch may do
# `make test` tries the same examples in each run; `make proof` tries others, and ten times as many
# of each test that does not set `max_examples` itself.
settings.register_profile("test", deadline=None, derandomize=True)
settings.register_profile("proof", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("GEMLINE_HYPOTHESIS", "test"))

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "conf" / "specs" / "simulator.yaml"
FIRST, LAST = date(2026, 1, 1), date(2026, 1, 4)
# Flags of the training of the shared GEM; the same flags train an equal one.
GEM_FLAGS = ("--scale", "tiny", "--batch-rows", "64", "--checkpoint-every", "5",
             "--max-length", "32")  # fmt: skip


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> OneSparkWorker:
    return OneSparkWorker(config, log)


@pytest.hookimpl(trylast=True)  # pytest-randomly shuffles first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = in_scheduling_order(items)


def short_spec() -> str:
    """The simulator's spec with labels that mature within a day, and fewer counters."""
    text = SPEC.read_text().replace("window: 3d", "window: 1h").replace("buckets: 4", "buckets: 2")
    spec = yaml.safe_load(text)
    spec["counters"]["keys"] = [["user"], ["user", "category"], ["item"], ["surface"]]
    spec["counters"]["windows"] = ["1h", "1d"]
    spec["max_events_per_user_day"] = 250
    return yaml.safe_dump(spec, sort_keys=False)


# For a few rows, planning is slower than running: plans are interpreted, have few tasks and skip no
# files. Other processes run with the defaults.
SMALL_DATA_SETTINGS = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.databricks.delta.stats.skipping": "false",
    "spark.databricks.delta.writeChecksumFile.enabled": "false",
    "spark.sql.ui.explainMode": "simple",
}


@pytest.fixture(scope="session")
def spark() -> Iterator[object]:
    """One session per worker, with one core where several workers share the machine."""
    from etl.runtime.spark import spark_session

    # After two minutes, planning takes half as long as with the first compiler alone.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JDK_JAVA_OPTIONS", raising=False)
        session = spark_session("tests")
    for key, value in SMALL_DATA_SETTINGS.items():
        session.conf.set(key, value)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def shared_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The folders that all workers of a test run share, or all parts of `make proof`."""
    if "GEMLINE_TEST_WORLD" in os.environ:
        return World(Path(os.environ["GEMLINE_TEST_WORLD"]))
    base = tmp_path_factory.getbasetemp()
    return World((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "world")


@pytest.fixture(scope="session")
def spec_path(shared_world: World) -> Path:
    """The file of `short_spec`."""
    folder = shared_world.folder(
        "spec", lambda folder: (folder / "short.yaml").write_text(short_spec())
    )
    return folder / "short.yaml"


@pytest.fixture(scope="session")
def lake_spec(spec_path: Path) -> DataSpec:
    """The data spec of the shared tables."""
    return load_spec(spec_path)


@pytest.fixture(scope="session")
def raw(shared_world: World) -> Path:
    """Raw logs of four simulated days, with late, duplicate and malformed records, and audits."""
    from etl.simulator.config import SimulatorConfig
    from etl.simulator.simulate import simulate

    config = yaml.safe_load((ROOT / "conf/simulator/demo.yaml").read_text())
    users = {"days": 4, "users": 160, "events_per_user_mean": 90, "max_events_per_user": 900}
    items = {"posts": 300, "ads_start": 60, "ads_per_day": 15, "advertisers": 12}
    audits = {"audience": config["audience"] | {"panel": 1.0, "min_panel": 1}}
    simulated = SimulatorConfig(**(config | users | items | audits | {"malformed": 0.01}))
    return shared_world.folder("raw", lambda folder: simulate(simulated, folder / "logs")) / "logs"


@dataclass(frozen=True)
class Tables:
    """Folders of tables: of the whole spec, and of a pipeline of one surface."""

    lake: Path
    small_lake: Path
    small_pipeline: SmallPipeline


@pytest.fixture(scope="session")
def tables(
    request: pytest.FixtureRequest, shared_world: World, spec_path: Path, raw: Path
) -> Tables:
    """All shared tables, built at once, so that only the worker with Spark builds tables."""
    from tests.pipeline import build_audiences, build_tables

    def build(folder: Path) -> None:
        request.getfixturevalue("spark")
        lake = Lake(str(folder / "lake"), load_spec(spec_path))
        build_tables(lake, raw, (FIRST, LAST))
        build_audiences(lake, raw, (FIRST, LAST))
        small = write_small_pipeline(spec_path, raw, folder)
        small_lake = Lake(str(folder / "small_lake"), load_spec(small.spec))
        build_tables(small_lake, small.raw, small.days)

    root = shared_world.folder("tables", build)
    small_pipeline = SmallPipeline(root / "small.yaml", root / "logs")
    return Tables(root / "lake", root / "small_lake", small_pipeline)


@pytest.fixture(scope="session")
def lake(tables: Tables, lake_spec: DataSpec) -> Iterator[Lake]:
    """Tables of all four days, built as one range. Tests must not write to it."""
    with unchanged(tables.lake):
        yield Lake(str(tables.lake), lake_spec)


@pytest.fixture(scope="session")
def small_pipeline(tables: Tables) -> SmallPipeline:
    """The spec and raw logs of the small pipeline."""
    return tables.small_pipeline


@pytest.fixture(scope="session")
def small_lake(tables: Tables) -> Iterator[Lake]:
    """The tables of the small pipeline, built as one range. Tests must not write to it."""
    with unchanged(tables.small_lake):
        yield Lake(str(tables.small_lake), load_spec(tables.small_pipeline.spec))


@pytest.fixture(scope="session")
def gem_lake(shared_world: World, lake: Lake, spec_path: Path) -> Iterator[Lake]:
    """The tables, a GEM trained through each of the first three days, and its predictions.

    Tests must not write to it.
    """
    from gemline import main

    def build(folder: Path) -> None:
        folder.rmdir()
        copy = copy_of(lake, folder)
        flags = ["--spec", str(spec_path), "--lake", copy.root, "--days"]
        training_days = f"{FIRST}:{LAST - timedelta(days=1)}"
        assert main(["train", "gem", *flags, training_days, *GEM_FLAGS]) == 0
        assert main(["teacher-predictions", *flags, f"{FIRST}:{LAST}"]) == 0

    root = shared_world.folder("gem", build)
    with unchanged(root):
        yield Lake(str(root), lake.spec)


@pytest.fixture
def own(lake: Lake, tmp_path: Path) -> Lake:
    """A copy of the tables that the test may change."""
    return copy_of(lake, tmp_path / "lake")


@pytest.fixture
def own_gem_lake(gem_lake: Lake, tmp_path: Path) -> Lake:
    """A copy of the tables and models that the test may change."""
    return copy_of(gem_lake, tmp_path / "lake")
