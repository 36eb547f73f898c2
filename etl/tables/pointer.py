"""Which of several version folders is the live one: a small file that is replaced atomically."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, ValidationError

from etl.errors import TemporaryError, UserError
from etl.spec.base import Strict
from etl.tables import atomic_io
from etl.tables.place import Place, text_of

# The name of a folder that lies where the pointer does: no path that leads elsewhere.
FolderName = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]*$")]


class Pointed(Strict):
    """The folder that is live now, those before it (the newest last), and those barred from it."""

    now: FolderName
    before: tuple[FolderName, ...] = ()
    barred: tuple[FolderName, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        """The folders that are live or may be so again by a rollback."""
        return *self.before, self.now


@dataclass(frozen=True)
class Pointer:
    """The file NAME.json of a folder; it remembers so many versions that were live before.

    Whoever changes it holds the lease of the step that does; a change by another process in the
    meantime is refused with TemporaryError, not overwritten.
    """

    folder: Place
    name: str = "current"
    remembered: int = 5

    @property
    def path(self) -> Place:
        """The file."""
        return self.folder / f"{self.name}.json"

    def read(self) -> Pointed | None:
        """What is live, if anything is. Raises UserError where the file is damaged."""
        return self._parsed(text_of(self.path))

    @property
    def target(self) -> Place | None:
        """The folder that is live, if one is."""
        found = self.read()
        return self.folder / found.now if found else None

    def swap(self, name: str) -> None:
        """Make another folder live. Raises UserError where it is barred."""
        text = text_of(self.path)
        found = self._parsed(text) or Pointed(now=name)
        if name in found.barred:
            raise UserError(f"{self.folder / name} was rolled back and is barred; lift that first")
        before = tuple(one for one in found.known if one != name)
        changed = {"now": name, "before": before[-self.remembered :]}
        self._replace(text, found.model_copy(update=changed))

    def rollback(self) -> str:
        """Make the folder before live again, and bar the one that was; returns its name.

        Raises UserError where there is none before.
        """
        text = text_of(self.path)
        found = self._parsed(text)
        if found is None or not found.before:
            raise UserError(f"{self.folder}: there is none before to go back to")
        *before, name = found.before
        changed = {"now": name, "before": tuple(before), "barred": (*found.barred, found.now)}
        self._replace(text, found.model_copy(update=changed))
        return name

    def lift(self, name: str) -> None:
        """Let a barred folder be made live again. Raises UserError where it is not barred."""
        text = text_of(self.path)
        found = self._parsed(text)
        if found is None or name not in found.barred:
            known = ", ".join(found.barred if found else ()) or "none"
            raise UserError(f"{name} is not barred; barred in {self.folder}: {known}")
        left = tuple(one for one in found.barred if one != name)
        self._replace(text, found.model_copy(update={"barred": left}))

    def _parsed(self, text: str | None) -> Pointed | None:
        if text is None:
            return None
        try:
            return Pointed.model_validate_json(text)
        except ValidationError:
            raise UserError(f"{self.path} is damaged; remove it, then choose again") from None

    def _replace(self, text: str | None, pointed: Pointed) -> None:
        if text_of(self.path) != text:
            raise TemporaryError(
                f"{self.path} was changed by another run meanwhile: run the same command again"
            )
        atomic_io.write_text(self.path, pointed.model_dump_json())


def clean(folder: Place, *pointers: Pointer) -> None:
    """Remove the folders that no pointer names as live or as live before."""
    found = (pointer.read() for pointer in pointers)
    kept = {name for pointed in found if pointed for name in pointed.known}
    for one in folder.iterdir():
        if one.is_dir() and one.name not in kept:
            atomic_io.remove_folder(one)
