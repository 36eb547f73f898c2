"""Predictions of a model on rows that it was not trained on, and their bootstrap intervals.

Intervals of NE differences and of calibration resample users, because the rows of a user are
correlated. U users.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from scipy.stats import bootstrap
from torch import Tensor

from etl.array_types import Bools, Float32, Float64, Int64
from etl.errors import UserError
from etl.spec.units import DaySplit
from etl.tables import atomic_io
from etl.tables.atomic_io import download
from etl.tables.uri import StoragePath, resolve_uri
from training.data.batch import Batch

SPLIT_METADATA_KEY = b"gemline.split"


@dataclass(frozen=True)
class Predictions:
    """Probabilities of B impressions and O objectives, with labels; `label_mask` marks final ones.

    `probabilities`, `labels` and `label_mask` are (B, O), everything else is (B).
    """

    objectives: tuple[str, ...]
    impression_ids: npt.NDArray[np.object_]
    user_hashes: Int64
    surface: Int64
    probabilities: Float64
    labels: Float32
    label_mask: Bools

    def write(self, path: StoragePath, split: DaySplit) -> None:
        """Write one Parquet file, atomically, with the split of days in its metadata."""
        columns = {
            "impression_id": pa.array(self.impression_ids, pa.string()),
            "user": self.user_hashes,
            "surface": self.surface,
        }
        for i, name in enumerate(self.objectives):
            columns[f"p_{name}"] = self.probabilities[:, i]
            columns[f"label_{name}"] = self.labels[:, i]
            columns[f"known_{name}"] = self.label_mask[:, i]
        table = pa.table(columns).replace_schema_metadata(
            {SPLIT_METADATA_KEY: split.model_dump_json()}
        )
        with atomic_io.replace_file(path) as temporary:
            pq.write_table(table, temporary)

    @classmethod
    def read(cls, path: StoragePath, split: DaySplit | None = None) -> "Predictions":
        """Read the predictions of a file. Raises UserError if they are of another split than one.

        Without a split, they may be of any.
        """
        table = pq.read_table(download(path))
        stored_split = (table.schema.metadata or {}).get(SPLIT_METADATA_KEY, b"{}").decode()
        if split is not None and stored_split != split.model_dump_json():
            raise UserError(
                f"{path} holds predictions of another split of days ({stored_split}); evaluate "
                "that model on these days again, or remove the file"
            )
        if "user" not in table.column_names:
            raise UserError(f"{path} was written by an older Gemline; evaluate that model again")
        objectives = tuple(n.removeprefix("p_") for n in table.column_names if n.startswith("p_"))

        def columns(prefix: str) -> npt.NDArray[np.generic]:
            return np.stack([table[f"{prefix}_{name}"].to_numpy() for name in objectives], 1)

        return cls(
            objectives,
            np.asarray(table["impression_id"]),
            table["user"].to_numpy(),
            table["surface"].to_numpy(),
            columns("p").astype(np.float64),
            columns("label").astype(np.float32),
            columns("known").astype(bool),
        )

    def filter(self, mask: Bools) -> "Predictions":
        """The rows of a mask (B)."""
        return self.take(np.flatnonzero(mask))

    def sorted_by_impression(self) -> "Predictions":
        """The same rows, sorted by impression."""
        return self.take(np.argsort(self.impression_ids, kind="stable"))

    def take(self, indices: Int64) -> "Predictions":
        """The rows of some indices, in their order."""
        return replace(
            self,
            impression_ids=self.impression_ids[indices],
            user_hashes=self.user_hashes[indices],
            surface=self.surface[indices],
            probabilities=self.probabilities[indices],
            labels=self.labels[indices],
            label_mask=self.label_mask[indices],
        )


def predict(
    logits_fn: Callable[[Batch], Tensor], batches: Iterable[Batch], objectives: Sequence[str]
) -> Predictions:
    """Predictions of a function from a batch to logits (B, O); empty without batches."""
    parts = [_empty_predictions(objectives)]
    with torch.no_grad():
        for batch in batches:
            parts.append(
                Predictions(
                    objectives=tuple(objectives),
                    impression_ids=batch.impression_ids,
                    user_hashes=batch.user_hash[batch.request_index].numpy(),
                    surface=batch.surface.numpy(),
                    probabilities=torch.sigmoid(logits_fn(batch)).double().numpy(),
                    labels=batch.labels.numpy(),
                    label_mask=batch.label_mask.numpy(),
                )
            )
    return concat_predictions(parts)


def has_enough_labels(predictions: Predictions, objective: str, minimum: int) -> bool:
    """Whether an objective has a minimum of positive and as many negative final labels."""
    column = predictions.objectives.index(objective)
    labels = predictions.labels[predictions.label_mask[:, column], column]
    positives = int(labels.sum())
    return min(positives, len(labels) - positives) >= minimum


def _empty_predictions(objectives: Sequence[str]) -> Predictions:
    shape = (0, len(objectives))
    return Predictions(
        objectives=tuple(objectives),
        impression_ids=np.zeros(0, object),
        user_hashes=np.zeros(0, np.int64),
        surface=np.zeros(0, np.int64),
        probabilities=np.zeros(shape),
        labels=np.zeros(shape, np.float32),
        label_mask=np.zeros(shape, bool),
    )


def concat_predictions(parts: Sequence[Predictions]) -> Predictions:
    """The rows of several predictions of the same objectives, in order."""
    names = ("impression_ids", "user_hashes", "surface", "probabilities", "labels", "label_mask")
    return Predictions(
        parts[0].objectives, *(np.concatenate([getattr(p, n) for p in parts]) for n in names)
    )


def evaluation_path(lake: str, model: str) -> StoragePath:
    """The file of a model's predictions on the test days."""
    return resolve_uri(lake, "evaluations", f"{model}.parquet")


ETA = 1e-12
RESAMPLES = 1000
RESAMPLES_PER_BATCH = 100  # limits memory


@dataclass(frozen=True)
class ConfidenceInterval:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        """As a difference of NE."""
        return format_ne_interval(self.value, self.low, self.high)


def format_ne_interval(value: float, low: float, high: float) -> str:
    """A difference of NE with its interval, in units of 1e-4, as such differences are small."""
    return f"{1e4 * value:+.0f} [{1e4 * low:+.0f}, {1e4 * high:+.0f}]"


def paired_ne_difference(
    treatment: Sequence[Predictions], control: Sequence[Predictions], objective: str, seed: int = 0
) -> ConfidenceInterval:
    """NE of the treatment minus that of the control, each the mean over its seeds.

    All predictions must be of the same rows; rows without a final label are excluded.
    """
    sums = sums_by_user([*treatment, *control], objective)
    n = len(treatment)
    data = (sums[:, :n].mean(1), sums[:, n:-2].mean(1), sums[:, -2], sums[:, -1])
    return _percentile_interval(data, ne_difference, seed)


def ne_interval(predictions: Predictions, objective: str, seed: int = 0) -> ConfidenceInterval:
    """NE on all rows with a final label."""
    losses, rows, positives = sums_by_user([predictions], objective).T
    data = (losses, np.zeros_like(losses), rows, positives)
    return _percentile_interval(data, ne_difference, seed)


def calibration_interval(
    predictions: Predictions, objective: str, seed: int = 0
) -> ConfidenceInterval:
    """Sum of predictions over sum of positives, on all rows with a final label."""
    column = predictions.objectives.index(objective)
    is_final = predictions.label_mask[:, column]
    _, user = np.unique(predictions.user_hashes[is_final], return_inverse=True)
    predicted = np.bincount(user, predictions.probabilities[is_final, column]).astype(np.float64)
    positives = np.bincount(user, predictions.labels[is_final, column]).astype(np.float64)
    return _percentile_interval((predicted, positives), ratio_of_sums, seed)


def _percentile_interval(
    sums: Sequence[Float64], statistic: Callable[..., Float64], seed: int
) -> ConfidenceInterval:
    """The statistic of sums by user (U), and its percentile bootstrap interval.

    Of fewer than two users, it may be anything.
    """
    value = float(statistic(*sums))
    if len(sums[0]) < 2:
        return ConfidenceInterval(value, -np.inf, np.inf)
    with np.errstate(invalid="ignore"):  # of the unused standard error, where a ratio is infinite
        result = bootstrap(
            sums,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=RESAMPLES_PER_BATCH,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    low, high = result.confidence_interval
    return ConfidenceInterval(value, float(low), float(high))


def ratio_of_sums(numerator: Float64, denominator: Float64, axis: int = -1) -> Float64:
    """Ratio of two sums; infinite if the denominator is zero."""
    total, divisor = np.asarray(numerator.sum(axis)), np.asarray(denominator.sum(axis))
    ratio = np.divide(total, divisor, out=np.full_like(total, np.inf), where=divisor > 0)
    return np.asarray(ratio)


def ne_difference(
    treatment: Float64, control: Float64, rows: Float64, positives: Float64, axis: int = -1
) -> Float64:
    """Difference of NE, from sums of logloss, rows and positives per user."""
    difference, count = treatment.sum(axis) - control.sum(axis), rows.sum(axis)
    rate = np.clip(positives.sum(axis) / count, ETA, 1 - ETA)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return np.asarray(difference / (count * entropy))


def sums_by_user(predictions: Sequence[Predictions], objective: str) -> Float64:
    """Sums by user (U, models + 2): the logloss of each model, then rows and positives."""
    first = predictions[0]
    column = first.objectives.index(objective)
    is_final = first.label_mask[:, column]
    labels = first.labels[is_final, column].astype(np.float64)
    _, user = np.unique(first.user_hashes[is_final], return_inverse=True)
    columns = []
    for model in predictions:
        assert (model.impression_ids == first.impression_ids).all()
        p = np.clip(model.probabilities[is_final, column], ETA, 1 - ETA)
        columns.append(-np.log(np.where(labels > 0, p, 1 - p)))
    columns += [np.ones(len(labels)), labels]
    return np.stack([np.bincount(user, column_values) for column_values in columns], 1)
