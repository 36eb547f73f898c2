"""The smallest whole pipeline: one surface, two objectives, three days."""

import gzip
import json
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import yaml

from etl.spec.units import DayRange

FIRST = date(2026, 1, 1)
DAYS = (FIRST, FIRST + timedelta(days=2))
SURFACE = "feed"


@dataclass(frozen=True)
class SmallPipeline:
    """The spec, raw logs and days of the pipeline."""

    spec: Path
    raw: Path
    days: DayRange = DAYS

    def command(self, lake: Path) -> list[str]:
        """The command-line arguments of `gemline` that run the pipeline into a lake."""
        paths = ["--spec", str(self.spec), "--raw", str(self.raw), "--lake", str(lake)]
        return ["run", *paths, "--days", f"{self.days[0]}:{self.days[1]}", "--scale", "tiny"]


def write_small_pipeline(spec_path: Path, raw: Path, folder: Path) -> SmallPipeline:
    """Write the spec, and the raw logs of its surface and days."""
    pipeline = SmallPipeline(folder / "small.yaml", folder / "logs")
    pipeline.spec.write_text(small_spec(spec_path))
    copy_logs_of_surface(raw, pipeline.raw)
    return pipeline


def small_spec(spec_path: Path) -> str:
    """The spec of one surface without conversions, audiences and forecasts, with all counters."""
    spec = yaml.safe_load(spec_path.read_text())
    spec["surfaces"] = {SURFACE: spec["surfaces"][SURFACE]}
    del spec["domains"], spec["objectives"]["conversion"]
    del spec["audiences"], spec["sources"]["audience_labels"], spec["sources"]["audits"]
    del spec["forecast"], spec["roi"], spec["sources"]["spend"]
    spec["auction"]["goal_objectives"]["sales"] = "click"
    del spec["auction"]["target_roas"]
    spec["attributes"]["event"] = {
        "rank": {"type": "numeric", "column": "position"},
        "network": {"type": "categorical", "size": 8, "column": "connection"},
    }
    spec["counters"] |= {
        "keys": [["user"], ["user", "category"], ["item"]],
        "half_lives": ["10m", "1d"],
        "time_since_last": ["ad_click", "ad_view"],
        "aggregations": [
            {"function": "mean", "column": "dwell", "event": "ad_view"},
            {"function": "last", "column": "dwell", "event": "ad_view"},
            {"function": "sum", "column": "value", "event": "post_purchase"},
            {"function": "max", "column": "value", "event": "post_purchase"},
            {"function": "mean", "column": "position", "event": "ad_impression"},
            {"function": "sum", "column": "rank", "event": "ad_impression"},
            {"function": "distinct_count", "column": "network", "event": "ad_impression"},
            {"function": "distinct_count", "column": "item", "event": "ad_impression"},
            {"function": "distinct_count", "column": "user", "event": "ad_click"},
            {"function": "distinct_count", "column": "category", "event": "ad_click"},
        ],
    }
    spec["sources"]["events"]["delay"] = "5m"
    return yaml.safe_dump(spec, sort_keys=False)


def copy_logs_of_surface(raw: Path, folder: Path) -> None:
    """Copy the logs of the first days, without the events of other surfaces."""
    for number in range((DAYS[1] - DAYS[0]).days + 1):
        day = f"day={DAYS[0] + timedelta(days=number)}"
        for source in ("users", "items"):
            file = Path(source, f"{day}.json.gz")
            (folder / source).mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes((raw / file).read_bytes())
        lines = [
            line
            for path in sorted((raw / "events" / day).glob("*.json.gz"))
            for line in gzip.decompress(path.read_bytes()).decode().splitlines()
            if surface_of(line) == SURFACE
        ]
        (folder / "events" / day).mkdir(parents=True)
        content = gzip.compress("\n".join(lines).encode())
        (folder / "events" / day / "part.json.gz").write_bytes(content)


def surface_of(line: str) -> object:
    """The surface of a raw record; None where it cannot be parsed."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record.get("surface") if isinstance(record, dict) else None
