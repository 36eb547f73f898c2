"""Edges of numeric encodings: fitted for new numbers, and updated where values have drifted."""

from itertools import compress
from typing import cast

import torch
from torch import Tensor

from etl.tables.lake import Lake
from training.data.batch import InputStatistics
from training.data.reader import ExampleReader
from training.model.gem import Gem
from training.model.numeric import NumericEmbedding
from training.model.weights import full_values, set_values
from training.trainer.resume import latest_statistics
from training.trainer.state import TrainState


def fit_numbers_of_day(lake: Lake, reader: ExampleReader, state: TrainState) -> None:
    """Before the first batch of a day, fit edges of numbers to the rows that are trained next.

    Numbers that had one value or none until now get their first edges: weights of their encodings
    are zero, so that this changes no prediction. With `update_edges`, edges that are no longer
    quantiles, such as those of weekly counts in the first days of a log, are replaced; predictions
    of values at the new edges stay the same. If only labels of earlier days became final on the
    day, the rows are those of the latest of these days.
    """
    manifest, core = state.manifest, state.model.core
    encodings = core.candidate_numeric.encoding, core.user_numeric.encoding
    is_constant = torch.cat([encoding.is_constant for encoding in encodings]).tolist()
    constant = compress(manifest.features.all_numeric_columns, is_constant)
    unfitted = {*manifest.unfitted_numbers, *constant}
    is_later_day = manifest.steps > 0 and manifest.batches == 0
    updates_edges = manifest.training.update_edges and is_later_day
    if not (unfitted or updates_edges):
        return
    statistics = latest_statistics(lake, reader, manifest, manifest.trained_until)
    if statistics is None:
        return
    if updates_edges:
        move_edges(state, statistics)
    for model in (core, cast("Gem", state.ema.module)):
        model.fit_numbers(statistics, unfitted)
    state.manifest = manifest.model_copy(update={"unfitted_numbers": ()})


def move_edges(state: TrainState, statistics: InputStatistics) -> None:
    """Move the edges that are no longer quantiles, in a model and in its average."""
    core, average = state.model.core, cast("Gem", state.ema.module)
    for module, averaged, values in (
        (core.candidate_numeric, average.candidate_numeric, statistics.row_numeric),
        (core.user_numeric, average.user_numeric, statistics.user_numeric),
    ):
        features = module.encoding.is_outdated(values).nonzero()[:, 0]
        if len(features):
            averaged.move_edges(values, features)
            module.move_edges(values, features)
            _restart_moments(state.optimizer, module, features)


def _restart_moments(
    optimizer: torch.optim.Optimizer, module: NumericEmbedding, features: Tensor
) -> None:
    """Reset the moments of moved segments: the first to zero, the second to the feature's mean."""
    moments = optimizer.state.get(module.piecewise, {})
    if "exp_avg" not in moments:
        return
    average, squares = (full_values(moments[name]).clone() for name in ("exp_avg", "exp_avg_sq"))
    average[features] = 0.0
    squares[features] = squares[features].mean(1, keepdim=True).expand_as(squares[features])
    set_values(moments["exp_avg"], average)
    set_values(moments["exp_avg_sq"], squares)
