"""`gemline bench tabular`: the non-sequence side alone, on a table in the public layout."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.result import Result, told
from etl.spec.base import Strict

if TYPE_CHECKING:
    from training.fitting.fit import Scored

COLUMNS = ("model", "test AUC", "test logloss", "seeds")


class TabularArgs(Strict):
    """Arguments of the benchmark."""

    data: Annotated[Path, tyro.conf.arg(help="folder of train.csv, valid.csv and test.csv")]
    label: Annotated[str, tyro.conf.arg(help="column of 0 and 1")]
    numeric: Annotated[str, tyro.conf.arg(help="columns that are numbers: A,B")] = ""
    seeds: int = Field(default=1, ge=1)
    peers: Annotated[
        bool, tyro.conf.arg(help="LightGBM, DCNv2 and FuxiCTR beside, by the same search")
    ] = False
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: TabularArgs) -> None:
    """Learn train.csv, stop early on valid.csv, report test.csv; all but --numeric is an id."""
    from training.tabular.files import read
    from training.tabular.model import STREAMS

    table = read(args.data, args.label, [name for name in args.numeric.split(",") if name])
    penalty, ours = table.learned(lambda: table.tabular(*STREAMS), args.seeds)
    result = Result(f"{args.data.name}, {len(table.test):,} test rows", COLUMNS)
    model = f"{' + '.join(s.interaction for s in STREAMS)}, penalty {penalty:g}"
    add(result, "", model, ours)
    result.figures |= {"auc_seeds": [round(s.auc, 6) for s in ours]}
    if args.peers:
        from benchmarks.peers import ABSENT, peers

        for key, name, found in peers(table, args.seeds):
            add(result, f"{key}_", name, found, ABSENT)
    result.show(args.as_json)


def add(
    result: Result, prefix: str, name: str, found: Sequence["Scored"], otherwise: str = ""
) -> None:
    """A row of the table and its figures; none where there are no scores."""
    for key in ("auc", "logloss"):
        values = [getattr(s, key) for s in found]
        result.take(f"{prefix}{key}", mean(values) if values else None, otherwise)
    cells = [told([getattr(s, key) for s in found]) if found else "" for key in ("auc", "logloss")]
    result.rows.append((name, *cells, str(len(found))))
