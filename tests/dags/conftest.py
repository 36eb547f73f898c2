"""A line that is as short as a whole one can be: one surface, two objectives, three days."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import pytest
import yaml

from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.conftest import FIRST
from tests.pipeline import build_tables
from tests.world import World, unchanged

DAYS = (FIRST, FIRST + timedelta(days=2))
SURFACE = "feed"


@dataclass(frozen=True)
class SmallLine:
    """Where the spec and the raw logs of the line lie, and its days."""

    spec: Path
    raw: Path
    days: tuple[date, date] = DAYS

    def command(self, lake: Path) -> list[str]:
        """The words after `gemline` that run the whole line."""
        where = ["--spec", str(self.spec), "--raw", str(self.raw), "--lake", str(lake)]
        return ["run", *where, "--days", f"{self.days[0]}:{self.days[1]}", "--scale", "tiny"]


@pytest.fixture(scope="session")
def small_line(world: World, spec_path: Path, raw: Path) -> SmallLine:
    """The shared logs of one surface."""

    def build(folder: Path) -> None:
        (folder / "small.yaml").write_text(small_spec(spec_path))
        keep_surface(raw, folder / "logs")

    folder = world.folder("small_line", build)
    return SmallLine(folder / "small.yaml", folder / "logs")


@pytest.fixture(scope="session")
def small_lake(spark: object, world: World, small_line: SmallLine) -> Iterator[Lake]:
    """The tables of the small line, made as one range. Tests must not write to it."""
    spec = load_spec(small_line.spec)
    root = world.folder(
        "small_lake",
        lambda folder: build_tables(Lake(str(folder), spec), small_line.raw, small_line.days),
    )
    with unchanged(root):
        yield Lake(str(root), spec)


def small_spec(spec_path: Path) -> str:
    spec = yaml.safe_load(spec_path.read_text())
    spec["surfaces"] = {SURFACE: spec["surfaces"][SURFACE]}
    del spec["domains"], spec["objectives"]["conversion"]
    spec["auction"]["pays_for"]["sales"] = "click"
    spec["counters"]["keys"] = [["user"], ["item"]]
    return yaml.safe_dump(spec, sort_keys=False)


def keep_surface(raw: Path, folder: Path) -> None:
    """Copy the logs of the first days, without the events of other surfaces."""
    for number in range((DAYS[1] - DAYS[0]).days + 1):
        day = f"day={DAYS[0] + timedelta(days=number)}"
        for source in ("users", "items"):
            file = Path(source, f"{day}.json.gz")
            (folder / source).mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes((raw / file).read_bytes())
        kept = [
            line
            for path in sorted((raw / "events" / day).glob("*.json.gz"))
            for line in gzip.decompress(path.read_bytes()).decode().splitlines()
            if surface_of(line) == SURFACE
        ]
        (folder / "events" / day).mkdir(parents=True)
        content = gzip.compress("\n".join(kept).encode())
        (folder / "events" / day / "part.json.gz").write_bytes(content)


def surface_of(line: str) -> object:
    """The surface of a raw record; None where it cannot be read."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record.get("surface") if isinstance(record, dict) else None
