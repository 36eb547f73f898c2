"""What linear layers read and hold during training: distributions to draw test inputs from.

Every few steps, inputs and output gradients of each layer update a mean and a covariance (batched
Welford), and less often the weights update a matrix normal distribution MN(M, U, V) by a flip-flop
of exponential moving averages (LoKA 2605.10886). Covariances are block-diagonal, with blocks of
BLOCK_WIDTH, so that wide layers cost little.

B rows, K inputs, N outputs, b block width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.precision.linear import forward_hooks, linear_sites

BLOCK_WIDTH = 512
MAX_ROWS = 1024  # of a batch, in an update
WEIGHTS_EVERY = 10  # probed steps between updates of the weights' distribution
WEIGHT_DECAY = 0.9  # of the moving averages of the weights
JITTER = 1e-6  # of the mean variance, added to diagonals


class GaussianStatistics(nn.Module):
    """Mean (W) and block-diagonal sums of squares (blocks, b, b) of vectors."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        block = min(width, BLOCK_WIDTH)
        padded = width + -width % block
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(padded))
        self.register_buffer("squares", torch.zeros(padded // block, block, block))

    def update(self, x: Tensor) -> None:
        """Add vectors (..., W); of many, evenly spread ones."""
        rows = x.detach().reshape(-1, self.width).float()
        rows = rows[:: max(1, -(-len(rows) // MAX_ROWS))]
        if not len(rows):
            return
        with torch.autocast(rows.device.type, enabled=False):  # hooks run within that of a layer
            self._add(rows)

    def _add(self, rows: Tensor) -> None:
        """Add vectors (B, W)."""
        rows = F.pad(rows, (0, len(self.mean) - self.width))
        total = self.count + len(rows)
        batch_mean = rows.mean(0)
        difference = batch_mean - self.mean
        centered = self._blocks(rows - batch_mean)  # (blocks, B, b)
        shift = self._blocks(difference[None])
        self.squares += centered.transpose(1, 2) @ centered
        self.squares += self.count * len(rows) / total * shift.transpose(1, 2) @ shift
        self.mean += len(rows) / total * difference
        self.count.copy_(total)

    def _blocks(self, rows: Tensor) -> Tensor:
        return torch.unflatten(rows, 1, (len(self.squares), -1)).transpose(0, 1)

    @property
    def covariance(self) -> Tensor:
        """The covariance (blocks, b, b)."""
        return self.squares / (self.count - 1).clamp(min=1)

    def sample(self, rows: int, generator: torch.Generator) -> Tensor:
        """Vectors (rows, W) of the normal distribution with this mean and covariance."""
        factor = _cholesky(self.covariance)
        noise = torch.randn(len(factor), rows, factor.shape[1], generator=generator)
        drawn = (noise @ factor.transpose(1, 2)).transpose(0, 1).flatten(1)
        return (drawn + self.mean)[:, : self.width]


class MatrixNormal(nn.Module):
    """MN(M, U, V) of a weight matrix (N, K): M (N, K), U and V block-diagonal over N and K."""

    mean: Tensor
    updates: Tensor
    row_covariance: Tensor
    column_covariance: Tensor

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.shape = outputs, inputs
        self.register_buffer("mean", torch.zeros(outputs, inputs))
        self.register_buffer("updates", torch.zeros(()))
        for name, width in (("row_covariance", outputs), ("column_covariance", inputs)):
            block = min(width, BLOCK_WIDTH)
            blocks = (width + -width % block) // block
            self.register_buffer(name, torch.eye(block).repeat(blocks, 1, 1))

    def update(self, weight: Tensor) -> None:
        """Add the weights of a step: one flip-flop, then U is scaled to a mean variance of 1."""
        weight = weight.detach().float()
        if self.updates == 0:
            self.mean.copy_(weight)
            self.column_covariance *= JITTER * weight.var().clamp(min=JITTER)
        self.updates += 1
        difference = self._padded(weight - self.mean)
        self.mean.lerp_(weight, 1 - WEIGHT_DECAY)
        outputs, inputs = self.shape
        rows = _scaled_squares(difference, self.column_covariance) / inputs
        self.row_covariance.lerp_(rows, 1 - WEIGHT_DECAY)
        columns = _scaled_squares(difference.t(), self.row_covariance) / outputs
        self.column_covariance.lerp_(columns, 1 - WEIGHT_DECAY)
        size = torch.diagonal(self.row_covariance, dim1=1, dim2=2).sum() / outputs
        size = size.clamp(min=JITTER**2)
        self.row_covariance /= size
        self.column_covariance *= size

    def _padded(self, x: Tensor) -> Tensor:
        sizes = [c.shape[0] * c.shape[1] for c in (self.row_covariance, self.column_covariance)]
        return F.pad(x, (0, sizes[1] - self.shape[1], 0, sizes[0] - self.shape[0]))

    def sample(self, generator: torch.Generator) -> Tensor:
        """A weight matrix (N, K)."""
        rows, columns = _cholesky(self.row_covariance), _cholesky(self.column_covariance)
        padded = self._padded(self.mean).shape
        noise = torch.randn(padded, generator=generator)
        noise = (rows @ noise.unflatten(0, (len(rows), -1))).flatten(0, 1)
        noise = (columns @ noise.t().unflatten(0, (len(columns), -1))).flatten(0, 1).t()
        sampled: Tensor = self.mean + noise[: self.shape[0], : self.shape[1]]
        return sampled


def _scaled_squares(difference: Tensor, covariance: Tensor) -> Tensor:
    """D C^-1 D^T of D (m, n) and block-diagonal C over n: its diagonal blocks of b rows."""
    factor = _cholesky(covariance)  # (blocks, b, b)
    parts = difference.t().unflatten(0, (len(factor), -1))  # (blocks, b, m)
    solved = torch.linalg.solve_triangular(factor, parts, upper=False).flatten(0, 1)  # (n, m)
    width = min(difference.shape[0], BLOCK_WIDTH)
    blocks = torch.unflatten(solved.t(), 0, (-1, width))  # (m / b, b, n)
    return torch.matmul(blocks, blocks.transpose(1, 2))


def _cholesky(covariance: Tensor) -> Tensor:
    """Lower factors of positive semi-definite blocks, with jitter on their diagonals."""
    mean_variance = torch.diagonal(covariance, dim1=1, dim2=2).mean().clamp(min=JITTER**2)
    eye = torch.eye(covariance.shape[1], device=covariance.device)
    factor, failed = torch.linalg.cholesky_ex(covariance + JITTER * mean_variance * eye)
    if failed.any():
        values, vectors = torch.linalg.eigh(covariance)
        values = values.clamp(min=0)[:, None] + JITTER * mean_variance
        root = vectors * values.sqrt()
        factor = torch.linalg.qr(root.transpose(1, 2)).R.transpose(1, 2)
    return cast(Tensor, factor)


class SiteProbe(nn.Module):
    """The distributions of one layer's inputs, output gradients and weights, and its rows."""

    calls: Tensor
    rows: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.inputs = GaussianStatistics(layer.in_features)
        self.gradients = GaussianStatistics(layer.out_features)
        self.weights = MatrixNormal(layer.out_features, layer.in_features)

    def add_inputs(self, x: Tensor) -> None:
        """Add the inputs (..., K) of a call."""
        self.calls += 1
        self.rows += x.numel() // self.inputs.width
        self.inputs.update(x)

    @property
    def rows_per_call(self) -> int:
        """The mean rows of a call; 0 if no call was counted, as by earlier versions."""
        return round(int(self.rows) / max(1, int(self.calls)))


class Probe(nn.Module):
    """The distributions of all layers that may have low precision, kept with the checkpoint."""

    probed_steps: Tensor

    def __init__(self, model: nn.Module, every: int) -> None:
        super().__init__()
        self.every = every
        self.layers = dict(linear_sites(model))
        self.names = list(self.layers)
        self.sites = nn.ModuleList(SiteProbe(layer) for layer in self.layers.values())
        self.register_buffer("probed_steps", torch.zeros((), dtype=torch.int64))

    def by_name(self) -> Iterator[tuple[str, SiteProbe]]:
        """Each layer's name and distributions."""
        yield from zip(self.names, cast(Any, self.sites), strict=True)

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Update the distributions with what layers do within the context, in each k-th step."""
        if step % self.every:
            yield
            return
        sites = dict(self.by_name())
        with forward_hooks(self.layers, lambda name: _recorder(sites[name])):
            yield
        if int(self.probed_steps) % WEIGHTS_EVERY == 0:
            for name, site in sites.items():
                weight = self.layers[name].weight
                with torch.autocast(weight.device.type, enabled=False):
                    site.weights.update(weight)
        self.probed_steps += 1


def _recorder(site: SiteProbe) -> Any:
    """A forward hook that records inputs, and the gradient of the output once it is known."""

    def record(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        site.add_inputs(inputs[0])
        if output.requires_grad:
            output.register_hook(site.gradients.update)

    return record
