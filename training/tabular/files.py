"""A table of three files: learned from one, stopped early by another, scored on the last."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from training.fitting.choose import Task, choose
from training.fitting.fit import Learner, Scored, predict, scored
from training.model.config import GemConfig
from training.tabular.model import Tabular
from training.tabular.table import Encoding, Rows, read_csv


@dataclass(frozen=True)
class Table:
    """The three files of a table, encoded."""

    encoding: Encoding
    train: Rows
    valid: Rows
    test: Rows

    def learned(self, make: Callable[[], Learner], seeds: int) -> tuple[float, list[Scored]]:
        """The penalty that was best on the validation rows, and scores on the test rows."""
        task = Task(make, self.train, self.valid)
        config = choose(task)
        models = (task.learn(config, 1 + seed)[0] for seed in range(seeds))
        return config.penalty, [scored(*predict(model, self.test)) for model in models]

    def tabular(self, *streams: GemConfig) -> Learner:
        """This project's model, of some streams of interactions."""
        return Tabular(self.encoding.sizes, len(self.encoding.numeric), streams)


def read(folder: Path, label: str, numeric: Collection[str]) -> Table:
    """The three files of a folder, by what train.csv holds. Raises UserError where they are bad."""
    tables = {name: read_csv(folder, f"{name}.csv") for name in ("train", "valid", "test")}
    encoding = Encoding.of(tables["train"], label, numeric)
    rows = {name: encoding(table, f"{name}.csv") for name, table in tables.items()}
    return Table(encoding, **rows)
