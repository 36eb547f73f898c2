"""`gemline bench sequence`: GEM's sequence modules on users' events in CSV files."""

from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import BenchmarkResult, format_mean_std
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    from benchmarks.public.sequence_data import InteractionLog
    from etl.array_types import Float32, Float64


COLUMNS = ("model", "test AUC", "test AUC within users", "test logloss", "seeds")
PENALTIES = (1e-3, 1e-2)  # larger ones underfit
METRICS = ("auc", "uauc", "logloss")


class SequenceArgs(StrictModel):
    """Arguments of the benchmark."""

    data: Annotated[
        Path,
        tyro.conf.arg(
            help="folder of train.csv, valid.csv and test.csv with user, item, time and label; "
            "events.csv, users.csv and items.csv are optional"
        ),
    ]
    seeds: int = Field(default=1, ge=1)
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: SequenceArgs) -> None:
    """Train on train.csv, stop early on valid.csv, report test.csv.

    A row reads all strictly earlier entries of its user from all files, with their labels: an
    outcome is visible from its time on.
    """
    measure(args.data, args.seeds).show(args.as_json)


def measure(folder: Path, seeds: int) -> BenchmarkResult:
    """Test metrics of GEM's sequence modules, and of LightGBM on the same counters."""
    from benchmarks.public.fit import (
        MEMBERS,
        Ensemble,
        TrainingTask,
        predict,
        select_embedding_l2,
    )
    from benchmarks.public.sequence_data import SPLITS, read_log
    from benchmarks.public.sequence_features import SequenceDataset, SplitRows
    from benchmarks.public.sequence_model import SequentialRanker

    log = read_log(folder)
    dataset = SequenceDataset(log)
    train, valid, test = (SplitRows(dataset, split) for split in range(len(SPLITS)))

    def build_member() -> SequentialRanker:
        return SequentialRanker(log, dataset.edges)

    config = select_embedding_l2(TrainingTask(build_member, train, valid), PENALTIES)
    task = TrainingTask(lambda: Ensemble(build_member, MEMBERS), train, valid)
    models = (task.fit(config, 1 + seed)[0] for seed in range(seeds))
    by_seed = [test_metrics(log, predict(model, test)[0]) for model in models]
    lightgbm = test_metrics(log, lightgbm_probabilities(log, dataset.entries.numeric.numpy()))

    test_rows = int((log.split == SPLITS.index("test")).sum())
    result = BenchmarkResult(f"{folder.name}, {test_rows:,} test rows", COLUMNS)
    cells = [f"{lightgbm[key]:.4f}" for key in METRICS]
    result.rows.append(("LightGBM, same counters", *cells, "1"))
    cells = [format_mean_std([metrics[key] for metrics in by_seed]) for key in METRICS]
    name = f"GEM's blocks, {MEMBERS} members, penalty {config.embedding_l2:g}"
    result.rows.append((name, *cells, str(seeds)))
    for key in METRICS:
        value = mean(metrics[key] for metrics in by_seed)
        result.record(key, value, "no test user has both classes")
        result.record(f"lightgbm_{key}", lightgbm[key], "no test user has both classes")
    result.figures["auc_seeds"] = [round(metrics["auc"], 6) for metrics in by_seed]
    return result


def test_metrics(log: "InteractionLog", predicted: "Float64") -> dict[str, float]:
    """Metrics of probabilities of the test rows."""
    import numpy as np

    from benchmarks.public.fit import binary_metrics
    from benchmarks.public.sequence_data import POSITIVE, SPLITS
    from training.evaluation.metrics import mean_group_auc

    rows = log.split == SPLITS.index("test")
    labels = (log.label[rows] == POSITIVE).astype(np.float64)
    metrics = binary_metrics(predicted, labels)
    within_users = mean_group_auc(log.user_code[rows], labels, predicted)
    return {"auc": metrics.auc, "uauc": within_users, "logloss": metrics.logloss}


def lightgbm_probabilities(log: "InteractionLog", features: "Float32") -> "Float64":
    """LightGBM's probabilities of the test rows, stopped early on the validation rows."""
    import lightgbm
    import numpy as np

    from benchmarks.public.sequence_data import POSITIVE, SPLITS

    x, y = features, log.label == POSITIVE
    train, valid, test = (log.split == split for split in range(len(SPLITS)))
    model = lightgbm.train(
        {"objective": "binary", "learning_rate": 0.05, "verbose": -1, "deterministic": True},
        lightgbm.Dataset(x[train], y[train]),
        600,
        valid_sets=[lightgbm.Dataset(x[valid], y[valid])],
        callbacks=[lightgbm.early_stopping(30, verbose=False)],
    )
    return np.asarray(model.predict(x[test]), np.float64)
