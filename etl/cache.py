"""What is kept between runs on this machine, for this user alone."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """The folder of one kind of things, below the user's cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemline" / name
