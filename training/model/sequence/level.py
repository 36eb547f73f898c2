"""One level of the pyramid: shorten, be told by rows, attend. N events of R requests, W width."""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from training.model.config import SequenceOptions
from training.model.sequence.layers import HstuLayer, TransformerLayer
from training.model.sequence.personalised import Gdpa, PersonalisedFFN
from training.model.sequence.rotary import RotaryTime
from training.model.sequence.shorten import shorten


@dataclass(frozen=True)
class Encoded:
    """Events (N, W) of requests cut by `offsets` (R+1), with their `ages` (N) in seconds."""

    events: Tensor
    offsets: Tensor
    ages: Tensor


@dataclass(frozen=True)
class Sizes:
    """Of a family's levels: `newest` events are encoded; d is the width of rows, `told` of them."""

    width: int
    heads: int
    window: int | None
    newest: int
    row_width: int
    told: int


class Told(nn.Module):
    """S + FFN(LN(S)), the feed-forward net written by rows of the request (PFFN or GDPA)."""

    def __init__(self, options: SequenceOptions, sizes: Sizes) -> None:
        super().__init__()
        w = sizes.width
        self.enter = nn.Linear(sizes.row_width, w)
        self.norm = nn.LayerNorm(w)
        self.ffn = (
            PersonalisedFFN(sizes.told, w)
            if options.personal == "pffn"
            else Gdpa(sizes.told, w, sizes.heads, 2 * w)
        )

    def forward(self, events: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        """Events (N, W) and rows (R, told, d) to (N, W)."""
        return events + self.ffn(self.norm(events), offsets, self.enter(rows))


class Level(nn.Module):
    """A layer over what the level below left, personalised first.

    With computation skip (Kunlun, 2602.10016) even levels are told and odd ones attend.
    """

    def __init__(self, number: int, options: SequenceOptions, sizes: Sizes) -> None:
        super().__init__()
        attends = options.attends(number)
        self.shorten = options.shorten if number else 1
        self.keep = options.keep
        self.told = Told(options, sizes) if options.hears(number) else None
        self.layer = _layer(options, sizes) if attends else None
        turns = attends and options.rotary
        self.rotary = RotaryTime(sizes.width // sizes.heads) if turns else None

    def forward(self, found: Encoded, rows: Tensor | None) -> Encoded:
        """One level up; `rows` (R, told, d) are what requests tell, where they do."""
        if self.shorten > 1:
            shorter = shorten(found.offsets, self.shorten, self.keep)
            means = shorter.mean(found.events), shorter.offsets, shorter.mean(found.ages.float())
            found = Encoded(*means)
        events = found.events
        if self.told:
            assert rows is not None
            events = self.told(events, found.offsets, rows)
        if self.layer:
            turn = self.rotary(found.offsets, found.ages) if self.rotary else None
            events = self.layer(events, found.offsets, turn)
        return replace(found, events=events)


def _layer(options: SequenceOptions, sizes: Sizes) -> nn.Module:
    if options.layer == "hstu":
        return HstuLayer(sizes.width, sizes.heads, sizes.window, sizes.newest)
    return TransformerLayer(sizes.width, sizes.heads, sizes.window, 2 * sizes.width)
