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
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import RESULTS, BenchmarkResult
from benchmarks.studies.ablation_rows import (
    DEEP,
    DEFAULT,
    OBJECTIVE,
    AblationTrials,
    Differences,
    all_rows,
    ne_differences,
    predictions_of,
)
from benchmarks.studies.committed import (
    StudyFolder,
    share_of,
    show_committed,
    trained_at_of,
)
from benchmarks.studies.model_changes import DATA_SETS, DataSet
from benchmarks.studies.quality import KUAIRAND_DATA, KuaiRandFolder
from dags.commands import Scale
from etl.errors import UserError
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from benchmarks.studies.seeded_estimates import SeededEstimate
    from ranking.report.study import StudyResult

GOALS = {"default_is_best": "true"}
RESULT = RESULTS / "ablation.json"
MAX_DEGREES_OF_FREEDOM = 1e9  # infinity is no number of JSON
FROM_DEFAULT = "less the default: "  # before the keys of paired estimates


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
        committed = committed_study(
            validation.RESULT, validation.validation_title(args.scale, args.seeds)
        )
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
        of_kuairand = trials["kuairand"]
        result = validation.compare_on_validation_days(
            of_kuairand, args.scale, args.seeds, names, committed
        )
        result.show(args.as_json)
    else:
        compare_on_test_days(args, trials, names, committed)


def compare_on_test_days(
    args: AblationArgs,
    trials: Mapping[DataSet, AblationTrials],
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
