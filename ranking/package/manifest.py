"""What a ranker's folder holds, and whether it is as it was made."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from etl.errors import UserError
from etl.spec.base import Strict
from etl.spec.model import DataSpec
from etl.tables.atomic_io import local_path
from etl.tables.place import Place
from ranking.calibration import Calibration
from ranking.package import signature
from ranking.reads import Reads

MANIFEST = "ranker.json"
USER, RANK, TABLES, VECTORS = "user.onnx", "rank.onnx", "tables.safetensors", "vectors.npz"
FILES = (USER, RANK, TABLES, VECTORS)
COMPILED = ("user.pt2", "rank.pt2")  # only where they were asked for


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
    files: dict[str, str] = {}

    @property
    def reads(self) -> Reads:
        """What is read of a request."""
        return Reads(self.max_length, self.events, self.before, self.user_rows)


def write(folder: Path, manifest: RankerManifest) -> None:
    """Name all files of a folder in its manifest, and sign it where a key is configured."""
    told = manifest.model_copy(update={"files": hashes(folder, FILES + COMPILED)})
    text = told.model_dump_json(indent=1).encode()
    (folder / MANIFEST).write_bytes(text)
    signature.sign(folder / MANIFEST, text)


def read(there: Place) -> RankerManifest:
    """The manifest of a folder; raises UserError where anything of it was changed since."""
    folder = local_path(there)
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{there} holds no ranker; run `gemline rank train` first")
    text = path.read_bytes()
    signature.check(path, text)
    try:
        manifest = RankerManifest.model_validate_json(text)
    except ValidationError:
        raise UserError(f"{path} is damaged; make the ranker again") from None
    found = hashes(folder, FILES + COMPILED)
    for name, said in manifest.files.items():
        if found.get(name) != said:
            raise UserError(
                f"{folder}/{name} is not the file that was saved; make the ranker again"
            )
    if not set(FILES) <= set(manifest.files):
        raise UserError(f"{path} does not name all files of the ranker; make the ranker again")
    return manifest


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
