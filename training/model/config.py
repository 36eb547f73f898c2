"""Sizes of GEM: one dial, `scale`, sets them all."""

from typing import Annotated, Literal

import tyro
from pydantic import Field

from etl.spec.base import Strict

Scale = Literal["tiny", "small", "base", "large"]
Kind = Literal["wukong", "dcnv2", "dhen", "two_streams"]


class GemOptions(Strict):
    """What GEM is made of, at any size.

    `across_rows` are what a Wukong layer keeps for all layers after it; with none it is plain
    Wukong.
    """

    interaction: Kind = "wukong"
    attentive: Annotated[bool, tyro.conf.arg(help="Wukong's projection is made from the input")] = (
        True
    )
    across_rows: Annotated[
        int, Field(ge=0), tyro.conf.arg(help="rows that a Wukong layer keeps for those after it")
    ] = 0


class GemConfig(GemOptions):
    """Sizes; names as in the papers (Wukong 2403.02545, InterFormer 2411.09852).

    The sequence layers see the newest `encoded_events`; older ones are only searched for events
    like the candidate, which costs little for thousands of them (SIM, 2006.05639).
    """

    row_width: int = 32
    numeric_rows: int = 4
    layers: int = 2
    fm_rows: int = 12
    linear_rows: int = 12
    rank: int = 12
    mlp: int = 128
    event_width: int = 64
    event_layers: int = 1
    encoded_events: int = 128
    heads: int = 2
    window: int = 64
    pooled_rows: int = 2
    recent_rows: int = 2
    embedding: int = 32
    dropout: float = 0.1
    item_dropout: float = 0.2


SCALES: dict[Scale, GemConfig] = {
    "tiny": GemConfig(row_width=16, fm_rows=8, linear_rows=8, rank=8, mlp=64, event_width=32),
    "small": GemConfig(),
    "base": GemConfig(
        row_width=64, layers=3, fm_rows=24, linear_rows=24, rank=24, mlp=512,
        event_width=128, event_layers=2, heads=4, pooled_rows=4, recent_rows=4, embedding=64,
    ),
    "large": GemConfig(
        row_width=128, layers=4, fm_rows=48, linear_rows=48, rank=48, mlp=2048,
        event_width=256, event_layers=4, heads=8, pooled_rows=8, recent_rows=8, embedding=128,
    ),
}  # fmt: skip
