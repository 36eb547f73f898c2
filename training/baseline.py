"""The strong simple baseline: LightGBM on the same non-sequence features and counters."""

from collections.abc import Callable, Sequence
from typing import Any

import lightgbm
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from etl.spec.base import Strict
from etl.spec.units import each_day
from etl.tables.lake import Lake
from training.data.reader import Reader
from training.data.tabular import Tabular, tabulate
from training.predictions import Predictions
from training.split import Split

LEAST_POSITIVES = 20
HELD_OUT, PATIENCE = 0.1, 30
Floats = npt.NDArray[np.float32]


class BaselineConfig(Strict):
    """Sizes that were best on a day before the test; see docs/decisions.md."""

    most_trees: int = 800
    leaves: int = 31
    learning_rate: float = 0.02
    least_rows: int = 50
    feature_share: float = 0.5
    seed: int = 0


def train_baseline(lake: Lake, split: Split, config: BaselineConfig) -> Predictions:
    """One model an objective on the training days; its predictions on the test days."""
    reader = Reader.newest(lake, max_length=0)
    train_days = list(each_day(split.train_first, split.train_last))
    train = tabulate(reader, train_days, split.learning(lake.spec))
    test_days = list(each_day(split.test_first, split.test_last))
    test = tabulate(reader, test_days, split.testing(lake.spec))
    names = enumerate(lake.spec.objectives)
    columns = [_predict(train, test, number, name, config) for number, name in names]
    return Predictions(
        tuple(lake.spec.objectives),
        test.impressions,
        test.user,
        test.surface,
        np.stack(columns, 1),
        test.labels,
        test.known,
    )


def _predict(
    train: Tabular, test: Tabular, number: int, name: str, config: BaselineConfig
) -> np.ndarray:
    known = train.known[:, number]
    labels = train.labels[known, number]
    if labels.sum() < LEAST_POSITIVES:
        return np.full(len(test.surface), (labels.sum() + 1) / (len(labels) + 100))
    model = fit(train.features[known], labels, name, train.names, config)
    return np.asarray(model.predict(test.features))


def fit(
    features: Floats, labels: Floats, what: str, names: Sequence[str], config: BaselineConfig
) -> lightgbm.Booster:
    """A model of all rows, of as many trees as were best for a tenth of them held out."""
    params = {
        "objective": "binary",
        "num_leaves": config.leaves,
        "learning_rate": config.learning_rate,
        "min_data_in_leaf": config.least_rows,
        "feature_fraction": config.feature_share,
        "seed": config.seed,
        "verbose": -1,
    }
    held = np.random.default_rng(config.seed).random(len(labels)) < HELD_OUT
    data = lightgbm.Dataset(features[~held], labels[~held], feature_name=list(names))
    tenth = lightgbm.Dataset(features[held], labels[held], reference=data)
    with tqdm(desc=f"lightgbm {what}", unit="tree", disable=None) as bar:
        told: list[Callable[..., Any]] = [lambda _: bar.update()]
        stop = lightgbm.early_stopping(PATIENCE, verbose=False)
        tried = lightgbm.train(params, data, config.most_trees, [tenth], callbacks=[*told, stop])
        whole = lightgbm.Dataset(features, labels, feature_name=list(names))
        return lightgbm.train(params, whole, tried.best_iteration, callbacks=told)
