"""`gemline bench ablation`: what each part of GEM contributes, on simulated logs and KuaiRand.

Without `--work` the committed figures are printed. With it, a long study runs, whose finished
trainings are kept in that folder; its rows are added to those that are committed, so that a study
may be continued elsewhere. Every row changes one option of GEM at DEPTH layers, because many
options need several, and is compared with GEM at DEPTH layers; the row DEEP compares that with the
default. Models never learned or were selected on the test days. With `--validation`, trainings on
KuaiRand are compared on the days on which defaults are chosen, for each objective. Several
processes may share a study: each runs with `--share k/n`, then one of them without.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
    from benchmarks.studies.seeded_estimates import SeededEstimate
    from ranking.report.study import StudyResult
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
MAX_DEGREES_OF_FREEDOM = 1e9  # infinity is no number of JSON
FROM_DEFAULT = "less the default: "  # before the keys of paired estimates
Differences = dict[DataSet, dict[str, "SeededEstimate"]]


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

    def trained_at(self) -> set[str]:
        """Dates and commits of the trainings whose predictions were read, where recorded."""


def bench_ablation(args: AblationArgs) -> None:
    """Difference of NE by each part of GEM, on simulated logs and KuaiRand (long; resumable)."""
    if args.work is None:
        show_committed("Ablation", GOALS, RESULT, args.as_json)
        return
    unknown = sorted(set(args.only) - set(all_rows()))
    if unknown:
        raise UserError(f"--only names {', '.join(unknown)}; there are {', '.join(all_rows())}")
    names = [name for name in all_rows() if not args.only or name in args.only]
    if args.validation and "kuairand" not in args.data:
        raise UserError("--validation compares trainings on KuaiRand: leave out --data simulated")
    from benchmarks.studies import ablation_validation as validation
    from benchmarks.studies.ablation_trials import (
        TEST_DAYS_OF_KUAIRAND,
        VALIDATION_DAYS,
        ablation_trials,
    )

    if args.validation:
        data_sets: tuple[DataSet, ...] = ("kuairand",)
        days = VALIDATION_DAYS
        committed = committed_study(validation.RESULT, validation.validation_title(args))
    else:
        data_sets, days = args.data, TEST_DAYS_OF_KUAIRAND
        committed = committed_study(RESULT, title_of(args.scale, args.seeds))
    logs = args.kuairand or KUAIRAND_DATA
    trials = {data: ablation_trials(data, args.work, logs, days) for data in data_sets}
    models = [(data, name, seed) for seed in range(args.seeds)
              for name in (DEFAULT, *names) for data in data_sets]  # fmt: skip
    for data, name, seed in share_of(models, args.share):
        predictions_of(trials[data], data, name, args.scale, seed)
    if args.share != "1/1":
        return
    if args.validation:
        validation.compare_on_validation_days(args, trials["kuairand"], names, committed)
    else:
        compare_on_test_days(args, trials, names, committed)


def compare_on_test_days(
    args: AblationArgs,
    trials: "Mapping[DataSet, AblationTrials]",
    names: Sequence[str],
    committed: "StudyResult | None",
) -> None:
    """Print the differences of click NE, and save them with the committed rows."""
    from benchmarks.studies.ablation_table import ablation_table

    differences = committed_differences(committed)
    from_default = committed_differences(committed, FROM_DEFAULT)
    trained_at = trained_at_of(committed)
    for data, of_data in trials.items():
        for rows, reference in ((differences, DEEP), (from_default, DEFAULT)):
            rows[data] |= ne_differences(
                of_data, data, args.scale, args.seeds, names, [OBJECTIVE], reference
            )[OBJECTIVE]
        trained_at |= of_data.trained_at()
    result = ablation_table(differences, from_default, title_of(args.scale, args.seeds))
    result.figures["trained_at"] = sorted(trained_at)
    result.show(args.as_json)
    command = f"gemline bench ablation --work FOLDER --seeds {args.seeds}"
    save_study(RESULT, result, differences, from_default, command, trained_at)


def title_of(scale: Scale, seeds: int) -> str:
    """The title of a study."""
    return (
        f"NE of {OBJECTIVE} less that of GEM {scale} of {DEEP} ({DEEP}: less that of the default), "
        f"seeds: {seeds}, 1e-4 [95 %]"
    )


def committed_study(path: Path, title: str) -> "StudyResult | None":
    """The committed study, to which a run adds rows; None if there is none.

    Raises UserError if it is of another scale or number of seeds.
    """
    from ranking.report.study import StudyResult

    if not path.is_file():
        return None
    study = StudyResult.model_validate_json(path.read_text())
    if study.title != title:
        raise UserError(f"{path} is another study, {study.title!r}: remove it to begin this one")
    return study


def trained_at_of(study: "StudyResult | None") -> set[str]:
    """The dates and commits of the trainings of a committed study."""
    return (
        set(study.figures.get("trained_at", [f"{study.date} {study.commit}"])) if study else set()
    )


def committed_differences(study: "StudyResult | None", prefix: str = "") -> Differences:
    """The rows of a committed study whose estimates have a prefix."""
    from benchmarks.studies.seeded_estimates import SeededEstimate

    differences: Differences = {data: {} for data in DATA_SETS}
    if study is None:
        return differences
    for key, estimate in study.estimates.items():
        name, _, data = key.removeprefix(prefix).rpartition(", ")
        if key.startswith(prefix) and name in all_rows() and data in DATA_SETS:
            differences[data][name] = SeededEstimate(*estimate)
    return differences


def save_study(
    path: Path,
    result: BenchmarkResult,
    differences: Differences,
    from_default: Differences,
    command: str,
    trained_at: Iterable[str],
) -> None:
    """Save the table, the estimates behind it, and the commits of the trainings."""
    by_row = keyed_by_row(differences)
    estimates = {
        key: (e.value, e.standard_error, min(e.degrees_of_freedom, MAX_DEGREES_OF_FREEDOM))
        for key, e in (by_row | keyed_by_row(from_default, FROM_DEFAULT)).items()
    }
    result.save_study(path, command, by_row, estimates, trained_at)


def keyed_by_row(differences: Differences, prefix: str = "") -> "dict[str, SeededEstimate]":
    """Differences by "ROW, DATA", as studies keep them."""
    return {
        f"{prefix}{name}, {data}": estimate
        for data, by_name in differences.items()
        for name, estimate in by_name.items()
    }


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
    reference: str = DEEP,
) -> dict[str, dict[str, "SeededEstimate"]]:
    """For each objective the rows of a data set with their difference of NE from a reference.

    That of the row DEEP is from the default.
    """
    from benchmarks.studies.seeded_estimates import ne_difference_over_seeds

    def all_seeds(name: str) -> "list[Predictions]":
        by_seed = [predictions_of(trials, data, name, scale, seed) for seed in range(seeds)]
        return [predictions for predictions in by_seed if predictions is not None]

    references = {name: all_seeds(name) for name in (DEFAULT, reference)}
    differences: dict[str, dict[str, SeededEstimate]] = {objective: {} for objective in objectives}
    for name in names:
        changed = all_seeds(name)
        control = references[DEFAULT if name == DEEP else reference]
        for objective in objectives if changed else ():
            difference = ne_difference_over_seeds(changed, control, objective)
            differences[objective][name] = difference
    return differences
