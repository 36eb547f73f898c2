"""Pointers to the live version among version folders: a small file that is replaced atomically."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, ValidationError

from etl.errors import TemporaryError, UserError
from etl.spec.base import StrictModel
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, read_text_if_exists

# The name of a folder in the pointer's folder, not a path.
FolderName = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]*$")]


class PointerState(StrictModel):
    """The content of a pointer."""

    live: FolderName
    """The version that is live."""
    previous: tuple[FolderName, ...] = ()
    """Versions that were live before and a rollback can return to, the latest last."""
    blocked: tuple[FolderName, ...] = ()
    """Versions that were rolled back and may not be promoted."""

    @property
    def retained(self) -> tuple[str, ...]:
        """The versions that are live or that a rollback can return to."""
        return *self.previous, self.live


@dataclass(frozen=True)
class VersionPointer:
    """The file NAME.json in a folder, which names the live one of its version folders.

    Writers hold the lease of their step. A write raises TemporaryError if another process has
    changed the file since it was read.

    Attributes:
        folder: Folder with the versions and the pointer.
        name: Name of the pointer's file, without `.json`.
        max_previous: How many earlier versions a rollback can return to.
    """

    folder: StoragePath
    name: str = "current"
    max_previous: int = 5

    @property
    def path(self) -> StoragePath:
        """Path of the pointer's file."""
        return self.folder / f"{self.name}.json"

    def read(self) -> PointerState | None:
        """The state, None if no version has been live; raises UserError if the file is damaged."""
        return self._parse(read_text_if_exists(self.path))

    @property
    def live_folder(self) -> StoragePath | None:
        """The folder of the live version, None if there is none."""
        state = self.read()
        return self.folder / state.live if state else None

    def promote(self, *versions: str) -> None:
        """Make the last of some versions live, at once; rollbacks return to those before it.

        Raises UserError if one is blocked.
        """
        text = read_text_if_exists(self.path)
        state = self._parse(text)
        for version in versions:
            if state and version in state.blocked:
                raise self._blocked(version)
        retained = [n for n in (state.retained if state else ()) if n not in versions]
        *previous, live = *retained, *versions
        changes = {"live": live, "previous": tuple(previous[-self.max_previous :])}
        self._replace(text, (state or PointerState(live=live)).model_copy(update=changes))

    def replace_live(self, version: str) -> None:
        """Make a version live as `promote` does; a rollback cannot return to the one it replaces.

        Raises UserError if no version is live.
        """
        text = read_text_if_exists(self.path)
        state = self._parse(text)
        if state is None:
            raise UserError(f"{self.folder}: there is no live version to replace")
        if version in state.blocked:
            raise self._blocked(version)
        previous = tuple(name for name in state.previous if name != version)
        self._replace(text, state.model_copy(update={"live": version, "previous": previous}))

    def rollback(self) -> str:
        """Make the previous version live again and block the current one.

        Returns the version that is live now; raises UserError if there is no previous one.
        """
        text = read_text_if_exists(self.path)
        state = self._parse(text)
        if state is None or not state.previous:
            raise UserError(f"{self.folder}: there is no previous version to roll back to")
        *previous, version = state.previous
        self._replace(
            text,
            PointerState(
                live=version, previous=tuple(previous), blocked=(*state.blocked, state.live)
            ),
        )
        return version

    def forget_previous(self) -> None:
        """Retain the live version only; a rollback is no longer possible."""
        text = read_text_if_exists(self.path)
        state = self._parse(text)
        if state is not None:
            self._replace(text, state.model_copy(update={"previous": ()}))

    def unblock(self, version: str) -> None:
        """Allow a blocked version to be promoted again; raises UserError if it is not blocked."""
        text = read_text_if_exists(self.path)
        state = self._parse(text)
        if state is None or version not in state.blocked:
            known = ", ".join(state.blocked if state else ()) or "none"
            raise UserError(f"{version} is not blocked; blocked in {self.folder}: {known}")
        blocked = tuple(name for name in state.blocked if name != version)
        self._replace(text, state.model_copy(update={"blocked": blocked}))

    def _blocked(self, version: str) -> UserError:
        return UserError(
            f"{self.folder / version} was rolled back and is blocked; unblock it first"
        )

    def _parse(self, text: str | None) -> PointerState | None:
        if text is None:
            return None
        try:
            return PointerState.model_validate_json(text)
        except ValidationError:
            raise UserError(f"{self.path} is damaged; remove it, then promote a version") from None

    def _replace(self, expected_text: str | None, state: PointerState) -> None:
        if read_text_if_exists(self.path) != expected_text:
            raise TemporaryError(
                f"{self.path} was changed by another run: run the same command again"
            )
        atomic_io.write_text(self.path, state.model_dump_json())


def remove_unreferenced_versions(folder: StoragePath, *pointers: VersionPointer) -> None:
    """Remove the version folders that no pointer retains or blocks."""
    states = [state for pointer in pointers if (state := pointer.read())]
    retained = {version for state in states for version in (*state.retained, *state.blocked)}
    for path in folder.iterdir():
        if path.is_dir() and path.name not in retained:
            atomic_io.remove_folder(path)
