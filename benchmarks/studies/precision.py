"""`gemline bench precision`: FP8 by the map of a probe, FP8 everywhere, and fp32, on the demo.

Without `--work` the committed figures are printed; `--only speed` needs no folder and is measured.
On a CPU products are emulated: errors, maps and training curves are those of FP8, speeds are not.
"""

import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from pydantic import Field

from benchmarks.harness import (
    DEMO_SIMULATOR,
    RESULTS,
    SIMULATOR_SPEC,
    BenchmarkResult,
    require_known,
)
from benchmarks.studies.committed import StudyFolder, show_committed, with_unmeasured
from etl.spec.base import StrictModel
from etl.spec.units import DaySplit

if TYPE_CHECKING:
    from torch import nn

    from etl.tables.lake import Lake
    from training.config import TrainConfig
    from training.model.config import Scale
    from training.precision.dispatch import Speedups
    from training.precision.errors import RecipeError
    from training.precision.precision_map import PrecisionMap

OBJECTIVE = "click"
DEMO_DAYS = "2026-01-01:2026-01-11"
SPLIT = DaySplit(
    train_first=date(2026, 1, 1),
    train_last=date(2026, 1, 4),
    calibration=None,
    test_first=date(2026, 1, 5),
    test_last=date(2026, 1, 7),
    data_until=date(2026, 1, 11),
)
PARTS = ("training", "mods", "speed")
PROBE_EVERY = 20
COST_PROBE_EVERY = 100  # of which the overhead is reported
NAIVE: Literal["fp8_tensor"] = "fp8_tensor"
GPU_ROWS = 8192
NO_GPU = "no GPU is available"
GOALS = {
    "probe_overhead": "<= 0.01",
    "ne_fp8_within_noise": "true",
    "ne_naive_fp8_loss": "",
    "random_probe_error": "",
    "sites_fp8_share": "",
    "speedup": "",
}

RESULT = RESULTS / "precision.json"


class PrecisionArgs(StrictModel):
    """Arguments of the benchmark."""

    work: StudyFolder = None
    seeds: int = Field(default=3, ge=2)
    only: Annotated[
        tuple[str, ...], tyro.conf.arg(help="training, mods, speed; by default training and speed")
    ] = ("training", "speed")
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_precision(args: PrecisionArgs) -> None:
    """NE of FP8 by a map and everywhere, cost of probes, and speed-up on a GPU."""
    require_known(args.only, PARTS)
    if args.work is None and args.only != ("speed",):
        show_committed("Precision of matrix products", GOALS, RESULT, args.as_json)
        return
    result = BenchmarkResult("Precision of matrix products", ("figure", "value", "", "goal"))
    if args.work and "training" in args.only:
        measure_training(result, args.work, args.seeds)
    if args.work and "mods" in args.only:
        measure_mods(result, args.work, args.seeds)
    if "speed" in args.only:
        measure_speed(result)
    measured = list(result.rows)
    result.rows += goal_rows(result.figures)
    result.show(args.as_json)
    if args.work and args.only != ("speed",):
        result.figures = with_unmeasured(result.figures, RESULT)
        result.rows = measured + goal_rows(result.figures)
        parts = " ".join(args.only)
        command = f"gemline bench precision --only {parts} --work FOLDER --seeds {args.seeds}"
        result.save_study(RESULT, command)


def goal_rows(figures: Mapping[str, object]) -> list[tuple[str, ...]]:
    """A row for each figure that has a goal."""
    return [
        (key, str(figures[key]), str(figures.get(f"{key}_reason", "")), goal)
        for key, goal in GOALS.items()
        if key in figures
    ]


def measure_training(result: BenchmarkResult, work: Path, seeds: int) -> None:
    """Train the demo's first days in fp32, by the map of a probe, and with FP8 everywhere."""
    from training.precision.dispatch import choose_recipes, precision_map
    from training.precision.precision_map import PrecisionMap

    lake = _demo_lake(work)
    errors = _probe(result, lake)
    chosen = precision_map(choose_recipes(errors))
    maps = {"fp32": None, "map": chosen, "naive": PrecisionMap.uniform(chosen.sites, NAIVE)}
    ne: dict[str, list[float]] = {name: [] for name in maps}
    for seed in range(seeds):
        for name, recipes in maps.items():
            ne[name].append(ne_of_training(lake, seed, recipes))
    noise = (stdev(ne["fp32"]) ** 2 / seeds + stdev(ne["map"]) ** 2 / seeds) ** 0.5
    differences = {name: mean(ne[name]) - mean(ne["fp32"]) for name in ("map", "naive")}
    result.figures["ne_fp8_within_noise"] = abs(differences["map"]) <= 2 * noise
    result.record("ne_fp32", mean(ne["fp32"]), "")
    result.record("ne_fp8_loss", differences["map"], "")
    result.record("ne_naive_fp8_loss", differences["naive"], "")
    result.record("ne_noise", noise, "")
    result.record("sites_fp8_share", chosen.fp8_share, "")


MODS: dict[str, dict[str, object]] = {
    "no_biases": {"linear_biases": False},
    "block_norm": {"trunk_norm": "block"},
    "swish_rms_norm": {"trunk_norm": "swish_rms"},
    "hard_gates": {"hard_gates": True},
}


def measure_mods(result: BenchmarkResult, work: Path, seeds: int) -> None:
    """NE of each change of the model for low precision less the default's, in fp32 and in FP8."""
    from training.precision.precision_map import PrecisionMap

    lake = _demo_lake(work)
    naive = PrecisionMap.uniform(_linear_layers("small"), NAIVE)
    for precision, recipes in (("fp32", None), ("fp8", naive)):
        default = [ne_of_training(lake, seed, recipes) for seed in range(seeds)]
        for name, options in MODS.items():
            changed = [ne_of_training(lake, seed, recipes, options) for seed in range(seeds)]
            result.record(f"ne_{name}_{precision}", mean(changed) - mean(default), "")
        result.record(f"ne_noise_{precision}", stdev(default) * (2 / seeds) ** 0.5, "")
    result.rows += [(key, str(value), "", "") for key, value in result.figures.items()]


def _demo_lake(work: Path) -> "Lake":
    """The demo's tables, built in `work` if they are missing."""
    from benchmarks.pipelines import simulated_tables
    from etl.spec import load_spec
    from etl.tables.lake import Lake

    paths = simulated_tables(work, DEMO_SIMULATOR, DEMO_DAYS)
    return Lake(paths.lake, load_spec(SIMULATOR_SPEC))


def _linear_layers(scale: "Scale") -> "dict[str, nn.Linear]":
    """The linear layers of a scale that may have low precision, by name."""
    from etl.spec import load_spec
    from features.schema import feature_schema
    from training.model.config import SCALES
    from training.model.gem import Gem
    from training.precision.linear import linear_sites

    return dict(linear_sites(Gem(feature_schema(load_spec(SIMULATOR_SPEC)), SCALES[scale])))


def _probe(result: BenchmarkResult, lake: "Lake") -> "list[RecipeError]":
    """The errors of recipes by the probe of a training, and its cost and use."""
    from benchmarks.studies.trials import scratch_lake
    from training.distributed.process_group import process_group
    from training.precision.errors import measure_errors
    from training.trainer.probing import load_probe
    from training.trainer.trainer import train_days

    first_day = (SPLIT.train_first, SPLIT.train_first)
    with scratch_lake(lake) as scratch, process_group():
        train_days(scratch, first_day, _config(seed=0, probe_every=PROBE_EVERY))
        errors = list(measure_errors(load_probe(scratch, SPLIT.train_first)))
    fp8 = [error for error in errors if error.recipe.startswith("fp8")]
    misjudged = mean(abs(error.random_mere / error.mere - 1) for error in fp8)
    result.record("random_probe_error", misjudged, "")
    result.record("probe_overhead", _probe_overhead(lake), "")
    return errors


def _config(seed: int, **compute: object) -> "TrainConfig":
    from training.config import TrainConfig

    return TrainConfig.model_validate({"seed": seed, "compute": compute})


def _probe_overhead(lake: "Lake") -> float:
    """CPU time of a probe every COST_PROBE_EVERY steps over that of the steps."""
    from benchmarks.studies.trials import scratch_lake
    from training.distributed.process_group import process_group
    from training.trainer.trainer import train_days

    seconds: dict[int, float] = {}
    for every in (0, 1, 0, 1):
        with scratch_lake(lake) as scratch, process_group():
            start = time.process_time()
            train_days(
                scratch, (SPLIT.train_first, SPLIT.train_first), _config(0, probe_every=every)
            )
            elapsed = time.process_time() - start
        seconds[every] = min(seconds.get(every, elapsed), elapsed)
    return max(0.0, seconds[1] - seconds[0]) / seconds[0] / COST_PROBE_EVERY


def ne_of_training(
    lake: "Lake",
    seed: int,
    recipes: "PrecisionMap | None",
    options: Mapping[str, object] = {},
) -> float:
    """NE of clicks on the test days, of a GEM with the recipes of a map; None for fp32."""
    from benchmarks.studies.trials import scratch_lake
    from training.config import TrainConfig
    from training.distributed.process_group import process_group
    from training.evaluation.metrics import ne_by_objective
    from training.trainer.trainer import predict_test, train_days

    with scratch_lake(lake) as scratch, process_group():
        if recipes:
            recipes.save(scratch.root)
        config = _config(seed, precision="fp8" if recipes else "fp32")
        config = TrainConfig.model_validate(config.model_dump() | {"model": options})
        train_days(scratch, (SPLIT.train_first, SPLIT.train_last), config)
        return float(ne_by_objective(predict_test(scratch, SPLIT))[OBJECTIVE])


def measure_speed(result: BenchmarkResult) -> None:
    """Seconds of a dense step in bf16 over those with the map of the fastest recipes, on a GPU.

    Also the share of the products that are faster in FP8, casts included, and the largest speed-up.
    """
    import torch

    if not torch.cuda.is_available():
        result.record("speedup", None, NO_GPU)
        return
    from benchmarks.system.gpu import SHAPES
    from training.precision.dispatch import MIN_SPEEDUP

    for scale in SHAPES:
        speedups = _product_speedups(scale)
        best: dict[tuple[str, str], float] = {}
        for (name, direction, _), value in speedups.items():
            best[name, direction] = max(best.get((name, direction), 0.0), value)
        is_fast = [value >= MIN_SPEEDUP for value in best.values()]
        suffix = "" if scale == "large" else f"_{scale}"
        result.record(f"largest_product_speedup{suffix}", max(best.values()), "")
        result.record(f"sites_fp8_share_by_speed{suffix}", mean(is_fast), "")
        for name, ratio in _step_speedups(scale, speedups).items():
            result.record(f"{name}{suffix}", ratio, "")
    result.figures["device"] = torch.cuda.get_device_name()


def _product_speedups(scale: "Scale") -> "Speedups":
    """Speed-ups of the products of a scale over bf16, by layer, direction and recipe."""
    import torch

    from training.precision.dispatch import measure_speedups

    layers, device = _linear_layers(scale), torch.device("cuda")
    rows = dict.fromkeys(layers, GPU_ROWS)
    return measure_speedups(layers, rows, ("fp8_tensor", "fp8_row"), device)


def _step_speedups(scale: "Scale", speedups: "Speedups") -> dict[str, float]:
    """Seconds of a step in bf16 over those in FP8, with layers as they are and compiled ones."""
    import torch

    from benchmarks.system.gpu import SHAPES, make_dense_step, seconds_of
    from training.config import ComputeConfig
    from training.precision.dispatch import choose_recipes, precision_map
    from training.precision.errors import RecipeError
    from training.precision.precision_map import PrecisionMap

    names = dict.fromkeys((name, direction) for name, direction, _ in speedups)
    exact = [
        RecipeError(name, direction, recipe, 0.0, 0.0, 1.0, 0.0)
        for name, direction in names
        for recipe in ("bf16", "fp8_tensor", "fp8_row")
    ]
    fastest = precision_map(choose_recipes(exact, speedups))
    naive = PrecisionMap.uniform(fastest.sites, NAIVE)
    device = torch.device("cuda")

    def seconds(recipes: PrecisionMap | None, compiled: bool = False) -> float:
        torch.compiler.reset()
        compute = ComputeConfig(precision="fp8" if recipes else "bf16", compiled=compiled)
        step = make_dense_step(scale, SHAPES[scale], device, compute, recipes)
        return seconds_of(step, device)

    bf16 = seconds(None)
    return {
        "speedup": bf16 / seconds(fastest),
        "naive_speedup": bf16 / seconds(naive),
        "compiled_speedup": seconds(None, compiled=True) / seconds(fastest, compiled=True),
    }
