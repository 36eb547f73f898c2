"""`gemline bench history`: NE by length of history, on the simulator's bench data.

GEM without history and with 32, 256 and 2,048 events, several seeds each, compared with LightGBM on
the same features and counters, with the simulator's true probabilities, and with clicks predicted
by an oracle that reads only the log (`observable_oracle`). Takes hours on two
cores; finished runs are kept in `--work`, and the study resumes from them. The table and the gap
ratios, which `gemline bench quality` prints, are saved to benchmarks/results/history.json.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import (
    BENCH_SIMULATOR,
    RESULTS,
    SIMULATOR_SPEC,
    BenchmarkResult,
    format_mean_std,
)
from benchmarks.pipelines import BENCH_DAYS, simulated_tables
from benchmarks.studies.committed import share_of
from dags.pipeline import latest_mature_split
from dags.steps import PipelinePaths
from etl.cli.runner import read_yaml_mapping
from etl.spec import load_spec
from etl.spec.base import StrictModel
from etl.spec.units import DaySplit, date_range, parse_date_range
from etl.tables import atomic_io

if TYPE_CHECKING:
    from etl.tables.lake import Lake
    from training.config import TrainConfig
    from training.evaluation.predictions import Predictions

LENGTHS = (0, 32, 256, 2048)


class HistoryArgs(StrictModel):
    """Arguments of the study."""

    work: Annotated[Path, tyro.conf.arg(help="folder for logs, tables and finished runs")]
    seeds: int = Field(default=3, ge=1)
    share: Annotated[str, tyro.conf.arg(help="only part k of n of the runs, not saved: k/n")] = (
        "1/1"
    )
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_history(args: HistoryArgs) -> None:
    """NE by length of history on simulated logs, GEM and LightGBM (long; resumable)."""
    ne = ne_by_run(args.work, share_of(run_names(args.seeds), args.share))
    if args.share != "1/1":
        return
    result = result_table(ne, list(load_spec(SIMULATOR_SPEC).objectives))
    record_gap_ratios(result, ne)
    result.show(args.as_json)
    command = f"gemline bench history --work work/bench --seeds {args.seeds}"
    result.save_study(RESULTS / "history.json", command)


def run_names(seeds: int) -> Iterator[str]:
    """All runs of the study, the cheap ones first."""
    yield from ("bound", "observable", "lightgbm")
    for length in LENGTHS:
        for seed in range(seeds):
            yield f"gem-{length}-{seed}"


def ne_by_run(work: Path, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """NE by objective of each run; results of finished runs are read from files."""
    paths = simulated_tables(work, BENCH_SIMULATOR, BENCH_DAYS)
    split = latest_mature_split(load_spec(SIMULATOR_SPEC), *parse_date_range(BENCH_DAYS))
    return {name: ne_of_run(work, paths, split, name) for name in names}


def ne_of_run(work: Path, paths: PipelinePaths, split: DaySplit, name: str) -> dict[str, float]:
    """NE of a run by objective over all surfaces.

    Read from its file if the tables, the days and the configuration are the same.
    """
    from benchmarks.studies.trials import trial_path
    from etl.tables.lake import Lake
    from training.data.reader import INPUT_TABLES
    from training.evaluation.metrics import ne_by_objective

    spec = load_spec(SIMULATOR_SPEC)
    lake = Lake(paths.lake, spec)
    identity = f"{name} {configuration_of_run(name)}"
    path = trial_path(work / "history", lake, INPUT_TABLES, split, identity).with_suffix(".json")
    if path.is_file():
        finished: dict[str, float] = json.loads(path.read_text())
        return finished
    p = predictions_of_run(lake, paths.raw, split, name)
    ne = {
        objective: value
        for objective, value in ne_by_objective(p).items()
        if name != "observable" or objective == "click"
    }
    atomic_io.write_text(path, json.dumps(ne))
    return ne


def configuration_of_run(name: str) -> str:
    """The configuration of a run's model as JSON; of a bound that of the simulator."""
    from etl.simulator.config import SimulatorConfig
    from training.baseline import BaselineConfig

    if name in ("bound", "observable"):
        return SimulatorConfig(**read_yaml_mapping(BENCH_SIMULATOR)).model_dump_json()
    config = BaselineConfig() if name == "lightgbm" else gem_config(name)
    return config.model_dump_json()


def gem_config(name: str) -> "TrainConfig":
    """The configuration of a run named `gem-LENGTH-SEED`."""
    from training.config import TrainConfig

    _, length, seed = name.split("-")
    return TrainConfig(max_length=int(length), seed=int(seed))


def predictions_of_run(lake: "Lake", raw: str, split: DaySplit, name: str) -> "Predictions":
    """Predictions of one run on the test days."""
    from benchmarks.studies.observable_oracle import with_observable_probabilities
    from benchmarks.studies.trials import scratch_lake
    from etl.simulator.config import SimulatorConfig
    from training.baseline import BaselineConfig, train_baseline
    from training.distributed.process_group import process_group
    from training.trainer.trainer import predict_test, train_days

    if name == "bound":
        return with_true_probabilities(test_rows(lake, split), raw)
    if name == "observable":
        config = SimulatorConfig(**read_yaml_mapping(BENCH_SIMULATOR))
        return with_observable_probabilities(test_rows(lake, split), config)
    if name == "lightgbm":
        return train_baseline(lake, split, BaselineConfig())
    with scratch_lake(lake) as scratch, process_group():
        train_days(scratch, (split.train_first, split.train_last), gem_config(name))
        return predict_test(scratch, split)


def test_rows(lake: "Lake", split: DaySplit) -> "Predictions":
    """The rows of the test days with their labels, and placeholder probabilities."""
    import torch

    from training.data.batch import Shuffle
    from training.data.label_window import LabelWindow
    from training.data.reader import ExampleReader
    from training.evaluation.predictions import predict

    reader = ExampleReader.latest(lake, max_length=0)
    days = list(date_range(split.test_first, split.test_last))
    batches = reader.batches(days, LabelWindow.for_test(split, lake.spec), 2048, Shuffle(None))
    return predict(
        lambda batch: torch.zeros_like(batch.labels), batches, list(lake.spec.objectives)
    )


def with_true_probabilities(rows: "Predictions", raw: str) -> "Predictions":
    """The same rows with the simulator's true probabilities."""
    from ranking.report.data import true_probabilities

    truth = true_probabilities(rows, raw)
    assert truth is not None
    return truth


def result_table(ne: dict[str, dict[str, float]], objectives: list[str]) -> BenchmarkResult:
    """A row per model: NE by objective, with the standard deviation over seeds."""
    title = "Length of history, simulator's bench data: NE on the test day"
    result = BenchmarkResult(title, ("model", *objectives))
    runs_by_model = {
        "truth (bound)": ["bound"],
        "oracle of the observable history": ["observable"],
        "LightGBM": ["lightgbm"],
    }
    for length in LENGTHS:
        model = f"GEM, {length:,} events" if length else "GEM, no history"
        runs_by_model[model] = [name for name in ne if name.startswith(f"gem-{length}-")]
    for model, runs in runs_by_model.items():
        cells = []
        for objective in objectives:
            values = [ne[run][objective] for run in runs if objective in ne[run]]
            if not values:
                cells.append("")
                continue
            cells.append(format_mean_std(values))
            result.figures[f"{objective} {model}"] = [round(v, 6) for v in values]
        result.rows.append((model, *cells))
    return result


def record_gap_ratios(result: BenchmarkResult, ne: dict[str, dict[str, float]]) -> None:
    """The distance of click NE to the true probabilities over that of LightGBM, all surfaces.

    `sim_gap_ratio` is of GEM with the longest history, `sim_gap_no_history` of GEM without history,
    which reads the inputs of LightGBM and item ids, `sim_gap_ratio_observable` of the oracle that
    reads only the log.
    """
    bound, lightgbm = ne["bound"]["click"], ne["lightgbm"]["click"]
    runs_by_key = {
        "sim_gap_ratio": f"gem-{max(LENGTHS)}-",
        "sim_gap_ratio_observable": "observable",
        "sim_gap_no_history": "gem-0-",
    }
    for key, prefix in runs_by_key.items():
        model = mean(ne[run]["click"] for run in ne if run.startswith(prefix))
        result.record(key, (model - bound) / (lightgbm - bound), "")
