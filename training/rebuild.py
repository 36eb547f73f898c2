"""A finished day's first batches once more, from its manifest alone, whatever was written since."""

from datetime import date

from etl.errors import UserError
from etl.tables.lake import Lake
from training.data.digest import digest
from training.data.reader import Reader
from training.day import Day
from training.loop import checkpoint
from training.resume import refuse_other_reading


def rebuild(lake: Lake, day: date) -> int:
    """Read again what the first process learned first on a day; returns how many batches.

    Raises UserError where a batch is not what it was, byte for byte, or its tables are gone.
    """
    manifest = checkpoint.read_manifest(checkpoint.folder(lake.root, day), lake.spec.hash)
    if manifest is None:
        raise UserError(f"no GEM was trained until {day}; run `gemline train gem` for that day")
    training = manifest.training
    assert training.sequence is not None
    reader = Reader(
        lake, manifest.versions, training.sequence, training.max_length, training.surfaces
    )
    refuse_other_reading(manifest, reader)
    batches = Day(lake, reader, day, manifest).lane(0)
    same = 0
    for told, batch in zip(manifest.first_batches, batches, strict=False):
        same += 1
        if digest(batch) != told:
            raise UserError(
                f"batch {same} of {day} is not what was learned from: its tables, or the code "
                "that reads them, have changed"
            )
    return same
