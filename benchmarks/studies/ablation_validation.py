"""The ablation on the days of KuaiRand on which defaults are chosen, for all objectives."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.harness import KUAIRAND_SPEC, RESULTS, BenchmarkResult, commits_of
from benchmarks.studies.ablation_rows import DEEP, AblationTrials, all_rows, ne_differences
from benchmarks.studies.ablation_trials import VALIDATION_DAYS
from benchmarks.studies.committed import trained_at_of
from dags.commands import Scale
from etl.spec import load_spec
from ranking.report.study import StudyResult

if TYPE_CHECKING:
    from benchmarks.studies.seeded_estimates import SeededEstimate

RESULT = RESULTS / "ablation_validation.json"
OBJECTIVES = tuple(load_spec(KUAIRAND_SPEC).objectives)


def validation_title(scale: Scale, seeds: int) -> str:
    """The title of a study."""
    first, last = VALIDATION_DAYS
    return (
        f"NE less that of GEM {scale} of {DEEP} ({DEEP}: less that of the default), KuaiRand, "
        f"{first} to {last}, seeds: {seeds}, 1e-4 [95 %]"
    )


def compare_on_validation_days(
    trials: AblationTrials,
    scale: Scale,
    seeds: int,
    names: Sequence[str],
    committed: StudyResult | None,
) -> BenchmarkResult:
    """The differences of NE of all objectives, which are saved with the committed rows."""
    measured = ne_differences(trials, "kuairand", scale, seeds, names, OBJECTIVES)
    trained_at = trained_at_of(committed) | trials.trained_at()
    study = add_rows(validation_title(scale, seeds), measured, committed, trained_at)
    command = f"gemline bench ablation --work FOLDER --validation --seeds {seeds}"
    study.model_copy(update={"command": command}).save(RESULT)
    return BenchmarkResult(study.title, study.columns, list(study.rows), dict(study.figures))


def add_rows(
    title: str,
    measured: Mapping[str, Mapping[str, "SeededEstimate"]],
    committed: StudyResult | None,
    trained_at: set[str],
) -> StudyResult:
    """The study of the committed rows and those that were measured, by objective and name."""
    rows = {row[0]: row for row in committed.rows} if committed else {}
    intervals = dict(committed.intervals) if committed else {}
    for name in dict.fromkeys(name for by_name in measured.values() for name in by_name):
        rows[name] = (name, *(str(by_name[name]) for by_name in measured.values()))
        for objective, by_name in measured.items():
            found = by_name[name]
            interval = (1e4 * found.value, 1e4 * found.low, 1e4 * found.high)
            intervals[f"{name}, {objective}"] = interval
    return StudyResult(
        title=title,
        command="",
        columns=("change", *measured),
        rows=tuple(rows[name] for name in all_rows() if name in rows),
        commit=commits_of(trained_at),
        figures={"trained_at": sorted(trained_at)},
        intervals=intervals,
    )
