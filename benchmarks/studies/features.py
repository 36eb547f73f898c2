"""`gemline bench features`: GEM with other counters than those of the specs.

Without `--work` the committed figures are printed. With it, a long study builds examples with the
changed counters and trains GEM on them, on days before those that other studies report: KuaiRand's
26 and 27 April, and 9 January of the bench data of the simulator. Tables and finished trainings
are kept there, and the study resumes from them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import RESULTS, BenchmarkResult
from benchmarks.studies.committed import StudyFolder, share_of, show_committed
from benchmarks.studies.counter_changes import CHANGES, DEFAULT
from benchmarks.studies.model_changes import DataSet
from benchmarks.studies.quality import KUAIRAND_DATA, KuaiRandFolder
from etl.errors import UserError
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from benchmarks.studies.seeded_estimates import SeededEstimate

DATA_SETS: tuple[DataSet, ...] = ("simulated", "kuairand")
GOALS = {"better_simulated": "", "better_kuairand": ""}
RESULT = RESULTS / "features.json"


class FeaturesArgs(StrictModel):
    """Arguments of the study."""

    work: StudyFolder = None
    kuairand: KuaiRandFolder = None
    data: Annotated[tuple[DataSet, ...], tyro.conf.arg(help="data sets to compare on")] = DATA_SETS
    seeds: int = Field(default=2, ge=1)
    only: Annotated[
        tuple[str, ...], tyro.conf.arg(help="only these changes; the study is then not saved")
    ] = ()
    share: Annotated[
        str, tyro.conf.arg(help="run only part k of n of the trainings, and no comparison: k/n")
    ] = "1/1"
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_features(args: FeaturesArgs) -> None:
    """Difference of NE by counters that are added or left out, on validation days (long)."""
    unknown = sorted(set(args.only) - set(CHANGES))
    if unknown:
        raise UserError(f"--only names {', '.join(unknown)}; there are {', '.join(CHANGES)}")
    if args.work is None:
        show_committed("Features", GOALS, RESULT, args.as_json)
        return
    names = args.only or tuple(CHANGES)
    changes = [(data, name) for data in args.data for name in names if data in CHANGES[name]]
    rows = [*((data, DEFAULT) for data in args.data), *changes]
    from benchmarks.studies.feature_study import FeatureStudy

    study = FeatureStudy(args.work.resolve(), args.kuairand or KUAIRAND_DATA)
    for row in share_of(rows, args.share):
        study.predictions(*row, args.seeds)
    if args.share != "1/1":
        return
    differences = {row: study.ne_differences(*row, args.seeds) for row in changes}
    result = features_table(differences, args.seeds)
    result.show(args.as_json)
    if not args.only and set(args.data) == set(DATA_SETS):
        command = f"gemline bench features --work work/bench --seeds {args.seeds}"
        result.save_study(RESULT, command, trained_at=study.trained_at)


def features_table(
    differences: "Mapping[tuple[DataSet, str], Mapping[str, SeededEstimate]]", seeds: int
) -> BenchmarkResult:
    """A row per data set and change; `better_…` are corrected for the number of comparisons."""
    from benchmarks.studies.seeded_estimates import LEVEL, holm

    by_column = list(dict.fromkeys(name for row in differences.values() for name in row))
    result = BenchmarkResult(
        f"NE of GEM small with other counters, less that of the spec's, seeds: {seeds}, "
        "1e-4 [95 %]",
        ("logs", "counters", *by_column),
    )
    flat = [(row, name) for row, by_name in differences.items() for name in by_name]
    corrected = holm([differences[row][name].p_value for row, name in flat])
    better: dict[str, list[str]] = {f"better_{data}": [] for data, _ in differences}
    for (row, name), p_value in zip(flat, corrected, strict=True):
        if differences[row][name].value < 0 and p_value < LEVEL:
            better[f"better_{row[0]}"].append(f"{row[1]}, {name}")
    for (data, change), by_name in differences.items():
        cells = (str(by_name.get(name, "")) for name in by_column)
        result.rows.append((data, change, *cells))
    result.figures |= better
    return result
