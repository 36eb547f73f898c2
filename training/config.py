"""How GEM is trained."""

from typing import Annotated

import tyro
from pydantic import Field

from etl.spec.base import Strict
from training.model.config import SCALES, GemConfig, GemOptions, Scale


class TrainConfig(Strict):
    """Settings of a training run; the first sequence of the spec is read where none is named."""

    scale: Scale = "small"
    model: GemOptions = GemOptions()
    batch_rows: int = Field(default=128, ge=1)
    dense_rate: float = 1e-3
    sparse_rate: float = 0.05
    weight_decay: float = 0.01
    warmup_steps: int = Field(default=50, ge=1)
    sequence: str | None = None
    max_length: Annotated[
        int | None, Field(ge=0), tyro.conf.arg(help="events of history; 0 reads none")
    ] = None
    item_rows: Annotated[
        int, Field(ge=2), tyro.conf.arg(help="of the items' table; new items reuse the oldest")
    ] = 2**17
    workers: Annotated[
        int, Field(ge=0), tyro.conf.arg(help="processes that read for each one that trains")
    ] = 0
    checkpoint_every: int = Field(default=200, ge=1)
    seed: int = 0

    @property
    def sizes(self) -> GemConfig:
        """The sizes that the scale stands for, of the model that the options name."""
        return SCALES[self.scale].model_copy(update=dict(self.model))

    def reads(self) -> dict[str, object]:
        """What may not change from one day to the next."""
        return self.model_dump(include={"scale", "model", "sequence", "max_length", "item_rows"})
