"""How much a ranker reads of a request."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reads:
    """How much is read of a user: the newest `events`, and what GEM kept of `before` impressions.

    Candidates are compared with the newest events `searched`. Users are rows of a table of
    `user_rows`, by hash.
    """

    searched: int
    events: int
    before: int
    user_rows: int
