"""A line that is as short as a whole one can be: one surface, two objectives, three days."""

import gzip
import json
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import yaml

FIRST = date(2026, 1, 1)
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


def write_small_line(spec_path: Path, raw: Path, folder: Path) -> SmallLine:
    """Write the spec, and those of some raw logs that are of its surface and days."""
    made = SmallLine(folder / "small.yaml", folder / "logs")
    made.spec.write_text(small_spec(spec_path))
    keep_surface(raw, made.raw)
    return made


def small_spec(spec_path: Path) -> str:
    spec = yaml.safe_load(spec_path.read_text())
    spec["surfaces"] = {SURFACE: spec["surfaces"][SURFACE]}
    del spec["domains"], spec["objectives"]["conversion"]
    spec["auction"]["pays_for"]["sales"] = "click"
    spec["counters"]["keys"] = [["user"], ["item"]]
    spec["sources"]["events"]["delay"] = "5m"
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
