"""What a student is made of, and how it is trained."""

from typing import Annotated, Literal

import tyro
from pydantic import Field, field_validator, model_validator

from etl.spec.base import Strict
from etl.words import in_yaml
from ranking.reads import Reads

Part = Literal["tables", "events", "recency"]
Share = Annotated[float, Field(gt=0, le=1)]


class StudentConfig(Strict):
    """Sizes of a student; row and event width are those of a small GEM, so that both can share."""

    row_width: int = 32
    event_width: int = 64
    heads: int = 2
    hidden: tuple[int, int] = (128, 64)
    events: Annotated[int, Field(ge=1), tyro.conf.arg(help="newest events that are encoded")] = 100
    max_length: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="events searched for those like a candidate")
    ] = 2048
    user_rows: Annotated[
        int, Field(ge=0), tyro.conf.arg(help="of a table of users, by hash; 0 has none")
    ] = 2**17
    before: Annotated[
        int, Field(ge=0), tyro.conf.arg(help="earlier impressions of which GEM's view is read")
    ] = 0
    pooling: Literal["attention", "mean", "sum"] = "attention"
    dropout: float = 0.1
    item_dropout: float = 0.2

    @property
    def reads(self) -> Reads:
        """What is read of a request."""
        return Reads(self.max_length, self.events, self.before, self.user_rows)

    def without_gem(self) -> "StudentConfig":
        """The same sizes, reading nothing of GEM's."""
        return self.model_copy(update={"before": 0})


class TransferConfig(Strict):
    """How a student learns from GEM (ExFM, 2502.17494; LoopFM, 2605.29280).

    `none` reads labels alone; `plain` shows GEM's scores to the served head, with `weight`;
    `auxiliary` shows them to a head of its own, whose gradient on the backbone is `ratio` times
    that of the labels. `adapter` corrects GEM's scores by fresh labels for a further head. `share`
    are parts of GEM that the student starts with (all, where widths are the same and none are
    named), and keeps as they are if `frozen`. `shuffled` is a control that should gain nothing:
    what GEM knows of other impressions, users and items. With `begin` at its `domain` a student
    takes over from the domain's model, not from GEM, all but layers of other sizes.
    """

    kind: Literal["none", "plain", "auxiliary"] = "auxiliary"
    weight: Annotated[float, Field(ge=0)] = 1.0
    ratio: Annotated[float, Field(ge=0)] = 0.3
    label_scale: Annotated[float, Field(gt=0)] = 1.0
    adapter: bool = True
    share: tuple[Part, ...] | None = None
    frozen: bool = False
    shuffled: bool = False
    begin: Literal["gem", "domain"] = "gem"

    @model_validator(mode="after")
    def _from_one(self) -> "TransferConfig":
        if self.begin == "domain" and (self.share or self.frozen):
            raise ValueError("share and frozen are of GEM's parts, not of a domain's model")
        return self


class StudentTraining(Strict):
    """How a student is trained."""

    model: StudentConfig = StudentConfig()
    transfer: TransferConfig = TransferConfig()
    passes: int = 1
    batch_rows: int = 128
    dense_rate: float = 2e-3
    sparse_rate: float = 0.05
    weight_decay: float = 0.01
    negatives: Annotated[
        dict[str, Share],
        in_yaml(dict[str, Share]),
        tyro.conf.arg(help="share of an objective's negatives to learn from: {click: 0.1}"),
    ] = {}
    seed: int = 0


class DomainTraining(StudentTraining):
    """How the model of a domain is trained: larger than the rankers that begin from it."""

    model: StudentConfig = StudentConfig(hidden=(256, 128))

    @field_validator("transfer")
    @classmethod
    def _from_gem(cls, transfer: TransferConfig) -> TransferConfig:
        if transfer.begin == "domain":
            raise ValueError("a domain's model begins with parts of GEM, not from itself")
        return transfer
