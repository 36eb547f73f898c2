"""The LightGBM baseline: gradient-boosted trees on all features but sequences and large ids."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated

import lightgbm
import numpy as np
import numpy.typing as npt
from lightgbm.callback import CallbackEnv
from pydantic import Field
from tqdm import tqdm

from etl.array_types import Bools, Float32, Int64
from etl.errors import UserError
from etl.spec.base import StrictModel
from etl.spec.units import DaySplit, date_range
from etl.tables.lake import Lake
from training.data.label_window import LabelWindow
from training.data.partition import ExamplePartition
from training.data.reader import ExampleReader
from training.evaluation.predictions import Predictions

MIN_POSITIVES = 20  # with fewer, the base rate of an objective is predicted
EARLY_STOPPING_ROUNDS = 30


class BaselineConfig(StrictModel):
    """Hyperparameters of LightGBM, selected on a day before the test days.

    The number of trees is selected on a random `validation_fraction` of the rows; with 0,
    `num_boost_round` trees are trained. See docs/adr/0014-lightgbm-600-trees.md and
    docs/adr/0024-lightgbm-early-stopping.md.
    """

    num_boost_round: int = 800
    num_leaves: int = 31
    learning_rate: float = 0.02
    min_data_in_leaf: int = 50
    feature_fraction: float = 0.5
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    seed: int = 0

    @property
    def params(self) -> dict[str, object]:
        """Parameters of `lightgbm.train`."""
        return {
            "objective": "binary",
            "num_leaves": self.num_leaves,
            "learning_rate": self.learning_rate,
            "min_data_in_leaf": self.min_data_in_leaf,
            "feature_fraction": self.feature_fraction,
            "seed": self.seed,
            "verbose": -1,
        }


Configs = BaselineConfig | Mapping[str, BaselineConfig]  # one for all objectives, or one for each


@dataclass(frozen=True)
class TabularDataset:
    """B impressions with `features` (B, F), NaN where missing; labels and their mask are (B, O)."""

    feature_names: tuple[str, ...]
    features: Float32
    user_hashes: Int64
    surface: Int64
    labels: Float32
    label_mask: Bools
    impression_ids: npt.NDArray[np.object_]


def load_tabular(
    reader: ExampleReader,
    days: Sequence[date],
    label_window: LabelWindow,
    buckets: Iterable[int] | None = None,
) -> TabularDataset:
    """`read_tabular`; raises UserError if no impression of the days has a label in the window."""
    dataset = read_tabular(reader, days, label_window, buckets)
    if dataset is None:
        raise UserError(
            f"no impressions with a final label on {days[0]} to {days[-1]}; choose other days"
        )
    return dataset


def read_tabular(
    reader: ExampleReader,
    days: Sequence[date],
    label_window: LabelWindow,
    buckets: Iterable[int] | None = None,
) -> TabularDataset | None:
    """The inputs of GEM on some days, without histories and without ids of users and items.

    By default all buckets are read. None if no impression of the days has a label in the window.
    """
    names = feature_names_of(reader)
    buckets = range(reader.lake.spec.buckets) if buckets is None else buckets
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
        return None
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


def _per_row(partition: ExamplePartition, values: Int64) -> Int64:
    """Values of requests (R), repeated for their impressions (B)."""
    return np.repeat(values, np.diff(partition.request_offsets))


def feature_names_of(reader: ExampleReader) -> tuple[str, ...]:
    """The names of the features of `read_tabular`."""
    schema = reader.features
    widths = schema.item.vectors | schema.user.vectors | schema.context.vectors
    vectors = [f"{name}_{i}" for name, width in widths.items() for i in range(width)]
    return (
        "surface",
        *schema.user.categorical,
        *schema.context.categorical,
        *schema.item.categorical,
        *schema.user.numeric,
        *schema.numeric_columns,
        *vectors,
    )


def _feature_matrix(reader: ExampleReader, partition: ExamplePartition) -> Float32:
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
        *(column[np.arange(len(version))] for column in partition.vectors.values()),
    ]
    return np.concatenate(parts, axis=1)


def train_baseline(lake: Lake, split: DaySplit, configs: Configs) -> Predictions:
    """Train one model per objective on the training days; returns predictions of the test days."""
    reader = ExampleReader.latest(lake, max_length=0)
    train_days = list(date_range(split.train_first, split.train_last))
    train = load_tabular(reader, train_days, LabelWindow.for_training(split, lake.spec))
    test_days = list(date_range(split.test_first, split.test_last))
    test = load_tabular(reader, test_days, LabelWindow.for_test(split, lake.spec))
    boosters = fit_boosters(train, lake.spec.objectives, configs)
    columns = [
        np.asarray(boosters[name].predict(test.features))
        if name in boosters
        else np.full(len(test.surface), smoothed_rate(train, column))
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


def fit_boosters(
    train: TabularDataset, objectives: Iterable[str], configs: Configs
) -> dict[str, lightgbm.Booster]:
    """A model for each objective that has MIN_POSITIVES or more; `objectives` name the labels."""
    boosters = {}
    for column, name in enumerate(objectives):
        mask = train.label_mask[:, column]
        labels = train.labels[mask, column]
        if labels.sum() >= MIN_POSITIVES:
            config = configs if isinstance(configs, BaselineConfig) else configs[name]
            boosters[name] = fit_booster(
                train.features[mask], labels, name, train.feature_names, config
            )
    return boosters


def smoothed_rate(train: TabularDataset, column: int) -> float:
    """The positive rate of an objective, shrunk towards 1 %."""
    labels = train.labels[train.label_mask[:, column], column]
    return float((labels.sum() + 1) / (len(labels) + 100))


def fit_booster(
    features: Float32,
    labels: Float32,
    objective: str,
    feature_names: Sequence[str],
    config: BaselineConfig,
) -> lightgbm.Booster:
    """Train on all rows; the number of trees is selected on a random part of them, if any."""
    with tqdm(desc=f"lightgbm {objective}", unit="tree", disable=None) as progress:

        def show_progress(_: CallbackEnv) -> None:
            progress.update()

        rounds, names = config.num_boost_round, list(feature_names)
        if config.validation_fraction:
            random = np.random.default_rng(config.seed).random(len(labels))
            held_out = random < config.validation_fraction
            training = lightgbm.Dataset(features[~held_out], labels[~held_out], feature_name=names)
            validation = lightgbm.Dataset(features[held_out], labels[held_out], reference=training)
            stopping = lightgbm.early_stopping(EARLY_STOPPING_ROUNDS, verbose=False)
            callbacks: list[Callable[..., object]] = [show_progress, stopping]
            rounds = lightgbm.train(
                config.params, training, rounds, [validation], callbacks=callbacks
            ).best_iteration
        everything = lightgbm.Dataset(features, labels, feature_name=names)
        return lightgbm.train(config.params, everything, rounds, callbacks=[show_progress])
