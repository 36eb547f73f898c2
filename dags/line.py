"""The line, declared once: its steps, their commands, what each reads and writes."""

from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Literal

from etl.errors import UserError
from etl.spec import DataSpec

Engine = Literal["spark", "torch"]
ATTRIBUTES = ("attributes_user", "attributes_item")
GEM = "models/gem"
ITEMS = ("items", "item_versions")
KNOWLEDGE = ("knowledge", "user_knowledge")
EXAMPLES = ("examples", "impressions", "history", *ITEMS)


@dataclass(frozen=True)
class Step:
    """A command of `gemline`; what it reads and writes, as paths below the lake, and `raw`."""

    name: str
    engine: Engine
    command: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where a line runs: its spec, its raw logs, its tables."""

    spec: Path
    raw: str
    lake: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of every step."""
        return ("--spec", str(self.spec), "--lake", self.lake)


@dataclass(frozen=True)
class Days:
    """The days of a run: all that landed, and how they are split for the models."""

    first: date
    last: date
    train_last: date
    calibration: date | None
    test_first: date
    test_last: date

    @property
    def landed(self) -> tuple[str, ...]:
        """Flag of the steps that work on all days."""
        return ("--days", f"{self.first}:{self.last}")

    @property
    def split(self) -> tuple[str, ...]:
        """Flags of the steps that train, calibrate and test."""
        calibration = ("--calibration", str(self.calibration)) if self.calibration else ()
        return (
            *("--train", f"{self.first}:{self.train_last}"),
            *calibration,
            *("--test", f"{self.test_first}:{self.test_last}"),
            *("--landed", str(self.last)),
        )

    @property
    def model_flags(self) -> "ModelFlags":
        """Flags of the steps of models, with all days at once."""
        return ModelFlags(
            learned=("--days", f"{self.first}:{self.train_last}"),
            known=("--days", f"{self.first}:{self.test_last}"),
            split=self.split,
            tested=("--days", f"{self.test_first}:{self.test_last}"),
            landed=("--landed", str(self.last)),
        )


@dataclass(frozen=True)
class ModelFlags:
    """Flags that name the days of models.

    GEM learns on the days `learned` and tells of those `known`; rankers and baselines follow
    `split`, the days `tested` are scored, and all has landed by the day `landed`.
    """

    learned: tuple[str, ...]
    known: tuple[str, ...]
    split: tuple[str, ...]
    tested: tuple[str, ...]
    landed: tuple[str, ...]


SHORT = 3600  # a day loses little if labels of its last hour are left out


def newest_mature(spec: DataSpec, first: date, last: date) -> Days:
    """Test on the newest day whose labels are all final by `last`, calibrate on the day before.

    Raises UserError where no day would be left to learn from.
    """
    slowest = max(objective.ripens_after for objective in spec.objectives.values())
    wait = spec.ripens_after_days if slowest > SHORT else 0
    test = last - timedelta(days=wait)
    train_last = test - timedelta(days=2)
    if train_last < first:
        raise UserError(
            f"--days {first}:{last} is too short: labels of {spec.name} ripen for {wait} days, and "
            "test, calibration and training need at least one day each before that"
        )
    return Days(first, last, train_last, test - timedelta(days=1), test, test)


def data_steps(place: Place, days: tuple[str, ...]) -> list[Step]:
    """Raw logs to examples."""
    raw = ("--raw", place.raw)
    table = [
        ("ingest", ("etl", "ingest", *raw), ("raw",), ("events", "quarantine", "flow")),
        ("attributes", ("etl", "attributes", *raw), ("raw",), (*ATTRIBUTES, "quarantine")),
        ("labels", ("etl", "labels"), ("events", *ATTRIBUTES), ("impressions",)),
        ("items", ("features", "items"), ("events", *ATTRIBUTES), ITEMS),
        ("history", ("features", "history"), ("events", "items"), ("history",)),
        (
            "examples",
            ("features", "examples"),
            ("events", *ITEMS, "history", *ATTRIBUTES),
            ("examples",),
        ),
    ]
    return [
        Step(name, "spark", (*command, *place.flags, *days), reads, writes)
        for name, command, reads, writes in table
    ]


def model_steps(
    spec: DataSpec, place: Place, flags: ModelFlags, gem: tuple[str, ...] = ()
) -> tuple[list[Step], list[Step]]:
    """What learns from examples by day, and what is trained, tested and told on a split of days.

    `gem` are further flags of the training of GEM.
    """
    where = place.flags
    learn = [
        Step("gem", "torch", ("train", "gem", *where, *flags.learned, *gem), EXAMPLES, (GEM,)),
        Step(
            "knowledge",
            "torch",
            ("knowledge", *where, *flags.known),
            (*EXAMPLES, GEM),
            KNOWLEDGE,
        ),
    ]
    judge = [
        Step(
            "evaluate",
            "torch",
            ("train", "evaluate", *where, *flags.split),
            (*EXAMPLES, GEM),
            ("evaluations/gem.parquet",),
        ),
        Step(
            "baseline",
            "torch",
            ("train", "baseline", *where, *flags.split),
            EXAMPLES,
            ("evaluations/lightgbm.parquet",),
        ),
    ]
    for surface in spec.ad_surfaces:
        judge += ranker_steps(place, flags, surface)
    judge += [score_step(place, flags, surface) for surface in spec.ad_surfaces]
    judge.append(
        Step(
            "online",
            "torch",
            ("rank", "store", *where, *flags.landed),
            (
                *("events", *ATTRIBUTES, "items", "user_knowledge"),
                *(f"rankers/{surface}/current.json" for surface in spec.ad_surfaces),
            ),
            ("online/current.json",),
        )
    )
    reads = (
        *(name for step in judge for name in step.writes),
        *("impressions", *KNOWLEDGE, "quarantine", "flow"),
    )
    command = ("report", *where, "--raw", place.raw, *flags.split)
    return learn, [*judge, Step("report", "torch", command, reads, ("report.html",))]


def ranker_steps(place: Place, flags: ModelFlags, surface: str) -> list[Step]:
    """What is done for one surface: its ranker, and whether it answers."""
    folder, which = f"rankers/{surface}", ("--surface", surface)
    variants = [f"evaluations/{name}-{surface}.parquet" for name in ("student", "distilled")]
    return [
        Step(
            f"ranker-{surface}",
            "torch",
            ("rank", "train", *place.flags, *flags.split, *which),
            (*EXAMPLES, *KNOWLEDGE, GEM),
            (f"{folder}/newest.json", *variants),
        ),
        Step(
            f"promotion-{surface}",
            "torch",
            ("rank", "promote", *place.flags, *flags.split, *which),
            (*EXAMPLES, *KNOWLEDGE, f"{folder}/newest.json"),
            (f"{folder}/current.json",),
        ),
    ]


def score_step(place: Place, flags: ModelFlags, surface: str) -> Step:
    """A surface's scores of the test days."""
    return Step(
        f"scores-{surface}",
        "spark",
        ("rank", "score", *place.flags, *flags.tested, "--surface", surface),
        ("examples", "history", *ITEMS, "user_knowledge", f"rankers/{surface}/current.json"),
        (f"scores/surface={surface}",),
    )


def line(spec: DataSpec, place: Place, days: Days, gem: tuple[str, ...] = ()) -> list[Step]:
    """All steps, in order; `gem` are further flags of the training of GEM."""
    learn, judge = model_steps(spec, place, days.model_flags, gem)
    return [*data_steps(place, days.landed), *learn, *judge]
