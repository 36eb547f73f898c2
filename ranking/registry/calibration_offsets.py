"""The calibration offsets of a ranker: a signed file of its folder that is refreshed in place.

The first refresh keeps those of the ranker's training in a file beside: they have learned no later
labels, on which the ranker may be evaluated. All other files of a ranker never change. The
signature and the offsets are in one file, so that a reader never sees one without the other.
"""

from pydantic import ValidationError

from etl.errors import UserError
from etl.signature import sign, verify_signature
from etl.spec.base import StrictModel
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, read_text_if_exists
from ranking.scoring.offsets import CalibrationOffsets

OFFSETS_FILE = "calibration_offsets.json"
INITIAL_OFFSETS_FILE = "initial_calibration_offsets.json"
REFRESH = "run `gemline rank calibrate` again"


class SignedOffsets(StrictModel):
    """Offsets as JSON, and the signature of that text if a key is configured."""

    offsets: str
    signature: str | None


def write_offsets(folder: StoragePath, offsets: CalibrationOffsets) -> None:
    """Replace the offsets of the ranker in a folder, atomically."""
    text = offsets.model_dump_json()
    signed = SignedOffsets(offsets=text, signature=sign(text.encode()))
    atomic_io.write_text(folder / OFFSETS_FILE, signed.model_dump_json(indent=1) + "\n")


def replace_offsets(folder: StoragePath, offsets: CalibrationOffsets) -> None:
    """`write_offsets`, which keeps the offsets of the ranker's training."""
    initial, current = folder / INITIAL_OFFSETS_FILE, read_text_if_exists(folder / OFFSETS_FILE)
    if current is not None and read_text_if_exists(initial) is None:
        atomic_io.write_text(initial, current)
    write_offsets(folder, offsets)


def read_offsets_before(
    folder: StoragePath, version: str, epoch_second: int
) -> CalibrationOffsets | None:
    """The latest offsets of a ranker that learned no label that became final after a time.

    Those that were kept are the ones of its training. Returns None if these have learned some, too.

    Raises:
        UserError: As `read_offsets`.
    """
    names = [OFFSETS_FILE]
    if read_text_if_exists(folder / INITIAL_OFFSETS_FILE) is not None:
        names.append(INITIAL_OFFSETS_FILE)
    for name in names:
        offsets = read_offsets(folder, version, name)
        if offsets.labels_until <= epoch_second:
            return offsets
    return None


def read_offsets(folder: StoragePath, version: str, name: str = OFFSETS_FILE) -> CalibrationOffsets:
    """The offsets of a version of a ranker, from its folder.

    Raises:
        UserError: The file is missing, damaged or of another version, or it is not signed by the
            trusted key.
    """
    path = folder / name
    text = read_text_if_exists(path)
    if text is None:
        raise UserError(f"{path} is missing: {REFRESH}")
    try:
        signed = SignedOffsets.model_validate_json(text)
        offsets = CalibrationOffsets.model_validate_json(signed.offsets)
    except ValidationError:
        raise UserError(f"{path} is damaged: {REFRESH}") from None
    verify_signature(signed.offsets.encode(), signed.signature, path)
    if offsets.version != version:
        raise UserError(f"{path} is of ranker {offsets.version}, not of {version}: {REFRESH}")
    return offsets
