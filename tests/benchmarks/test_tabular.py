"""Models of plain tables: encoding, training, and errors in files."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.public import tabular_models
from benchmarks.public.fit import (
    MEMBERS,
    BinaryClassifier,
    Ensemble,
    FitConfig,
    TrainingTask,
    binary_metrics,
    predict,
)
from benchmarks.public.tabular_data import UNKNOWN, FieldEncoding, TabularRows
from benchmarks.public.tabular_models import TabularModel
from gemline import main
from training.model.interaction import DCNv2

values = st.one_of(st.none(), st.sampled_from(["a", "b", "c", "é", "0"]))


@given(st.lists(values, min_size=1, max_size=12), st.lists(values, min_size=1, max_size=12))
def test_ids_are_the_vocabulary_of_the_training_file(
    train: list[str | None], other: list[str | None]
) -> None:
    """Equal values have equal ids; missing values and values not in training are UNKNOWN."""

    def table(column: list[str | None]) -> pa.Table:
        return pa.table({"f": pa.array(column, pa.string()), "y": ["1"] * len(column)})

    encoding = FieldEncoding.from_train(table(train), "y", ())
    known = {value for value in train if value is not None}
    assert encoding.vocabulary_sizes == [len(known) + 1]
    ids = dict(zip(train, encoding(table(train), "train").ids[:, 0].tolist(), strict=True))
    assert len({ids[value] for value in known}) == len(known)
    for value, id_ in zip(other, encoding(table(other), "other").ids[:, 0], strict=True):
        assert id_ == (ids[value] if value in known else UNKNOWN)


def rows(seed: int, n: int = 4000) -> TabularRows:
    """The label is whether two fields agree: neither is informative by itself."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 9, (n, 3))
    agree = ids[:, 0] % 2 == ids[:, 1] % 2
    return TabularRows(ids, np.empty((n, 0), np.float32), agree.astype(np.float32), 64)


def trained(train: TabularRows, penalty: float, seed: int = 0, epochs: int = 6) -> BinaryClassifier:
    sizes = [int(n) + 1 for n in train.ids.max(0)]
    task = TrainingTask(lambda: TabularModel(sizes), train, train)
    return task.fit(FitConfig(embedding_l2=penalty, epochs=epochs), seed)[0]


def auc(model: BinaryClassifier, rows: TabularRows) -> float:
    return binary_metrics(*predict(model, rows)).auc


def test_interactions_are_learned() -> None:
    assert auc(trained(rows(0, 1500), 1e-3), rows(2)) > 0.99


def test_the_penalty_limits_memorization() -> None:
    """Labels are random: learning from values that occur in three rows is memorization."""
    rng = np.random.default_rng(0)
    ids, labels = rng.integers(1, 1000, (3000, 2)), rng.integers(0, 2, 3000)
    noise = TabularRows(ids, np.empty((3000, 0), np.float32), labels.astype(np.float32), 64)
    without_penalty, with_penalty = (auc(trained(noise, p, epochs=4), noise) for p in (0.0, 1.0))
    assert without_penalty > with_penalty + 0.1


def test_training_is_deterministic_and_predictions_do_not_depend_on_the_batch() -> None:
    test = rows(2)
    first, second = (predict(trained(rows(0, 500), 1e-3, 3), test)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    model = TabularModel([9, 9, 9])
    in_small_batches = predict(model, replace(test, batch_rows=7))[0]
    np.testing.assert_allclose(predict(model, test)[0], in_small_batches, rtol=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("train", "valid", "test")):
        held = rows(seed, 120)
        columns = {f"f{i}": held.ids[:, i].astype(str) for i in range(3)}
        noise = np.random.default_rng(seed).normal(size=120)
        table = pa.table(columns | {"n": noise, "click": held.labels.astype(int)})
        pc_csv.write_csv(table, tmp_path / f"{name}.csv")
    return tmp_path


def bench(folder: Path, *options: str) -> list[str]:
    return ["bench", "tabular", "--data", str(folder), "--label", "click", "--json", *options]


def test_the_bench_reports_the_test_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the opposite labels in that file only, models are the same, and 1 - AUC their AUC."""

    def figures() -> dict[str, Any]:
        assert main(bench(folder, "--numeric", "n", "--seeds", "2")) == 0
        return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))

    before = figures()
    table = pc_csv.read_csv(folder / "test.csv")
    opposite = pa.array(1 - table["click"].to_numpy())
    column = table.column_names.index("click")
    pc_csv.write_csv(table.set_column(column, "click", opposite), folder / "test.csv")
    opposite_auc = [1 - auc for auc in before["auc_seeds"]]
    assert figures()["auc_seeds"] == pytest.approx(opposite_auc, abs=1e-6)
    assert abs(before["auc"] - 0.5) > 0.01 and before["logloss"] > 0


def test_peers_are_reported_and_one_that_is_not_installed_is_null(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fuxictr", None)
    assert main(bench(folder, "--numeric", "n", "--peers")) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(0 < figures[f"{key}auc"] <= 1 for key in ("", "lightgbm_", "dcnv2_"))
    assert figures["fuxictr_auc"] is None and "pip install" in figures["fuxictr_auc_reason"]


def test_neural_peers_have_the_same_members_and_may_read_statistics(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def fit(task: TrainingTask, config: FitConfig, seed: int) -> tuple[BinaryClassifier, object]:
        trained.append(model := task.make_model())
        width = task.train.numeric.shape[1]  # type: ignore[attr-defined]
        return model, SimpleNamespace(selection_score=width)  # statistics are better

    monkeypatch.setattr(TrainingTask, "fit", fit)
    dataset = tabular_models.read_dataset(folder, "click", ["n"])
    name, _ = tabular_models.score_peer(dataset, "dcnv2", 1)
    assert name.startswith(f"{MEMBERS} x DCNv2") and name.endswith("statistics of values")
    assert isinstance(trained[-1], Ensemble) and len(trained[-1].members) == MEMBERS
    stream = trained[0].streams[0]  # type: ignore[index]
    assert isinstance(stream.interaction, DCNv2), "no other interaction beside it"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda f: (f / "valid.csv").unlink(), (), "valid.csv is absent"),
        (lambda f: None, ("--numeric", "age"), "no column age"),
        (lambda f: None, ("--numeric", "n,f9"), "no column f9"),
        (lambda f: (f / "test.csv").write_text("f0,f1,n,click\n1,1,1,1\n"), (), "no column f2"),
        (lambda f: (f / "test.csv").write_text("f0,f1,f2,n,click\n1,1,1,1,2\n"), (), "0 or 1"),
        (lambda f: (f / "test.csv").write_text("f0,f1,f2,n,click\n"), (), "no rows"),
        (
            lambda f: (f / "valid.csv").write_text("f0,f1,f2,n,click\n1,1,1,1,1\n1,1,1,1,1\n"),
            (),
            "valid.csv: the label click must be 0 in some rows and 1 in others",
        ),
        (
            lambda f: (f / "test.csv").write_text("f0,f1,f2,n,click\n1,1,1,x,1\n"),
            ("--numeric", "n"),
            "column n has a non-numeric value",
        ),
    ],
)
def test_invalid_tables_are_reported_with_their_cause(
    folder: Path,
    change: Callable[[Path], object],
    options: tuple[str, ...],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    change(folder)
    assert main(bench(folder, *options)) == 2
    assert message in capfd.readouterr().err
