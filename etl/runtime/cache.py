"""The per-user cache on this machine: Delta JARs, class archives and compiled kernels."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """A folder below the user's cache; it is not created here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemline" / name
