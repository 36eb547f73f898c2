"""Which labels a pass over the examples is about: those that became final in a span of time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ripened:
    """Labels that became final in [after, until), epoch seconds; the span of one training run.

    Rows without such a label are left out, unless `unlabelled` ones are wanted too.
    """

    after: int
    until: int
    unlabelled: bool = False


EVERYTHING = Ripened(after=0, until=0, unlabelled=True)
