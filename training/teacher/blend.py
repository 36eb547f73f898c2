"""A teacher of several models: the mean of GEMs of several seeds, blended with trees, in logits.

The weight of the trees is prequential: it is fitted on predictions of earlier days, which were made
before the models learned those days. For that the logits of both are kept, one file a day.

n impressions, O objectives.
"""

from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.optimize import minimize_scalar
from scipy.special import logit

from etl.array_types import Float64
from etl.spec.model import DataSpec
from etl.spec.units import date_range
from etl.tables import arrow, atomic_io, label_schemas
from etl.tables.atomic_io import download
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, list_matching, resolve_uri
from training.data.label_window import LabelWindow
from training.evaluation.drift import with_final_labels
from training.evaluation.predictions import ETA


def logits_of(probabilities: Float64) -> Float64:
    """Finite logits of probabilities, of any shape."""
    return np.asarray(logit(np.clip(probabilities, ETA, 1 - ETA)))


def fit_blend_weight(gem: Float64, trees: Float64, labels: Float64) -> float:
    """The weight in [0, 1] of the trees' logits (n) with the least logloss on labels (n).

    The predictions must be prequential: made by models that had not learned from the labels.
    Logloss is convex in the weight. Without two classes there is no evidence: 0, GEM alone.
    """
    if len(np.unique(labels)) < 2:
        return 0.0

    def logloss(weight: float) -> float:
        z = blend(gem, trees, weight)
        return float((np.logaddexp(0, z) - labels * z).mean())

    best = float(minimize_scalar(logloss, bounds=(0, 1), method="bounded").x)
    return min((0.0, best, 1.0), key=logloss)  # the bounded search never tries its ends


def blend(gem: Float64, trees: Float64, weight: float | Float64) -> Float64:
    """Logits of the teacher, of the shape of both inputs: (1 - weight) gem + weight trees."""
    return (1 - weight) * gem + weight * trees


@dataclass(frozen=True)
class DayLogits:
    """Logits (n, O) of GEM and of the trees for the impressions of a day, before it was learned.

    Those of the trees are NaN for objectives without trees.
    """

    impression_ids: npt.NDArray[np.object_]
    gem: Float64
    trees: Float64

    def write(self, lake: str, day: date, spec: DataSpec) -> None:
        """Write the file of a day, atomically."""
        columns = {"impression_id": pa.array(self.impression_ids, pa.string())}
        for column, name in enumerate(spec.objectives):
            columns[f"logit_{name}"] = pa.array(self.gem[:, column])
            columns[f"trees_{name}"] = pa.array(self.trees[:, column])
        with atomic_io.replace_file(day_logits_path(lake, day)) as temporary:
            pq.write_table(pa.table(columns), temporary)


def day_logits_path(lake: str, day: date) -> StoragePath:
    """The file of the logits of a day."""
    return resolve_uri(lake, "models", "gem", "blend", f"{day}.parquet")


def blend_weights(lake: Lake, trained_until: date, day: date, blend_days: int) -> dict[str, float]:
    """The weight of the trees by objective, for scoring `day`; 0 without evidence.

    Fitted on the last `blend_days` days before `day` that were scored, on labels that were final
    when the teacher's last day of training ended.
    """
    earlier = date_range(day - timedelta(days=blend_days), trained_until)
    paths = {d: day_logits_path(lake.root, d) for d in earlier}
    logits = {d: pq.read_table(download(path)) for d, path in paths.items() if path.exists()}
    impressions = arrow.snapshot(lake, label_schemas.impressions(lake.spec))
    window = LabelWindow(0, lake.spec.day_end(trained_until))
    weights = {}
    for name in lake.spec.objectives:
        labels = ["impression_id", f"label_{name}", f"label_mature_ts_{name}"]
        rows = [
            with_final_labels(_join(impressions.read(labels, day=d), table), name, window).select(
                [f"logit_{name}", f"trees_{name}", f"label_{name}"]
            )
            for d, table in logits.items()
            if f"logit_{name}" in table.column_names  # else an upgrade has added the objective
        ]
        weights[name] = _weight_on(pa.concat_tables(rows)) if rows else 0.0
    return weights


def _join(labels: pa.Table, logits: pa.Table) -> pa.Table:
    """The rows of impressions in both tables, in the same order each time: joins use threads."""
    return labels.join(logits, "impression_id", join_type="inner").sort_by("impression_id")


def _weight_on(rows: pa.Table) -> float:
    """The weight of the trees on rows of GEM's logit, the trees' logit and the label."""
    gem, trees, label = (column.to_numpy().astype(np.float64) for column in rows.columns)
    has_trees = ~np.isnan(trees)
    return fit_blend_weight(gem[has_trees], trees[has_trees], label[has_trees])


def remove_old_day_logits(lake: str, oldest_kept: date) -> None:
    """Remove the files of days before `oldest_kept`."""
    for path in list_matching(resolve_uri(lake, "models", "gem", "blend"), "[0-9]*.parquet"):
        if path.stem < f"{oldest_kept}":
            path.unlink()
