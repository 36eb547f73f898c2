"""Students of one size that learn from GEM in several ways, each trained once."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks import history
from dags.line import Place, newest_mature
from etl.spec import load_spec
from etl.spec.units import each_day, parse_days
from etl.tables.lake import Lake
from ranking.report.facts import true_probabilities
from ranking.student.config import DomainTraining, StudentTraining
from ranking.train import (
    calibrated,
    fit_calibration,
    fitted_on,
    tested,
    train_domain,
    trained,
)
from training.config import TrainConfig
from training.data.parts import Shuffle
from training.data.reader import TABLES
from training.gem import load_trained, train
from training.knowledge.earlier import earlier
from training.knowledge.write import write_knowledge
from training.lawcurve import ne
from training.loop import checkpoint
from training.parallel.processes import process_group
from training.predictions import Predictions, joined, predict
from training.split import Split
from training.trials import linked, path_of

Change = Mapping[str, Any]
CHOOSING_SEED = 1007
EARLIER_DAYS = 2  # by which the days to choose on lie before those reported
WEIGHTS = (0.3, 1.0, 3.0)
BEFORE = 32


def transfer(**options: object) -> Change:
    """A way of transfer, of students that learn in no other way unless it is said."""
    return {"transfer": {"ratio": 1.0, "adapter": False, "share": ()} | options}


ALONE = transfer(kind="none")


@dataclass(frozen=True)
class Trials:
    """The lake of the bench data with a GEM that was trained by day, and its knowledge."""

    lake: Lake
    raw: str
    split: Split
    folder: Path

    @classmethod
    def of(cls, work: Path) -> "Trials":
        """Logs, tables, GEM and knowledge: made where they are missing."""
        work, spec = work.resolve(), load_spec(history.SPEC)
        place = Place(history.SPEC, str(work / "raw"), str(work / "lake"))
        days = newest_mature(spec, *parse_days(history.DAYS))
        history.prepare(history.HistoryArgs(work=work), place, days)
        lake = linked(Lake(place.lake, spec), work / "transfer" / "lake")
        with process_group():
            if not checkpoint.written_until(lake, days.train_last):
                train(lake, (days.first, days.train_last), TrainConfig(max_length=2048))
            if not lake.exists("user_knowledge"):
                write_knowledge(lake, (days.first, days.test_last))
        return cls(lake, place.raw, history.split_of(days), work / "transfer" / "trials")

    @property
    def objectives(self) -> list[str]:
        """The objectives of the spec."""
        return list(self.lake.spec.objectives)

    @cached_property
    def choosing(self) -> Split:
        """The split to choose on."""
        days = timedelta(days=EARLIER_DAYS)
        names = ("train_last", "calibration", "test_first", "test_last")
        moved = {name: getattr(self.split, name) - days for name in names}
        return self.split.model_copy(update=moved)

    @cached_property
    def weight(self) -> float:
        """The best weight of plain distillation."""
        return self._best({w: transfer(kind="plain", weight=w) for w in WEIGHTS})

    @cached_property
    def ratio(self) -> float:
        """The best ratio of the auxiliary head's gradient."""
        return self._best({r: transfer(ratio=r) for r in WEIGHTS})

    def told(self) -> dict[str, float]:
        """What was chosen."""
        return {"plain weight": self.weight, "auxiliary ratio": self.ratio}

    def variants(self) -> dict[str, Change]:
        """All ways, one by one and together, and each one's control."""
        plain = {"kind": "plain", "weight": self.weight}
        head = {"kind": "auxiliary", "ratio": self.ratio}
        seen: Change = {"model": {"before": BEFORE}}
        return {
            "labels only": ALONE,
            "plain distillation": transfer(**plain),
            "plain distillation, shuffled": transfer(**plain, shuffled=True),
            "auxiliary head": transfer(**head),
            "auxiliary head, shuffled": transfer(**head, shuffled=True),
            "auxiliary head, adapter": transfer(**head, adapter=True),
            "representation": {**ALONE, **seen},
            "representation, shuffled": {**transfer(kind="none", shuffled=True), **seen},
            "sharing": transfer(kind="none", share=None),
            "sharing, shuffled": transfer(kind="none", share=None, shuffled=True),
            "all": transfer(**head, adapter=True, share=None),
            "domain": transfer(**head, adapter=True, begin="domain"),
            "domain, shuffled": transfer(**head, adapter=True, begin="domain", shuffled=True),
        }

    def student(self, change: Change, seed: int, split: Split | None = None) -> Predictions:
        """Calibrated predictions of a student of each surface, from their file if it is there."""
        split = split or self.split
        config = StudentTraining.model_validate({**change, "seed": seed})
        path = self._path(config.model_dump_json(), split)
        if not path.is_file():
            with self._models(config, split) as lake:
                joined(list(_told(lake, split, config))).write(path, split)
        return Predictions.read(path, split).in_order()

    def gem(self) -> Predictions:
        """GEM's predictions, calibrated by surface as the students' are."""
        path = self._path("gem", self.split)
        if not path.is_file():
            with process_group():
                self._gem().write(path, self.split)
        return Predictions.read(path, self.split).in_order()

    def worst_calibration(self, found: Sequence[Predictions]) -> float:
        """The largest distance from 1 of predictions over true probabilities, by pair."""
        worst = []
        for p in found:
            truth = true_probabilities(p, self.raw)
            if truth is None:
                return float("nan")
            for code in np.unique(p.surface):
                here = p.surface == code
                sums = p.probability[here].sum(0) / truth.probability[here].sum(0)
                worst.append(np.abs(sums - 1))
        pairs = np.stack(worst).reshape(len(found), -1)
        return float(pairs.mean(0).max())

    def _best(self, changes: dict[float, Change]) -> float:
        """The option with the least NE on the days to choose on, mean of objectives."""
        found = {o: self.student(c, CHOOSING_SEED, self.choosing) for o, c in changes.items()}
        loss = {
            o: mean(ne(p, objective) for objective in self.objectives) for o, p in found.items()
        }
        return min(loss, key=lambda option: loss[option])

    @contextmanager
    def _models(self, config: StudentTraining, split: Split) -> Iterator[Lake]:
        """The lake; with domains' models of its own for students that begin from them."""
        if config.transfer.begin == "gem":
            yield self.lake
            return
        own = config.transfer.model_copy(update={"begin": "gem", "share": None})
        with tempfile.TemporaryDirectory() as folder:
            lake = with_gem_of(self.lake, Path(folder))
            for name in lake.spec.domains:
                train_domain(lake, name, split, DomainTraining(transfer=own, seed=config.seed))
            yield lake

    def _gem(self) -> Predictions:
        lake, split = self.lake, self.split
        trained_gem, reader = load_trained(lake, split.train_last)
        ripening = timedelta(days=lake.spec.ripens_after_days)
        assert split.calibration is not None
        spans = (
            ((split.calibration - ripening, split.calibration), split.calibrating(lake.spec)),
            ((split.test_first, split.test_last), split.testing(lake.spec)),
        )
        early, late = (
            predict(
                lambda batch: trained_gem.model(batch).logits,
                reader.batches(list(each_day(*days)), ripened, 2048, Shuffle(None)),
                self.objectives,
            )
            for days, ripened in spans
        )
        codes = np.unique(late.surface)
        surfaces = ((early.of(early.surface == c), late.of(late.surface == c)) for c in codes)
        return joined([calibrated(own, fitted_on(before, {})) for before, own in surfaces])

    def _path(self, name: str, split: Split) -> Path:
        tables = (*TABLES, "knowledge", "user_knowledge")
        return path_of(self.folder, self.lake, tables, split, name)


def with_gem_of(lake: Lake, folder: Path) -> Lake:
    """All of a lake in another folder, of its models GEM alone."""
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    theirs = {path.name: path for path in Path(lake.root).iterdir() if path.name != "models"}
    for name, path in (theirs | {"models/gem": Path(lake.root, "models", "gem")}).items():
        if not (folder / name).exists():
            (folder / name).symlink_to(path.resolve())
    return Lake(str(folder), lake.spec)


def _told(lake: Lake, split: Split, config: StudentTraining) -> Iterator[Predictions]:
    """Calibrated predictions of the student of each surface."""
    known = earlier(lake)
    for surface in lake.spec.ad_surfaces:
        student = trained(lake, (surface,), split, config, known)
        fitted = fit_calibration(lake, split, student, {})
        yield calibrated(tested(lake, split, student), fitted)
