"""Other models on the table of `gemline bench tabular`: same rows, same search, same stopping.

B rows, F fields, d width.
"""

from collections.abc import Iterator, Sequence

import lightgbm
import numpy as np
import torch
from torch import Tensor, nn

from training.fitting.fit import Learner, Scored, scored
from training.tabular.files import Table
from training.tabular.model import SIZE
from training.tabular.table import Rows

DCNV2 = SIZE.model_copy(update={"interaction": "dcnv2", "layers": 3})
ABSENT = "FuxiCTR is not there: pip install fuxictr"
TREES = {"objective": "binary", "learning_rate": 0.05, "num_leaves": 63, "verbose": -1}


def peers(table: Table, seeds: int) -> Iterator[tuple[str, str, Sequence[Scored]]]:
    """Key, name and test scores of each; no scores where a package is absent."""
    yield "lightgbm", "LightGBM, fields as categories", [boosted(table)]
    penalty, found = table.learned(lambda: table.tabular(DCNV2), seeds)
    yield "dcnv2", f"DCNv2 of this project, penalty {penalty:g}", found
    try:
        import fuxictr.pytorch.layers  # noqa: F401
    except ImportError:
        yield "fuxictr", "FuxiCTR's DCNv2", []
        return
    penalty, found = table.learned(lambda: FuxiCtr(table.encoding.sizes), seeds)
    yield "fuxictr", f"FuxiCTR's DCNv2, penalty {penalty:g}", found


def boosted(table: Table) -> Scored:
    """LightGBM, stopped early on the validation rows."""

    def data(rows: Rows) -> lightgbm.Dataset:
        fields = list(range(rows.ids.shape[1]))
        return lightgbm.Dataset(_columns(rows), rows.labels, categorical_feature=fields)

    model = lightgbm.train(
        TREES,
        data(table.train),
        1000,
        valid_sets=[data(table.valid)],
        callbacks=[lightgbm.early_stopping(50, verbose=False)],
    )
    predicted = np.asarray(model.predict(_columns(table.test)), np.float64)
    return scored(predicted, table.test.labels.astype(np.float64))


def _columns(rows: Rows) -> np.ndarray:
    return np.concatenate((rows.ids, rows.numbers), 1).astype(np.float64)


class FuxiCtr(Learner):
    """DCNv2, parallel, of FuxiCTR's own cross net and MLP (2008.13535); numbers are not read."""

    first: Tensor

    def __init__(self, sizes: Sequence[int]) -> None:
        from fuxictr.pytorch.layers import CrossNetV2, MLP_Block

        super().__init__()
        starts = torch.tensor([0, *sizes]).cumsum(0)
        self.register_buffer("first", starts[:-1], persistent=False)
        self.table = nn.Embedding(int(starts[-1]), SIZE.row_width)
        nn.init.normal_(self.table.weight, std=1e-4)
        width, hidden = len(sizes) * SIZE.row_width, [400, 400]
        self.cross = CrossNetV2(width, 3)
        self.deep = MLP_Block(
            width, hidden, batch_norm=True, dropout_rates=SIZE.dropout, hidden_activations="ReLU"
        )
        self.out = nn.Linear(width + hidden[-1], 1)

    @property
    def embeddings(self) -> list[Tensor]:
        """The weights of single values, which memorise."""
        return [self.table.weight]

    def forward(self, ids: Tensor, _numbers: Tensor) -> Tensor:
        """Ids (B, F) to logits (B)."""
        x = self.table(ids + self.first).flatten(1)
        return self.out(torch.cat((self.cross(x), self.deep(x)), 1))[:, 0]
