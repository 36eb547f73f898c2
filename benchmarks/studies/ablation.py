"""`gemline bench ablation`: what each part of GEM contributes, on simulated logs and KuaiRand.

Without `--work` the committed figures are printed. With it, a long study runs, whose finished
trainings are kept in that folder. Every row changes one option of GEM at DEPTH layers, because many
options need several, and is compared with GEM at DEPTH layers; the row DEEP compares that with the
default. Models never learned or were selected on the test days. Several processes may share a
study: each runs with `--share k/n`, then one of them without.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Protocol

import tyro
from pydantic import Field

from benchmarks.harness import RESULTS, BenchmarkResult
from benchmarks.studies.committed import StudyFolder, share_of, show_committed
from benchmarks.studies.model_changes import CHANGES, DATA_SETS, DataSet
from benchmarks.studies.quality import KUAIRAND_DATA, KuaiRandFolder
from dags.commands import Scale
from etl.errors import UserError
from etl.spec.base import StrictModel
from training.config import TrainConfig
from training.model.config import SizeName

if TYPE_CHECKING:
    from benchmarks.studies.seeded_estimates import Estimate
    from training.evaluation.predictions import Predictions

OBJECTIVE = "click"
DEPTH = 3
DEEP = f"{DEPTH} layers"
DEEP_SIZES: dict[SizeName, int] = {"layers": DEPTH, "event_layers": DEPTH}
DEFAULT = "default"
SEPARATE = "a model for each surface"
LIGHTGBM = "LightGBM"
CONTROLS = (SEPARATE, LIGHTGBM)
GOALS = {"default_is_best": "true"}
RESULT = RESULTS / "ablation.json"


class AblationArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    kuairand: KuaiRandFolder = None
    data: Annotated[tuple[DataSet, ...], tyro.conf.arg(help="data sets of the study")] = DATA_SETS
    seeds: int = Field(default=5, ge=1)
    scale: Scale = "small"
    only: Annotated[
        tuple[str, ...], tyro.conf.arg(help="only these rows; the study is then not saved")
    ] = ()
    share: Annotated[
        str, tyro.conf.arg(help="run only part k of n of the trainings, and no comparison: k/n")
    ] = "1/1"
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


class AblationTrials(Protocol):
    """Trainings on a data set, kept once they are finished."""

    def gem(self, config: TrainConfig) -> "Predictions":
        """Predictions of a GEM on the test days, sorted by impression."""

    def lightgbm(self) -> "Predictions":
        """Predictions of LightGBM on the same rows."""

    def gem_per_surface(self, config: TrainConfig) -> "Predictions | None":
        """Predictions of a GEM for each surface; None where surfaces have too few rows."""


def bench_ablation(args: AblationArgs) -> None:
    """Difference of NE by each part of GEM, on simulated logs and KuaiRand (long; resumable)."""
    if args.work is None:
        show_committed("Ablation", GOALS, RESULT, args.as_json)
        return
    rows = (DEEP, *CHANGES, *CONTROLS)
    unknown = sorted(set(args.only) - set(rows))
    if unknown:
        raise UserError(f"--only names {', '.join(unknown)}; there are {', '.join(rows)}")
    names = [name for name in rows if not args.only or name in args.only]
    from benchmarks.studies.ablation_trials import ablation_trials

    logs = args.kuairand or KUAIRAND_DATA
    trials = {data: ablation_trials(data, args.work, logs) for data in args.data}
    models = [(data, name, seed) for seed in range(args.seeds)
              for name in (DEFAULT, *names) for data in args.data]  # fmt: skip
    for data, name, seed in share_of(models, args.share):
        predictions_of(trials[data], data, name, args.scale, seed)
    if args.share != "1/1":
        return
    differences = {
        data: ne_differences(trials[data], data, args.scale, args.seeds, names)
        for data in args.data
    }
    result = ablation_table(differences, args.scale, args.seeds)
    result.show(args.as_json)
    if not args.only and set(args.data) == set(DATA_SETS):
        from training.evaluation.predictions import ConfidenceInterval

        command = f"gemline bench ablation --work work/ablation --seeds {args.seeds}"
        intervals = {
            f"{name}, {data}": ConfidenceInterval(estimate.value, estimate.low, estimate.high)
            for data, by_name in differences.items()
            for name, estimate in by_name.items()
        }
        result.save_study(RESULT, command, intervals)


def config_of(data: DataSet, name: str, scale: Scale, seed: int) -> TrainConfig | None:
    """The configuration of a row; None where the data set does not have it."""
    config = TrainConfig(scale=scale, seed=seed, sizes={} if name == DEFAULT else DEEP_SIZES)
    if name not in CHANGES:
        return config
    options = CHANGES[name].get(data)
    return None if options is None else TrainConfig.model_validate(config.model_dump() | options)


def predictions_of(
    trials: AblationTrials, data: DataSet, name: str, scale: Scale, seed: int
) -> "Predictions | None":
    """Predictions of a row with a seed; None where the data set does not have it."""
    config = config_of(data, name, scale, seed)
    if name == LIGHTGBM:
        return trials.lightgbm() if seed == 0 else None
    if config is None:
        return None
    return trials.gem_per_surface(config) if name == SEPARATE else trials.gem(config)


def ne_differences(
    trials: AblationTrials, data: DataSet, scale: Scale, seeds: int, names: Sequence[str]
) -> dict[str, "Estimate"]:
    """Each row of a data set, and its difference of NE from its reference."""
    from benchmarks.studies.seeded_estimates import ne_difference_over_seeds

    def all_seeds(name: str) -> "list[Predictions]":
        by_seed = [predictions_of(trials, data, name, scale, seed) for seed in range(seeds)]
        return [predictions for predictions in by_seed if predictions is not None]

    references = {name: all_seeds(name) for name in (DEFAULT, DEEP)}
    differences = {}
    for name in names:
        changed = all_seeds(name)
        if changed:
            reference = references[DEFAULT if name == DEEP else DEEP]
            differences[name] = ne_difference_over_seeds(changed, reference, OBJECTIVE)
    return differences


def ablation_table(
    differences: Mapping[DataSet, Mapping[str, "Estimate"]], scale: Scale, seeds: int
) -> BenchmarkResult:
    """A row per change with its difference on each data set, and whether the default is best."""
    verdicts = verdicts_of(differences)
    result = BenchmarkResult(
        f"NE of {OBJECTIVE} less that of GEM {scale} of {DEEP} ({DEEP}: less that of the default), "
        f"{seeds} seeds, 1e-4 [95 %]",
        ("change", *(cell for data in differences for cell in (data, f"{data}, corrected"))),
    )
    names = list(dict.fromkeys(name for by_name in differences.values() for name in by_name))
    for name in names:
        cells = []
        for data, by_name in differences.items():
            cells += [str(by_name.get(name, "")), verdicts[data].get(name, "")]
        result.rows.append((name, *cells))
    better = {
        data: [name for name, verdict in by_name.items() if verdict == "better"]
        for data, by_name in verdicts.items()
    }
    result.figures |= {
        "default_is_best": not any(better.values()),
        "comparisons": sum(map(len, differences.values())),
        **{f"better_{data}": rows for data, rows in better.items()},
        "better_on_all_data": [n for n in names if all(n in rows for rows in better.values())],
    }
    return result


def verdicts_of(
    differences: Mapping[DataSet, Mapping[str, "Estimate"]],
) -> dict[DataSet, dict[str, str]]:
    """Whether each row is better or worse outside noise, corrected for all rows and data sets."""
    from benchmarks.studies.seeded_estimates import LEVEL, holm

    flat = [(data, name) for data, by_name in differences.items() for name in by_name]
    corrected = holm([differences[data][name].p_value for data, name in flat])
    verdicts: dict[DataSet, dict[str, str]] = {data: {} for data in differences}
    for (data, name), p_value in zip(flat, corrected, strict=True):
        direction = "worse" if differences[data][name].value > 0 else "better"
        verdicts[data][name] = direction if p_value < LEVEL else "within noise"
    return verdicts
