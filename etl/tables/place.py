"""Where the parts of a lake lie: on a disk, or on any object store that fsspec reaches.

An object store moves no folders and locks nothing, but puts a file whole or not at all. So what has
several files is named by one that is written last, and never changes under its name.
"""

import hashlib
import os
from pathlib import Path

from upath import UPath

from etl.cache import user_cache
from etl.errors import UserError

Place = Path | UPath


def place(root: str, *parts: str) -> Place:
    """A place below a folder or URL; what other processes write there is seen at once.

    Raises UserError where nothing is installed that reads such a URL.
    """
    if "://" not in root:
        return Path(root, *parts)
    try:
        found = UPath(root, *parts, use_listings_cache=False)
        _ = found.fs
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{root} cannot be read here ({error}): install gemline[s3] for s3://, or the package "
            "that fsspec names for other stores"
        ) from None
    return found


def text_of(file: Place) -> str | None:
    """What a file says; None where there is none, an error where that cannot be told.

    A store that does not answer must not pass for an empty one, which `is_file` lets it do.
    """
    try:
        return file.read_text()
    except FileNotFoundError:
        return None


def listed(folder: Place, pattern: str) -> list[Place]:
    """What is in a folder under names like a pattern, by name; nothing where there is no folder."""
    return sorted(folder.glob(pattern), key=str)


def here(there: Place) -> Path:
    """Where this machine's disk has a place: itself, or where a copy of it is kept."""
    if isinstance(there, Path):
        return there
    endpoint = hashlib.sha256(_endpoint(there).encode()).hexdigest()[:8]
    return user_cache("lakes") / f"{there.protocol}-{endpoint}" / there.path.strip("/")


def _endpoint(there: UPath) -> str:
    """The server of an object store, which may have buckets of the same names as another."""
    options = getattr(there.fs, "client_kwargs", None) or {}
    named = getattr(there.fs, "endpoint_url", None) or options.get("endpoint_url")
    if named or not there.protocol.startswith("s3"):
        return str(named or "")
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
