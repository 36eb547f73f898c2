"""`gemline bench calibration`: do rankers of real logs predict as much as happens?

The line of some days of KuaiRand, up to its rankers, in `--work`; it goes on from what finished.
Rankers are calibrated on the day before the one that is reported.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from benchmarks.history import split_of
from benchmarks.kuairand import SPEC
from benchmarks.result import Result
from dags.line import Days, Place, data_steps, model_steps, newest_mature, ranker_steps
from dags.local import run_line
from etl.errors import UserError
from etl.spec import DataSpec, load_spec
from etl.spec.base import Strict
from etl.spec.units import parse_days

if TYPE_CHECKING:
    from training.predictions import Predictions

DAYS = "2022-04-25:2022-04-30"
ENOUGH = 1000  # positives; of fewer the interval tells more than the ratio
COLUMNS = ("surface", "objective", "positives", "predictions / outcomes [95 %]", "goal")


class CalibrationArgs(Strict):
    """Arguments of the benchmark."""

    data: Annotated[Path, tyro.conf.arg(help="folder that holds KuaiRand's data/log_standard_*")]
    work: Annotated[Path, tyro.conf.arg(help="folder for tables and models, kept")]
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: CalibrationArgs) -> None:
    """Predictions over outcomes of each surface and objective on the last day."""
    from ranking.package.versions import newest
    from training.predictions import Predictions, evaluation_path

    if not args.data.is_dir():
        raise UserError(f"--data {args.data} is no folder; KuaiRand's raw files are read from it")
    spec = load_spec(SPEC)
    place = Place(SPEC, str(args.data.resolve()), str(args.work.resolve()))
    days = newest_mature(spec, *parse_days(DAYS))
    prepare(spec, place, days)
    split = split_of(days)
    result = Result(f"Rankers of KuaiRand on {days.test_last}", COLUMNS)
    off = []
    for surface in (s for s in spec.ad_surfaces if newest(place.lake, s).target):
        path = evaluation_path(place.lake, f"distilled-{surface}")
        off += taken(result, surface, Predictions.read(path, split))
    why = f"no surface has {ENOUGH:,} positives of an objective"
    result.take("calibration_worst_kuairand", max(off, default=None), why)
    result.show(args.as_json)


def prepare(spec: DataSpec, place: Place, days: Days) -> None:
    """Tables, GEM and its knowledge, a ranker of each surface."""
    flags = days.model_flags
    learn, _ = model_steps(spec, place, flags)
    rankers = [ranker_steps(place, flags, surface)[0] for surface in spec.ad_surfaces]
    run_line(spec, place, [*data_steps(place, days.landed), *learn, *rankers])


def taken(result: Result, surface: str, found: "Predictions") -> list[float]:
    """Rows of a surface; distances from 1 of the pairs with enough positives."""
    from training.loop.paired import calibration

    off = []
    for i, objective in enumerate(found.objectives):
        positives = int(found.labels[found.known[:, i], i].sum())
        if not positives:
            continue
        ratio = calibration(found, objective)
        told = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        enough = positives >= ENOUGH
        goal = "0.97 to 1.03" if enough else ""
        result.rows.append((surface, objective, f"{positives:,}", told, goal))
        off += [abs(ratio.value - 1)] if enough else []
    return off
