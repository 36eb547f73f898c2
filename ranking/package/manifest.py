"""What a ranker's folder holds, and whether it is as it was made."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from etl.errors import UserError
from etl.signature import check_signature, signature_of
from etl.spec.base import Strict
from etl.spec.model import DataSpec
from etl.tables.atomic_io import local_path
from etl.tables.place import Place, text_of
from ranking.calibration import Calibration
from ranking.reads import Reads

MANIFEST, SIGNATURE = "ranker.json", "ranker.json.sig"
USER, RANK, TABLES, VECTORS = "user.onnx", "rank.onnx", "tables.safetensors", "vectors.npz"
FILES = (USER, RANK, TABLES, VECTORS)
COMPILED = ("user.pt2", "rank.pt2")  # only where they were asked for
FileName = Literal[
    "user.onnx", "rank.onnx", "tables.safetensors", "vectors.npz", "user.pt2", "rank.pt2"
]


class RankerManifest(Strict):
    """A ranker: the whole data spec included, so that it stands alone.

    Of `max_length` events of `sequence` it reads the newest `events`, and `before` impressions that
    GEM has judged. Items from `items` on are unknown to it; users have `user_rows`, by hash.
    `files` are the SHA-256 of all others in the folder.
    """

    surface: str
    version: str
    spec: DataSpec
    sequence: str
    max_length: int
    events: int
    before: int
    items: int
    user_rows: int
    calibration: dict[str, Calibration]
    made_with: dict[str, str]
    files: dict[FileName, str] = {}

    @property
    def reads(self) -> Reads:
        """What is read of a request."""
        return Reads(self.max_length, self.events, self.before, self.user_rows)


def write(folder: Path, manifest: RankerManifest) -> None:
    """Name all files of a folder in its manifest, and sign it where a key is configured."""
    told = manifest.model_copy(update={"files": hashes(folder, FILES + COMPILED)})
    text = told.model_dump_json(indent=1)
    (folder / MANIFEST).write_text(text)
    signature = signature_of(text.encode())
    if signature:
        (folder / SIGNATURE).write_text(signature)


class Package(NamedTuple):
    """The manifest of a ranker, and the bytes of its files by name, as they were saved."""

    manifest: RankerManifest
    files: dict[str, bytes]


def read(there: Place) -> RankerManifest:
    """The manifest of a folder; raises UserError where anything of it was changed since."""
    return read_package(there).manifest


def read_package(there: Place) -> Package:
    """A ranker's folder in memory: the bytes that were hashed are those that are loaded.

    Raises UserError where anything of it was changed since it was saved, or is not signed.
    """
    folder = local_path(there)
    text = text_of(folder / MANIFEST)
    if text is None:
        raise UserError(f"{there} holds no ranker; run `gemline rank train` first")
    check_signature(text.encode(), text_of(folder / SIGNATURE), folder / MANIFEST)
    try:
        manifest = RankerManifest.model_validate_json(text)
    except ValidationError:
        raise UserError(f"{folder / MANIFEST} is damaged; make the ranker again") from None
    if not set(FILES) <= set(manifest.files):
        raise UserError(
            f"{folder / MANIFEST} does not name all files of the ranker; make the ranker again"
        )
    files: dict[str, bytes] = {
        name: _read_file(folder / name, digest) for name, digest in manifest.files.items()
    }
    return Package(manifest, files)


def _read_file(path: Path, digest: str) -> bytes:
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(f"{path} is not the file that was saved; make the ranker again")
    return content


def digest(folder: Path, manifest: RankerManifest) -> str:
    """One hash of all that a ranker is: its files, and what its manifest says."""
    told = [*hashes(folder, FILES + COMPILED).values(), manifest.model_dump_json()]
    return hashlib.sha256("".join(told).encode()).hexdigest()


def hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the files that there are."""
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in names
        if (folder / name).is_file()
    }
