"""`gemline bench staleness`: what does an old GEM still teach?

Students of the bench data learn on the same newest days each time, from GEMs that are some days
older than they could be. Long; every finished training is kept in `--work`, and the study goes on
from there. The table goes to benchmarks/results/staleness.json.
"""

from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.ablation import OBJECTIVE
from benchmarks.result import Result
from etl.spec.base import Strict
from etl.spec.units import DAY, each_day
from training.study import Study

if TYPE_CHECKING:
    from benchmarks.transfer.trials import Trials
    from etl.tables.lake import Lake
    from training.loop.paired import Interval

RESULTS = Path(__file__).parent / "results" / "staleness.json"
WINDOW = 3  # days that students learn on: each has a GEM that is as old as is asked for
OLDEST = 7


class StalenessArgs(Strict):
    """Arguments of the study."""

    work: Annotated[Path, tyro.conf.arg(help="folder of `gemline bench transfer`")]
    seeds: int = Field(default=3, ge=1)
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


@dataclass(frozen=True)
class Gained:
    """NE of a student that learns from a GEM some days old, less that of labels alone."""

    stale: int
    student: str
    by_objective: "dict[str, Interval]"


def bench(args: StalenessArgs) -> None:
    """What students gain from GEMs that are 0 to 7 days old, their own days fixed (long)."""
    from benchmarks.transfer.trials import Trials

    trials = Trials.of(args.work)
    found = [gained for stale in range(OLDEST + 1) for gained in at_age(trials, stale, args.seeds)]
    objectives = list(found[0].by_objective)
    result = Result(
        f"NE less that of labels alone, by the age of GEM; {WINDOW} days to learn on, "
        f"{args.seeds} seeds, 1e-4 [95 %]",
        ("days too old", "student", *objectives),
    )
    for one in found:
        result.rows.append((str(one.stale), one.student, *map(str, one.by_objective.values())))
        values = {o: round(i.value, 6) for o, i in one.by_objective.items()}
        result.figures[f"{one.student}, {one.stale} days"] = values
    missing = OLDEST - max(one.stale for one in found)
    if missing:
        result.figures["not measured"] = f"the last {missing} ages: no GEM is old enough"
    result.show(args.as_json)
    clicks = {f"{g.student}, {g.stale} days": g.by_objective[OBJECTIVE] for g in found}
    Study(
        title=result.title,
        command=f"gemline bench staleness --work work/bench --seeds {args.seeds}",
        columns=tuple(result.columns),
        rows=tuple(result.rows),
        intervals={n: (1e4 * i.value, 1e4 * i.low, 1e4 * i.high) for n, i in clicks.items()},
    ).keep(RESULTS)


def at_age(trials: "Trials", stale: int, seeds: int) -> "list[Gained]":
    """What students of each kind gain; none where a day of theirs would lack its GEM."""
    from benchmarks.transfer.trials import ALONE, transfer
    from training.loop.paired import apart

    first = trials.split.train_last - timedelta(days=WINDOW - 1)
    if first - timedelta(days=1 + stale) < trials.split.train_first:
        return []
    window = replace(trials, split=trials.split.model_copy(update={"train_first": first}))
    plain = {"kind": "plain", "weight": trials.weight}
    head = {"kind": "auxiliary", "ratio": trials.ratio}
    kinds = {
        "plain distillation": transfer(**plain),
        "auxiliary head": transfer(**head),
        "auxiliary head, adapter": transfer(**head, adapter=True),
    }
    if not stale:  # who knows nothing does not age
        kinds["plain distillation, shuffled"] = transfer(**plain, shuffled=True)
        kinds["auxiliary head, adapter, shuffled"] = transfer(**head, adapter=True, shuffled=True)
    objectives = [n for n, o in trials.lake.spec.objectives.items() if o.ripens_after <= DAY]
    alone = [window.student(ALONE, seed) for seed in range(seeds)]
    aged = older(window, stale)
    found = []
    for name, change in kinds.items():
        students = [aged.student(change, seed) for seed in range(seeds)]
        found.append(Gained(stale, name, {o: apart(students, alone, o) for o in objectives}))
    return found


def older(window: "Trials", stale: int) -> "Trials":
    """The same days, told of by GEMs that are so many days older."""
    from training.knowledge.write import write_knowledge
    from training.parallel.processes import process_group
    from training.trials import linked

    folder = window.folder.parent / f"stale-{stale}"
    lake = linked(window.lake, folder / "lake")
    gem = Path(lake.root, "models", "gem")
    gem.parent.mkdir(exist_ok=True)
    if not gem.exists():
        gem.symlink_to(Path(window.lake.root, "models", "gem").resolve())
    days = window.split.train_first, window.split.train_last
    if not lake.exists("knowledge") or ages(lake, days) != {1 + stale}:
        with process_group():
            write_knowledge(lake, days, stale)
        assert ages(lake, days) == {1 + stale}, "a GEM of these days is missing"
    return replace(window, lake=lake, folder=folder / "trials")


def ages(lake: "Lake", days: "tuple[date, date]") -> set[int]:
    """Days from what GEM had learned to what it tells of; 0 among them where a day is missing."""
    from etl.tables import arrow, contracts

    stored = arrow.snapshot(lake, contracts.knowledge(lake.spec))
    rows = stored.read(["day", "fm_trained_until"], day=list(each_day(*days)))
    told = rows.group_by(["day", "fm_trained_until"]).aggregate([]).to_pylist()
    missing = set(each_day(*days)) - {row["day"] for row in told}
    return {(row["day"] - row["fm_trained_until"]).days for row in told} | {0 for _ in missing}
