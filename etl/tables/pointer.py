"""Which of the folders beside it is meant: a small file, swapped whole."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, ValidationError

from etl.errors import UserError
from etl.spec.base import Strict
from etl.tables import atomic_io
from etl.tables.place import Place, text_of

# A name of a folder beside the pointer: no path that leads elsewhere.
FolderName = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]*$")]


class Pointed(Strict):
    """The folder that is meant now, and those that were before, the newest last."""

    now: FolderName
    before: tuple[FolderName, ...] = ()


@dataclass(frozen=True)
class Pointer:
    """The file NAME.json of a folder; it remembers so many that were meant before."""

    folder: Place
    name: str = "current"
    remembered: int = 5

    @property
    def path(self) -> Place:
        """The file."""
        return self.folder / f"{self.name}.json"

    def read(self) -> Pointed | None:
        """What is meant, if anything is. Raises UserError where that cannot be read."""
        told = text_of(self.path)
        if told is None:
            return None
        try:
            return Pointed.model_validate_json(told)
        except ValidationError:
            raise UserError(f"{self.path} is damaged; remove it, then choose again") from None

    @property
    def target(self) -> Place | None:
        """The folder that is meant, if one is."""
        found = self.read()
        return self.folder / found.now if found else None

    def swap(self, name: str) -> None:
        """From now on another folder is meant."""
        found = self.read()
        before = tuple(one for one in _all(found) if one != name)
        self._write(Pointed(now=name, before=before[-self.remembered :]))

    def back(self) -> str:
        """The one before is meant again; raises UserError where there is none."""
        found = self.read()
        if found is None or not found.before:
            raise UserError(f"{self.folder}: there is none before to go back to")
        *before, name = found.before
        self._write(Pointed(now=name, before=tuple(before)))
        return name

    def _write(self, pointed: Pointed) -> None:
        atomic_io.write_text(self.path, pointed.model_dump_json())


def _all(found: Pointed | None) -> tuple[str, ...]:
    return (*found.before, found.now) if found else ()


def clean(folder: Place, *pointers: Pointer) -> None:
    """Remove the folders that no pointer means, nor meant a little while ago."""
    kept = {name for pointer in pointers for name in _all(pointer.read())}
    for one in folder.iterdir():
        if one.is_dir() and one.name not in kept:
            atomic_io.remove_folder(one)
