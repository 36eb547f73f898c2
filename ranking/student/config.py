"""Configuration of students: sizes, distillation from GEM, and training."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import tyro
from pydantic import Field, field_validator, model_validator

from etl.cli.yaml_options import yaml_option
from etl.spec.base import NotNegative, Seed, StrictModel


@dataclass(frozen=True)
class InputLimits:
    """The amount of data of a request that a ranker reads.

    Attributes:
        max_length: Most recent events that are searched for those similar to a candidate.
        encoded_events: Most recent events that are encoded for attention.
        teacher_history_length: Earlier impressions whose teacher embeddings are read; 0 for none.
        user_hash_buckets: Rows of the table of users, addressed by hash; 0 for no table.
    """

    max_length: int
    encoded_events: int
    teacher_history_length: int
    user_hash_buckets: int

    @classmethod
    def of(cls, sizes: object) -> "InputLimits":
        """The limits among the sizes of a student or the fields of a manifest."""
        return cls(**{field.name: getattr(sizes, field.name) for field in fields(cls)})

    @classmethod
    def maximum(cls, limits: Sequence["InputLimits"]) -> "InputLimits":
        """The largest of each of several limits."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: max(getattr(each, name) for each in limits) for name in names})


SharedModule = Literal["tables", "events", "recency"]
Share = Annotated[float, Field(ge=0, lt=1)]
SamplingRate = Annotated[float, Field(gt=0, le=1)]
LayerWidth = Annotated[int, Field(ge=1)]


class StudentConfig(StrictModel):
    """Sizes of a student; the widths are those of a small GEM, so that modules can be shared."""

    embedding_dim: Annotated[int, Field(ge=1), tyro.conf.arg(help="width of an embedding row")] = 32
    event_width: Annotated[int, Field(ge=1), tyro.conf.arg(help="width of an encoded event")] = 64
    heads: Annotated[int, Field(ge=1), tyro.conf.arg(help="attention heads")] = 2
    hidden: Annotated[
        tuple[LayerWidth, LayerWidth], tyro.conf.arg(help="widths of the hidden layers")
    ] = (
        128,
        64,
    )
    encoded_events: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="most recent events that are encoded for attention")
    ] = 100
    max_length: Annotated[
        int,
        Field(ge=1),
        tyro.conf.arg(help="most recent events that are searched for those similar to a candidate"),
    ] = 2048
    user_hash_buckets: Annotated[
        int,
        Field(ge=0),
        tyro.conf.arg(help="rows of the table of users, addressed by hash; 0 for no table"),
    ] = 0
    teacher_history_length: Annotated[
        int,
        Field(ge=0),
        tyro.conf.arg(help="earlier impressions whose teacher embeddings are read; 0 for none"),
    ] = 0
    teacher_history_pooling: Annotated[
        Literal["attention", "mean", "sum"],
        tyro.conf.arg(help="how the earlier impressions are combined"),
    ] = "attention"
    dropout: Annotated[Share, tyro.conf.arg(help="dropout of the hidden layers")] = 0.1
    item_dropout: Annotated[
        Share, tyro.conf.arg(help="share of items that training replaces by the unknown item")
    ] = 0.2

    @model_validator(mode="after")
    def _check_heads(self) -> "StudentConfig":
        if self.event_width % self.heads:
            raise ValueError(
                f"heads is {self.heads}, which does not divide event_width {self.event_width}: "
                "set heads to a divisor of it"
            )
        return self

    @property
    def input_limits(self) -> InputLimits:
        """The amount of data of a request that the student reads."""
        return InputLimits.of(self)

    def without_teacher(self) -> "StudentConfig":
        """The same sizes, without teacher embeddings."""
        return self.model_copy(update={"teacher_history_length": 0})


class DistillationConfig(StrictModel):
    """Distillation from GEM (ExFM, 2502.17494; LoopFM, 2605.29280).

    With `teacher: domain` the student learns the predictions of the model of its domain, which
    learned those of GEM. With `warm_start_from: domain` it starts with all weights of that model
    that have the same shape, instead of modules of GEM. Models of domains share no modules of GEM.
    """

    teacher: Annotated[
        Literal["gem", "domain"],
        tyro.conf.arg(help="the model whose predictions the student learns"),
    ] = "gem"
    kind: Annotated[
        Literal["none", "plain", "auxiliary"],
        tyro.conf.arg(
            help="none: labels only; plain: the served head also learns the teacher's predictions; "
            "auxiliary: a separate head learns them"
        ),
    ] = "auxiliary"
    weight: Annotated[
        float, Field(ge=0), tyro.conf.arg(help="plain: weight of the distillation loss")
    ] = 1.0
    gradient_ratio: Annotated[
        float,
        Field(ge=0),
        tyro.conf.arg(help="auxiliary: norm of the teacher's gradient over that of the labels'"),
    ] = 0.1
    gradient_balance: Annotated[
        Literal["all", "objective"],
        tyro.conf.arg(
            help="auxiliary: gradient_ratio of all objectives together, or of each objective"
        ),
    ] = "all"
    pretraining_epochs: Annotated[
        int,
        Field(ge=0),
        tyro.conf.arg(
            help="passes over the training days that learn GEM's predictions alone, before those "
            "that also learn labels"
        ),
    ] = 1
    use_adapter: Annotated[
        bool, tyro.conf.arg(help="correct GEM's predictions by fresh labels (student adapter)")
    ] = True
    shared_modules: Annotated[
        tuple[SharedModule, ...] | None,
        tyro.conf.arg(
            help="modules of GEM that the student starts with; by default all if sizes are equal, "
            "none for models of domains"
        ),
    ] = None
    freeze_shared: Annotated[bool, tyro.conf.arg(help="do not train the shared modules")] = False
    warm_start_from: Annotated[
        Literal["gem", "domain"],
        tyro.conf.arg(help="the model whose weights the student starts with"),
    ] = "gem"

    @model_validator(mode="after")
    def _check_warm_start(self) -> "DistillationConfig":
        if self.warm_start_from == "domain" and (self.shared_modules or self.freeze_shared):
            raise ValueError(
                "shared_modules and freeze_shared apply to modules of GEM: remove them, or set "
                "warm_start_from: gem"
            )
        return self


class StudentTrainConfig(StrictModel):
    """Training of a student."""

    model: StudentConfig = StudentConfig()
    distillation: DistillationConfig = DistillationConfig()
    epochs: Annotated[int, Field(ge=0), tyro.conf.arg(help="passes over the training days")] = 1
    batch_rows: Annotated[int, Field(ge=1), tyro.conf.arg(help="examples per batch")] = 128
    dense_lr: Annotated[
        NotNegative, tyro.conf.arg(help="learning rate of dense weights (AdamW)")
    ] = 2e-3
    embedding_lr: Annotated[
        NotNegative, tyro.conf.arg(help="learning rate of embedding tables")
    ] = 0.05
    weight_decay: Annotated[
        NotNegative, tyro.conf.arg(help="weight decay of dense weights (AdamW)")
    ] = 0.01
    negative_sampling_rate: Annotated[
        dict[str, SamplingRate],
        yaml_option(dict[str, SamplingRate]),
        tyro.conf.arg(help="share of an objective's negatives to train on: {click: 0.1}"),
    ] = {}
    mix_windows: Annotated[
        bool,
        tyro.conf.arg(
            help="learn each impression by one of an objective's windows, drawn by hash, with a "
            "head per window (Zipper); the longest is served"
        ),
    ] = False
    seed: Annotated[
        Seed, tyro.conf.arg(help="seed of initial weights and of the order of examples")
    ] = 0

    def labels_only(self) -> "StudentTrainConfig":
        """The same training without GEM: from labels alone, and without teacher embeddings."""
        none = DistillationConfig(kind="none", shared_modules=())
        return self.model_copy(update={"distillation": none, "model": self.model.without_teacher()})


class DomainTrainConfig(StudentTrainConfig):
    """Training of the model of a domain, which is larger than the rankers that start from it.

    It starts with no modules of GEM: they have learned the labels of the training examples, and its
    scores of an example must not depend on the example's own labels.
    """

    model: StudentConfig = StudentConfig(hidden=(256, 128))
    distillation: DistillationConfig = DistillationConfig(shared_modules=())

    @field_validator("distillation")
    @classmethod
    def _check_teacher(cls, distillation: DistillationConfig) -> DistillationConfig:
        if "domain" in (distillation.warm_start_from, distillation.teacher):
            raise ValueError(
                "the model of a domain can neither start nor learn from itself: set "
                "warm_start_from: gem and teacher: gem"
            )
        if distillation.shared_modules or distillation.freeze_shared:
            raise ValueError(
                "the model of a domain starts with no modules of GEM, which have learned the "
                "labels that its scores predict: remove shared_modules and freeze_shared"
            )
        return distillation.model_copy(update={"shared_modules": ()})
