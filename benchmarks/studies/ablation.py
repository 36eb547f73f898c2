"""`gemline bench ablation`: what each part of GEM contributes, on simulated logs and KuaiRand.

Without `--work` the committed figures are printed. With it, a long study runs, whose finished
trainings are kept in that folder; its rows are added to those that are committed, so that a study
may be continued elsewhere. Every row changes one option of GEM at DEPTH layers, because many
options need several, and is compared with GEM at DEPTH layers; the row DEEP compares that with the
default. Models never learned or were selected on the test days. With `--validation`, trainings on
KuaiRand are compared on the days on which defaults are chosen, for each objective. Several
processes may share a study: each runs with `--share k/n`, then one of them without.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import tyro
from pydantic import Field

from benchmarks.harness import KUAIRAND_SPEC, RESULTS, BenchmarkResult
from benchmarks.studies.committed import StudyFolder, share_of, show_committed
from benchmarks.studies.model_changes import CHANGES, DATA_SETS, DataSet
from benchmarks.studies.quality import KUAIRAND_DATA, KuaiRandFolder
from dags.commands import Scale
from etl.errors import UserError
from etl.spec import load_spec
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
VALIDATION_RESULT = RESULTS / "ablation_validation.json"
MAX_DEGREES_OF_FREEDOM = 1e9  # infinity is no number of JSON
Differences = dict[DataSet, dict[str, "Estimate"]]


class AblationArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    kuairand: KuaiRandFolder = None
    data: Annotated[tuple[DataSet, ...], tyro.conf.arg(help="data sets of the study")] = DATA_SETS
    seeds: int = Field(default=5, ge=1)
    scale: Scale = "small"
    only: Annotated[
        tuple[str, ...],
        tyro.conf.arg(help="only these rows; others keep their figures"),
    ] = ()
    share: Annotated[
        str, tyro.conf.arg(help="run only part k of n of the trainings, and no comparison: k/n")
    ] = "1/1"
    validation: Annotated[
        bool, tyro.conf.arg(help="compare trainings on KuaiRand's validation days instead")
    ] = False
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
    unknown = sorted(set(args.only) - set(all_rows()))
    if unknown:
        raise UserError(f"--only names {', '.join(unknown)}; there are {', '.join(all_rows())}")
    names = [name for name in all_rows() if not args.only or name in args.only]
    from benchmarks.studies.ablation_trials import ablation_trials

    logs = args.kuairand or KUAIRAND_DATA
    if args.validation:
        compare_on_validation_days(args, args.work, logs, names)
        return
    differences = committed_differences(RESULT, title_of(args.scale, args.seeds))
    trials = {data: ablation_trials(data, args.work, logs) for data in args.data}
    models = [(data, name, seed) for seed in range(args.seeds)
              for name in (DEFAULT, *names) for data in args.data]  # fmt: skip
    for data, name, seed in share_of(models, args.share):
        predictions_of(trials[data], data, name, args.scale, seed)
    if args.share != "1/1":
        return
    for data in args.data:
        measured = ne_differences(trials[data], data, args.scale, args.seeds, names, [OBJECTIVE])
        differences[data] = differences[data] | measured[OBJECTIVE]
    result = ablation_table(differences, args.scale, args.seeds)
    result.show(args.as_json)
    command = f"gemline bench ablation --work FOLDER --seeds {args.seeds}"
    save_study(RESULT, result, differences, command)


def compare_on_validation_days(
    args: AblationArgs, work: Path, logs: Path, names: Sequence[str]
) -> None:
    """Print and save the differences of NE of all objectives on KuaiRand's validation days."""
    from benchmarks.studies.ablation_trials import VALIDATION_DAYS, ablation_trials

    trials = ablation_trials("kuairand", work, logs, VALIDATION_DAYS)
    objectives = tuple(load_spec(KUAIRAND_SPEC).objectives)
    by_objective = ne_differences(trials, "kuairand", args.scale, args.seeds, names, objectives)
    first, last = VALIDATION_DAYS
    title = (
        f"NE less that of GEM {args.scale} of {DEEP} ({DEEP}: less that of the default), KuaiRand, "
        f"{first} to {last}, seeds: {args.seeds}, 1e-4 [95 %]"
    )
    result = BenchmarkResult(title, ("change", *objectives))
    for name in names:
        if name in by_objective[OBJECTIVE]:
            result.rows.append((name, *(str(by_objective[o][name]) for o in objectives)))
    result.show(args.as_json)
    intervals = {
        f"{name}, {objective}": estimate
        for objective, by_name in by_objective.items()
        for name, estimate in by_name.items()
    }
    command = f"gemline bench ablation --work FOLDER --validation --seeds {args.seeds}"
    result.save_study(VALIDATION_RESULT, command, intervals)


def title_of(scale: Scale, seeds: int) -> str:
    """The title of a study."""
    return (
        f"NE of {OBJECTIVE} less that of GEM {scale} of {DEEP} ({DEEP}: less that of the default), "
        f"seeds: {seeds}, 1e-4 [95 %]"
    )


def committed_differences(path: Path, title: str) -> Differences:
    """The rows of the committed study, to which a run adds; none if there is no study.

    Raises UserError if it is of another scale or number of seeds.
    """
    from benchmarks.studies.seeded_estimates import Estimate
    from ranking.report.study import StudyResult

    differences: Differences = {data: {} for data in DATA_SETS}
    if not path.is_file():
        return differences
    study = StudyResult.model_validate_json(path.read_text())
    if study.title != title:
        raise UserError(f"{path} is another study, {study.title!r}: remove it to begin this one")
    for key, estimate in study.estimates.items():
        name, _, data = key.rpartition(", ")
        if name in all_rows() and data in DATA_SETS:
            differences[data][name] = Estimate(*estimate)
    return differences


def save_study(path: Path, result: BenchmarkResult, differences: Differences, command: str) -> None:
    """Save the table, and the estimates behind it."""
    by_row = {
        f"{name}, {data}": estimate
        for data, by_name in differences.items()
        for name, estimate in by_name.items()
    }
    estimates = {
        key: (e.value, e.standard_error, min(e.degrees_of_freedom, MAX_DEGREES_OF_FREEDOM))
        for key, e in by_row.items()
    }
    result.save_study(path, command, by_row, estimates)


def all_rows() -> tuple[str, ...]:
    """The names of all rows, in the order of the table."""
    return (DEEP, *CHANGES, *CONTROLS)


def has_row(data: DataSet, name: str) -> bool:
    """Whether a data set has a row; KuaiRand's surfaces have too few rows for a model each."""
    if name in CHANGES:
        return data in CHANGES[name]
    return name != SEPARATE or data == "simulated"


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
    trials: AblationTrials,
    data: DataSet,
    scale: Scale,
    seeds: int,
    names: Sequence[str],
    objectives: Sequence[str],
) -> dict[str, dict[str, "Estimate"]]:
    """For each objective the rows of a data set with their difference of NE from the reference."""
    from benchmarks.studies.seeded_estimates import ne_difference_over_seeds

    def all_seeds(name: str) -> "list[Predictions]":
        by_seed = [predictions_of(trials, data, name, scale, seed) for seed in range(seeds)]
        return [predictions for predictions in by_seed if predictions is not None]

    references = {name: all_seeds(name) for name in (DEFAULT, DEEP)}
    differences: dict[str, dict[str, Estimate]] = {objective: {} for objective in objectives}
    for name in names:
        changed = all_seeds(name)
        reference = references[DEFAULT if name == DEEP else DEEP]
        for objective in objectives if changed else ():
            difference = ne_difference_over_seeds(changed, reference, objective)
            differences[objective][name] = difference
    return differences


def ablation_table(
    differences: Mapping[DataSet, Mapping[str, "Estimate"]], scale: Scale, seeds: int
) -> BenchmarkResult:
    """A row per change with its difference on each data set, and whether the default is best.

    Rows are compared with the reference of DEPTH layers; `default_is_best` and the rows that are
    `better` are judged by their differences from the default.
    """
    expected = [(data, name) for data in differences for name in all_rows() if has_row(data, name)]
    verdicts = verdicts_of(differences, len(expected))
    from_default = {data: differences_from_default(rows) for data, rows in differences.items()}
    result = BenchmarkResult(
        title_of(scale, seeds),
        ("change", *(cell for data in differences for cell in (data, f"{data}, corrected"))),
    )
    names = [name for name in all_rows() if any(name in rows for rows in differences.values())]
    for name in names:
        cells = []
        for data, by_name in differences.items():
            cells += [str(by_name.get(name, "")), verdicts[data].get(name, "")]
        result.rows.append((name, *cells))
    better = {
        data: [name for name, verdict in by_name.items() if verdict == "better"]
        for data, by_name in verdicts_of(from_default, len(expected)).items()
    }
    missing = [f"{name}, {data}" for data, name in expected if name not in differences[data]]
    if missing and not any(better.values()):
        result.record("default_is_best", None, f"{len(missing)} rows are not measured yet")
    else:
        result.figures["default_is_best"] = not any(better.values())
    result.figures |= {
        "rows_not_measured": missing,
        "comparisons": sum(map(len, differences.values())),
        **{f"better_{data}": rows for data, rows in better.items()},
        "better_on_all_data": [n for n in names if all(n in rows for rows in better.values())],
    }
    return result


def differences_from_default(by_name: Mapping[str, "Estimate"]) -> dict[str, "Estimate"]:
    """Differences of NE of a data set's rows from the default instead of the reference.

    The difference of the reference from the default is added as if it were independent. That is
    wider than pairs would be, because both differences contain the reference, with opposite signs;
    stored estimates do not allow pairs. Empty as long as the row DEEP is not measured.
    """
    from benchmarks.studies.seeded_estimates import Estimate

    if DEEP not in by_name:
        return {}
    deep = by_name[DEEP]
    return {
        name: e
        if name == DEEP
        else Estimate.combine(e.value + deep.value, e.variance, deep.variance)
        for name, e in by_name.items()
    }


def verdicts_of(
    differences: Mapping[DataSet, Mapping[str, "Estimate"]], comparisons: int
) -> dict[DataSet, dict[str, str]]:
    """Whether each row is better or worse outside noise, corrected for a number of comparisons.

    These are all rows and data sets, measured or not, so that later rows change no verdict.
    """
    from benchmarks.studies.seeded_estimates import LEVEL, holm

    flat = [(data, name) for data, by_name in differences.items() for name in by_name]
    p_values = [differences[data][name].p_value for data, name in flat]
    unmeasured = [1.0] * (comparisons - len(flat))
    corrected = holm([*p_values, *unmeasured])[: len(flat)]
    verdicts: dict[DataSet, dict[str, str]] = {data: {} for data in differences}
    for (data, name), p_value in zip(flat, corrected, strict=True):
        direction = "worse" if differences[data][name].value > 0 else "better"
        verdicts[data][name] = direction if p_value < LEVEL else "within noise"
    return verdicts
