"""`gemline bench tabular`: the non-sequence side alone, on a table in the public layout."""

from pathlib import Path
from statistics import mean
from typing import Annotated

import tyro
from pydantic import Field

from benchmarks.result import Result, told
from etl.spec.base import Strict

COLUMNS = ("model", "test AUC", "test logloss", "seeds")


class TabularArgs(Strict):
    """Arguments of the benchmark."""

    data: Annotated[Path, tyro.conf.arg(help="folder of train.csv, valid.csv and test.csv")]
    label: Annotated[str, tyro.conf.arg(help="column of 0 and 1")]
    numeric: Annotated[str, tyro.conf.arg(help="columns that are numbers: A,B")] = ""
    seeds: int = Field(default=1, ge=1)
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: TabularArgs) -> None:
    """Learn train.csv, stop early on valid.csv, report test.csv; all but --numeric is an id."""
    from training.fitting.choose import Task, choose
    from training.fitting.fit import predict, scored
    from training.tabular.model import STREAMS, Tabular
    from training.tabular.table import Encoding, read_csv

    tables = {name: read_csv(args.data, f"{name}.csv") for name in ("train", "valid", "test")}
    numeric = [name for name in args.numeric.split(",") if name]
    encoding = Encoding.of(tables["train"], args.label, numeric)
    train, valid, test = (encoding(table, f"{name}.csv") for name, table in tables.items())
    task = Task(lambda: Tabular(encoding.sizes, len(encoding.numeric)), train, valid)
    config = choose(task)
    models = (task.learn(config, 1 + seed)[0] for seed in range(args.seeds))
    found = [scored(*predict(model, test)) for model in models]
    auc, logloss = [s.auc for s in found], [s.logloss for s in found]
    result = Result(f"{args.data.name}, {len(test):,} test rows", COLUMNS)
    model = f"{' + '.join(s.interaction for s in STREAMS)}, penalty {config.penalty:g}"
    result.rows.append((model, told(auc), told(logloss), str(args.seeds)))
    result.take("auc", mean(auc), "")
    result.take("logloss", mean(logloss), "")
    result.figures |= {"auc_seeds": [round(a, 6) for a in auc]}
    result.show(args.as_json)
