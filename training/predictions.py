"""What a model predicted on rows that it had not learned from, beside what happened."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from etl.errors import UserError
from etl.tables import atomic_io
from etl.tables.atomic_io import download
from etl.tables.place import Place, place
from training.data.batch import Batch
from training.split import Split

SPLIT = b"gemline.split"


@dataclass(frozen=True)
class Predictions:
    """B rows, O objectives: probabilities, labels, and whether each label is final (B, O).

    `user` (B) are the hashes of their users.
    """

    objectives: tuple[str, ...]
    impressions: npt.NDArray[np.object_]
    user: npt.NDArray[np.int64]
    surface: npt.NDArray[np.int64]
    probability: npt.NDArray[np.float64]
    labels: npt.NDArray[np.float32]
    known: npt.NDArray[np.bool_]

    def write(self, path: Place, split: Split) -> None:
        """Store as one Parquet file, whole or not at all, with the days that they are of."""
        columns = {
            "impression_id": pa.array(self.impressions, pa.string()),
            "user": self.user,
            "surface": self.surface,
        }
        for i, name in enumerate(self.objectives):
            columns[f"p_{name}"] = self.probability[:, i]
            columns[f"label_{name}"] = self.labels[:, i]
            columns[f"known_{name}"] = self.known[:, i]
        table = pa.table(columns).replace_schema_metadata({SPLIT: split.model_dump_json()})
        with atomic_io.replace_file(path) as temporary:
            pq.write_table(table, temporary)

    @classmethod
    def read(cls, path: Place, split: Split) -> "Predictions":
        """The predictions of a file; raises UserError where they are of other days."""
        table = pq.read_table(download(path))
        told = (table.schema.metadata or {}).get(SPLIT, b"{}").decode()
        if told != split.model_dump_json():
            raise UserError(
                f"{path} holds predictions of another split of days ({told}); evaluate that model "
                "on these days again, or remove the file"
            )
        if "user" not in table.column_names:
            raise UserError(f"{path} was written by an older Gemline; evaluate that model again")
        names = tuple(n.removeprefix("p_") for n in table.column_names if n.startswith("p_"))

        def columns(prefix: str) -> npt.NDArray[np.generic]:
            return np.stack([table[f"{prefix}_{name}"].to_numpy() for name in names], 1)

        return cls(
            names,
            np.asarray(table["impression_id"]),
            table["user"].to_numpy(),
            table["surface"].to_numpy(),
            columns("p").astype(np.float64),
            columns("label").astype(np.float32),
            columns("known").astype(bool),
        )

    def of(self, rows: npt.NDArray[np.bool_]) -> "Predictions":
        """Some of the rows."""
        return self._taken(np.flatnonzero(rows))

    def in_order(self) -> "Predictions":
        """The same rows, sorted by impression."""
        return self._taken(np.argsort(self.impressions, kind="stable"))

    def _taken(self, at: npt.NDArray[np.int64]) -> "Predictions":
        return replace(
            self,
            impressions=self.impressions[at],
            user=self.user[at],
            surface=self.surface[at],
            probability=self.probability[at],
            labels=self.labels[at],
            known=self.known[at],
        )


def predict(
    logits: Callable[[Batch], Tensor], batches: Iterable[Batch], objectives: Sequence[str]
) -> Predictions:
    """The probabilities of a model's logits (B, O), batch after batch; no rows, no predictions."""
    none = np.zeros((0, len(objectives)))
    parts = [
        Predictions(
            tuple(objectives),
            np.zeros(0, object),
            np.zeros(0, np.int64),
            np.zeros(0, np.int64),
            none,
            none.astype(np.float32),
            none.astype(bool),
        )
    ]
    with torch.no_grad():
        for batch in batches:
            p = torch.sigmoid(logits(batch)).double().numpy()
            parts.append(
                Predictions(
                    tuple(objectives),
                    batch.impressions,
                    batch.user[batch.request].numpy(),
                    batch.surface.numpy(),
                    p,
                    batch.labels.numpy(),
                    batch.known.numpy(),
                )
            )
    return joined(parts)


def joined(parts: Sequence[Predictions]) -> Predictions:
    """Predictions of several sets of rows as one."""
    names = ("impressions", "user", "surface", "probability", "labels", "known")
    return Predictions(
        parts[0].objectives, *(np.concatenate([getattr(p, n) for p in parts]) for n in names)
    )


def evaluation_path(lake: str, model: str) -> Place:
    """Where the predictions of a model on the test days lie."""
    return place(lake, "evaluations", f"{model}.parquet")
