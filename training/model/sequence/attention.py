"""Multi-head attention over ragged sequences. N positions, W width, H heads, D = W / H."""

from torch import Tensor, nn

from training.model.sequence.rotary import Turn
from training.ops.attention import CAUSAL, SOFTMAX, Kind, attention


def heads_of(x: Tensor, heads: int) -> Tensor:
    """(N, W) to (N, H, D)."""
    return x.unflatten(1, (heads, x.shape[1] // heads))


class Attention(nn.Module):
    """From queries (Nq, W) to keys (Nk, W) of the same sequence."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        q_offsets: Tensor,
        kv_offsets: Tensor,
        kind: Kind = SOFTMAX,
        limits: Tensor | None = None,
    ) -> Tensor:
        """(Nq, W); see `training.ops.attention`."""
        q = heads_of(self.q(queries), self.heads)
        k, v = heads_of(self.k(keys), self.heads), heads_of(self.v(keys), self.heads)
        found = attention(q, k, v, q_offsets, kv_offsets, kind, limits=limits)
        return self.out(found.flatten(1))


class SelfAttention(nn.Module):
    """From each event to those before it, in a window or to all."""

    def __init__(self, width: int, heads: int, window: int | None) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, events: Tensor, offsets: Tensor, turn: Turn | None = None) -> Tensor:
        """(N, W) to (N, W)."""
        q, k, v = (heads_of(x, self.heads) for x in self.qkv(events).chunk(3, 1))
        if turn:
            q, k = turn(q), turn(k)
        return self.out(attention(q, k, v, offsets, offsets, CAUSAL, self.window).flatten(1))
