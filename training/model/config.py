"""What GEM is made of, and its sizes: one dial, `scale`, sets them all."""

from typing import Annotated, Literal

import tyro
from pydantic import Field

from etl.spec.base import Strict
from etl.words import in_yaml

Scale = Literal["tiny", "small", "base", "large"]
Kind = Literal["wukong", "dcnv2", "dhen", "two_streams", "plain"]
Flow = Literal["sole", "sep", "s2n", "n2s", "int"]


class FamilyOptions(Strict):
    """Event types that are encoded apart from all others, in sizes of their own."""

    events: tuple[str, ...]
    width: int | None = None
    heads: int | None = None
    layers: int | None = None
    window: int | None = None
    newest: Annotated[
        int | None, tyro.conf.arg(help="events that are encoded; the scale's number without")
    ] = None


Families = dict[str, FamilyOptions]


class SequenceOptions(Strict):
    """How events are encoded (InterFormer 2411.09852, Kunlun 2602.10016, HSTU 2402.17152).

    `flow` is what tells the other side of itself at each layer: the sequence the user's rows
    (s2n), those rows the sequence (n2s), both (int) or none (sep); with `sole` events are pooled
    as they come, without layers.
    """

    flow: Flow = "sep"
    layer: Literal["transformer", "hstu"] = "transformer"
    personal: Annotated[
        Literal["pffn", "gdpa"], tyro.conf.arg(help="how rows change events, in n2s and int")
    ] = "gdpa"
    pooling: Literal["pma", "hsp"] = "pma"
    cls_rows: Annotated[int, Field(ge=0), tyro.conf.arg(help="rows that read all, as events")] = 0
    rotary: Annotated[bool, tyro.conf.arg(help="queries and keys turn by place and age")] = False
    skip: Annotated[
        bool, tyro.conf.arg(help="layers attend and are told in turn; pooling every other time")
    ] = False
    shorten: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="older events that become one at each further layer")
    ] = 1
    keep: Annotated[int, Field(ge=1), tyro.conf.arg(help="newest events, never shortened")] = 32
    next_action: Annotated[
        float, Field(ge=0), tyro.conf.arg(help="weight of guessing each event's next; 0 does not")
    ] = 0.0
    families: Annotated[
        Families,
        in_yaml(Families),
        tyro.conf.arg(help="by name: {ads: {events: [ad_click], layers: 2}}"),
    ] = {}

    @property
    def mixes(self) -> bool:
        """Whether sequences tell the rows of a request."""
        return self.flow in ("s2n", "int")

    def hears(self, level: int) -> bool:
        """Whether rows of a request tell a level of the sequences; with `skip` the even ones."""
        return self.flow in ("n2s", "int") and not (self.skip and level % 2)

    def attends(self, level: int) -> bool:
        """Whether events of a level attend to each other; with `skip` those of the odd ones."""
        return not self.skip or level % 2 == 1

    def pools(self, level: int) -> bool:
        """Whether a level's summary is its own; with `skip` odd ones keep that of the one below."""
        return not (self.skip and level % 2)


class GemOptions(Strict):
    """What GEM is made of, at any size.

    `across_rows` are what a Wukong layer keeps for all layers after it; with none it is plain
    Wukong.
    """

    interaction: Kind = "wukong"
    beside: Annotated[
        Kind | None, tyro.conf.arg(help="a second kind of interactions that sees the same rows")
    ] = None
    attentive: Annotated[bool, tyro.conf.arg(help="Wukong's projection is made from the input")] = (
        True
    )
    across_rows: Annotated[
        int, Field(ge=0), tyro.conf.arg(help="rows that a Wukong layer keeps for those after it")
    ] = 0
    user_rows: Annotated[
        int, Field(ge=0), tyro.conf.arg(help="of a table of users, by hash; 0 has none")
    ] = 2**17
    weak_below: Annotated[
        int, Field(ge=0), tyro.conf.arg(help="features of fewer values share rows")
    ] = 0
    after: Annotated[
        dict[str, str],
        in_yaml(dict[str, str]),
        tyro.conf.arg(help="objectives that only come after others: {conversion: click}"),
    ] = {}
    value: Annotated[
        float, Field(ge=0), tyro.conf.arg(help="weight of what outcomes are worth; 0 has no head")
    ] = 0.0
    sequence: SequenceOptions = SequenceOptions()


class GemConfig(GemOptions):
    """Sizes; names as in the papers (Wukong 2403.02545, InterFormer 2411.09852).

    The sequence layers see the newest `encoded_events`; older ones are only searched for events
    like the candidate, which costs little for thousands of them (SIM, 2006.05639). Of those the
    newest `matched_events` are attended to; when all others were is known too.
    """

    row_width: int = 32
    numeric_rows: int = 4
    weak_rows: int = 2
    layers: int = 2
    fm_rows: int = 12
    linear_rows: int = 12
    rank: int = 12
    mlp: int = 128
    event_width: int = 64
    event_layers: int = 1
    encoded_events: int = 128
    matched_events: int = 32
    heads: int = 2
    window: int | None = 64
    pooled_rows: int = 2
    recent_rows: int = 2
    told_rows: int = 4
    request_rows: int = 8
    embedding: int = 32
    dropout: float = 0.1
    item_dropout: float = 0.2

    def times(self, factor: float) -> "GemConfig":
        """The same model in other widths, in steps that heads divide."""
        step = 2 * self.heads
        wider = {
            name: max(step, round(getattr(self, name) * factor / step) * step) for name in WIDTHS
        }
        return self.model_copy(update=wider)


WIDTHS = ("row_width", "fm_rows", "linear_rows", "rank", "mlp", "event_width", "embedding")

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
