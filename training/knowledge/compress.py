"""GEM's view of an impression in few bits (LoopFM, 2605.29280, section 3.2).

n impressions, M width of GEM's hidden layer, Z width of what is kept.
"""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from etl.tables import atomic_io
from etl.tables.atomic_io import download
from etl.tables.place import Place
from features.four_bits import HALF
from features.inputs import KEPT_WIDTH
from training.model.numeric import RunningScale

PREFIXES = (8, 16, KEPT_WIDTH)  # each tells as much as so few numbers can
STEPS, ROWS, RATE = 400, 512, 2e-3


class Compressor(nn.Module):
    """To Z numbers between -1 and 1, of which each prefix of `PREFIXES` is the best of its length.

    Prefixes are nested (Matryoshka, 2205.13147): a reader may take the first eight. Training adds
    the noise of four bits.
    """

    def __init__(self, given: int) -> None:
        super().__init__()
        self.scale = RunningScale(given)
        self.encode = nn.Sequential(
            nn.Linear(given, 2 * KEPT_WIDTH), nn.SiLU(), nn.Linear(2 * KEPT_WIDTH, KEPT_WIDTH)
        )
        self.decode = nn.Linear(KEPT_WIDTH, given)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden layers (n, M) to what is kept of them (n, Z)."""
        return torch.tanh(self.encode(self.scale(hidden)))

    def loss(self, hidden: Tensor) -> Tensor:
        """Mean squared errors of what the prefixes tell, summed."""
        wanted = self.scale(hidden)
        kept = torch.tanh(self.encode(wanted))
        noisy = kept + (torch.rand_like(kept) - 0.5) / HALF
        place = torch.arange(KEPT_WIDTH)
        losses = [F.mse_loss(self.decode(noisy * (place < n)), wanted) for n in PREFIXES]
        return torch.stack(losses).sum()


def fit(compressor: Compressor, hidden: Tensor, seed: int) -> None:
    """Learn from hidden layers (n, M); goes on from where an earlier day's fit ended."""
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(compressor.parameters(), RATE)
    compressor.train()
    for _ in range(STEPS):
        rows = hidden[torch.randint(len(hidden), (ROWS,))]
        optimizer.zero_grad()
        compressor.loss(rows).backward()
        optimizer.step()
    compressor.eval()


def save(compressor: Compressor, path: Place) -> None:
    """Write it, whole or not at all."""
    with atomic_io.replace_file(path) as temporary:
        save_file(compressor.state_dict(), temporary)


def load(path: Place) -> Compressor:
    """A compressor that was saved."""
    state = load_file(download(path))
    compressor = Compressor(len(state["scale.mean"]))
    compressor.load_state_dict(state)
    return compressor.eval()
