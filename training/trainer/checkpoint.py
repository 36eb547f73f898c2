"""Checkpoints of GEM: all state that the next step depends on, written atomically.

A checkpoint is a folder with a manifest. The manifest names a folder of safetensors files, one
per process, with the SHA-256 of each file. Nothing is pickled, and files are verified before they
are opened.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from etl.errors import UserError
from etl.signature import SignatureError, verify_signature
from etl.spec.units import DayRange
from etl.tables import atomic_io
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, list_matching, read_text_if_exists, resolve_uri
from training.trainer.state import Manifest, TrainState

MANIFEST, SIGNATURE = "gem.json", "gem.json.sig"
START_OVER = "remove models/gem and models/compressor from the lake to start over"
log = logging.getLogger(__name__)


class DamagedCheckpointError(UserError):
    """A checkpoint is damaged, was changed after it was written, or is not signed."""


def checkpoint_path(lake: str, day: date, complete: bool = True, member: int = 0) -> StoragePath:
    """The folder of the GEM that was trained until a day, or is in the middle of that day.

    A teacher of several seeds has further GEMs, each `member` in a folder of its own.
    """
    name = f"{day}" if complete else f"{day}.partial"
    return _member_folder(lake, member) / name


def _member_folder(lake: str, member: int) -> StoragePath:
    folder = resolve_uri(lake, "models", "gem")
    return folder / f"seed-{member}" if member else folder


def read_manifest(path: StoragePath, spec_hash: str | None) -> Manifest | None:
    """The manifest of a checkpoint; None if it does not exist.

    A `spec_hash` of None allows any spec.

    Raises:
        DamagedCheckpointError: The manifest cannot be read, or lacks a valid signature.
        UserError: The checkpoint was trained under another spec.
    """
    text = read_text_if_exists(path / MANIFEST)
    if text is None:
        return None
    try:
        manifest = Manifest.model_validate_json(text)
        signature = read_text_if_exists(path / manifest.state_dir / SIGNATURE)
        verify_signature(text.encode(), signature, path / MANIFEST)
    except ValidationError:
        raise _damaged(path, f"{path / MANIFEST} cannot be read") from None
    except SignatureError as error:
        raise _damaged(path, str(error)) from None
    if spec_hash not in (None, manifest.spec_hash):
        raise UserError(
            f"{path} was trained under spec {manifest.spec_hash}, but the spec now has hash "
            f"{spec_hash}: run `gemline train upgrade`, or use another --lake or the previous spec"
        )
    return manifest


def require_manifest(lake: Lake, day: date, member: int = 0) -> Manifest:
    """The manifest of the GEM that was trained until a day.

    Raises UserError if it does not exist, or if it was trained under another spec.
    """
    manifest = read_manifest(checkpoint_path(lake.root, day, member=member), lake.spec.hash)
    if manifest is None:
        raise UserError(_missing_checkpoint(lake, day, member))
    return manifest


def _missing_checkpoint(lake: Lake, day: date, member: int) -> str:
    """Why there is no checkpoint of a day, and what to do."""
    complete = [m for _, m in list_checkpoints(lake.root, lake.spec.hash, member) if m.complete]
    later = [m.trained_until for m in complete if _continues_beyond(m, (day, day))]
    if not later:
        return f"no GEM was trained until {day}; run `gemline train gem` for that day"
    return (
        f"no checkpoint of GEM until {day} is left, and GEM until {later[-1]} has learned it: "
        f"choose days for which one is left (the earliest is of {complete[0].trained_until}), or "
        f"{START_OVER}"
    )


def _continues_beyond(manifest: Manifest, days: DayRange) -> bool:
    """Whether a GEM has learned some days and later ones."""
    return manifest.trained_from <= days[0] and days[1] < manifest.trained_until


def _damaged(path: StoragePath, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{reason}: remove {path} and train again, which resumes from the checkpoint before it"
    )


def load_checkpoint(path: StoragePath, train_state: TrainState) -> None:
    """Restore a checkpoint into a model of the same configuration, to continue training.

    The optimizer's state may be partial: weights that never had a gradient have none, for example
    if no history is read. So may the probe's, if the day before was not probed. Raises
    DamagedCheckpointError if a file was changed.
    """
    folder = verified_state_dir(path, train_state.manifest.spec_hash)
    state = train_state.state_dict()
    partial = {name: state.pop(name) for name in ("optimizer", "probe") if name in state}
    state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    state_dict_loader.load(
        partial,
        storage_reader=HuggingFaceStorageReader(str(folder)),
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    train_state.load_state_dict(state | partial)


def load_weights(path: StoragePath, train_state: TrainState) -> None:
    """Restore a model for inference: tables, item rows, and averaged weights as its weights.

    Raises DamagedCheckpointError if a file was changed.
    """
    folder = verified_state_dir(path, train_state.manifest.spec_hash)
    state: dict[str, Any] = {
        "ema": train_state.ema.state_dict(),
        "tables": train_state.tables.state_dict(),
        "item_rows": train_state.item_rows.state_dict(),
    }
    state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    train_state.ema.load_state_dict(state["ema"])
    train_state.tables.load_state_dict(state["tables"])
    train_state.item_rows.load_state_dict(state["item_rows"])
    train_state.model.core.load_state_dict(train_state.ema.module.state_dict())


def verified_state_dir(path: StoragePath, spec_hash: str) -> Path:
    """The local folder with the tensors of a checkpoint, with exactly the files that were saved.

    Raises DamagedCheckpointError if a file is missing, was changed or was added.
    """
    manifest = read_manifest(path, spec_hash)
    if manifest is None:
        raise _damaged(path, f"{path} holds no checkpoint")
    folder = atomic_io.local_path(path / manifest.state_dir)
    present = {file.name for file in folder.glob("*") if file.name != SIGNATURE}
    for name in sorted(present | set(manifest.file_hashes)):
        expected = manifest.file_hashes.get(name)
        if name not in present or expected is None or sha256_of(folder / name) != expected:
            raise _damaged(path, f"{folder / name} is not a file that was saved")
    return folder


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's bytes, as hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_checkpoints(
    lake: str, spec_hash: str | None, member: int = 0
) -> list[tuple[StoragePath, Manifest]]:
    """All readable checkpoints with their manifests, in order of training progress.

    Damaged ones are skipped with a warning.
    """
    paths = list_matching(_member_folder(lake, member), "[0-9]*")
    checkpoints = _readable_checkpoints(paths, spec_hash)
    return sorted(checkpoints, key=lambda pair: (pair[1].trained_until, pair[1].complete))


def _readable_checkpoints(
    paths: list[StoragePath], spec_hash: str | None
) -> Iterator[tuple[StoragePath, Manifest]]:
    for path in paths:
        try:
            manifest = read_manifest(path, spec_hash)
        except DamagedCheckpointError as error:
            log.warning("checkpoint skipped: %s", error)
            continue
        if manifest:
            yield path, manifest


def linked_checkpoints(
    checkpoints: Sequence[tuple[StoragePath, Manifest]],
) -> list[tuple[StoragePath, Manifest]]:
    """The checkpoints without those of a model of which an earlier day was trained again since.

    A checkpoint is linked if it continues that of the day before, which has to be linked, too. If
    that one is gone, or is not named, as in earlier versions, the checkpoint counts as linked.
    `checkpoints` are in order of training progress.
    """
    linked: list[tuple[StoragePath, Manifest]] = []
    states: dict[date, str | None] = {}  # of each complete checkpoint; None if it is not linked
    for path, manifest in checkpoints:
        parent = manifest.parent_state_dir
        day_before = manifest.trained_until - timedelta(days=1)
        is_linked = not parent or states.get(day_before, parent) == parent
        if is_linked:
            linked.append((path, manifest))
        if manifest.complete:
            states[manifest.trained_until] = manifest.state_dir if is_linked else None
    return linked


def check_can_start(
    lake: str, checkpoints: Sequence[tuple[StoragePath, Manifest]], days: DayRange, member: int = 0
) -> None:
    """Raises UserError if a new GEM of some days would take the place of one that learned more.

    That is a GEM of a requested day that learned earlier days, too, as the one that an upgrade
    leaves; one that learned the requested days and later ones; or any GEM, if none can be read or
    trusted. `checkpoints` are those that can.
    """
    for _, manifest in reversed(checkpoints):
        is_requested = days[0] <= manifest.trained_until <= days[1]
        learned_earlier = is_requested and manifest.trained_from < days[0]
        if manifest.complete and (learned_earlier or _continues_beyond(manifest, days)):
            raise UserError(
                f"GEM until {manifest.trained_until} has learned the days from "
                f"{manifest.trained_from} on, and no checkpoint of a day before {days[0]} is left "
                f"to continue from: train on days after {manifest.trained_until} or on all days "
                f"from {manifest.trained_from} on, at least until {manifest.trained_until}, or "
                f"{START_OVER}"
            )
    check_readable(lake, checkpoints, member)


def check_readable(
    lake: str, checkpoints: Sequence[tuple[StoragePath, Manifest]], member: int = 0
) -> None:
    """Raises UserError if there are checkpoints, but none of them can be read or trusted.

    `checkpoints` are those that can.
    """
    unreadable = [] if checkpoints else _unreadable_checkpoints(lake, member)
    if unreadable:
        raise UserError(
            f"no checkpoint in {unreadable[0].parent} can be read or trusted, for the reasons "
            f"above: restore the checkpoints, or {START_OVER}"
        )


def _unreadable_checkpoints(lake: str, member: int) -> list[StoragePath]:
    """Complete checkpoints that are damaged, or not signed where signatures are required."""
    unreadable = []
    for path in list_matching(_member_folder(lake, member), "[0-9]*[0-9]"):
        try:
            read_manifest(path, None)
        except DamagedCheckpointError:
            unreadable.append(path)
    return unreadable


def has_checkpoint(lake: Lake, day: date) -> bool:
    """Whether a GEM that was trained until a day exists."""
    return read_manifest(checkpoint_path(lake.root, day), lake.spec.hash) is not None


def remove_checkpoints(lake: str) -> None:
    """Remove every checkpoint and compressor, so that the next training starts from scratch."""
    for folder in ("gem", "compressor"):
        atomic_io.remove_folder(resolve_uri(lake, "models", folder))


def remove_old_checkpoints(lake: Lake, keep_days: int) -> list[date]:
    """Remove checkpoints more than `keep_days` older than the most recent; returns their days.

    Those that are still evaluated, or that rankers start from, are kept in any case: up to
    `ranker_lag_days`, and a day more, because GEM may have started the next day.
    """
    checkpoints = list_checkpoints(lake.root, lake.spec.hash)
    if not checkpoints:
        return []
    _, newest = checkpoints[-1]
    kept_days = max(keep_days, lake.spec.ranker_lag_days + 1)
    oldest_kept = newest.trained_until - timedelta(days=kept_days)
    removed = []
    for path, manifest in checkpoints:
        if manifest.trained_until < oldest_kept:
            day = path.name
            for folder in (path, *_of_other_members(lake.root, day)):
                atomic_io.remove_folder(folder)
            removed.append(manifest.trained_until)
    return removed


def _of_other_members(lake: str, name: str) -> list[StoragePath]:
    """The checkpoints of a name of the other GEMs of a teacher."""
    folders = list_matching(_member_folder(lake, 0), "seed-*")
    return [folder / name for folder in folders if (folder / name).exists()]
