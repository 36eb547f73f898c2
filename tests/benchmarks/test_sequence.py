"""Models of user sequences in files: reading, visibility of events, training, and errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.public import sequence_features
from benchmarks.public.fit import FitConfig, TrainingTask, binary_metrics, predict
from benchmarks.public.sequence_data import (
    EVENT_SPLIT,
    NEGATIVE,
    POSITIVE,
    UNLABELLED,
    Attribute,
    InteractionLog,
    read_log,
)
from benchmarks.public.sequence_features import SequenceDataset, SplitRows
from benchmarks.public.sequence_model import SequentialRanker
from gemline import main
from training.model.sequence.target_attention import PRIOR_EVENTS, LinearItemAttention

USERS, ITEMS, KINDS = 12, 30, 4


def log_of(
    seed: int, entries_per_user: int = 40, split: tuple[float, ...] = (0.6, 0.2, 0.2, 0.0)
) -> InteractionLog:
    """Users that prefer about half of the kinds of items."""
    rng = np.random.default_rng(seed)
    n = USERS * entries_per_user
    user = np.repeat(np.arange(USERS), entries_per_user)
    times = rng.integers(0, 3 * entries_per_user, (USERS, entries_per_user))
    time = np.sort(times, 1).ravel().astype(float)
    item = rng.integers(0, ITEMS, n)
    kind = np.arange(ITEMS) % KINDS
    likes = rng.random((USERS, KINDS)) < 0.5
    label = np.where(likes[user, kind[item]], POSITIVE, NEGATIVE)
    return InteractionLog(
        user=user + 1,
        item=item + 1,
        item_code=item,
        time=time,
        label=label,
        split=rng.choice(4, n, p=split),
        user_offsets=np.arange(USERS + 1) * entries_per_user,
        num_users=USERS + 1,
        num_items=ITEMS + 1,
        user_attributes={},
        item_attributes={"kind": Attribute(kind + 1, np.arange(ITEMS + 1), 1 + KINDS)},
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 5), st.integers(1, 8))
def test_sums_are_over_strictly_earlier_entries(seed: int, n: int, keys: int, times: int) -> None:
    rng = np.random.default_rng(seed)
    key, time = rng.integers(0, keys, n), rng.integers(0, times, n).astype(float)
    values = rng.normal(size=(n, 2))
    sums = sequence_features.sums_before(key, time, values)
    for i in range(n):
        earlier = (key == key[i]) & (time < time[i])
        np.testing.assert_allclose(sums[i], values[earlier].sum(0), atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, USERS * 40 - 1))
def test_rows_do_not_depend_on_entries_of_the_same_second_or_later(seed: int, at: int) -> None:
    """Labels and items from a second on do not change rows up to and including it."""
    log = log_of(seed)
    rng = np.random.default_rng(seed)
    later = log.time >= log.time[at]
    changed = replace(
        log,
        label=np.where(later & (log.split != 0), UNLABELLED, log.label),
        item_code=np.where(later, rng.integers(0, ITEMS, len(log)), log.item_code),
    )
    dataset, changed_dataset = SequenceDataset(log), SequenceDataset(changed)
    rows = torch.from_numpy(np.flatnonzero(log.time <= log.time[at]))
    user_columns = torch.tensor([0, 1, 4, 6, 7])  # the others are of the item, which was changed
    numeric, changed_numeric = (d.entries.numeric[rows] for d in (dataset, changed_dataset))
    assert torch.equal(numeric[:, user_columns], changed_numeric[:, user_columns])
    a, b = dataset.batch(rows), changed_dataset.batch(rows)
    for row in range(len(rows)):
        first = int(a.offsets[a.chunk[row]])
        visible = slice(first, first + int(a.visible_events[row]))
        assert torch.equal(a.labels[visible], b.labels[visible])
        assert torch.equal(a.events.item_code[visible], b.events.item_code[visible])


def test_a_row_sees_all_earlier_entries_within_the_lookback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequence_features, "CHUNK_ENTRIES", 4)
    monkeypatch.setattr(sequence_features, "LOOKBACK_ENTRIES", 6)
    log = log_of(0)
    batch = SequenceDataset(log).batch(torch.arange(40))  # all entries of the first user
    for row in range(40):
        earlier = int((log.time[:40] < log.time[row]).sum())
        first_in_lookback = max(0, row // 4 * 4 - 6)
        assert int(batch.visible_events[row]) == max(0, earlier - first_in_lookback)


def logits_of(model: SequentialRanker, dataset: SequenceDataset, rows: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(dataset.batch(rows))
    return logits


def test_logits_do_not_depend_on_the_other_rows_of_a_batch() -> None:
    """A row has the same logit alone and with all others, with an empty and with a long history."""
    log = log_of(1)
    dataset = SequenceDataset(log)
    torch.manual_seed(0)
    model = SequentialRanker(log, dataset.edges)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    together = logits_of(model, dataset, torch.arange(len(log)))
    for row in (0, 1, 17, 39, 40, len(log) - 1):
        alone = logits_of(model, dataset, torch.tensor([row]))
        torch.testing.assert_close(alone, together[row : row + 1], rtol=1e-4, atol=1e-5)


def test_every_row_occurs_once_in_either_order() -> None:
    dataset = SequenceDataset(log_of(2))
    log, rows = dataset.log, SplitRows(dataset, 0)
    generator = torch.Generator().manual_seed(0)
    for batches in (rows.in_order(), rows.shuffled(generator)):
        parts = [
            (batch.rows.user_code, batch.rows.item_code, labels) for (batch,), labels in batches
        ]
        columns = [torch.cat(part).numpy() for part in zip(*parts, strict=True)]
        is_train = log.split == 0
        expected = (
            log.user_code[is_train], log.item_code[is_train], log.label[is_train] == POSITIVE,
        )  # fmt: skip
        assert sorted(zip(*columns, strict=True)) == sorted(zip(*expected, strict=True))


def test_linear_item_attention_is_a_kernel_regression() -> None:
    torch.manual_seed(0)
    layer = LinearItemAttention(6, 8, 2)
    items, events = torch.randn(5, 6), torch.randn(5, 8)
    candidates, offsets = torch.randn(3, 6), torch.tensor([0, 5])
    limits = torch.tensor([0, 3, 5])
    output = layer(candidates, items, events, torch.zeros(3, dtype=torch.long), offsets, limits)
    for b, n in enumerate(limits.tolist()):
        q, k = (layer.key(layer.norm(x)).view(-1, 2, 4) for x in (candidates, items[:n]))
        v = layer.value(events[:n]).view(-1, 2, 4)
        weights = torch.einsum("hd,shd->sh", q[b], k) / 2
        mean = torch.einsum("sh,shd->hd", weights, v) / (n + PRIOR_EVENTS)
        torch.testing.assert_close(output[b], layer.out(mean.flatten()))


def test_preferences_of_new_users_are_read_from_their_earlier_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test users are new: only their earlier labels show their preferences."""
    monkeypatch.setattr(sequence_features, "BATCH_ROWS", 64)

    def log_of_new_users(seed: int) -> InteractionLog:
        log = log_of(seed, entries_per_user=80)
        return replace(log, user=np.zeros_like(log.user), split=np.zeros_like(log.split))

    train, valid, test = (SequenceDataset(log_of_new_users(seed)) for seed in (0, 1, 2))
    task = TrainingTask(
        lambda: SequentialRanker(train.log, train.edges),
        SplitRows(train, 0),
        SplitRows(valid, 0),
    )
    model, _ = task.fit(
        FitConfig(embedding_l2=1e-4, learning_rate=3e-3, epochs=12, max_lr_reductions=9), 0
    )
    assert binary_metrics(*predict(model, SplitRows(test, 0))).auc > 0.8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    log = log_of(3, split=(0.5, 0.2, 0.2, 0.1))
    names = np.array([f"u{u}" for u in log.user_code])
    for split, name in enumerate(("train", "valid", "test", "events")):
        rows = log.split == split
        table = {"user": names[rows], "item": log.item_code[rows], "time": log.time[rows]}
        if split != EVENT_SPLIT:
            table["label"] = (log.label == POSITIVE)[rows].astype(int)
        pc_csv.write_csv(pa.table(table), tmp_path / f"{name}.csv")
    kinds = [f"k{i % KINDS}|odd" if i % 2 else f"k{i % KINDS}" for i in range(ITEMS)]
    pc_csv.write_csv(pa.table({"item": range(ITEMS), "kinds": kinds}), tmp_path / "items.csv")
    ages = {"user": [f"u{u}" for u in range(USERS - 1)], "age": ["a"] * (USERS - 1)}
    pc_csv.write_csv(pa.table(ages), tmp_path / "users.csv")
    return tmp_path


def test_all_files_are_read_as_one_log(folder: Path) -> None:
    written, log = log_of(3, split=(0.5, 0.2, 0.2, 0.1)), read_log(folder)
    assert len(log) == len(written) and (np.diff(log.user_offsets) == 40).all()
    assert sorted(log.split) == sorted(written.split)
    assert (log.label[log.split == EVENT_SPLIT] == UNLABELLED).all()
    assert (log.label[log.split != EVENT_SPLIT] != UNLABELLED).all()
    for first, stop in zip(log.user_offsets, log.user_offsets[1:], strict=False):
        assert (np.diff(log.time[first:stop]) >= 0).all()
    kinds = log.item_attributes["kinds"]
    assert kinds.num_values == 1 + KINDS + 1  # UNKNOWN, the kinds, odd
    assert set(np.diff(kinds.offsets)) == {1, 2}
    age = log.user_attributes["age"]
    assert age.num_values >= 2 and (age.values == 0).sum() == 1  # one user has no row


@pytest.mark.parametrize(
    "format_time", [float, lambda s: f"2026-01-01T00:{int(s) // 60:02}:{s % 60:02.0f}"]
)
def test_times_are_seconds_or_dates(folder: Path, format_time: Callable[[float], object]) -> None:
    before = read_log(folder)
    for name in ("train", "valid", "test", "events"):
        table = pc_csv.read_csv(folder / f"{name}.csv")
        times = pa.array([str(format_time(t)) for t in table["time"].to_pylist()])
        table = table.set_column(table.column_names.index("time"), "time", times)
        pc_csv.write_csv(table, folder / f"{name}.csv")
    after = read_log(folder)
    np.testing.assert_allclose(after.time - after.time.min(), before.time - before.time.min())


def bench(folder: Path) -> list[str]:
    return ["bench", "sequence", "--data", str(folder), "--json"]


def test_the_bench_reports_the_test_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is learned from the other files is wrong where the test file has opposite labels."""
    table = pc_csv.read_csv(folder / "test.csv")
    opposite = pa.array(1 - table["label"].to_numpy())
    column = table.column_names.index("label")
    pc_csv.write_csv(table.set_column(column, "label", opposite), folder / "test.csv")
    assert main(bench(folder)) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < figures["auc"] < 0.4 and 0 <= figures["uauc"] <= 1 and figures["logloss"] > 0


def rewrite(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "test.csv").unlink(), "test.csv is absent"),
        (rewrite("valid.csv", "user,item,label\nu1,1,1\n"), "valid.csv has no column time"),
        (rewrite("test.csv", "user,item,time,label\nu1,1,1,2\n"), "0 or 1"),
        (rewrite("test.csv", "user,item,time,label\nu1,1,1,\n"), "0 or 1"),
        (rewrite("test.csv", "user,item,time,label\nu1,1,,1\n"), "the time of a row is missing"),
        (rewrite("test.csv", "user,item,time,label\nu1,1,soon,1\n"), "non-numeric"),
        (rewrite("events.csv", "user,time\nu1,1\n"), "events.csv has no column item"),
        (rewrite("items.csv", "id,kinds\n1,a\n"), "items.csv has no column item"),
        (rewrite("items.csv", "item,kinds\n1,a\n1,b\n"), "several rows of one item"),
        (rewrite("valid.csv", "user,item,time,label\nu1,1,1,1\n"), "both classes"),
    ],
)
def test_invalid_files_are_reported_with_their_cause(
    folder: Path,
    change: Callable[[Path], object],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    change(folder)
    assert main(bench(folder)) == 2
    assert message in capfd.readouterr().err
