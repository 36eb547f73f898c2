"""Configuration of GEM: its modules, and their sizes at each `scale`."""

from typing import Annotated, Literal

import tyro
from pydantic import Field

from etl.cli.yaml_options import yaml_option
from etl.spec.base import StrictModel

Scale = Literal["tiny", "small", "base", "large"]
InteractionKind = Literal["wukong", "dcnv2", "dhen", "finalmlp", "plain", "rankmixer"]
Flow = Literal["sole", "sep", "s2n", "n2s", "int"]
TrunkNorm = Literal["layer", "block", "swish_rms"]
SizeName = Literal[
    "embedding_dim",
    "numeric_segments",
    "layers",
    "fm_rows",
    "linear_rows",
    "rank",
    "mlp_width",
    "trunk_layers",
    "tower_width",
    "event_width",
    "event_layers",
    "encoded_events",
    "matched_events",
    "heads",
    "window",
    "pooled_rows",
    "recent_rows",
    "context_rows",
    "request_rows",
    "output_embedding_dim",
]


class EventGroupOptions(StrictModel):
    """Event types with their own encoder; None uses the size of the model."""

    events: tuple[str, ...]
    width: int | None = None
    heads: int | None = None
    layers: int | None = None
    window: int | None = None
    max_events: Annotated[int | None, tyro.conf.arg(help="most recent events to encode")] = None
    pooled_rows: Annotated[int | None, tyro.conf.arg(help="rows that pool all events")] = None
    recent_rows: Annotated[int | None, tyro.conf.arg(help="rows of the most recent events")] = None


EventGroups = dict[str, EventGroupOptions]


class SequenceOptions(StrictModel):
    """Encoding of event sequences (InterFormer 2411.09852, Kunlun 2602.10016, HSTU 2402.17152).

    `flow` is the direction of information between sequences (s) and the non-sequence rows of a
    request (n) at each layer: "s2n", "n2s", both ("int") or neither ("sep"). With "sole" the event
    tokens are pooled without any sequence layer.
    """

    flow: Flow = "sep"
    context: Annotated[
        Literal["request", "candidate"],
        tyro.conf.arg(
            help="the non-sequence rows: of the request, whose candidates share all sequences, or "
            "of each candidate, as in InterFormer, whose sequences are encoded for each candidate"
        ),
    ] = "request"
    layer: Literal["transformer", "hstu"] = "transformer"
    num_layers: Annotated[
        int | None,
        Field(ge=1),
        tyro.conf.arg(help="layers of each event group; default: event_layers of the scale"),
    ] = None
    max_events: Annotated[
        int | None,
        Field(ge=1),
        tyro.conf.arg(
            help="most recent events to encode in each group; default: encoded_events of the scale"
        ),
    ] = None
    masknet: Annotated[
        bool, tyro.conf.arg(help="make event tokens of their attributes by MaskNet (InterFormer)")
    ] = False
    personalization: Annotated[
        Literal["pffn", "gdpa"],
        tyro.conf.arg(
            help="feed-forward layer generated from the non-sequence rows, for n2s and int"
        ),
    ] = "gdpa"
    gdpa_activation: Annotated[
        Literal["gelu", "silu", "relu", "identity"], tyro.conf.arg(help="activation of GDPA")
    ] = "gelu"
    gdpa_scale: Annotated[
        Literal["scores", "weights"],
        tyro.conf.arg(
            help="what GDPA divides by the most events of a sequence: scores before the "
            "activation (Kunlun's paper) or weights after it (its published kernel)"
        ),
    ] = "scores"
    pooling: Literal["pma", "hsp"] = "pma"
    cls_tokens: Annotated[
        int,
        Field(ge=0),
        tyro.conf.arg(help="tokens made of the non-sequence rows, appended to each sequence"),
    ] = 0
    target_attention: Annotated[
        Literal["dot_product", "activation_unit"],
        tyro.conf.arg(
            help="attention of a candidate to the events: softmax of dot products, or DIN's "
            "activation unit, whose weights are not normalized"
        ),
    ] = "dot_product"
    rotary: Annotated[
        bool, tyro.conf.arg(help="rotary embeddings of position and age in self-attention")
    ] = False
    computation_skip: Annotated[
        bool,
        tyro.conf.arg(help="attend in odd layers only, personalize and pool in even ones (Kunlun)"),
    ] = False
    pyramid_stride: Annotated[
        int,
        Field(ge=1),
        tyro.conf.arg(help="older events merged into one by each layer after the first"),
    ] = 1
    pyramid_keep_recent: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="most recent events that are never merged")
    ] = 32
    next_action_weight: Annotated[
        float, Field(ge=0), tyro.conf.arg(help="weight of the next-item loss; 0 turns it off")
    ] = 0.0
    event_groups: Annotated[
        EventGroups,
        yaml_option(EventGroups),
        tyro.conf.arg(help="encoders by name: {ads: {events: [ad_click], layers: 2}}"),
    ] = {}

    @property
    def updates_context(self) -> bool:
        """Whether the non-sequence rows are updated from sequence summaries."""
        return self.flow in ("s2n", "int")

    @property
    def encodes_each_candidate(self) -> bool:
        """Whether sequences depend on the candidate, so that each one has its own copy."""
        reads_rows = self.flow in ("n2s", "int") or self.cls_tokens > 0
        return self.context == "candidate" and reads_rows

    def receives_context(self, level: int) -> bool:
        """Whether a level is personalized by non-sequence rows; with skipping, even ones."""
        return self.flow in ("n2s", "int") and not (self.computation_skip and level % 2)

    def uses_attention(self, level: int) -> bool:
        """Whether a level has self-attention; with skipping, odd ones."""
        return not self.computation_skip or level % 2 == 1

    def updates_summary(self, level: int) -> bool:
        """Whether a level reads a new summary of its input; with skipping, odd ones keep it."""
        return not (self.computation_skip and level % 2)

    def shortens(self, level: int) -> bool:
        """Whether a level merges older events; the first attention is over all of them."""
        return self.pyramid_stride > 1 and level > self.computation_skip

    def mixes_positions(self, level: int) -> bool:
        """Whether an event's encoding may depend on later events from this level on.

        Slots are counted from the latest event, and rows that were updated have read all events.
        """
        reads_updated_rows = self.updates_context and level > 0 and self.receives_context(level)
        return self.shortens(level) or reads_updated_rows


class GemOptions(StrictModel):
    """The modules of GEM, independent of its size."""

    interaction: Annotated[
        InteractionKind | Literal["hyformer"],
        tyro.conf.arg(help="interaction module; hyformer also reads the events in each layer"),
    ] = "wukong"
    parallel_interaction: Annotated[
        InteractionKind | None,
        tyro.conf.arg(help="second interaction module over the same rows"),
    ] = "plain"
    input_dependent_projection: Annotated[
        bool, tyro.conf.arg(help="compute Wukong's projection matrix from the input")
    ] = True
    cross_layer_rows: Annotated[
        int,
        Field(ge=0),
        tyro.conf.arg(
            help="compressed rows of each Wukong layer that all later layers attend to, with the "
            "scale's heads; 0: plain Wukong"
        ),
    ] = 0
    wukong_rows: Annotated[
        tuple[Annotated[int, Field(ge=2)], ...],
        tyro.conf.arg(
            help="rows after each Wukong layer, such as 48 32 24; by default the scale's number of "
            "layers, all of fm_rows + linear_rows"
        ),
    ] = ()
    mixer_tokens: Annotated[
        int,
        Field(ge=2),
        tyro.conf.arg(help="tokens that RankMixer and HyFormer make of all rows"),
    ] = 16
    hyformer_queries: Annotated[
        int,
        Field(ge=1),
        tyro.conf.arg(help="of HyFormer's tokens, those that attend to each event group"),
    ] = 2
    user_hash_buckets: Annotated[
        int, Field(ge=0), tyro.conf.arg(help="rows of the hashed user embedding table; 0: no table")
    ] = 0
    embedding_width_factor: Annotated[
        float,
        Field(ge=0),
        tyro.conf.arg(
            help="embeddings of an attribute have this factor times the fourth root of its rows "
            "as their rank, at most embedding_dim; 0: no limit"
        ),
    ] = 0.0
    low_cardinality_threshold: Annotated[
        int,
        Field(ge=0),
        tyro.conf.arg(help="categorical features with fewer values share interaction rows"),
    ] = 0
    numeric_scale_lr_factor: Annotated[
        float,
        Field(ge=0),
        tyro.conf.arg(
            help="each number has a learned scale, whose learning rate is this times dense_lr; "
            "0: no scales"
        ),
    ] = 20.0
    trunk_scale_lr_factor: Annotated[
        float, Field(ge=0), tyro.conf.arg(help="the same for each input of the trunk")
    ] = 6.0
    experts: Annotated[
        Literal["none", "mmoe", "ple"],
        tyro.conf.arg(help="experts between trunk and towers, mixed by a gate of each objective"),
    ] = "none"
    num_experts: Annotated[
        int,
        Field(ge=1),
        tyro.conf.arg(help="experts of all objectives; with ple also of each one alone"),
    ] = 4
    esmm_parents: Annotated[
        dict[str, str],
        yaml_option(dict[str, str]),
        tyro.conf.arg(help="objective: parent objective, as in ESMM: {conversion: click}"),
    ] = {}
    value_loss_weight: Annotated[
        float,
        Field(ge=0),
        tyro.conf.arg(help="weight of the ZILN loss of outcome values; 0: no value head"),
    ] = 0.0
    auxiliary_weight: Annotated[
        float,
        Field(ge=0),
        tyro.conf.arg(
            help="weight of the losses of the spec's auxiliary objectives; 0: GEM has no such heads"
        ),
    ] = 0.0
    trunk_norm: Annotated[
        TrunkNorm, tyro.conf.arg(help="block: RMSNorm of 256 outputs; swish_rms: x sigmoid(norm x)")
    ] = "layer"
    linear_biases: Annotated[
        bool, tyro.conf.arg(help="biases of linear layers other than the prediction layers")
    ] = True
    hard_gates: Annotated[
        bool, tyro.conf.arg(help="HardSwish for Swish, hard gates for sigmoids except of attention")
    ] = False
    sequence: SequenceOptions = SequenceOptions()


class GemConfig(GemOptions):
    """Modules and sizes, named as in the papers (Wukong 2403.02545, InterFormer 2411.09852).

    Sequence layers encode the latest `encoded_events`; with a `window` an event attends to itself
    and the `window` events before it. The whole history is searched for events that share an
    attribute with the candidate (SIM, 2006.05639): the latest `matched_events` of them are attended
    to; recency features use all of them.
    """

    embedding_dim: int = 32
    numeric_segments: int = 48
    low_cardinality_rows: int = 2
    layers: int = 2
    fm_rows: int = 12
    linear_rows: int = 12
    rank: int = 12
    mlp_width: int = 256
    trunk_layers: int = 1
    tower_width: int = 16
    event_width: int = 64
    event_layers: int = 1
    encoded_events: int = 128
    matched_events: int = 32
    heads: int = 2
    window: int | None = 64
    pooled_rows: int = 2
    recent_rows: int = 2
    context_rows: int = 4
    request_rows: int = 8
    output_embedding_dim: int = 32
    dropout: float = 0.1
    item_dropout: float = 0.2

    def scaled_by(self, factor: float) -> "GemConfig":
        """This configuration with its widths scaled, rounded to multiples of 2 * heads."""
        step = 2 * self.heads
        widths = {
            name: max(step, round(getattr(self, name) * factor / step) * step)
            for name in SCALED_FIELDS
        }
        return self.model_copy(update=widths)


SCALED_FIELDS = (
    "embedding_dim",
    "fm_rows",
    "linear_rows",
    "rank",
    "mlp_width",
    "event_width",
    "output_embedding_dim",
)

SCALES: dict[Scale, GemConfig] = {
    "tiny": GemConfig(
        embedding_dim=16, fm_rows=8, linear_rows=8, rank=8, mlp_width=64, event_width=32
    ),
    "small": GemConfig(),
    "base": GemConfig(
        embedding_dim=64, layers=3, fm_rows=24, linear_rows=24, rank=24, mlp_width=512,
        event_width=128, event_layers=2, heads=4, pooled_rows=4, recent_rows=4,
        output_embedding_dim=64,
    ),
    "large": GemConfig(
        embedding_dim=128, layers=4, fm_rows=48, linear_rows=48, rank=48, mlp_width=2048,
        event_width=256, event_layers=4, heads=8, pooled_rows=8, recent_rows=8,
        output_embedding_dim=128,
    ),
}  # fmt: skip
