"""Every second of a training run by what it went to, and the share that learned from new rows."""

import time
from collections import defaultdict

FIRST_STEP, STEPS = "first step", "steps"


class Timeline:
    """Spans that follow one another without a gap, from `began` (of the monotonic clock) on."""

    def __init__(self, began: float | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._at = time.monotonic() if began is None else began

    def spent(self, name: str) -> None:
        """All since the last call went to this."""
        now = time.monotonic()
        self.seconds[name] += now - self._at
        self._at = now

    def stepped(self) -> None:
        """All since the last call was a step; the first one compiles and fills caches."""
        self.spent(STEPS if FIRST_STEP in self.seconds else FIRST_STEP)

    @property
    def effective(self) -> float:
        """Effective training time: the share of all seconds that went to steps on new rows."""
        return self.seconds[STEPS] / max(sum(self.seconds.values()), 1e-9)

    def __str__(self) -> str:
        """In one line, the longest first."""
        longest = sorted(self.seconds.items(), key=lambda span: -span[1])
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest)
        return f"effective training time {self.effective:.0%}: {parts}"
