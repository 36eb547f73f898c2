"""The versions of a surface's ranker in a lake: the newest trained, and the one that answers."""

from etl.errors import UserError
from etl.tables.place import Place, place
from etl.tables.pointer import Pointer


def versions(lake: str, surface: str) -> Place:
    """The folder of all versions."""
    return place(lake, "rankers", surface)


def newest(lake: str, surface: str) -> Pointer:
    """Which was trained last."""
    return Pointer(versions(lake, surface), "newest")


def current(lake: str, surface: str) -> Pointer:
    """Which answers."""
    return Pointer(versions(lake, surface))


def answering(lake: str, surface: str) -> Place:
    """The folder of the ranker that answers; raises UserError where none was promoted."""
    found = current(lake, surface).target
    if found is None:
        raise UserError(
            f"no ranker of {surface} is promoted: run `gemline rank train`, then `gemline rank "
            "promote`"
        )
    return found
