"""Interaction modules: rows of features to rows of their interactions.

Modules take rows (n, B, d) and return rows (m, B, d): B batch, d row width, m is `out_rows`.
"""

from etl.errors import UserError
from training.model.config import GemConfig, InteractionKind
from training.model.interaction.dcn_dhen import DCNv2, Dhen
from training.model.interaction.parallel import (
    FinalMlp,
    IdentityInteraction,
    ParallelInteraction,
    SingleInteraction,
)
from training.model.interaction.token_mixing import RankMixer
from training.model.interaction.wukong import Wukong, WukongShape

Interaction = SingleInteraction | ParallelInteraction

__all__ = [
    "DCNv2",
    "Dhen",
    "FinalMlp",
    "IdentityInteraction",
    "Interaction",
    "ParallelInteraction",
    "RankMixer",
    "SingleInteraction",
    "Wukong",
    "build_interaction",
    "build_single_interaction",
]


def build_interaction(rows: int, config: GemConfig) -> Interaction:
    """The interaction module, or pair of modules, of a configuration, for n input rows."""
    if config.interaction == "hyformer":
        raise UserError("--model.interaction hyformer reads sequences; rows alone have none")
    first = build_single_interaction(config.interaction, rows, config)
    if not config.parallel_interaction:
        return first
    second = build_single_interaction(config.parallel_interaction, rows, config)
    return ParallelInteraction(first, second)


def build_single_interaction(
    kind: InteractionKind, rows: int, config: GemConfig
) -> SingleInteraction:
    """One interaction module in the sizes of a configuration."""
    d, out_rows = config.embedding_dim, config.fm_rows + config.linear_rows
    match kind:
        case "dcnv2":
            return DCNv2(rows, d, config.layers, config.mlp_width)
        case "dhen":
            return Dhen(rows, d, config.layers, out_rows, config.mlp_width)
        case "plain":
            return IdentityInteraction(rows)
        case "finalmlp":
            return FinalMlp(rows, d, config.mlp_width, out_rows // 3)
        case "rankmixer":
            return RankMixer(rows, d, config.mixer_tokens, config.layers)
        case "wukong":
            return Wukong(rows, wukong_shapes(config), config.cross_layer_rows, config.heads)


def wukong_shapes(config: GemConfig) -> list[WukongShape]:
    """The shape of each Wukong layer; `wukong_rows` are divided as fm_rows and linear_rows are."""
    out_rows = config.fm_rows + config.linear_rows
    shapes = []
    for rows in config.wukong_rows or [out_rows] * config.layers:
        fm_rows = min(rows - 1, max(1, round(rows * config.fm_rows / out_rows)))
        shapes.append(
            WukongShape(
                config.embedding_dim,
                fm_rows,
                rows - fm_rows,
                config.rank,
                config.mlp_width,
                config.input_dependent_projection,
            )
        )
    return shapes
