"""`gemline bench tabular`: GEM's interaction modules on a plain table in CSV files."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import BenchmarkResult, format_mean_std
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from benchmarks.public.fit import BinaryMetrics

COLUMNS = ("model", "test AUC", "test logloss", "seeds")


class TabularArgs(StrictModel):
    """Arguments of the benchmark."""

    data: Annotated[Path, tyro.conf.arg(help="folder of train.csv, valid.csv and test.csv")]
    label: Annotated[str, tyro.conf.arg(help="column of 0 and 1")]
    numeric: Annotated[str, tyro.conf.arg(help="columns that are numbers: A,B")] = ""
    seeds: int = Field(default=1, ge=1)
    peers: Annotated[
        bool, tyro.conf.arg(help="compare LightGBM, DCNv2 and FuxiCTR, with the same search")
    ] = False
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: TabularArgs) -> None:
    """Train on train.csv, stop early on valid.csv, report test.csv; all but --numeric is an id."""
    from benchmarks.public.tabular_models import STREAMS, read_dataset

    numeric = [name for name in args.numeric.split(",") if name]
    dataset = read_dataset(args.data, args.label, numeric)
    penalty, ours = dataset.train_and_score(lambda: dataset.build_model(*STREAMS), args.seeds)
    result = BenchmarkResult(f"{args.data.name}, {len(dataset.test):,} test rows", COLUMNS)
    model = f"{' + '.join(s.interaction for s in STREAMS)}, penalty {penalty:g}"
    add_row(result, "", model, ours)
    result.figures |= {"auc_seeds": [round(s.auc, 6) for s in ours]}
    if args.peers:
        from benchmarks.public.tabular_models import FUXICTR_MISSING, score_peers

        for key, name, scores in score_peers(dataset, args.seeds):
            add_row(result, f"{key}_", name, scores, FUXICTR_MISSING)
    result.show(args.as_json)


def add_row(
    result: BenchmarkResult,
    prefix: str,
    name: str,
    scores: Sequence["BinaryMetrics"],
    reason: str = "",
) -> None:
    """Add a row of the table and its figures, which are None without scores."""
    cells = []
    for key in ("auc", "logloss"):
        values = [getattr(s, key) for s in scores]
        result.record(f"{prefix}{key}", mean(values) if values else None, reason)
        cells.append(format_mean_std(values) if values else "")
    result.rows.append((name, *cells, str(len(scores))))
