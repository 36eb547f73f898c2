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

PEERS = ("lightgbm", "dcnv2", "fuxictr")
COLUMNS = ("model", "test AUC", "test logloss", "seeds")


class TabularArgs(StrictModel):
    """Arguments of the benchmark."""

    data: Annotated[Path, tyro.conf.arg(help="folder of train.csv, valid.csv and test.csv")]
    label: Annotated[str, tyro.conf.arg(help="column of 0 and 1")]
    numeric: Annotated[str, tyro.conf.arg(help="columns that are numbers: A,B")] = ""
    seeds: int = Field(default=1, ge=1)
    peers: Annotated[
        bool,
        tyro.conf.arg(help="also LightGBM, and DCNv2 and FuxiCTR with the same members and search"),
    ] = False
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: TabularArgs) -> None:
    """Train on train.csv, stop early on valid.csv, report test.csv; all but --numeric is an id."""
    numeric = [name for name in args.numeric.split(",") if name]
    peers = PEERS if args.peers else ()
    measure(args.data, args.label, numeric, args.seeds, peers).show(args.as_json)


def measure(
    folder: Path, label: str, numeric: Sequence[str], seeds: int, peers: Sequence[str]
) -> BenchmarkResult:
    """Test metrics of GEM's interaction modules, and of some peers on the files as they are.

    Whether the model reads statistics of values, and its penalty, are selected on the validation
    rows.
    """
    from benchmarks.public.tabular_models import (
        FUXICTR_MISSING,
        STREAMS,
        TabularDataset,
        read_dataset,
        score_peer,
        select_inputs,
        title_of,
    )

    dataset = read_dataset(folder, label, numeric)
    inputs, has_statistics = select_inputs(dataset, TabularDataset.build_member)
    penalty, ours = inputs.train_and_score(TabularDataset.build_member, seeds)
    result = BenchmarkResult(f"{folder.name}, {len(dataset.test):,} test rows", COLUMNS)
    streams = " + ".join(s.interaction for s in STREAMS)
    add_row(result, "", title_of(f"({streams})", penalty, has_statistics), ours)
    result.figures |= {"auc_seeds": [round(s.auc, 6) for s in ours]}
    result.figures |= {"reads_statistics": has_statistics}
    for peer in peers:
        name, scores = score_peer(dataset, peer, seeds)
        add_row(result, f"{peer}_", name, scores, FUXICTR_MISSING)
    return result


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
