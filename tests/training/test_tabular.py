"""Laws of learning a plain table: how it is read, what is learned, what is refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemline import main
from training.fitting.choose import Task
from training.fitting.fit import FitConfig, Learner, predict, scored
from training.tabular.model import Tabular
from training.tabular.table import UNKNOWN, Encoding, Rows

values = st.one_of(st.none(), st.sampled_from(["a", "b", "c", "é", "0"]))


@given(st.lists(values, min_size=1, max_size=12), st.lists(values, min_size=1, max_size=12))
def test_ids_are_the_values_of_the_training_file(train: list, other: list) -> None:
    """Equal ids, equal values; what training lacked, and what is missing, is the unknown id."""

    def table(column: list) -> pa.Table:
        return pa.table({"f": pa.array(column, pa.string()), "y": ["1"] * len(column)})

    encoding = Encoding.of(table(train), "y", ())
    known = {value for value in train if value is not None}
    assert encoding.sizes == [len(known) + 1]
    learned = dict(zip(train, encoding(table(train), "train").ids[:, 0].tolist(), strict=True))
    assert len({learned[value] for value in known}) == len(known)
    for value, found in zip(other, encoding(table(other), "other").ids[:, 0], strict=True):
        assert found == (learned[value] if value in known else UNKNOWN)


def rows(seed: int, n: int = 4000) -> Rows:
    """The label is whether two fields agree: neither tells anything by itself."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 9, (n, 3))
    agree = ids[:, 0] % 2 == ids[:, 1] % 2
    return Rows(ids, np.empty((n, 0), np.float32), agree.astype(np.float32), 64)


def learned(train: Rows, penalty: float, seed: int = 0, epochs: int = 6) -> Learner:
    sizes = [int(n) + 1 for n in train.ids.max(0)]
    task = Task(lambda: Tabular(sizes, 0), train, train)
    return task.learn(FitConfig(penalty=penalty, epochs=epochs), seed)[0]


def auc(model: Learner, rows: Rows) -> float:
    return scored(*predict(model, rows)).auc


def test_interactions_are_learned() -> None:
    assert auc(learned(rows(0, 1500), 1e-3), rows(2)) > 0.99


def test_the_penalty_holds_back_what_single_values_say() -> None:
    """Labels are coins: whatever is learned of values that three rows have is memory."""
    rng = np.random.default_rng(0)
    ids, coins = rng.integers(1, 1000, (3000, 2)), rng.integers(0, 2, 3000)
    noise = Rows(ids, np.empty((3000, 0), np.float32), coins.astype(np.float32), 64)
    remembered, held = (auc(learned(noise, p, epochs=4), noise) for p in (0.0, 1.0))
    assert remembered > held + 0.1


def test_a_seed_gives_one_model_and_rows_do_not_see_each_other() -> None:
    some = rows(2)
    twice = [predict(learned(rows(0, 500), 1e-3, 3), some)[0] for _ in range(2)]
    np.testing.assert_array_equal(*twice)
    model = Tabular([9, 9, 9], 0)
    alone = predict(model, replace(some, batch_rows=7))[0]
    np.testing.assert_allclose(predict(model, some)[0], alone, rtol=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("train", "valid", "test")):
        held = rows(seed, 600)
        columns = {f"f{i}": held.ids[:, i].astype(str) for i in range(3)}
        noise = np.random.default_rng(seed).normal(size=600)
        table = pa.table(columns | {"n": noise, "click": held.labels.astype(int)})
        pc_csv.write_csv(table, tmp_path / f"{name}.csv")
    return tmp_path


def bench(folder: Path, *more: str) -> list[str]:
    return ["bench", "tabular", "--data", str(folder), "--label", "click", "--json", *more]


def test_the_bench_reports_the_test_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bench(folder, "--numeric", "n", "--seeds", "2")) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < figures["auc"] <= 1 and figures["logloss"] > 0 and len(figures["auc_seeds"]) == 2


def test_peers_stand_beside_and_one_that_is_not_there_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fuxictr", None)
    assert main(bench(folder, "--numeric", "n", "--peers")) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(0 < figures[f"{key}auc"] <= 1 for key in ("", "lightgbm_", "dcnv2_"))
    assert figures["fuxictr_auc"] is None and "pip install" in figures["fuxictr_auc_reason"]


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        (lambda f: (f / "valid.csv").unlink(), (), "valid.csv is absent"),
        (lambda f: None, ("--numeric", "age"), "no column age"),
        (lambda f: None, ("--numeric", "n,f9"), "no column f9"),
        (lambda f: (f / "test.csv").write_text("f0,f1,n,click\n1,1,1,1\n"), (), "no column f2"),
        (lambda f: (f / "test.csv").write_text("f0,f1,f2,n,click\n1,1,1,1,2\n"), (), "0 or 1"),
        (lambda f: (f / "test.csv").write_text("f0,f1,f2,n,click\n"), (), "no rows"),
        (
            lambda f: (f / "test.csv").write_text("f0,f1,f2,n,click\n1,1,1,x,1\n"),
            ("--numeric", "n"),
            "column n holds what is not a number",
        ),
    ],
)
def test_bad_tables_are_told_in_a_sentence(
    folder: Path, change, more: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    assert main(bench(folder, *more)) == 2
    assert said in capfd.readouterr().err
