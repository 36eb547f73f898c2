"""`gemline bench sequence`: a user's events and a candidate, on files in a public layout."""

from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import tyro
from pydantic import Field

from benchmarks.result import Result, told
from etl.spec.base import Strict

if TYPE_CHECKING:
    from training.sequential.files import Log

COLUMNS = ("model", "test AUC", "test AUC within users", "test logloss", "seeds")
PENALTIES = (1e-3, 1e-2)  # histories generalise: more than that only holds them back
KEYS = ("auc", "uauc", "logloss")
Floats = npt.NDArray[np.float64]


class SequenceArgs(Strict):
    """Arguments of the benchmark."""

    data: Annotated[
        Path,
        tyro.conf.arg(
            help="folder of train.csv, valid.csv and test.csv with user, item, time and label; "
            "events.csv, users.csv and items.csv may lie by"
        ),
    ]
    seeds: int = Field(default=1, ge=1)
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: SequenceArgs) -> None:
    """Learn train.csv, stop early on valid.csv, report test.csv.

    A row sees all entries of its user that are strictly earlier, whichever file they are in, with
    their labels: what happened is known from then on.
    """
    from training.fitting.choose import Task, choose
    from training.fitting.fit import predict
    from training.sequential.files import SPLITS, read_log
    from training.sequential.model import Sequential
    from training.sequential.streams import Rows, Source

    log = read_log(args.data)
    source = Source(log)
    train, valid, test = (Rows(source, split) for split in range(len(SPLITS)))
    task = Task(lambda: Sequential(log, source.numbers), train, valid)
    config = choose(task, PENALTIES)
    models = (task.learn(config, 1 + seed)[0] for seed in range(args.seeds))
    ours = [figures(log, predict(model, test)[0]) for model in models]
    trees = figures(log, boosted(log, source.entries.numbers.numpy()))

    result = Result(f"{args.data.name}, {int((log.split == 2).sum()):,} test rows", COLUMNS)
    result.rows.append(("LightGBM, same counters", *(f"{trees[key]:.4f}" for key in KEYS), "1"))
    cells = [told([found[key] for found in ours]) for key in KEYS]
    result.rows.append((f"GEM's blocks, penalty {config.penalty:g}", *cells, str(args.seeds)))
    for key in KEYS:
        result.take(key, mean(found[key] for found in ours), "no test user has both classes")
        result.take(f"lightgbm_{key}", trees[key], "no test user has both classes")
    result.figures["auc_seeds"] = [round(found["auc"], 6) for found in ours]
    result.show(args.as_json)


def figures(log: "Log", predicted: Floats) -> dict[str, float]:
    """Scores of the test rows' probabilities."""
    from training.fitting.fit import scored
    from training.loop.metrics import mean_auc
    from training.sequential.files import POSITIVE, SPLITS

    rows = log.split == SPLITS.index("test")
    labels = (log.label[rows] == POSITIVE).astype(np.float64)
    found = scored(predicted, labels)
    within = mean_auc(log.person[rows], labels, predicted)
    return {"auc": found.auc, "uauc": within, "logloss": found.logloss}


def boosted(log: "Log", numbers: npt.NDArray[np.float32]) -> Floats:
    """LightGBM's probabilities of the test rows, stopped early on the validation rows."""
    import lightgbm

    from training.sequential.files import POSITIVE, SPLITS

    x, y = numbers, log.label == POSITIVE
    train, valid, test = (log.split == split for split in range(len(SPLITS)))
    learned = lightgbm.train(
        {"objective": "binary", "learning_rate": 0.05, "verbose": -1, "deterministic": True},
        lightgbm.Dataset(x[train], y[train]),
        600,
        valid_sets=[lightgbm.Dataset(x[valid], y[valid])],
        callbacks=[lightgbm.early_stopping(30, verbose=False)],
    )
    return np.asarray(learned.predict(x[test]), np.float64)
