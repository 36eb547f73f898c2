"""Probabilities of simulated impressions at the served position, compared with the true ones there.

The simulator's truth is at the logged positions; its effect of a position on the logits is known.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.studies.refit_predictions import ServedRows
from etl.array_types import Float64
from etl.simulator.ads import CLICK_POSITION, LONG_VIEW_POSITION
from etl.simulator.config import SURFACES
from etl.spec.model import DataSpec
from etl.tables import schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from ranking.report.data import true_probabilities
from ranking.scoring.calibration import logit, sigmoid


def true_at_served_position(rows: ServedRows, spec: DataSpec, surface: str, raw: Path) -> Float64:
    """The true probabilities (n, O) of served rows, had they been at the served position."""
    predictions = rows.predictions.predictions
    truth = true_probabilities(predictions, str(raw))
    assert truth is not None and spec.position_bias is not None
    assert (truth.impression_ids == predictions.impression_ids).all()
    logged, position = truth.probabilities, rows.positions
    moved = position - spec.position_bias.served_position
    column = {name: i for i, name in enumerate(predictions.objectives)}
    click_effect = CLICK_POSITION[SURFACES.index(surface)]
    at_served = logged.copy()
    for name, effect in (("click", click_effect), ("long_view", LONG_VIEW_POSITION)):
        at_served[:, column[name]] = sigmoid(logit(logged[:, column[name]]) - effect * moved)
    clicks = at_served[:, column["click"]] / logged[:, column["click"]]
    at_served[:, column["conversion"]] = logged[:, column["conversion"]] * clicks
    return at_served


def share_of_logged_outcomes(lake: Lake, raw: Path) -> Float64:
    """Positives over their true expectation (O), of all final labels of a lake.

    Some outcomes are logged too late to count as labels. All days are used, so that the share is
    not that of the rows which are judged by it.
    """
    names = list(lake.spec.objectives)
    table = snapshot(lake, schemas.table_schema(lake.spec, "impressions"))
    stored = table.read(["impression_id", *(f"label_{name}" for name in names)])
    paths = sorted((raw / "truth").glob("day=*.parquet"))
    truth = pa.concat_tables(pq.read_table(path) for path in paths)
    joined = stored.join(truth, "impression_id", join_type="inner")
    shares = []
    for name in names:
        final = joined.filter(pc.is_valid(joined[f"label_{name}"]))
        shares.append(pc.sum(final[f"label_{name}"]).as_py() / pc.sum(final[f"p_{name}"]).as_py())
    return np.array(shares)
