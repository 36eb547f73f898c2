"""The store that answers now, of a lake that gets a new one each day."""

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.tables.place import here, place
from etl.tables.pointer import Pointer
from ranking.online.store import Store, open_store
from ranking.online.takeover import take_over


def stores(lake: str) -> Pointer:
    """Which of a lake's stores is to answer; each machine has its own of an object store."""
    return Pointer(here(place(lake, "online")), remembered=1)


class Live:
    """Follows the pointer of a lake's stores."""

    def __init__(self, lake: str, spec: DataSpec) -> None:
        """Open the store. Raises UserError where there is none, or one of another spec."""
        self._pointer = stores(lake)
        folder = self._pointer.target
        if folder is None:
            raise UserError(f"{lake} holds no online features; run `gemline rank store` first")
        self.store = open_store(here(folder), spec)

    def prepare(self) -> Store | None:
        """A newer store, told what this one was told; None where there is none.

        Raises UserError where it cannot be opened.
        """
        folder = self._pointer.target
        if folder is None or folder == self.store.folder:
            return None
        new = open_store(here(folder), self.store.spec)
        take_over(self.store, new)
        return new

    def swap(self, new: Store, told_ts: int) -> None:
        """Answer from a prepared store, once it has heard what was told since it was prepared."""
        take_over(self.store, new, told_ts)
        old, self.store = self.store, new
        old.close()
