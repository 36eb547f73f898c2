"""The demo's world in other sizes, and its tables: what several benchmarks begin with."""

from pathlib import Path

from dags.line import Place, Step
from etl.cli import read_mapping
from etl.errors import UserError
from etl.sources.simulator.config import SimulatorConfig
from etl.sources.simulator.simulate import simulate

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "conf" / "specs" / "simulator.yaml"


def write_logs(raw: Path, changes: dict[str, int]) -> None:
    """Simulate the demo's logs with some settings changed."""
    world = read_mapping(ROOT / "conf" / "simulator" / "demo.yaml") | changes
    simulate(SimulatorConfig(**world), raw)


def run_here(steps: list[Step]) -> None:
    """Run steps in this process; raises UserError where one fails."""
    from gemline import main

    for step in steps:
        if main(step.command):
            raise UserError(f"{step.name} failed; the reason is above")


def place_in(work: str, lake: str = "lake") -> Place:
    """Where a benchmark's line runs: its logs, and one of its lakes, below a folder."""
    return Place(SPEC, str(Path(work, "raw")), str(Path(work, lake)))
