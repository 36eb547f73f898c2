"""Publication: changes of a surface's live version, under a lease of their own.

A rollback must not wait for a training, which holds the lease of the surface's rankers for as long
as it runs. So it holds the lease of the live version alone, and a version that was trained from the
live one, or compared with it, is published only if that version is still live.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from etl.errors import TemporaryError
from etl.tables.lake import Lake
from etl.tables.lease import hold_leases
from etl.tables.pointer import VersionPointer, remove_unreferenced_versions
from ranking.registry.ranker import latest_trained_pointer, live_pointer, rankers_folder


@contextmanager
def publication(lake: Lake, surface: str, expected: str | None) -> Iterator[VersionPointer]:
    """Yield the pointer to the live version, then remove versions that no pointer retains.

    Args:
        lake: The lake.
        surface: The surface.
        expected: The version that is expected to be live; None if none is.

    Raises:
        TemporaryError: Another version is live, or another command is changing the live version.
    """
    pointer = live_pointer(lake.root, surface, lake.spec)
    with hold_leases(lake.root, [f"live-{surface}"], f"publication of a ranker of {surface}"):
        state = pointer.read()
        if (state.live if state else None) != expected:
            raise TemporaryError(
                f"the live ranker of {surface} was changed by another command, such as a rollback: "
                "run the same command again"
            )
        yield pointer
    # Under the lease of the surface's rankers alone: a rollback need not wait for it.
    remove_unreferenced_versions(
        rankers_folder(lake.root, surface), pointer, latest_trained_pointer(lake.root, surface)
    )
