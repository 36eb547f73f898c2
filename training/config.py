"""Configuration of a training run of GEM."""

from datetime import date
from typing import Annotated, Literal, Self

import tyro
from pydantic import Field, model_validator

from etl.cli.yaml_options import yaml_option
from etl.spec.base import NotNegative, Seed, StrictModel
from training.model.config import SCALES, GemConfig, GemOptions, Scale, SizeName

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class ComputeConfig(StrictModel):
    """How the model is computed; the options do not change the model itself."""

    precision: Annotated[
        Literal["fp32", "tf32", "bf16", "fp8"],
        tyro.conf.arg(
            help="precision of matrix products; tf32: that of tensor cores on CUDA; fp8: per "
            "layer, from the precision map written by `gemline train probe`"
        ),
    ] = "fp32"
    probe_every: Annotated[
        int,
        Field(ge=0),
        tyro.conf.arg(help="steps between probes of what linear layers read, for fp8; 0: none"),
    ] = 0
    compiled: Annotated[
        bool, tyro.conf.arg(help="compile interaction and sequence layers, one by one")
    ] = False
    activation_checkpointing: Annotated[
        Literal["none", "sequence", "blocks"],
        tyro.conf.arg(help="blocks to recompute in the backward pass, to save memory"),
    ] = "none"


class ParallelismConfig(StrictModel):
    """How the model is placed on several processes (2D sparse parallelism, 2508.03854)."""

    table_replicas: Annotated[
        int,
        Field(ge=1),
        tyro.conf.arg(help="groups of processes; each group holds a copy of the embedding tables"),
    ] = 1
    sync_every_steps: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="steps between averages of the tables' copies")
    ] = 1
    moment_scale: Annotated[
        Positive | None,
        tyro.conf.arg(
            help="divisor of the tables' optimizer state, which averaging over copies makes too "
            "large for rows that only one of them trains; by default the number of copies"
        ),
    ] = None
    row_wise: Annotated[bool, tyro.conf.arg(help="let the planner shard tables by rows")] = False
    dense_parallelism: Annotated[
        Literal["ddp", "fsdp"], tyro.conf.arg(help="copy (ddp) or shard (fsdp) the dense weights")
    ] = "ddp"


SINGLE_PROCESS = ParallelismConfig()


class TeacherConfig(StrictModel):
    """What scores examples for rankers: GEM alone, or several models together."""

    seeds: Annotated[
        int,
        Field(ge=1),
        tyro.conf.arg(help="GEMs that differ only in their seed; the mean of their logits teaches"),
    ] = 1
    blend: Annotated[
        Literal["lightgbm"] | None,
        tyro.conf.arg(help="trees whose logits are added, weighted by their value on earlier days"),
    ] = None
    blend_days: Annotated[
        int,
        Field(ge=1),
        tyro.conf.arg(help="most recent days that trees learn from and their weight is fitted on"),
    ] = 14


class TrainConfig(StrictModel):
    """Configuration of a training run."""

    scale: Annotated[Scale, tyro.conf.arg(help="size of the model")] = "small"
    model: GemOptions = GemOptions()
    teacher: TeacherConfig = TeacherConfig()
    compute: ComputeConfig = ComputeConfig()
    batch_rows: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="impressions per batch and process, approximately")
    ] = 128
    dense_lr: Annotated[
        NotNegative, tyro.conf.arg(help="learning rate of dense weights (AdamW)")
    ] = 1e-3
    dense_optimizer: Annotated[
        Literal["adamw", "muon"],
        tyro.conf.arg(help="muon: orthogonal steps for matrices of hidden layers, else AdamW"),
    ] = "adamw"
    embedding_lr: Annotated[
        NotNegative, tyro.conf.arg(help="learning rate of embedding tables (row-wise AdaGrad)")
    ] = 0.005
    weight_decay: Annotated[NotNegative, tyro.conf.arg(help="weight decay of dense weights")] = 0.01
    max_grad_norm: Annotated[
        Positive | None,
        tyro.conf.arg(help="clip the dense gradients to this norm over all weights"),
    ] = None
    warmup_steps: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="steps of linear warmup of both learning rates")
    ] = 50
    decay_share: Annotated[
        float,
        Field(ge=0, le=1),
        tyro.conf.arg(help="share of a day's steps, its last ones, over which both rates decay"),
    ] = 0.5
    first_training: Annotated[
        Literal["daily", "joint"],
        tyro.conf.arg(
            help="how a new GEM learns the requested days: one after the other, or all together in "
            "random order; later days follow one by one"
        ),
    ] = "daily"
    joint_until: Annotated[
        date | None,
        tyro.conf.arg(
            help="last of the days that `--first-training joint` learns together; by default the "
            "last requested one"
        ),
    ] = None
    passes: Annotated[int, Field(ge=1), tyro.conf.arg(help="passes over the rows of a day")] = 2
    update_edges: Annotated[
        bool,
        tyro.conf.arg(
            help="before a day, replace bin edges of numbers that are no longer quantiles"
        ),
    ] = False
    reset_embeddings_each_pass: Annotated[
        bool,
        tyro.conf.arg(help="reset all embeddings before each further pass over a day (MEDA)"),
    ] = False
    sequence: Annotated[
        str | None,
        tyro.conf.arg(help="the spec's sequence to read; optional where there is only one"),
    ] = None
    surface: Annotated[
        str | None, tyro.conf.arg(help="train on the impressions of this surface only")
    ] = None
    width_multiplier: Annotated[
        float, Field(gt=0), tyro.conf.arg(help="multiplies the widths of the scale")
    ] = 1.0
    sizes: Annotated[
        dict[SizeName, Annotated[int, Field(ge=1)]],
        yaml_option(dict[SizeName, Annotated[int, Field(ge=1)]]),
        tyro.conf.arg(help="sizes that differ from those of the scale: {layers: 3, rank: 16}"),
    ] = {}
    max_length: Annotated[
        int | None,
        Field(ge=0),
        tyro.conf.arg(help="events per history, by default the sequence's; 0 reads no history"),
    ] = None
    item_table_rows: Annotated[
        int,
        Field(ge=2),
        tyro.conf.arg(
            help="rows of the item table; in a full one, items not read lately make room"
        ),
    ] = 2**17
    item_admission_count: Annotated[
        int,
        Field(ge=1),
        tyro.conf.arg(help="look-ups after which an item gets a row, on the next day; 1: at once"),
    ] = 1
    item_dropout_lookups: Annotated[
        float,
        Field(ge=0),
        tyro.conf.arg(
            help="look-ups at which training ignores an item's id half of the time; 0: rare items "
            "are ignored as often as frequent ones"
        ),
    ] = 0.0
    embedding_initial_accumulator: Annotated[
        float,
        Field(ge=0),
        tyro.conf.arg(
            help="initial value of AdaGrad's sums of squared gradients of the summed loss; with 0 "
            "the first step of a row does not depend on its gradient"
        ),
    ] = 0.01
    embedding_accumulator_decay: Annotated[
        float,
        Field(gt=0, le=1),
        tyro.conf.arg(help="factor on AdaGrad's sums before each day; 1: they only grow"),
    ] = 1.0
    embedding_ttl_days: Annotated[
        int | None,
        Field(ge=1),
        tyro.conf.arg(help="days without access after which an embedding row is reset"),
    ] = 90
    objective_weights: Annotated[
        dict[str, Positive],
        yaml_option(dict[str, Positive]),
        tyro.conf.arg(help="weights of objectives in the loss, by default 1: {click: 2}"),
    ] = {}
    entropy_power: Annotated[
        float,
        Field(ge=0),
        tyro.conf.arg(
            help="divide the loss of each objective by this power of the entropy of its base rate, "
            "relative to the most frequent one; 1: normalized entropy, 0: plain cross-entropy"
        ),
    ] = 0.5
    negative_sampling_rate: Annotated[
        dict[str, Fraction],
        yaml_option(dict[str, Fraction]),
        tyro.conf.arg(help="share of an objective's negatives to train on: {click: 0.1}"),
    ] = {}
    distillation_weight: Annotated[
        float,
        Field(ge=0),
        tyro.conf.arg(
            help="weight of a loss towards the teacher's stored logits, which an earlier teacher "
            "predicted; 0: GEM learns from labels alone"
        ),
    ] = 0.0
    workers: Annotated[
        int, Field(ge=0), tyro.conf.arg(help="reader processes per training process; 0: none")
    ] = 0
    checkpoint_every: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="steps between checkpoints within a day")
    ] = 200
    seed: Seed = 0

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        config = self.gem_config
        sizes = {"event_width": (config.event_width, config.heads)}
        for name, group in config.sequence.event_groups.items():
            key = f"sequence.event_groups.{name}.width"
            sizes[key] = group.width or config.event_width, group.heads or config.heads
        for key, (width, heads) in sizes.items():
            if width % (2 * heads):
                raise ValueError(
                    f"{key} is {width}: make it a multiple of {2 * heads}, twice `heads`"
                )
        return self

    @property
    def gem_config(self) -> GemConfig:
        """The sizes of the scale, with those of `sizes`, and the options of `model`.

        The width multiplier does not change `sizes`.
        """
        scale = SCALES[self.scale].scaled_by(self.width_multiplier)
        return scale.model_copy(
            update={**{str(name): size for name, size in self.sizes.items()}, **dict(self.model)}
        )

    @property
    def surfaces(self) -> tuple[str, ...]:
        """Surfaces to train on; empty for all."""
        return (self.surface,) if self.surface else ()

    @property
    def initial_accumulator(self) -> float:
        """AdaGrad's initial sums for the mean loss of a batch, whose gradients are smaller."""
        return self.embedding_initial_accumulator / self.batch_rows**2

    def resume_invariants(self) -> dict[str, object]:
        """The settings that may not change from one day to the next."""
        return self.model_dump(
            include={
                "scale": True,
                "width_multiplier": True,
                "sizes": True,
                "model": True,
                "sequence": True,
                "surface": True,
                "max_length": True,
                "item_table_rows": True,
                "dense_optimizer": True,
                "teacher": {"seeds"},
            }
        )
