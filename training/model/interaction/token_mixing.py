"""RankMixer (2507.15551): tokens mixed by transposing heads, and a feed-forward net for each token.

B batch, n rows in, d row width, T tokens, D token width, h hidden width. Tokens are the first
dimension, (T, B, D), so that the nets of all tokens are one batched matrix product.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etl.errors import UserError

EXPANSION = 4  # hidden width of a token's net, by its width


def token_width(width: int, tokens: int) -> int:
    """The least D, at least twice the row width, that both the rows and the heads divide."""
    step = math.lcm(width, tokens)
    return -(-2 * width // step) * step


def mix_heads(x: Tensor) -> Tensor:
    """Token h of the result has head h of all tokens, in T heads: (T, B, D) to (T, B, D).

    A transpose without parameters; applied twice it is the identity.
    """
    tokens = len(x)
    mixed: Tensor = x.unflatten(2, (tokens, -1)).transpose(0, 2).flatten(2)
    return mixed


def tokens_to_rows(x: Tensor, width: int) -> Tensor:
    """Tokens (T, B, D), cut into rows of some width d: (T D / d, B, d)."""
    rows: Tensor = x.unflatten(2, (-1, width)).transpose(1, 2).flatten(0, 1)
    return rows


class TokenLinear(nn.Module):
    """x_t W_t + b_t with weights of its own for each token: (T, B, w) to (T, B, D)."""

    def __init__(self, tokens: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, inputs, outputs))
        nn.init.uniform_(self.weight, -(inputs**-0.5), inputs**-0.5)
        self.bias = nn.Parameter(torch.zeros(tokens, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map of each token to it."""
        return torch.baddbmm(self.bias, x, self.weight)


class TokenFFN(nn.Module):
    """W2_t GELU(W1_t x_t + a_t) + c_t for each token: (T, B, w) to (T, B, D)."""

    def __init__(self, tokens: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.up = TokenLinear(tokens, inputs, hidden)
        self.down = TokenLinear(tokens, hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the net of each token to it."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class RowTokens(nn.Module):
    """Rows (n, B, d) to tokens (T, B, D), each a linear map of some neighbouring rows.

    Rows are in semantic order, and none is divided between two tokens: the first n mod T tokens
    have one more row than the others, which are padded with zeros.
    """

    row_index: Tensor

    def __init__(self, rows: int, width: int, tokens: int, out_width: int) -> None:
        super().__init__()
        if rows < tokens:
            raise UserError(
                f"--model.mixer-tokens: {tokens} tokens cannot be made of {rows} rows; use "
                f"at most {rows}"
            )
        most = -(-rows // tokens)
        index = torch.full((tokens, most), rows)
        for token, group in enumerate(torch.arange(rows).tensor_split(tokens)):
            index[token, : len(group)] = group
        self.register_buffer("row_index", index.flatten(), persistent=False)
        self.linear = TokenLinear(tokens, most * width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        """The token of each group of rows."""
        padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
        tokens = len(self.linear.weight)
        groups = padded.index_select(0, self.row_index).unflatten(0, (tokens, -1))
        out: Tensor = self.linear(groups.transpose(1, 2).flatten(2))
        return out


class MixerBlock(nn.Module):
    """S = LN(Mix(X) + X), then LN(P(S) + S) with a net for each token: (T, B, D) to (T, B, D)."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.ffn = TokenFFN(tokens, width, EXPANSION * width, width)
        self.mix_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        mixed = self.mix_norm(mix_heads(x) + x)
        out: Tensor = self.ffn_norm(self.ffn(mixed) + mixed)
        return out


class RankMixer(nn.Module):
    """Rows to tokens, a stack of blocks, and all tokens as rows: (n, B, d) to (T D / d, B, d).

    The paper averages the tokens for its towers; here the layers above read each of them, because
    a mean hides tokens that learn nothing.
    """

    def __init__(self, rows: int, width: int, tokens: int, layers: int) -> None:
        super().__init__()
        self.width, inner = width, token_width(width, tokens)
        self.out_rows = tokens * inner // width
        self.tokens = RowTokens(rows, width, tokens, inner)
        self.blocks = nn.ModuleList(MixerBlock(tokens, inner) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Apply all blocks."""
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return tokens_to_rows(x, self.width)
