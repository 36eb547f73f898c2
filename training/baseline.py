"""The strong simple baseline: LightGBM on the same non-sequence features and counters."""

import lightgbm
import numpy as np
from tqdm import tqdm

from etl.spec.base import Strict
from etl.spec.units import each_day
from etl.tables.lake import Lake
from training.data.reader import Reader
from training.data.tabular import Tabular, tabulate
from training.predictions import Predictions
from training.split import Split

LEAST_POSITIVES = 20


class BaselineConfig(Strict):
    """Sizes that were best on a day before the test; see docs/decisions.md."""

    trees: int = 600
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
    params = {
        "objective": "binary",
        "num_leaves": config.leaves,
        "learning_rate": config.learning_rate,
        "min_data_in_leaf": config.least_rows,
        "feature_fraction": config.feature_share,
        "seed": config.seed,
        "verbose": -1,
    }
    data = lightgbm.Dataset(train.features[known], labels, feature_name=list(train.names))
    with tqdm(total=config.trees, desc=f"lightgbm {name}", unit="tree", disable=None) as bar:
        model = lightgbm.train(params, data, config.trees, callbacks=[lambda _: bar.update()])
    return np.asarray(model.predict(test.features))
