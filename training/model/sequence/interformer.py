"""InterFormer (2411.09852): sequences and non-sequence rows exchange information at each layer.

N events of R requests, B candidates, n non-sequence rows (X), s summary rows of sequences, d row
width. In the paper X includes the candidate, so that sequences are encoded for each candidate; here
that is an option (`sequence.context`): by default X are rows of the request, and the module runs
once for all of its candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from etl.errors import UserError
from training.model.config import GemConfig
from training.model.interaction.wukong import WukongLayer, WukongShape
from training.model.sequence.event_groups import (
    FINAL,
    EventGroupEncoder,
    event_groups_of,
    group_depths,
)
from training.model.sequence.pyramid import EncodedEvents


@dataclass(frozen=True)
class InterFormerOutput:
    """Rows, and sequences of each event group.

    Attributes:
        rows: Updated non-sequence rows and the summaries of the sequences (R or B, m, d).
        full_length: Sequences of the last level before the first that shortens them.
        causal: Sequences of the last level at which an event does not depend on later ones.
        levels: Sequences before the first level, and after each one.
    """

    rows: Tensor
    full_length: list[EncodedEvents]
    causal: list[EncodedEvents]
    levels: list[list[EncodedEvents]]


class InterFormer(nn.Module):
    """Encodes the sequences of all event groups together with non-sequence rows.

    Both sides of a layer read the output of the layer before, and run in parallel: a summary of X
    personalizes the sequences (n2s), and a Wukong layer mixes X with the summaries of the sequences
    (s2n). `flow` selects the directions.
    """

    def __init__(self, rows: int, config: GemConfig) -> None:
        super().__init__()
        options, d = config.sequence, config.embedding_dim
        self.options = options
        _check_context(config)
        fm_rows = config.request_rows // 2
        shape = WukongShape(
            width=d,
            fm_rows=fm_rows,
            linear_rows=config.request_rows - fm_rows,
            rank=config.rank,
            hidden=config.mlp_width,
        )
        depths = group_depths(config)
        self.depth = max(depths)
        later_rows = shape.out_rows if options.updates_context else rows
        context_sizes = [rows, *[later_rows] * (self.depth - 1)][: self.depth]
        groups = event_groups_of(config).values()
        self.encoder_modules = nn.ModuleList(
            EventGroupEncoder(config, group, depth, rows, context_sizes)
            for group, depth in zip(groups, depths, strict=True)
        )
        summary_rows = sum(encoder.num_rows for encoder in self.encoders)
        mixed_sizes = context_sizes if options.updates_context else []
        self.interaction_norms = nn.ModuleList(nn.LayerNorm(d) for _ in mixed_sizes)
        self.interaction_layers = nn.ModuleList(
            WukongLayer(n + summary_rows, shape) for n in mixed_sizes
        )
        self.out_rows = summary_rows + (shape.out_rows if mixed_sizes else 0)

    @property
    def encoders(self) -> list[EventGroupEncoder]:
        """The encoder of each event group."""
        return cast("list[EventGroupEncoder]", list(self.encoder_modules))

    def forward(
        self, x: Tensor, sequences: Sequence[EncodedEvents], request: Tensor | None = None
    ) -> InterFormerOutput:
        """Encode rows and the projected tokens of each event group.

        Args:
            x: Rows of the requests (R, n, d), or of the candidates (B, n, d).
            sequences: The sequences of the requests, for each event group.
            request: The request (B) of each candidate, if the rows are those of candidates.
        """
        encoders = self.encoders
        if request is not None and self.options.encodes_each_candidate:
            sequences, request = [sequence.repeat(request) for sequence in sequences], None
        sequences = [
            encoder.append_cls_tokens(sequence, x)
            for encoder, sequence in zip(encoders, sequences, strict=True)
        ]
        output = InterFormerOutput(x, list(sequences), list(sequences), [list(sequences)])
        summary = None
        for level in range(self.depth):
            next_sequences = [
                encoder.encode_level(level, sequence, x)
                for encoder, sequence in zip(encoders, sequences, strict=True)
            ]
            if self.options.updates_context:
                if summary is None or self.options.updates_summary(level):
                    summary = self._summarize(str(level), sequences, request)
                x = self._interact(level, x, summary)
            sequences = next_sequences
            self._keep_level(output, level, sequences)
        rows = self._summarize(FINAL, sequences, request)
        if self.options.updates_context:
            rows = torch.cat((x, rows), 1)
        return replace(output, rows=rows)

    def _keep_level(
        self, output: InterFormerOutput, level: int, sequences: Sequence[EncodedEvents]
    ) -> None:
        """Keep the output of a level, also where a group still is of full length, or causal."""
        output.levels.append(list(sequences))
        for group, encoder in enumerate(self.encoders):
            if level < encoder.num_full_length_levels:
                output.full_length[group] = sequences[group]
            if level < encoder.num_causal_levels:
                output.causal[group] = sequences[group]

    def _interact(self, level: int, x: Tensor, summary: Tensor) -> Tensor:
        """Mix rows (R, n, d) and summary rows (R, s, d) with a Wukong layer."""
        rows = torch.cat((x, summary), 1).transpose(0, 1)
        mixed: Tensor = self.interaction_layers[level](self.interaction_norms[level](rows))
        return mixed.transpose(0, 1)

    def _summarize(
        self, name: str, sequences: Sequence[EncodedEvents], request: Tensor | None
    ) -> Tensor:
        """Summary rows of all event groups (R, s, d), or those of each candidate's request."""
        summaries = [
            encoder.summarize(name, sequence)
            for encoder, sequence in zip(self.encoders, sequences, strict=True)
        ]
        rows = torch.cat(summaries, 1)
        return rows if request is None else rows[request]


def _check_context(config: GemConfig) -> None:
    """Refuse rows of candidates that nothing reads, and losses that they make impossible."""
    options = config.sequence
    if options.context == "request":
        return
    if not (options.updates_context or options.encodes_each_candidate):
        raise UserError(
            f"--model.sequence.context candidate has no effect with the flow {options.flow}: set "
            "--model.sequence.flow to s2n, n2s or int"
        )
    if options.next_action_weight and options.encodes_each_candidate:
        raise UserError(
            "--model.sequence.next-action-weight needs sequences that do not depend on the "
            "candidate: set --model.sequence.context request"
        )
