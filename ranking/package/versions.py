"""The versions of a surface's ranker in a lake: the newest trained, and the live one."""

from etl.errors import UserError
from etl.tables.place import Place, place
from etl.tables.pointer import Pointer
from ranking.package.ranker import Ranker


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


def identified(ranker: Ranker, lake: str, surface: str) -> Ranker:
    """The ranker; raises UserError where it is another surface's, or was rolled back."""
    manifest, pointed = ranker.manifest, current(lake, surface).read()
    if manifest.surface != surface:
        raise UserError(
            f"the ranker {manifest.version} is of surface {manifest.surface}, not of {surface}: "
            f"promote one of {surface}"
        )
    if pointed and manifest.version in pointed.barred:
        raise UserError(
            f"the ranker {manifest.version} of {surface} was rolled back and is barred: run "
            f"`gemline rank rollback --lift {manifest.version}` to let it answer again"
        )
    return ranker
