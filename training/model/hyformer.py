"""HyFormer (2601.12681): tokens of all features that decode the events, then mix, in each layer.

B candidates, R requests, n rows, d row width, k event groups, N queries of each, T = k N + M tokens
of which M are made of rows, D token width, W width of events.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from etl.errors import UserError
from training.model.config import GemConfig
from training.model.interaction import build_single_interaction
from training.model.interaction.token_mixing import (
    EXPANSION,
    RowTokens,
    TokenFFN,
    mix_heads,
    token_width,
    tokens_to_rows,
)
from training.model.sequence.attention import Attention
from training.model.sequence.pyramid import EncodedEvents
from training.model.sequence.target_attention import candidate_offsets
from training.ops.ragged import segment_ids


class SequenceLevels(NamedTuple):
    """The events of each group before the first sequence layer and after each one.

    `request` (B) is the number of the sequence that belongs to each candidate; it is sorted.
    """

    levels: list[list[EncodedEvents]]
    request: Tensor


def mean_of_events(encoded: EncodedEvents) -> Tensor:
    """The mean event (R, W) of each sequence; zeros for an empty one."""
    events, counts = encoded.events, encoded.offsets.diff()
    sequence = segment_ids(encoded.offsets, len(events))
    sums = events.new_zeros(len(counts), events.shape[1]).index_add(0, sequence, events)
    return sums / counts.clamp(min=1)[:, None]


class HyFormerLayer(nn.Module):
    """Queries decode the events of their group; then all tokens mix: X + P(LN(Mix(X))).

    P has a net for each token. The decoded queries replace the queries, as in the paper; those of
    an empty sequence are the bias of the attention's output.
    """

    def __init__(self, tokens: int, width: int, event_widths: Sequence[int], heads: int) -> None:
        super().__init__()
        self.decoders = nn.ModuleList(Attention(w, heads, width) for w in event_widths)
        self.norm = nn.LayerNorm(width)
        self.ffn = TokenFFN(tokens, width, EXPANSION * width, width)

    def forward(
        self,
        queries: Sequence[Tensor],
        fields: Tensor,
        sequences: Sequence[EncodedEvents],
        offsets: Tensor,
    ) -> Tensor:
        """Queries (N, B, D) of each group and field tokens (M, B, D) to all tokens (T, B, D).

        `offsets` (R + 1) cut the candidates into requests.
        """
        decoded = [
            self._decode(cast("Attention", decoder), query, sequence, offsets)
            for decoder, query, sequence in zip(self.decoders, queries, sequences, strict=True)
        ]
        x = torch.cat((*decoded, fields))
        out: Tensor = x + self.ffn(self.norm(mix_heads(x)))
        return out

    def _decode(
        self, decoder: Attention, queries: Tensor, encoded: EncodedEvents, offsets: Tensor
    ) -> Tensor:
        """Attention of queries (N, B, D) to the events of their request."""
        count = len(queries)
        flat = queries.transpose(0, 1).flatten(0, 1)
        attended: Tensor = decoder(flat, encoded.events, count * offsets, encoded.offsets)
        by_query: Tensor = attended.unflatten(0, (-1, count)).transpose(0, 1)
        return by_query


class HyFormer(nn.Module):
    """An interaction module over rows and events: rows (n, B, d) to (m, B, d).

    The queries are made once, by a net for each, of the field tokens and the mean event of their
    group. Layer l decodes the output of sequence layer l, or of the last one. The layers above read
    all tokens, in the paper only the queries. With `parallel_interaction` the rows of a second
    module, which reads no events, follow.
    """

    def __init__(self, rows: int, event_widths: Sequence[int], config: GemConfig) -> None:
        super().__init__()
        tokens, d = config.mixer_tokens, config.embedding_dim
        self.num_queries = config.hyformer_queries
        fields = tokens - self.num_queries * len(event_widths)
        if fields < 1:
            raise UserError(
                f"--model.mixer-tokens {tokens}: must be more than --model.hyformer-queries "
                f"{self.num_queries} times {len(event_widths)} event groups"
            )
        self.width, inner = d, token_width(d, tokens)
        self.field_tokens = RowTokens(rows, d, fields, inner)
        self.query_ffns = nn.ModuleList(
            TokenFFN(self.num_queries, fields * inner + w, EXPANSION * inner, inner)
            for w in event_widths
        )
        self.layers = nn.ModuleList(
            HyFormerLayer(tokens, inner, event_widths, config.heads) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(inner)
        self.parallel = (
            build_single_interaction(config.parallel_interaction, rows, config)
            if config.parallel_interaction
            else None
        )
        self.out_rows = tokens * inner // d + (self.parallel.out_rows if self.parallel else 0)

    def forward(self, x: Tensor, sequences: SequenceLevels) -> Tensor:
        """Rows of the tokens, then those of the second module."""
        levels, request = sequences
        offsets = candidate_offsets(request, levels[0][0].offsets)
        fields = self.field_tokens(x)
        queries = self.make_queries(fields, levels[0], request)
        tokens = torch.cat((*queries, fields))
        for number, layer in enumerate(self.layers, 1):
            level = levels[min(number, len(levels) - 1)]
            tokens = layer(queries, fields, level, offsets)
            *queries, fields = tokens.split([self.num_queries] * len(level) + [len(fields)])
        rows = tokens_to_rows(self.norm(tokens), self.width)
        return torch.cat((rows, self.parallel(x))) if self.parallel else rows

    def make_queries(
        self, fields: Tensor, sequences: Sequence[EncodedEvents], request: Tensor
    ) -> list[Tensor]:
        """The first queries (N, B, D) of each event group."""
        context = fields.transpose(0, 1).flatten(1)
        queries = []
        for ffn, encoded in zip(self.query_ffns, sequences, strict=True):
            pooled = torch.cat((context, mean_of_events(encoded)[request]), 1)
            queries.append(ffn(pooled.expand(self.num_queries, -1, -1)))
        return queries
