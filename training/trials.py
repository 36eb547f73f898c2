"""GEM in many configurations on the same days, each trained once: what studies are made of."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from etl.errors import UserError
from etl.spec.units import each_day
from etl.tables import atomic_io
from etl.tables.lake import Lake
from training.baseline import BaselineConfig, train_baseline
from training.config import TrainConfig
from training.data.parts import Shuffle
from training.data.reader import TABLES
from training.data.ripened import EVERYTHING
from training.evaluate import predict_test
from training.gem import load_trained, train
from training.loop.cost import cost
from training.parallel.processes import process_group
from training.predictions import Predictions, joined
from training.split import Split


@dataclass(frozen=True)
class Trial:
    """Predictions of the test days, and FLOPs of an example, forward and backward."""

    predictions: Predictions
    flops: float


@dataclass(frozen=True)
class Trials:
    """Trainings on the days of a split; `folder` keeps each that was ended.

    A trial is known by its configuration, the versions of the tables and the split: it is run again
    when one of them has changed, and not when the code has.
    """

    lake: Lake
    split: Split
    folder: Path

    def gem(self, config: TrainConfig) -> Trial:
        """GEM of a configuration."""
        path = self._path(config.model_dump_json())
        told = path.with_suffix(".json")
        if not path.is_file() or not told.is_file():
            trial = self._trained(config)
            trial.predictions.write(path, self.split)
            about = {"flops": trial.flops, "config": config.model_dump(mode="json")}
            atomic_io.write_text(told, json.dumps(about))
        flops = json.loads(told.read_text())["flops"]
        return Trial(Predictions.read(path, self.split), flops)

    def separate(self, config: TrainConfig) -> Predictions:
        """A GEM for each surface that has ads, learned from its rows alone."""
        surfaces = self.lake.spec.ad_surfaces
        parts = [self.gem(config.model_copy(update={"surface": s})).predictions for s in surfaces]
        return joined(parts).in_order()

    def pooled(self, config: TrainConfig) -> Predictions:
        """One GEM of all surfaces, rows as those of `separate`."""
        return self.gem(config).predictions.in_order()

    def lightgbm(self, config: BaselineConfig) -> Predictions:
        """LightGBM on the same features, but for histories."""
        path = self._path(f"lightgbm {config.model_dump_json()}")
        if not path.is_file():
            train_baseline(self.lake, self.split, config).write(path, self.split)
        return Predictions.read(path, self.split)

    def _path(self, name: str) -> Path:
        return path_of(self.folder, self.lake, TABLES, self.split, name)

    def _trained(self, config: TrainConfig) -> Trial:
        split = self.split
        with aside(self.lake) as lake, process_group():
            train(lake, (split.train_first, split.train_last), config)
            predictions = predict_test(lake, split)
            return Trial(predictions, flops_of(lake, split.train_last, config))


def path_of(folder: Path, lake: Lake, tables: Iterable[str], split: Split, name: str) -> Path:
    """Where predictions lie that are known by a name, the versions of some tables and a split."""
    versions = {table: lake.version(table) for table in tables}
    told = json.dumps([name, versions, split.model_dump(mode="json")])
    return folder / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.parquet"


@contextmanager
def aside(lake: Lake) -> Iterator[Lake]:
    """The same tables, with models of their own that are gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield linked(lake, Path(folder))


MADE = {
    "_line",
    "models",
    "knowledge",
    "user_knowledge",
    "evaluations",
    "rankers",
    "scores",
    "studies",
}


def linked(lake: Lake, folder: Path) -> Lake:
    """The same tables in another folder, without what models have made of them.

    Raises UserError where they are not on this machine.
    """
    if "://" in lake.root:
        raise UserError(f"{lake.root} is no folder: studies need tables on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(lake.root).iterdir():
        if path.name not in MADE and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())
    return Lake(str(folder), lake.spec)


def flops_of(lake: Lake, day: date, config: TrainConfig) -> float:
    """FLOPs of an example on the first batch of a day, by the GEM that was trained until then."""
    trained, reader = load_trained(lake, day)
    batches = reader.batches(list(each_day(day, day)), EVERYTHING, config.batch_rows, Shuffle(0))
    return cost(trained, next(iter(batches))).flops
