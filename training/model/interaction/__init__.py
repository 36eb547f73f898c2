"""The non-sequence side: rows of features to rows of what they are together.

All kinds take (n, B, d) and give (m, B, d), n and m rows, B batch, d width; `out_rows` is m.
"""

from training.model.config import GemConfig, Kind
from training.model.interaction.beside import Beside, Single
from training.model.interaction.dcn import DCNv2
from training.model.interaction.dhen import Dhen
from training.model.interaction.plain import Plain
from training.model.interaction.streams import TwoStreams
from training.model.interaction.wukong import Shape, Wukong

Interaction = Single | Beside

__all__ = ["Beside", "DCNv2", "Dhen", "Interaction", "Plain", "TwoStreams", "Wukong", "interaction"]


def interaction(rows: int, config: GemConfig) -> Interaction:
    """The kind, or the two kinds, that a configuration names, for so many rows."""
    one = single(config.interaction, rows, config)
    return Beside(one, single(config.beside, rows, config)) if config.beside else one


def single(kind: Kind, rows: int, config: GemConfig) -> Single:
    """One kind in a configuration's sizes."""
    d, out = config.row_width, config.fm_rows + config.linear_rows
    match kind:
        case "dcnv2":
            return DCNv2(rows, d, config.layers, config.mlp)
        case "dhen":
            return Dhen(rows, d, config.layers, out, config.mlp)
        case "plain":
            return Plain(rows)
        case "two_streams":
            return TwoStreams(rows, d, config.mlp, out // 3)
        case "wukong":
            shape = Shape(
                d, config.fm_rows, config.linear_rows, config.rank, config.mlp, config.attentive
            )
            return Wukong(rows, config.layers, shape, config.across_rows)
