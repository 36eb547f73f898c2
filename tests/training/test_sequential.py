"""Laws of learning users' sequences from files: what is read, what is seen, what is refused."""

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

from gemline import main
from training.fitting.choose import Task
from training.fitting.fit import FitConfig, predict, scored
from training.model.sequence.affinity import PRIOR, Affinity
from training.sequential import counts, streams
from training.sequential.files import (
    EVENT,
    NEGATIVE,
    POSITIVE,
    UNLABELLED,
    Attribute,
    Log,
    read_log,
)
from training.sequential.model import Sequential
from training.sequential.streams import Rows, Source

USERS, ITEMS, KINDS = 12, 30, 4


def log_of(seed: int, each: int = 40, split: tuple[float, ...] = (0.6, 0.2, 0.2, 0.0)) -> Log:
    """Users who like some kinds of items and not others; each kind is liked by half of them."""
    rng = np.random.default_rng(seed)
    n = USERS * each
    person = np.repeat(np.arange(USERS), each)
    time = np.sort(rng.integers(0, 3 * each, (USERS, each)), 1).ravel().astype(float)
    item = rng.integers(0, ITEMS, n)
    kind = np.arange(ITEMS) % KINDS
    likes = rng.random((USERS, KINDS)) < 0.5
    label = np.where(likes[person, kind[item]], POSITIVE, NEGATIVE)
    return Log(
        user=person + 1,
        item=item + 1,
        key=item,
        time=time,
        label=label,
        split=rng.choice(4, n, p=split),
        user_offsets=np.arange(USERS + 1) * each,
        users=USERS + 1,
        items=ITEMS + 1,
        user_attributes={},
        item_attributes={"kind": Attribute(kind + 1, np.arange(ITEMS + 1), 1 + KINDS)},
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 5), st.integers(1, 8))
def test_sums_are_of_what_is_strictly_earlier(seed: int, n: int, keys: int, times: int) -> None:
    rng = np.random.default_rng(seed)
    key, time = rng.integers(0, keys, n), rng.integers(0, times, n).astype(float)
    values = rng.normal(size=(n, 2))
    found = counts.before(key, time, values)
    for i in range(n):
        earlier = (key == key[i]) & (time < time[i])
        np.testing.assert_allclose(found[i], values[earlier].sum(0), atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, USERS * 40 - 1))
def test_nothing_is_seen_of_now_and_later(seed: int, at: int) -> None:
    """Other labels and items from a second on: numbers and events of rows up to then are as before.

    Those of all rows of that second, too: they do not see each other.
    """
    log = log_of(seed)
    rng = np.random.default_rng(seed)
    later = log.time >= log.time[at]
    changed = replace(
        log,
        label=np.where(later & (log.split != 0), UNLABELLED, log.label),
        key=np.where(later, rng.integers(0, ITEMS, len(log)), log.key),
    )
    told, other = Source(log), Source(changed)
    rows = torch.from_numpy(np.flatnonzero(log.time <= log.time[at]))
    before = told.entries.numbers[rows]
    own = torch.tensor([0, 1, 4, 6, 7])  # of the user; the rest is of the item, which was changed
    assert torch.equal(before[:, own], other.entries.numbers[rows][:, own])
    a, b = told.streams(rows), other.streams(rows)
    for row in range(len(rows)):
        first = int(a.offsets[a.chunk[row]])
        span = slice(first, first + int(a.limits[row]))
        assert torch.equal(a.labels[span], b.labels[span])
        assert torch.equal(a.events.key[span], b.events.key[span])


def test_a_row_sees_all_earlier_entries_up_to_a_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CHUNK", 4)
    monkeypatch.setattr(streams, "BACK", 6)
    log = log_of(0)
    source = Source(log)
    rows = torch.arange(40)  # all of the first user
    found = source.streams(rows)
    for b in range(40):
        earlier = int((log.time[:40] < log.time[b]).sum())
        furthest = max(0, b // 4 * 4 - 6)
        assert int(found.limits[b]) == max(0, earlier - furthest)


def scores(model: Sequential, source: Source, rows: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(source.streams(rows))


def test_rows_do_not_see_each_other() -> None:
    """Alone or with all others, with an empty history or a long one, a row has one score."""
    log = log_of(1)
    source = Source(log)
    torch.manual_seed(0)
    model = Sequential(log, source.numbers)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    together = scores(model, source, torch.arange(len(log)))
    for row in (0, 1, 17, 39, 40, len(log) - 1):
        alone = scores(model, source, torch.tensor([row]))
        torch.testing.assert_close(alone, together[row : row + 1], rtol=1e-4, atol=1e-5)


def test_every_row_comes_once_in_any_order() -> None:
    source = Source(log_of(2))
    rows = Rows(source, 0)
    generator = torch.Generator().manual_seed(0)
    for batches in (rows.in_order(), rows.shuffled(generator)):
        parts = [(found.rows.person, found.rows.key, labels) for (found,), labels in batches]
        person, key, labels = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        here = source.log.split == 0
        told = source.log.person[here], source.log.key[here], source.log.label[here] == POSITIVE
        assert sorted(zip(person, key, labels, strict=True)) == sorted(zip(*told, strict=True))


def test_affinity_is_a_kernel_regression() -> None:
    torch.manual_seed(0)
    layer = Affinity(6, 8, 2)
    items, events = torch.randn(5, 6), torch.randn(5, 8)
    candidates, offsets = torch.randn(3, 6), torch.tensor([0, 5])
    limits = torch.tensor([0, 3, 5])
    found = layer(candidates, items, events, torch.zeros(3, dtype=torch.long), offsets, limits)
    for b, n in enumerate(limits.tolist()):
        q, k = (layer.key(layer.norm(x)).view(-1, 2, 4) for x in (candidates, items[:n]))
        v = layer.value(events[:n]).view(-1, 2, 4)
        weights = torch.einsum("hd,shd->sh", q[b], k) / 2
        mean = torch.einsum("sh,shd->hd", weights, v) / (n + PRIOR)
        torch.testing.assert_close(found[b], layer.out(mean.flatten()))


def test_what_a_user_likes_is_learned_of_users_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users of the test are new: only their earlier labels can tell what they like."""
    monkeypatch.setattr(streams, "BATCH_ROWS", 64)

    def fresh(seed: int) -> Log:
        log = log_of(seed, each=80)
        return replace(log, user=np.zeros_like(log.user), split=np.zeros_like(log.split))

    learned, valid, test = (Source(fresh(seed)) for seed in (0, 1, 2))
    task = Task(lambda: Sequential(learned.log, learned.numbers), Rows(learned, 0), Rows(valid, 0))
    model, _ = task.learn(FitConfig(penalty=1e-4, rate=3e-3, epochs=12, lowered=9), 0)
    assert scored(*predict(model, Rows(test, 0))).auc > 0.8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    log = log_of(3, split=(0.5, 0.2, 0.2, 0.1))
    names = np.array([f"u{u}" for u in log.person])
    for split, name in enumerate(("train", "valid", "test", "events")):
        here = log.split == split
        table = {"user": names[here], "item": log.key[here], "time": log.time[here]}
        if split != EVENT:
            table["label"] = (log.label == POSITIVE)[here].astype(int)
        pc_csv.write_csv(pa.table(table), tmp_path / f"{name}.csv")
    kinds = [f"k{i % KINDS}|odd" if i % 2 else f"k{i % KINDS}" for i in range(ITEMS)]
    pc_csv.write_csv(pa.table({"item": range(ITEMS), "kinds": kinds}), tmp_path / "items.csv")
    ages = {"user": [f"u{u}" for u in range(USERS - 1)], "age": ["a"] * (USERS - 1)}
    pc_csv.write_csv(pa.table(ages), tmp_path / "users.csv")
    return tmp_path


def test_files_make_one_log(folder: Path) -> None:
    told, log = log_of(3, split=(0.5, 0.2, 0.2, 0.1)), read_log(folder)
    assert len(log) == len(told) and (np.diff(log.user_offsets) == 40).all()
    assert sorted(log.split) == sorted(told.split)
    assert (log.label[log.split == EVENT] == UNLABELLED).all()
    assert (log.label[log.split != EVENT] != UNLABELLED).all()
    for first, stop in zip(log.user_offsets, log.user_offsets[1:], strict=False):
        assert (np.diff(log.time[first:stop]) >= 0).all()
    kinds = log.item_attributes["kinds"]
    assert kinds.size == 1 + KINDS + 1  # none, the kinds, odd
    assert set(np.diff(kinds.offsets)) == {1, 2}
    age = log.user_attributes["age"]
    assert age.size >= 2 and (age.values == 0).sum() == 1  # one user has no row


@pytest.mark.parametrize(
    "written", [float, lambda s: f"2026-01-01T00:{int(s) // 60:02}:{s % 60:02.0f}"]
)
def test_times_are_seconds_or_dates(folder: Path, written: Callable[[float], object]) -> None:
    before = read_log(folder)
    for name in ("train", "valid", "test", "events"):
        table = pc_csv.read_csv(folder / f"{name}.csv")
        times = pa.array([str(written(t)) for t in table["time"].to_pylist()])
        table = table.set_column(table.column_names.index("time"), "time", times)
        pc_csv.write_csv(table, folder / f"{name}.csv")
    after = read_log(folder)
    np.testing.assert_allclose(after.time - after.time.min(), before.time - before.time.min())


def bench(folder: Path, *more: str) -> list[str]:
    return ["bench", "sequence", "--data", str(folder), "--json", *more]


def test_the_bench_reports_the_test_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bench(folder)) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < figures["auc"] <= 1 and 0 < figures["uauc"] <= 1 and figures["logloss"] > 0


def rewritten(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "test.csv").unlink(), "test.csv is absent"),
        (rewritten("valid.csv", "user,item,label\nu1,1,1\n"), "valid.csv has no column time"),
        (rewritten("test.csv", "user,item,time,label\nu1,1,1,2\n"), "0 or 1"),
        (rewritten("test.csv", "user,item,time,label\nu1,1,1,\n"), "0 or 1"),
        (rewritten("test.csv", "user,item,time,label\nu1,1,,1\n"), "the time of a row is missing"),
        (rewritten("test.csv", "user,item,time,label\nu1,1,soon,1\n"), "not a number"),
        (rewritten("events.csv", "user,time\nu1,1\n"), "events.csv has no column item"),
        (rewritten("items.csv", "id,kinds\n1,a\n"), "items.csv has no column item"),
        (rewritten("items.csv", "item,kinds\n1,a\n1,b\n"), "several rows of one item"),
        (rewritten("valid.csv", "user,item,time,label\nu1,1,1,1\n"), "both classes"),
    ],
)
def test_bad_files_are_told_in_a_sentence(
    folder: Path, change, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    assert main(bench(folder)) == 2
    assert said in capfd.readouterr().err
