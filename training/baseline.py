"""The LightGBM baseline: gradient-boosted trees on all features but sequences and large ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import lightgbm
import numpy as np
import numpy.typing as npt
from lightgbm.callback import CallbackEnv
from tqdm import tqdm

from etl.errors import UserError
from etl.spec.base import StrictModel
from etl.spec.units import DaySplit, date_range
from etl.tables.lake import Lake
from training.data.label_window import LabelWindow
from training.data.partition import ExamplePartition
from training.data.reader import ExampleReader
from training.evaluation.predictions import Predictions

MIN_POSITIVES = 20  # with fewer, the base rate of an objective is predicted
VALIDATION_FRACTION, EARLY_STOPPING_ROUNDS = 0.1, 30
Floats = npt.NDArray[np.float32]


class BaselineConfig(StrictModel):
    """Hyperparameters of LightGBM, selected on a day before the test days.

    See docs/adr/0014-lightgbm-600-trees.md and docs/adr/0024-lightgbm-early-stopping.md.
    """

    num_boost_round: int = 800
    num_leaves: int = 31
    learning_rate: float = 0.02
    min_data_in_leaf: int = 50
    feature_fraction: float = 0.5
    seed: int = 0


@dataclass(frozen=True)
class TabularDataset:
    """B impressions with `features` (B, F), NaN where missing; labels and their mask are (B, O)."""

    feature_names: tuple[str, ...]
    features: Floats
    user_hashes: npt.NDArray[np.int64]
    surface: npt.NDArray[np.int64]
    labels: Floats
    label_mask: npt.NDArray[np.bool_]
    impression_ids: npt.NDArray[np.object_]


def load_tabular(
    reader: ExampleReader, days: Sequence[date], label_window: LabelWindow
) -> TabularDataset:
    """The inputs of GEM on some days, without histories and without ids of users and items.

    Raises UserError if no impression of the days has a label in the window.
    """
    names = _feature_names(reader)
    buckets = range(reader.lake.spec.buckets)
    parts = [
        TabularDataset(
            feature_names=names,
            features=_feature_matrix(reader, partition),
            user_hashes=_per_row(partition, partition.user_hashes),
            surface=partition.surface,
            labels=partition.labels,
            label_mask=partition.label_mask,
            impression_ids=partition.impression_ids,
        )
        for _, partition in reader.partitions(days, buckets, label_window)
    ]
    if not parts:
        raise UserError(
            f"no impressions with a final label on {days[0]} to {days[-1]}; choose other days"
        )
    assert parts[0].features.shape[1] == len(names)
    return TabularDataset(
        feature_names=names,
        features=np.concatenate([part.features for part in parts]),
        user_hashes=np.concatenate([part.user_hashes for part in parts]),
        surface=np.concatenate([part.surface for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        label_mask=np.concatenate([part.label_mask for part in parts]),
        impression_ids=np.concatenate([part.impression_ids for part in parts]),
    )


def _per_row(partition: ExamplePartition, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Values of requests (R), repeated for their impressions (B)."""
    return np.repeat(values, np.diff(partition.request_offsets))


def _feature_names(reader: ExampleReader) -> tuple[str, ...]:
    """The columns of `_feature_matrix`."""
    schema = reader.features
    vectors = [f"{name}_{i}" for name, width in schema.item.vectors.items() for i in range(width)]
    return (
        "surface",
        *schema.user.categorical,
        *schema.context.categorical,
        *schema.item.categorical,
        *schema.user.numeric,
        *schema.numeric_columns,
        *vectors,
    )


def _feature_matrix(reader: ExampleReader, partition: ExamplePartition) -> Floats:
    """The features (B, F) of a partition."""
    schema, items = reader.features, reader.items
    version = items.versions_at(partition.item_index, _per_row(partition, partition.as_of))
    categorical = [partition.surface]
    for name in (*schema.user.categorical, *schema.context.categorical):
        categorical.append(partition.categorical[name])
    for name in schema.item.categorical:
        categorical.append(items.categorical[name][version])
    parts = [
        np.stack(categorical, 1).astype(np.float32),
        partition.user_numeric,
        items.numeric[version],
        partition.numeric,
        *(vectors[version] for vectors in items.vectors.values()),
    ]
    return np.concatenate(parts, axis=1)


def train_baseline(lake: Lake, split: DaySplit, config: BaselineConfig) -> Predictions:
    """Train one model per objective on the training days; returns predictions of the test days."""
    reader = ExampleReader.latest(lake, max_length=0)
    train_days = list(date_range(split.train_first, split.train_last))
    train = load_tabular(reader, train_days, LabelWindow.for_training(split, lake.spec))
    test_days = list(date_range(split.test_first, split.test_last))
    test = load_tabular(reader, test_days, LabelWindow.for_test(split, lake.spec))
    columns = [
        _predict_objective(train, test, column, name, config)
        for column, name in enumerate(lake.spec.objectives)
    ]
    return Predictions(
        objectives=tuple(lake.spec.objectives),
        impression_ids=test.impression_ids,
        user_hashes=test.user_hashes,
        surface=test.surface,
        probabilities=np.stack(columns, 1),
        labels=test.labels,
        label_mask=test.label_mask,
    )


def _predict_objective(
    train: TabularDataset, test: TabularDataset, column: int, objective: str, config: BaselineConfig
) -> npt.NDArray[np.float64]:
    """Probabilities (B) of the test rows; the smoothed base rate if there are few positives."""
    mask = train.label_mask[:, column]
    labels = train.labels[mask, column]
    if labels.sum() < MIN_POSITIVES:
        return np.full(len(test.surface), (labels.sum() + 1) / (len(labels) + 100))
    model = fit_booster(train.features[mask], labels, objective, train.feature_names, config)
    return np.asarray(model.predict(test.features))


def fit_booster(
    features: Floats,
    labels: Floats,
    objective: str,
    feature_names: Sequence[str],
    config: BaselineConfig,
) -> lightgbm.Booster:
    """Train on all rows; the number of trees is selected on a held-out tenth of them."""
    params = {
        "objective": "binary",
        "num_leaves": config.num_leaves,
        "learning_rate": config.learning_rate,
        "min_data_in_leaf": config.min_data_in_leaf,
        "feature_fraction": config.feature_fraction,
        "seed": config.seed,
        "verbose": -1,
    }
    names = list(feature_names)
    held_out = np.random.default_rng(config.seed).random(len(labels)) < VALIDATION_FRACTION
    training = lightgbm.Dataset(features[~held_out], labels[~held_out], feature_name=names)
    validation = lightgbm.Dataset(features[held_out], labels[held_out], reference=training)
    everything = lightgbm.Dataset(features, labels, feature_name=names)
    with tqdm(desc=f"lightgbm {objective}", unit="tree", disable=None) as progress:

        def show_progress(_: CallbackEnv) -> None:
            progress.update()

        stopping = lightgbm.early_stopping(EARLY_STOPPING_ROUNDS, verbose=False)
        best = lightgbm.train(
            params,
            training,
            config.num_boost_round,
            [validation],
            callbacks=[show_progress, stopping],
        ).best_iteration
        return lightgbm.train(params, everything, best, callbacks=[show_progress])
