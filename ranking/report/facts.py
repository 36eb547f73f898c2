"""The numbers of a report: all of them come from the tables and files of the run."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etl.tables import arrow, contracts
from etl.tables.atomic_io import download
from etl.tables.lake import Lake
from etl.tables.place import listed, place
from training.loop.metrics import Score, score
from training.predictions import Predictions, evaluation_path, joined
from training.split import Split

NAMES = {
    "bound": "truth (bound)",
    "gem": "GEM",
    "lightgbm": "LightGBM",
    "student": "student, labels only",
    "distilled": "student, distilled",
}


@dataclass(frozen=True)
class Compared:
    """A model's scores against another's: the mean difference in logloss, and its half interval.

    Negative is better; the interval (95 %) is of paired rows.
    """

    surface: str
    objective: str
    rows: int
    difference: float
    half: float


def flow(lake: Lake) -> list[dict[str, object]]:
    """What became of each day's records."""
    rows = arrow.snapshot(lake, contracts.flow(lake.spec)).read()
    return rows.sort_by("day").to_pylist()


def quarantined(lake: Lake) -> list[tuple[str, int]]:
    """Records by reason, the most frequent first."""
    rows = arrow.snapshot(lake, contracts.quarantine(lake.spec)).read(["reasons"])
    counts = pc.value_counts(rows["reasons"].combine_chunks().flatten()).to_pylist()
    return sorted(((c["values"], c["counts"]) for c in counts), key=lambda c: -c[1])


def parked(lake: Lake) -> list[tuple[str, int, int]]:
    """Events that are not used, by reason; and of how many users."""
    rows = arrow.snapshot(lake, contracts.parked(lake.spec)).read(["reason", "user_id"])
    counts = rows.group_by("reason").aggregate(
        [("user_id", "count"), ("user_id", "count_distinct")]
    )
    told = counts.sort_by([("user_id_count", "descending")]).to_pylist()
    return [(row["reason"], row["user_id_count"], row["user_id_count_distinct"]) for row in told]


def measured(lake: Lake, scores: dict[str, list[Score]]) -> list[str]:
    """Objectives that some model was measured on, in the order of the spec."""
    there = {s.objective for rows in scores.values() for s in rows if not np.isnan(s.ne)}
    return [name for name in lake.spec.objectives if name in there]


def predictions(lake: Lake, raw: str, split: Split) -> dict[str, Predictions]:
    """Test predictions of each model that has any; the truth's where the raw folder tells it.

    Raises UserError where some are of other days than the split's.
    """
    found = {
        name: Predictions.read(path, split)
        for name in ("gem", "lightgbm")
        if (path := evaluation_path(lake.root, name)).is_file()
    }
    for variant in ("student", "distilled"):
        paths = [evaluation_path(lake.root, f"{variant}-{s}") for s in lake.spec.ad_surfaces]
        parts = [Predictions.read(path, split) for path in paths if path.is_file()]
        if parts:
            found[variant] = joined(parts)
    truth = true_probabilities(found["gem"], raw) if "gem" in found else None
    return ({"bound": truth} if truth else {}) | found


def true_probabilities(gem: Predictions, raw: str) -> Predictions | None:
    """The rows of `gem` with the simulator's true probabilities; None for real logs."""
    paths = listed(place(raw, "truth"), "day=*.parquet")
    if not paths:
        return None
    table = pa.concat_tables(pq.read_table(download(path)) for path in paths)
    at = pc.index_in(
        pa.array(gem.impressions, pa.string()), table["impression_id"].combine_chunks()
    )
    known = at.is_valid().to_numpy(zero_copy_only=False)
    rows = table.take(at.filter(pa.array(known)))
    p = np.stack([rows[f"p_{name}"].to_numpy() for name in gem.objectives], 1)
    return Predictions(
        gem.objectives,
        gem.impressions[known],
        gem.user[known],
        gem.surface[known],
        p,
        gem.labels[known],
        gem.known[known],
    )


def scores(lake: Lake, found: dict[str, Predictions]) -> dict[str, list[Score]]:
    """NE, AUC and calibration of each model by surface and objective."""
    surfaces, objectives = list(lake.spec.surfaces), list(lake.spec.objectives)
    return {
        name: score(p.probability, p.labels, p.known, p.surface, surfaces, objectives)
        for name, p in found.items()
    }


def compare(lake: Lake, one: Predictions, other: Predictions) -> list[Compared]:
    """Differences in logloss, one less other, on the rows that both have.

    Left out is where all outcomes are the same: no sampling error could be told from them.
    """
    order = np.argsort(other.impressions.astype(str))
    at = order[np.searchsorted(other.impressions.astype(str)[order], one.impressions.astype(str))]
    assert (other.impressions[at] == one.impressions).all(), "the models saw other rows"
    rows = []
    for name, code in (("all", None), *lake.spec.surface_codes.items()):
        here = np.ones(len(at), bool) if code is None else one.surface == code
        for i, objective in enumerate(one.objectives):
            known = here & one.known[:, i]
            y = one.labels[known, i]
            if len(np.unique(y)) > 1:
                gap = logloss(one.probability[known, i], y)
                gap = gap - logloss(other.probability[at][known, i], y)
                half = 1.96 * gap.std() / np.sqrt(len(gap))
                rows.append(Compared(name, objective, len(gap), float(gap.mean()), float(half)))
    return rows


def logloss(p: npt.NDArray[np.float64], y: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The cross-entropy of each row."""
    p = np.clip(p, 1e-12, 1 - 1e-12)
    return np.asarray(-np.where(y > 0, np.log(p), np.log1p(-p)))
