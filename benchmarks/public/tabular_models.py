"""Models of plain tables: GEM's interaction modules, and baselines trained and tuned equally.

B rows, F categorical fields, M numbers, d embedding width, T segments of numbers, n embeddings per
row.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import lightgbm
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.public.fit import (
    MEMBERS,
    BinaryClassifier,
    BinaryMetrics,
    Ensemble,
    FitConfig,
    TrainingTask,
    binary_metrics,
    predict,
    select_embedding_l2,
)
from benchmarks.public.quantile_encoding import ROWS, SEGMENTS, QuantileEmbedding
from benchmarks.public.tabular_data import FieldEncoding, TabularRows, read_csv
from benchmarks.public.target_statistics import TargetStatistics
from etl.errors import UserError
from training.model.config import GemConfig
from training.model.interaction import build_interaction
from training.model.numeric import quantile_edges

DEFAULT_CONFIG = GemConfig(
    embedding_dim=16, layers=2, fm_rows=16, linear_rows=16, rank=8, mlp_width=256, dropout=0.2
)
STREAMS = (DEFAULT_CONFIG, DEFAULT_CONFIG.model_copy(update={"interaction": "finalmlp"}))


class TabularModel(BinaryClassifier):
    """A sum of logits: a linear logit, and one per interaction stream.

    Streams read the same embeddings but make different errors, unlike a deeper stack of one kind.
    `edges` (M, T + 1) are the quantiles of the numbers, if there are any.
    """

    field_offsets: Tensor

    def __init__(
        self,
        vocabulary_sizes: Sequence[int],
        edges: Tensor | None = None,
        streams: Sequence[GemConfig] = STREAMS,
    ) -> None:
        super().__init__()
        d = streams[0].embedding_dim
        starts = torch.tensor([0, *vocabulary_sizes]).cumsum(0)
        self.register_buffer("field_offsets", starts[:-1], persistent=False)
        self.table = nn.Embedding(int(starts[-1]), d)
        self.linear = nn.Embedding(int(starts[-1]), 1)
        nn.init.normal_(self.table.weight, std=0.01)
        nn.init.zeros_(self.linear.weight)
        self.bias = nn.Parameter(torch.zeros(1))
        self.numeric = None
        if edges is not None:
            self.numeric = QuantileEmbedding(edges, d, streams[0].mlp_width)
        rows = ROWS if self.numeric else 0
        self.streams = nn.ModuleList(
            InteractionStream(len(vocabulary_sizes) + rows, config) for config in streams
        )

    @property
    def embeddings(self) -> list[Tensor]:
        """Weights of single feature values, which memorize."""
        return [self.table.weight, self.linear.weight]

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Ids (B, F) and numbers (B, M) to logits (B)."""
        rows = (ids + self.field_offsets).T
        x = self.table(rows)
        if self.numeric:
            x = torch.cat((x, self.numeric(numbers).transpose(0, 1)))
        linear: Tensor = self.linear(rows).sum(0)[:, 0] + self.bias
        return linear + torch.stack([stream(x) for stream in self.streams]).sum(0)


class InteractionStream(nn.Module):
    """An interaction module and an MLP on its output: (n, B, d) to (B)."""

    def __init__(self, rows: int, config: GemConfig) -> None:
        super().__init__()
        self.interaction = build_interaction(rows, config)
        self.head = nn.Sequential(
            nn.Linear(self.interaction.out_rows * config.embedding_dim, config.mlp_width),
            nn.LayerNorm(config.mlp_width),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.mlp_width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """One logit per row."""
        logits: Tensor = self.head(self.interaction(x).transpose(0, 1).flatten(1))[:, 0]
        return logits


@dataclass(frozen=True)
class TabularDataset:
    """The three files of a table, encoded."""

    encoding: FieldEncoding
    train: TabularRows
    valid: TabularRows
    test: TabularRows

    def with_statistics(self) -> "TabularDataset":
        """The same rows, with the statistics of the training rows' fields as further numbers."""
        sizes = tuple(self.encoding.vocabulary_sizes)
        statistics = TargetStatistics.of(sizes, self.train.ids, self.train.labels)
        return replace(
            self,
            train=self.train.with_numbers(statistics.of_training_rows()),
            valid=self.valid.with_numbers(statistics(self.valid.ids)),
            test=self.test.with_numbers(statistics(self.test.ids)),
        )

    @cached_property
    def edges(self) -> Tensor | None:
        """The quantiles (M, T + 1) of the numbers of the training rows; None without numbers."""
        numbers = torch.from_numpy(self.train.numeric)
        return quantile_edges(numbers, SEGMENTS) if numbers.shape[1] else None

    def build_member(self) -> BinaryClassifier:
        """A member of this project's model, of two streams of interactions."""
        return self.build_model(*STREAMS)

    def validation_score(self, build_member: "MemberBuilder") -> float:
        """The score of one member on the validation rows, with the default penalty."""
        task = TrainingTask(partial(build_member, self), self.train, self.valid)
        return task.fit(FitConfig(), 0)[1].selection_score

    def train_and_score(
        self, build_member: "MemberBuilder", seeds: int
    ) -> tuple[float, list[BinaryMetrics]]:
        """The penalty selected on the validation rows, and metrics of MEMBERS on the test rows.

        Metrics are by seed. The penalty is selected with one member: a search with all of them
        takes as many times as long.
        """
        make_member = partial(build_member, self)
        config = select_embedding_l2(TrainingTask(make_member, self.train, self.valid))
        task = TrainingTask(lambda: Ensemble(make_member, MEMBERS), self.train, self.valid)
        models = (task.fit(config, 1 + seed)[0] for seed in range(seeds))
        return config.embedding_l2, [binary_metrics(*predict(model, self.test)) for model in models]

    def build_model(self, *streams: GemConfig) -> BinaryClassifier:
        """A model with some streams of interactions."""
        return TabularModel(self.encoding.vocabulary_sizes, self.edges, streams)


MemberBuilder = Callable[[TabularDataset], BinaryClassifier]


def read_dataset(folder: Path, label: str, numeric: Collection[str]) -> TabularDataset:
    """The three files of a folder, encoded by train.csv. Raises UserError if they do not fit."""
    tables = {name: read_csv(folder, f"{name}.csv") for name in ("train", "valid", "test")}
    encoding = FieldEncoding.from_train(tables["train"], label, numeric)
    rows = {name: encoding(table, f"{name}.csv") for name, table in tables.items()}
    for name, encoded in rows.items():
        if len(np.unique(encoded.labels)) < 2:
            raise UserError(f"{name}.csv: the label {label} must be 0 in some rows and 1 in others")
    return TabularDataset(encoding, **rows)


def select_inputs(
    dataset: TabularDataset, build_member: MemberBuilder
) -> tuple[TabularDataset, bool]:
    """The dataset with or without statistics, by validation score, and whether it has them.

    Statistics help where values come back, and mislead where the validation rows differ from the
    training rows, as later rows may.
    """
    if not dataset.train.ids.shape[1]:
        return dataset, False
    extended = dataset.with_statistics()
    if extended.validation_score(build_member) > dataset.validation_score(build_member):
        return extended, True
    return dataset, False


DCNV2_CONFIG = DEFAULT_CONFIG.model_copy(
    update={"interaction": "dcnv2", "parallel_interaction": None, "layers": 3}
)
FUXICTR_MISSING = "FuxiCTR is not installed: pip install fuxictr"
LIGHTGBM_PARAMS = {"objective": "binary", "learning_rate": 0.05, "num_leaves": 63, "verbose": -1}


def score_peer(
    dataset: TabularDataset, peer: str, seeds: int
) -> tuple[str, Sequence[BinaryMetrics]]:
    """Name and test metrics of a baseline, by seed; no metrics if its package is missing.

    Neural ones have as many members as this project's model, and are searched as it is.
    """
    if peer == "lightgbm":
        return "LightGBM, fields as categories", [lightgbm_score(dataset)]
    if peer == "dcnv2":
        inputs, has_statistics = select_inputs(dataset, build_dcnv2)
        penalty, metrics = inputs.train_and_score(build_dcnv2, seeds)
        return title_of("DCNv2 of this project", penalty, has_statistics), metrics
    try:
        import fuxictr.pytorch.layers  # noqa: F401
    except ImportError:
        return "FuxiCTR's DCNv2", []
    penalty, metrics = dataset.train_and_score(build_fuxictr, seeds)  # statistics are numbers
    return title_of("FuxiCTR's DCNv2", penalty, has_statistics=False), metrics


def title_of(name: str, penalty: float, has_statistics: bool) -> str:
    """A neural model with its members, and what was selected on the validation rows."""
    title = f"{MEMBERS} x {name}, penalty {penalty:g}"
    return f"{title}, statistics of values" if has_statistics else title


def build_dcnv2(dataset: TabularDataset) -> BinaryClassifier:
    """A member of this project's DCNv2."""
    return dataset.build_model(DCNV2_CONFIG)


def build_fuxictr(dataset: TabularDataset) -> BinaryClassifier:
    """A member of FuxiCTR's DCNv2."""
    return FuxiCtrDCNv2(dataset.encoding.vocabulary_sizes)


def lightgbm_score(dataset: TabularDataset) -> BinaryMetrics:
    """LightGBM, stopped early on the validation rows."""

    def data(rows: TabularRows) -> lightgbm.Dataset:
        fields = list(range(rows.ids.shape[1]))
        return lightgbm.Dataset(_columns(rows), rows.labels, categorical_feature=fields)

    model = lightgbm.train(
        LIGHTGBM_PARAMS,
        data(dataset.train),
        1000,
        valid_sets=[data(dataset.valid)],
        callbacks=[lightgbm.early_stopping(50, verbose=False)],
    )
    predicted = np.asarray(model.predict(_columns(dataset.test)), np.float64)
    return binary_metrics(predicted, dataset.test.labels.astype(np.float64))


def _columns(rows: TabularRows) -> np.ndarray:
    return np.concatenate((rows.ids, rows.numeric), 1).astype(np.float64)


class FuxiCtrDCNv2(BinaryClassifier):
    """Parallel DCNv2 (2008.13535) of FuxiCTR's cross network and MLP; numbers are not read."""

    field_offsets: Tensor

    def __init__(self, sizes: Sequence[int]) -> None:
        from fuxictr.pytorch.layers import CrossNetV2, MLP_Block

        super().__init__()
        starts = torch.tensor([0, *sizes]).cumsum(0)
        self.register_buffer("field_offsets", starts[:-1], persistent=False)
        self.table = nn.Embedding(int(starts[-1]), DEFAULT_CONFIG.embedding_dim)
        nn.init.normal_(self.table.weight, std=1e-4)
        width, hidden = len(sizes) * DEFAULT_CONFIG.embedding_dim, [400, 400]
        self.cross = CrossNetV2(width, 3)
        self.deep = MLP_Block(
            width,
            hidden,
            batch_norm=True,
            dropout_rates=DEFAULT_CONFIG.dropout,
            hidden_activations="ReLU",
        )
        self.head = nn.Linear(width + hidden[-1], 1)

    @property
    def embeddings(self) -> list[Tensor]:
        """Weights of single feature values, which memorize."""
        return [self.table.weight]

    def forward(self, ids: Tensor, _numbers: Tensor) -> Tensor:
        """Ids (B, F) to logits (B)."""
        x = self.table(ids + self.field_offsets).flatten(1)
        logits: Tensor = self.head(torch.cat((self.cross(x), self.deep(x)), 1))[:, 0]
        return logits
