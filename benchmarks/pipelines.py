"""Pipelines that benchmarks run: simulated logs, and steps on them in this process."""

import shutil
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import DEMO_SIMULATOR, SIMULATOR_SPEC
from dags.pipeline import all_days_flags, data_steps, latest_mature_split
from dags.runner import run_pipeline
from dags.steps import PipelinePaths, Step
from etl.cli.runner import read_yaml_mapping
from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.units import parse_date_range

DEMO_DAYS = "2026-01-01:2026-01-11"  # of DEMO_SIMULATOR
BENCH_DAYS = "2026-01-01:2026-01-14"  # of BENCH_SIMULATOR
SMALL_SIMULATION = {"users": 150, "events_per_user_mean": 80, "max_events_per_user": 600, "days": 7}


def simulate_logs(raw: Path, overrides: dict[str, int], simulator: Path = DEMO_SIMULATOR) -> None:
    """Simulate logs with a configuration, by default the demo's, and some settings changed."""
    from etl.simulator.config import SimulatorConfig
    from etl.simulator.simulate import simulate

    simulate(SimulatorConfig(**read_yaml_mapping(simulator) | overrides), raw)


def simulated_tables(
    work: Path, simulator: Path, days: str, spec_path: Path = SIMULATOR_SPEC
) -> PipelinePaths:
    """Simulated logs and all their tables, built in `work` if they are missing."""
    from etl.commands import SimulateArgs, simulate

    spec, work = load_spec(spec_path), work.resolve()  # step completion depends on the paths
    paths = PipelinePaths(spec_path, str(work / "raw"), str(work / "lake"))
    simulate(SimulateArgs(simulator=simulator, out=Path(paths.raw)))
    all_days = latest_mature_split(spec, *parse_date_range(days))
    run_pipeline(spec, paths, data_steps(spec, paths, all_days_flags(all_days)))
    return paths


def pipeline_paths_in(folder: str, lake: str = "lake") -> PipelinePaths:
    """Paths of a pipeline on simulated logs, below a folder; several lakes may share its logs."""
    return PipelinePaths(SIMULATOR_SPEC, str(Path(folder, "raw")), str(Path(folder, lake)))


def fresh_copy(paths: PipelinePaths, folder: Path) -> PipelinePaths:
    """The pipeline with a copy of its lake, in a folder that is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(paths.lake, folder / "lake", symlinks=True)
    return replace(paths, lake=str(folder / "lake"))


def run_steps_in_process(steps: list[Step]) -> None:
    """Run steps in this process. Raises UserError if one fails."""
    from gemline import main

    for step in steps:
        if main(step.command):
            raise UserError(f"{step.name} failed; the reason is above")
