"""Predictions with the values of segments, from which calibrations are fitted and judged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from etl.array_types import Float64
from etl.spec.model import DataSpec
from ranking.inputs.segments import SegmentValues, segment_columns, segment_values
from ranking.scoring.calibration import logit
from ranking.scoring.offsets import LabeledRows, RankerCalibration
from ranking.scoring.outcome_values import OutcomeValues, concat_outcomes
from ranking.scoring.segment_calibration import SegmentCalibration, segment_calibrations
from training.data.batch import Batch
from training.evaluation.predictions import Predictions, concat_predictions, predict


@dataclass(frozen=True)
class SegmentedPredictions:
    """Predictions (B, O), the values (B) of segments, and the outcomes with values by objective."""

    predictions: Predictions
    segments: SegmentValues
    outcomes: Mapping[str, OutcomeValues] = field(default_factory=dict)

    def calibrated(self, calibration: RankerCalibration) -> "SegmentedPredictions":
        """The same with calibrated probabilities and values."""
        logits = logit(self.predictions.probabilities)
        probabilities = calibration(logits, self.segments, self.predictions.objectives)
        return replace(
            self,
            predictions=replace(self.predictions, probabilities=probabilities),
            outcomes={
                name: replace(
                    values,
                    predicted=values.predicted
                    * calibration.value_factors(values.segments, [name])[..., 0],
                )
                for name, values in self.outcomes.items()
            },
        )

    def labeled(self) -> dict[str, LabeledRows]:
        """The rows with a final label, by objective."""
        predictions, labeled = self.predictions, {}
        for column, objective in enumerate(predictions.objectives):
            is_final = predictions.label_mask[:, column]
            labeled[objective] = LabeledRows(
                predictions.probabilities[is_final, column],
                predictions.labels[is_final, column],
                {name: values[is_final] for name, values in self.segments.items()},
            )
        return labeled

    def to_arrays(self) -> dict[str, np.ndarray]:
        """What `from_arrays` reads, by name: everything but ids of impressions and users."""
        predictions = self.predictions
        arrays: dict[str, np.ndarray] = {
            "probabilities": predictions.probabilities,
            "labels": predictions.labels,
            "label_mask": predictions.label_mask,
        }
        arrays |= {f"segments/{name}": values for name, values in self.segments.items()}
        for name, outcomes in self.outcomes.items():
            arrays |= {f"predicted/{name}": outcomes.predicted, f"actual/{name}": outcomes.actual}
            arrays |= {f"segments_of/{name}/{s}": values for s, values in outcomes.segments.items()}
        return arrays

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], spec: DataSpec
    ) -> "SegmentedPredictions | None":
        """Predictions of a spec that were stored; None if its segments have changed since."""
        segments, start = spec.calibration_segments, "segments/"
        if {name for name in arrays if name.startswith(start)} != {start + s for s in segments}:
            return None
        labels, rows = arrays["labels"], len(arrays["labels"])
        predictions = Predictions(
            objectives=tuple(spec.objectives),
            impression_ids=np.full(rows, "", object),
            user_hashes=np.zeros(rows, np.int64),
            surface=np.zeros(rows, np.int64),
            probabilities=arrays["probabilities"],
            labels=labels,
            label_mask=arrays["label_mask"],
        )
        outcomes = {
            name: OutcomeValues(
                arrays[f"predicted/{name}"],
                arrays[f"actual/{name}"],
                {segment: arrays[f"segments_of/{name}/{segment}"] for segment in segments},
            )
            for name in _no_outcomes(spec)
        }
        return cls(predictions, {s: arrays[start + s] for s in segments}, outcomes)

    def segment_calibrations(self) -> list[SegmentCalibration]:
        """The calibration of each objective, on all rows and by segment."""
        return [
            calibration
            for objective, rows in self.labeled().items()
            for calibration in segment_calibrations(objective, rows)
        ]


@dataclass(frozen=True)
class BatchScores:
    """Logits (B, O) of a batch, and expected values of outcomes (B, O); NaN where unknown."""

    logits: Tensor
    outcome_values: Float64 | None = None


def predict_by_segment(
    score: Callable[[Batch], BatchScores], batches: Iterable[Batch], spec: DataSpec, num_items: int
) -> SegmentedPredictions:
    """Predictions of a function from a batch to scores; empty without batches.

    Items from index `num_items` on are new to the model.
    """
    by_batch: list[SegmentValues] = []
    outcomes = [_no_outcomes(spec)]

    def logits(batch: Batch) -> Tensor:
        segments, scores = batch_segments(batch, spec, num_items), score(batch)
        by_batch.append(segments)
        if scores.outcome_values is not None:
            outcomes.append(_outcomes_of(batch, scores.outcome_values, spec, segments))
        return scores.logits

    predictions = predict(logits, batches, list(spec.objectives))
    segments = _concat_segments(by_batch, spec.calibration_segments)
    return SegmentedPredictions(predictions, segments, concat_outcomes(outcomes))


def _no_outcomes(spec: DataSpec) -> dict[str, OutcomeValues]:
    """An entry without rows for each objective with values."""
    segments = {name: np.zeros(0, np.int64) for name in spec.calibration_segments}
    empty = OutcomeValues(np.zeros(0), np.zeros(0), segments)
    return {name: empty for name, objective in spec.objectives.items() if objective.value}


def _outcomes_of(
    batch: Batch, expected: Float64, spec: DataSpec, segments: SegmentValues
) -> dict[str, OutcomeValues]:
    """The outcomes of a batch with a final label and a prediction, by objective with values."""
    is_positive = (batch.label_mask & (batch.labels > 0)).numpy()
    actual = batch.outcome_values.double().numpy()
    outcomes = {}
    for column, (name, objective) in enumerate(spec.objectives.items()):
        if objective.value:
            rows = is_positive[:, column] & np.isfinite(expected[:, column])
            outcomes[name] = OutcomeValues(
                expected[rows, column],
                actual[rows, column],
                {segment: values[rows] for segment, values in segments.items()},
            )
    return outcomes


def concat_by_segment(parts: Sequence[SegmentedPredictions]) -> SegmentedPredictions:
    """The rows of several predictions of the same objectives and segments, in order."""
    names = list(parts[0].segments)
    segments = _concat_segments([part.segments for part in parts], names)
    predictions = concat_predictions([part.predictions for part in parts])
    outcomes = concat_outcomes(part.outcomes for part in parts)
    return SegmentedPredictions(predictions, segments, outcomes)


def _concat_segments(parts: Sequence[SegmentValues], names: Sequence[str]) -> SegmentValues:
    empty = np.zeros(0, np.int64)
    return {name: np.concatenate([empty, *(part[name] for part in parts)]) for name in names}


def batch_segments(batch: Batch, spec: DataSpec, num_items: int) -> SegmentValues:
    """The values (B) of segments of a batch; items from index `num_items` on are new."""
    request = batch.request_index.numpy()
    columns = {
        column: batch.row_categorical[column].numpy()
        if column in batch.row_categorical
        else batch.user_categorical[column].numpy()[request]
        for column in segment_columns(spec).values()
    }
    return segment_values(spec, columns, batch.item_index.numpy(), num_items)
