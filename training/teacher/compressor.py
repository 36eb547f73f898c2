"""GEM's hidden layer in few bits: a learned, nested, 4-bit embedding (LoopFM, 2605.29280).

n impressions, M width of GEM's hidden layer, Z width of the compressed embedding.
"""

import hashlib

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from etl.array_types import Float64
from etl.tables import atomic_io
from etl.tables.atomic_io import download
from etl.tables.uri import StoragePath
from features.encoding.scalar import INT4_ZERO_POINT
from features.schema import TEACHER_EMBEDDING_WIDTH
from training.model.numeric import RunningStandardizer
from training.trainer.state import Manifest

MATRYOSHKA_WIDTHS = (8, 16, TEACHER_EMBEDDING_WIDTH)
STEPS, BATCH_SIZE, LEARNING_RATE = 400, 512, 2e-3
MAX_FIT_ROWS = 65_536  # hidden layers of a day from which the batches are drawn


class EmbeddingCompressor(nn.Module):
    """An autoencoder to Z numbers in [-1, 1] whose prefixes are also embeddings.

    Prefixes of `MATRYOSHKA_WIDTHS` are also trained to reconstruct the hidden layer (Matryoshka,
    2205.13147), so that a reader may use only the first eight numbers. Training adds the rounding
    noise of 4-bit quantization.
    """

    def __init__(self, input_width: int) -> None:
        super().__init__()
        self.scale = RunningStandardizer(input_width)
        self.encoder = nn.Sequential(
            nn.Linear(input_width, 2 * TEACHER_EMBEDDING_WIDTH),
            nn.SiLU(),
            nn.Linear(2 * TEACHER_EMBEDDING_WIDTH, TEACHER_EMBEDDING_WIDTH),
        )
        self.decoder = nn.Linear(TEACHER_EMBEDDING_WIDTH, input_width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden layers (n, M) to embeddings (n, Z)."""
        return torch.tanh(self.encoder(self.scale(hidden)))

    def loss(self, hidden: Tensor) -> Tensor:
        """Mean squared errors of the reconstructions from all prefixes, summed."""
        target = self.scale(hidden)
        embedding = torch.tanh(self.encoder(target))
        noisy = embedding + (torch.rand_like(embedding) - 0.5) / INT4_ZERO_POINT
        index = torch.arange(TEACHER_EMBEDDING_WIDTH)
        losses = [
            F.mse_loss(self.decoder(noisy * (index < width)), target) for width in MATRYOSHKA_WIDTHS
        ]
        return torch.stack(losses).sum()


class RowSample:
    """A uniform sample of rows (n, M) that are added batch by batch, at most `max_rows` of them.

    The rows have random keys, and those with the least keys are the sample: the same one for the
    same seed and rows, however they are batched. At most `2 * max_rows` and a batch are in memory.
    """

    def __init__(self, max_rows: int, seed: int) -> None:
        self._max_rows = max_rows
        self._random = np.random.default_rng(seed)
        self._largest_key = 1.0
        self._keys: list[Float64] = []
        self._rows: list[Tensor] = []

    @property
    def num_rows(self) -> int:
        """The number of rows in memory."""
        return sum(map(len, self._rows))

    def add(self, rows: Tensor) -> None:
        """Add rows (n, M); those that may be in the sample are copied."""
        keys = self._random.random(len(rows))
        candidates = keys <= self._largest_key
        self._keys.append(keys[candidates])
        self._rows.append(rows[torch.from_numpy(candidates)])
        if self.num_rows > 2 * self._max_rows:
            self._drop_others()

    def rows(self) -> Tensor:
        """The sample, in the order in which its rows were added."""
        self._drop_others()
        return self._rows[0]

    def _drop_others(self) -> None:
        keys, rows = np.concatenate(self._keys), torch.cat(self._rows)
        if len(keys) > self._max_rows:
            sampled = np.sort(np.argpartition(keys, self._max_rows - 1)[: self._max_rows])
            keys, rows = keys[sampled], rows[torch.from_numpy(sampled)]
            self._largest_key = float(keys.max())
        self._keys, self._rows = [keys], [rows]


def compressor_version(manifest: Manifest) -> str:
    """The compressor of a GEM: one for all days of the same training.

    It is named by the first day and the settings with which the training starts. Days that continue
    it and upgrades keep the name, also with a larger item table or longer histories, because the
    hidden layer stays the same one.
    """
    training = manifest.training
    identity = repr((sorted(training.resume_invariants().items()), training.seed))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:6]
    return manifest.compressor_version or f"{manifest.trained_from:%Y%m%d}-{digest}"


def fit_compressor(compressor: EmbeddingCompressor, hidden: Tensor, seed: int) -> None:
    """Train on hidden layers (n, M), continuing from the compressor's current weights."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(compressor.parameters(), LEARNING_RATE)
    compressor.train()
    for _ in range(STEPS):
        rows = hidden[torch.randint(len(hidden), (BATCH_SIZE,))]
        optimizer.zero_grad()
        torch.autograd.backward(compressor.loss(rows))
        optimizer.step()
    compressor.eval()


def save_compressor(compressor: EmbeddingCompressor, path: StoragePath) -> None:
    """Write the weights as a safetensors file, atomically."""
    with atomic_io.replace_file(path) as temporary:
        save_file(compressor.state_dict(), temporary)


def load_compressor(path: StoragePath) -> EmbeddingCompressor:
    """Load the compressor of a file, in eval mode."""
    state = load_file(download(path))
    compressor = EmbeddingCompressor(len(state["scale.mean"]))
    compressor.load_state_dict(state)
    return compressor.eval()
