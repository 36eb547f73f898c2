"""How GEM is trained."""

from typing import Annotated, Literal

import tyro
from pydantic import Field

from etl.spec.base import Strict
from etl.words import in_yaml
from training.model.config import SCALES, GemConfig, GemOptions, Scale

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class ComputeOptions(Strict):
    """How a model is computed; nothing of what it is. Precision is that of products."""

    precision: Literal["fp32", "bf16"] = "fp32"
    compiled: Annotated[bool, tyro.conf.arg(help="interactions are compiled, block by block")] = (
        False
    )
    recompute: Annotated[
        Literal["nothing", "sequence", "blocks"],
        tyro.conf.arg(help="activations that the backward pass makes anew: less memory"),
    ] = "nothing"


class SpreadOptions(Strict):
    """How a model lies on many processes.

    `groups` hold the tables once each, and average them every `average_every` steps. `moment_scale`
    makes up for states that are too small on average; without, it is the number of groups.
    """

    groups: int = Field(default=1, ge=1)
    average_every: int = Field(default=1, ge=1)
    moment_scale: Positive | None = None
    by_rows: Annotated[bool, tyro.conf.arg(help="the planner may cut tables by rows")] = False
    dense: Annotated[
        Literal["copied", "sharded"], tyro.conf.arg(help="weights of the dense part")
    ] = "copied"


ALONE = SpreadOptions()


class TrainConfig(Strict):
    """Settings of a training run; `sequence` may be left out where the spec has one."""

    scale: Scale = "small"
    model: GemOptions = GemOptions()
    compute: ComputeOptions = ComputeOptions()
    batch_rows: int = Field(default=128, ge=1)
    dense_rate: float = 1e-3
    sparse_rate: float = 0.05
    weight_decay: float = 0.01
    warmup_steps: int = Field(default=50, ge=1)
    sequence: str | None = None
    surface: Annotated[
        str | None, tyro.conf.arg(help="learn from the rows of this surface alone")
    ] = None
    size: Annotated[
        float, Field(gt=0), tyro.conf.arg(help="multiplies the widths of the scale")
    ] = 1.0
    max_length: Annotated[
        int | None, Field(ge=0), tyro.conf.arg(help="events of history; 0 reads none")
    ] = None
    item_rows: Annotated[
        int, Field(ge=2), tyro.conf.arg(help="of the items' table; new items reuse the oldest")
    ] = 2**17
    forget_after_days: Annotated[
        int | None,
        Field(ge=1),
        tyro.conf.arg(help="rows of tables that nobody asked for in so long start anew"),
    ] = 90
    weights: Annotated[
        dict[str, Positive],
        in_yaml(dict[str, Positive]),
        tyro.conf.arg(help="of objectives in the loss, 1 where none is told: {click: 2}"),
    ] = {}
    negatives: Annotated[
        dict[str, Share],
        in_yaml(dict[str, Share]),
        tyro.conf.arg(help="share of an objective's negatives to learn from: {click: 0.1}"),
    ] = {}
    workers: Annotated[
        int, Field(ge=0), tyro.conf.arg(help="processes that read for each one that trains")
    ] = 0
    checkpoint_every: int = Field(default=200, ge=1)
    seed: int = 0

    @property
    def sizes(self) -> GemConfig:
        """The sizes that the scale stands for, of the model that the options name."""
        return SCALES[self.scale].times(self.size).model_copy(update=dict(self.model))

    @property
    def surfaces(self) -> tuple[str, ...]:
        """Surfaces whose rows are learned from; empty for all."""
        return (self.surface,) if self.surface else ()

    def reads(self) -> dict[str, object]:
        """What may not change from one day to the next."""
        told = {"scale", "size", "model", "sequence", "surface", "max_length", "item_rows"}
        return self.model_dump(include=told)
