"""A lake's next store: it holds what the rankers that answer read, and takes over by itself."""

import itertools
from datetime import date

from etl.errors import UserError
from etl.tables.lake import Lake
from etl.tables.place import here
from etl.tables.pointer import clean
from ranking.online.build import build
from ranking.online.live import stores
from ranking.package.manifest import RankerManifest, read
from ranking.package.versions import current


def renew(lake: Lake, last: date) -> str:
    """Make a store of all that had landed by the end of a day the lake's store; its name.

    Raises UserError where no ranker answers.
    """
    told = manifests(lake)
    sequences = {one.sequence for one in told}
    if len(sequences) != 1:
        raise UserError(
            f"the rankers read the sequences {', '.join(sorted(sequences))}; train them on one"
            if told
            else f"no ranker of {lake.root} is promoted; run `gemline rank promote` first"
        )
    pointer = stores(lake.root)
    names = (f"{last:%Y%m%d}-{n}" for n in itertools.count(1))
    name = next(n for n in names if not (pointer.folder / n).exists())
    length, before = (max(getattr(one, n) for one in told) for n in ("max_length", "before"))
    build(lake, here(pointer.folder) / name, last, sequences.pop(), length, before).close()
    pointer.swap(name)
    clean(pointer.folder, pointer)
    return name


def manifests(lake: Lake) -> list[RankerManifest]:
    """Of the rankers that answer."""
    folders = [current(lake.root, surface).target for surface in lake.spec.ad_surfaces]
    return [read(folder) for folder in folders if folder]
