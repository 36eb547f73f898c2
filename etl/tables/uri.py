"""Paths of a lake, on a disk or in any object store that fsspec supports.

An object store can neither rename folders nor lock files, but writes single files atomically. Hence
a folder is named by a file that is written last, and its content never changes.
"""

import hashlib
import os
from pathlib import Path

from upath import UPath

from etl.errors import UserError
from etl.runtime.cache import user_cache

StoragePath = Path | UPath


def is_url(root: str) -> bool:
    """Whether the folder of logs or of a lake is a URL, and not a path on a disk."""
    return "://" in root


def resolve_uri(root: str, *parts: str) -> StoragePath:
    """A path below a folder or URL, without cached listings.

    Raises UserError if no installed package supports the URL.
    """
    if not is_url(root):
        return Path(root, *parts)
    try:
        path = UPath(root, *parts, use_listings_cache=False)
        _ = path.fs  # imports the package of the file system
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{root} cannot be read here ({error}): install gemline[s3] for s3://, or the package "
            "of the file system that fsspec names"
        ) from None
    return path


def read_text_if_exists(path: StoragePath) -> str | None:
    """The text of a file, None if it does not exist.

    Other errors are raised: a store that does not answer must not look like an empty one, as it
    does to `is_file`.
    """
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def list_matching(folder: StoragePath, pattern: str) -> list[StoragePath]:
    """Paths in a folder that match a glob pattern, sorted; none if there is no such folder."""
    return sorted(folder.glob(pattern), key=str)


def local_cache_path(path: StoragePath) -> Path:
    """The path on the local disk: the path itself, or that of its cached copy."""
    if isinstance(path, Path):
        return path
    endpoint = hashlib.sha256(_object_store_endpoint(path).encode()).hexdigest()[:8]
    return user_cache("lakes") / f"{path.protocol}-{endpoint}" / path.path.strip("/")


def _object_store_endpoint(path: UPath) -> str:
    """URL of the server of an object store; other servers may have buckets of the same name."""
    options = getattr(path.fs, "client_kwargs", None) or {}
    endpoint = getattr(path.fs, "endpoint_url", None) or options.get("endpoint_url")
    if endpoint or not path.protocol.startswith("s3"):
        return str(endpoint or "")
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
