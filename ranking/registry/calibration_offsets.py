"""The calibration offsets of a ranker: a signed file of its folder that is refreshed in place.

All other files of a ranker never change. The signature and the offsets are in one file, so that a
reader never sees one without the other.
"""

from pydantic import ValidationError

from etl.errors import UserError
from etl.signature import sign, verify_signature
from etl.spec.base import StrictModel
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, read_text_if_exists
from ranking.scoring.offsets import CalibrationOffsets

OFFSETS_FILE = "calibration_offsets.json"
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


def read_offsets(folder: StoragePath, version: str) -> CalibrationOffsets:
    """The offsets of a version of a ranker, from its folder.

    Raises:
        UserError: The file is missing, damaged or of another version, or it is not signed by the
            trusted key.
    """
    path = folder / OFFSETS_FILE
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
