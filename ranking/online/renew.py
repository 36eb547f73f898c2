"""A lake's next store: it holds what the promoted rankers read, and running services load it."""

import itertools
import logging
from datetime import date

from etl.errors import UserError
from etl.tables.lake import Lake
from etl.tables.place import here
from etl.tables.pointer import clean
from ranking.online.build import build
from ranking.online.live import stores
from ranking.package.manifest import RankerManifest, read
from ranking.package.versions import current

log = logging.getLogger(__name__)


def renew(lake: Lake, last: date) -> str:
    """Make a store of all that had landed by the end of a day the lake's store; its name.

    A promoted ranker that is damaged is left out. Raises UserError where there is no other.
    """
    told, damaged = manifests(lake)
    for sentence in damaged:
        log.warning("left out: %s", sentence)
    sequences = {one.sequence for one in told}
    if len(sequences) != 1:
        raise UserError(
            f"the rankers read the sequences {', '.join(sorted(sequences))}; train them on one"
            if told
            else "; ".join(damaged)
            or f"no ranker of {lake.root} is promoted; run `gemline rank promote` first"
        )
    pointer = stores(lake.root)
    names = (f"{last:%Y%m%d}-{n}" for n in itertools.count(1))
    name = next(n for n in names if not (pointer.folder / n).exists())
    length, before = (max(getattr(one, n) for one in told) for n in ("max_length", "before"))
    build(lake, here(pointer.folder) / name, last, sequences.pop(), length, before).close()
    pointer.swap(name)
    clean(pointer.folder, pointer)
    return name


def manifests(lake: Lake) -> tuple[list[RankerManifest], list[str]]:
    """Those of the promoted rankers, and what is wrong with those that cannot be read."""
    found, damaged = [], []
    for surface in lake.spec.ad_surfaces:
        try:
            folder = current(lake.root, surface).target
            found += [read(folder)] if folder else []
        except UserError as error:
            damaged.append(str(error))
    return found, damaged
