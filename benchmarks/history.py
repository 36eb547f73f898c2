"""`gemline bench history`: does a longer history help? A long study on the simulator's bench data.

GEM with no history and with 32, 256 and 2,048 events, three seeds each, beside LightGBM on the
same features and counters. Hours on two cores: every finished run is kept in `--work`, and the
study goes on from there. The table goes to benchmarks/results/history.json.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.result import Result, told
from dags.line import Days, Place, data_steps, newest_mature
from dags.local import run_line
from etl.spec import load_spec
from etl.spec.base import Strict
from etl.spec.units import each_day, parse_days
from training.study import Study

if TYPE_CHECKING:
    from etl.tables.lake import Lake
    from training.predictions import Predictions
    from training.split import Split

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "conf" / "specs" / "simulator.yaml"
SIMULATOR = ROOT / "conf" / "simulator" / "bench.yaml"
DAYS = "2026-01-01:2026-01-14"
LENGTHS = (0, 32, 256, 2048)
RESULTS = ROOT / "benchmarks" / "results" / "history.json"


class HistoryArgs(Strict):
    """Arguments of the study."""

    work: Annotated[Path, tyro.conf.arg(help="folder for logs, tables and finished runs")]
    seeds: int = Field(default=3, ge=1)
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: HistoryArgs) -> None:
    """NE by length of history on simulated logs, GEM and LightGBM (long; resumable)."""
    result = table(runs(args, names(args)), list(load_spec(SPEC).objectives))
    result.show(args.as_json)
    Study(
        title="Length of history, simulator's bench data: NE on the test day",
        command=f"gemline bench history --work work/bench --seeds {args.seeds}",
        columns=tuple(result.columns),
        rows=tuple(result.rows),
    ).keep(RESULTS)


def runs(args: HistoryArgs, wanted: Iterable[str]) -> dict[str, dict[str, float]]:
    """NE by objective of some runs; finished ones are read."""
    work = args.work.resolve()  # steps are finished for the paths that they were given
    place = Place(SPEC, str(work / "raw"), str(work / "lake"))
    days = newest_mature(load_spec(SPEC), *parse_days(DAYS))
    prepare(args, place, days)
    return {name: measured(args, place, days, name) for name in wanted}


def names(args: HistoryArgs) -> Iterator[str]:
    """Every run of the study, the cheap ones first."""
    yield from ("bound", "lightgbm")
    for length in LENGTHS:
        for seed in range(args.seeds):
            yield f"gem-{length}-{seed}"


def prepare(args: HistoryArgs, place: Place, days: Days) -> None:
    """Simulated logs and their tables, once."""
    from etl.commands import SimulateArgs, simulate

    simulate(SimulateArgs(simulator=SIMULATOR, out=Path(place.raw)))
    run_line(load_spec(SPEC), place, data_steps(place, days.landed))


def measured(args: HistoryArgs, place: Place, days: Days, name: str) -> dict[str, float]:
    """NE of a run by objective, on all surfaces; from its file if it was taken on these tables."""
    from etl.tables.lake import Lake
    from training.data.reader import TABLES
    from training.loop.metrics import score

    spec = load_spec(SPEC)
    lake = Lake(place.lake, spec)
    versions = "-".join(f"{table}{lake.version(table)}" for table in TABLES)
    path = args.work / "history" / versions / f"{name}.json"
    if path.is_file():
        found: dict[str, float] = json.loads(path.read_text())
        return found
    p = predicted(lake, place.raw, days, name)
    scores = score(p.probability, p.labels, p.known, p.surface, (), list(spec.objectives))
    found = {s.objective: s.ne for s in scores}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    return found


def predicted(lake: "Lake", raw: str, days: Days, name: str) -> "Predictions":
    """Test predictions of one run."""
    from training.baseline import BaselineConfig, train_baseline
    from training.config import TrainConfig
    from training.evaluate import predict_test
    from training.gem import train
    from training.loop import checkpoint
    from training.parallel.processes import process_group

    split = split_of(days)
    if name == "bound":
        return true_of(tested(lake, split), raw)
    if name == "lightgbm":
        return train_baseline(lake, split, BaselineConfig())
    _, length, seed = name.split("-")
    config = TrainConfig(max_length=int(length), seed=int(seed))
    with process_group():
        checkpoint.forget(lake.root)
        train(lake, (days.first, days.train_last), config)
        return predict_test(lake, split)


def split_of(days: Days) -> "Split":
    """The days of a line as models are given them."""
    from training.split import Split

    return Split(
        train_first=days.first,
        train_last=days.train_last,
        calibration=days.calibration,
        test_first=days.test_first,
        test_last=days.test_last,
        landed=days.last,
    )


def tested(lake: "Lake", split: "Split") -> "Predictions":
    """The rows of the test days, with their labels; nothing is predicted of them."""
    import torch

    from training.data.parts import Shuffle
    from training.data.reader import Reader
    from training.predictions import predict

    reader = Reader.newest(lake, max_length=0)
    days = list(each_day(split.test_first, split.test_last))
    batches = reader.batches(days, split.testing(lake.spec), 2048, Shuffle(None))
    return predict(lambda b: torch.zeros_like(b.labels), batches, list(lake.spec.objectives))


def true_of(rows: "Predictions", raw: str) -> "Predictions":
    """The same rows with the probabilities that the simulator drew from."""
    from ranking.report.facts import true_probabilities

    truth = true_probabilities(rows, raw)
    assert truth is not None
    return truth


def table(runs: dict[str, dict[str, float]], objectives: list[str]) -> Result:
    """A row a model: NE by objective, with the deviation over seeds."""
    result = Result("NE on the test day", ("model", *objectives))
    groups = {"truth (bound)": ["bound"], "LightGBM": ["lightgbm"]}
    for length in LENGTHS:
        label = f"GEM, {length:,} events" if length else "GEM, no history"
        groups[label] = [name for name in runs if name.startswith(f"gem-{length}-")]
    for label, members in groups.items():
        cells = []
        for objective in objectives:
            values = [runs[name][objective] for name in members]
            cells.append(told(values))
            result.figures[f"{objective} {label}"] = [round(v, 6) for v in values]
        result.rows.append((label, *cells))
    return result
