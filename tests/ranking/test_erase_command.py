"""`gemline erase` leaves no trace of a user in any file of a lake, decoded in its format."""

import fcntl
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zlib import crc32

import lmdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from etl.runtime.spark import spark_session
from etl.spec import load_spec
from etl.spec.units import DAY, MICROS
from etl.tables import arrow, schemas
from etl.tables.atomic_io import local_path
from etl.tables.forecast_schemas import FORECAST_SCHEMAS
from etl.tables.lake import Lake, create_table
from etl.tables.maintenance import vacuum_lake
from features.encoding.scalar import spark_xxhash64
from features.validation import validate_examples
from gemline import main
from ranking.erasure import (
    _erase_from_feature_store,
    _erase_from_files,
    _rebuild_forecasts,
    remaining_traces,
)
from ranking.feature_store.materialize import HistoryLengths, build_feature_store, materialize
from ranking.feature_store.store import METADATA_KEY
from ranking.feature_store.wal import FeatureStoreHandle, WalEntry, feature_store_pointer, open_wal
from ranking.registry.ranker import live_pointer, rankers_folder
from ranking.scoring.batch import score_days
from tests.conftest import LAST
from tests.ranking.poster import event_of, post
from tests.world import copy_of
from training.trainer.nan_guard import REPORT_FILE

pytestmark = pytest.mark.spark

RANKERS = "rankers"  # their test vectors are encoded inputs; the command names them


@pytest.fixture
def complete_lake(gem_lake: Lake, folder: Path, tmp_path: Path) -> Lake:
    """A lake with tables, GEM, a ranker, a feature store, an evaluation and a domain."""
    lake = copy_of(gem_lake, tmp_path / "lake")
    shutil.copytree(folder, local_path(rankers_folder(lake.root, "feed") / "one"))
    live_pointer(lake.root, "feed").promote("one")
    materialize(lake, lake.spec.day_end(LAST))
    examples = arrow.snapshot(lake, schemas.examples(lake.spec))
    rows = examples.read(["impression_id", "user_id"], day=LAST)
    users = pa.array([crc32(user.encode()) for user in rows["user_id"].to_pylist()])
    table = pa.table({"impression_id": rows["impression_id"], "user": users})
    for path in ("evaluations/gem.parquet", f"models/domains/video/{LAST}.parquet"):
        Path(lake.root, path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, Path(lake.root, path))
    loss_report = json.dumps({"impressions": rows["impression_id"].to_pylist()})
    for seed in ("", "seed-1"):
        Path(lake.root, "models", "gem", seed).mkdir(exist_ok=True)
        Path(lake.root, "models", "gem", seed, REPORT_FILE).write_text(loss_report)
    return lake


def traces(root: Path, users: Iterable[str], impressions: pa.Array | None = None) -> set[str]:
    """Where ids of users, hashes of them, or ids of their impressions are in the files of a lake.

    Names of users have four characters or more: shorter ones may be bytes of weights.
    """
    ids = "|".join(map(re.escape, users))
    word = re.compile(rf"(?<![A-Za-z0-9])({ids})(?![A-Za-z0-9])".encode())
    hashes = {spark_xxhash64(user) for user in users} | {crc32(user.encode()) for user in users}
    found = set()
    for file in root.rglob("*"):
        name = file.relative_to(root).parts[0]
        if file.name == "data.mdb":
            found |= {f"{name} {table}" for table in _traces_in_database(file, word, hashes)}
        elif file.suffix == ".parquet":
            table = pq.ParquetFile(file).read()
            columns = [*_traces_in_columns(table, word, hashes)]
            if impressions is not None and "impression_id" in table.column_names:
                columns += ["impression_id"] * _has_any(table["impression_id"], impressions)
            found |= {f"{name} {column}" for column in columns}
        elif name != RANKERS and file.is_file() and word.search(file.read_bytes()):
            found.add(f"{name} {file.name}")
    return found


def _has_any(column: pa.ChunkedArray, values: pa.Array) -> bool:
    return bool(pc.any(pc.is_in(column, values)).as_py())


def _traces_in_columns(
    table: pa.Table, word: "re.Pattern[bytes]", hashes: set[int]
) -> Iterator[str]:
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pa.types.is_integer(column.type):
            if hashes & set(column.drop_null().to_pylist()):
                yield name
        elif word.search("\n".join(map(str, column.to_pylist())).encode()):
            yield name


def _traces_in_database(file: Path, word: "re.Pattern[bytes]", hashes: set[int]) -> Iterator[str]:
    keys = [hash_.to_bytes(8, "big", signed=True) for hash_ in hashes]
    with lmdb.open(str(file.parent), max_dbs=20, readonly=True, lock=False) as env:
        with env.begin() as txn:
            names = [name for name, _ in txn.cursor()]
        for name in names:
            table = env.open_db(name, create=False)
            with env.begin(db=table) as txn:
                for key, value in txn.cursor():
                    if word.search(key) or word.search(value) or any(k in key for k in keys):
                        yield name.decode()


@pytest.mark.proof
def test_no_file_of_a_lake_holds_an_erased_user(
    complete_lake: Lake, spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 100,000 that are erased at once; most are in no table."""
    lake, root = complete_lake, Path(complete_lake.root)
    score_days(lake, "feed", (LAST, LAST))
    users = quarantined_users(lake)
    handle = FeatureStoreHandle(lake.root, lake.spec)
    posted = event_of("posted", 0)
    assert post(handle, posted) == 1
    handle.close()
    ids = [*users, posted.user]
    examples = arrow.snapshot(lake, schemas.examples(lake.spec)).read(["user_id", "impression_id"])
    of_users = examples.filter(pc.is_in(examples["user_id"], pa.array(ids)))
    impressions = of_users["impression_id"]
    before = traces(root, ids, impressions.combine_chunks())
    for name in (
        *("events user_id", "examples user_id", "history user_id", "impressions user_id"),
        *("user_teacher_embeddings user_id", "audience_labels user_id", "evaluations user"),
        *("teacher_predictions impression_id", "scores impression_id", "quarantine payload"),
        *("models user", "models impression_id"),
        *("feature_store users", "feature_store hours", "feature_store_wal entries"),
    ):
        assert name in before, f"there is nothing to erase in {name}: {sorted(before)}"
    rows_of_others = others(lake, users)

    flags = ["--spec", str(spec_path), "--lake", lake.root]
    file = tmp_path / "ids.txt"
    file.write_text("\n".join([*ids, *(f"absent-{number}" for number in range(100_000))]))
    capsys.readouterr()
    assert main(["erase", *flags, "--users", str(file), "--now"]) == 0
    assert f"examples: {len(of_users):,} rows removed" in capsys.readouterr().out.splitlines()
    assert traces(root, ids, impressions.combine_chunks()) == set()
    assert others(lake, users) == rows_of_others
    different = [found for found in validate_examples(lake, 50, 0) if found[1]]
    assert not different, "pointers and counters of the others still fit"


def test_an_erasure_removes_a_store_of_an_earlier_spec_that_cannot_be_rebuilt(
    lake: Lake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an upgrade there is no ranker of the new spec, and the live store is of the old one."""
    own = copy_of(lake, tmp_path / "lake")
    lengths = HistoryLengths("behaviour", 64)
    surfaces = {**own.spec.surfaces, "stories": own.spec.surfaces["feed"]}
    pointer = feature_store_pointer(own.root)
    earlier = own.spec.model_copy(update={"surfaces": surfaces})
    for version in ("one", "two"):
        end = own.spec.day_end(LAST)
        store = build_feature_store(own, Path(own.root, "feature_store", version), end, lengths)
        metadata = store.metadata.model_copy(update={"spec": earlier})
        with store.write_transaction() as txn:
            txn.put("meta", METADATA_KEY, metadata.model_dump_json().encode())
        store.close()
        pointer.promote(version)
    user = arrow.snapshot(own, schemas.examples(own.spec)).read(["user_id"])["user_id"][0].as_py()
    until_ts = (own.spec.day_end(LAST) + DAY) * MICROS["s"]
    for _ in range(2):  # it can be repeated
        _erase_from_feature_store(own, [user], until_ts)
    output = capsys.readouterr().out
    assert "the feature store was removed and could not be built: no ranker" in output
    assert "stop services that are running" in output
    assert pointer.live_folder is None
    assert not {found for found in traces(Path(own.root), [user]) if "feature_store" in found}


def test_forecasts_are_removed_also_if_no_day_is_scored_any_more(
    spec_path: Path, tmp_path: Path
) -> None:
    """Such as after the retention of scores."""
    lake = Lake(str(tmp_path / "lake"), load_spec(spec_path))
    names = [schema(lake.spec).name for schema in FORECAST_SCHEMAS]
    for name in names:
        create_table(lake, schemas.table_schema(lake.spec, name))
    _rebuild_forecasts(lake)
    assert not any(map(lake.exists, names))


def test_an_erasure_removes_a_damaged_store(
    spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until when it has data cannot be read: it is not built again."""
    lake = Lake(str(tmp_path), load_spec(spec_path))
    store = tmp_path / "feature_store" / "one"
    store.mkdir(parents=True)
    (store / "data.mdb").write_bytes(b"no store of user-1")
    feature_store_pointer(lake.root).promote("one")
    for _ in range(2):  # it can be repeated
        _erase_from_feature_store(lake, ["user-1"], 0)
    output = capsys.readouterr().out
    assert "the feature store was removed and could not be built: the feature store in" in output
    assert "is damaged: run `gemline rank materialize` again" in output
    assert not store.parent.exists()


def test_files_with_predictions_are_erased_also_those_of_domains(complete_lake: Lake) -> None:
    lake, path = complete_lake, f"models/domains/video/{LAST}.parquet"
    examples = arrow.snapshot(lake, schemas.examples(lake.spec))
    rows = examples.read(["impression_id", "user_id"], day=LAST)
    user = rows["user_id"][0].as_py()
    of_user = rows.filter(pc.field("user_id") == user).select(["impression_id"])
    impressions = spark_session("test").createDataFrame(of_user)
    erased = _erase_from_files(lake, impressions)
    assert erased[path] == erased["evaluations/gem.parquet"] > 0
    assert crc32(user.encode()) not in pq.read_table(Path(lake.root, path))["user"].to_pylist()
    assert erased[f"models/gem/{REPORT_FILE}"] == erased[f"models/gem/seed-1/{REPORT_FILE}"] > 0
    assert not list(Path(lake.root).rglob(REPORT_FILE)), "they name impressions of the batch"


def test_the_log_of_posts_keeps_no_bytes_of_an_erased_user(
    spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = Lake(str(tmp_path), load_spec(spec_path))
    folder = tmp_path / "feature_store_wal"
    posts = [replace(event_of(f"post-{n}", n), user=f"user-{n % 2}") for n in range(200)]
    wal = open_wal(folder)
    wal.append([[WalEntry("event", n, post) for n, post in enumerate(posts)]], lambda _: False)
    remaining = [(k, entry) for k, entry in wal.entries_after(0) if entry.user_id == "user-0"]
    wal.close()
    with (folder / "usage.lock").open() as service:
        fcntl.flock(service, fcntl.LOCK_SH)
        _erase_from_feature_store(lake, ["user-1"], len(posts))
    assert b"user-1" in (folder / "data.mdb").read_bytes(), "a service writes to this file"
    assert f"{folder} is open in a service" in capsys.readouterr().out
    _erase_from_feature_store(lake, ["user-1"], len(posts))
    stored = (folder / "data.mdb").read_bytes()
    assert b"user-0" in stored and b"user-1" not in stored
    reopened = open_wal(folder)
    assert [*reopened.entries_after(0)] == remaining
    assert reopened.identity == wal.identity and reopened.last_entry_number() == len(posts)
    with pytest.raises(BlockingIOError), (folder / "usage.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert reopened.append([[WalEntry("event", 0, event_of("next", 0))]], lambda _: False) == [1]
    reopened.close()


def quarantined_users(lake: Lake) -> list[str]:
    """The two users with the most examples of those who have bad records and long names."""
    payloads = arrow.snapshot(lake, schemas.quarantine(lake.spec)).read(["payload"])["payload"]
    bad = set(re.findall(r'"user_id":"(u\d{3,})"', "\n".join(filter(None, payloads.to_pylist()))))
    examples = arrow.snapshot(lake, schemas.examples(lake.spec)).read(["user_id"], day=LAST)
    counts = pc.value_counts(examples["user_id"]).to_pylist()
    frequent = sorted(counts, key=lambda row: -row["counts"])
    return [row["values"] for row in frequent if row["values"] in bad][:2]


def others(lake: Lake, users: list[str]) -> list[dict[str, object]]:
    """The examples of all other users."""
    rows = arrow.snapshot(lake, schemas.examples(lake.spec)).read()
    rows = rows.filter(pc.invert(pc.is_in(rows["user_id"], pa.array(users))))
    return sorted(rows.to_pylist(), key=lambda row: str(row["impression_id"]))


def test_an_erasure_of_nobody_is_refused(
    spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--spec", str(spec_path), "--lake", str(tmp_path / "lake")]
    (tmp_path / "ids.txt").write_text("\n \n")
    assert main(["erase", *flags, "--users", str(tmp_path / "ids.txt")]) == 2
    assert "no ids of users are given" in capsys.readouterr().err
    assert main(["erase", *flags, "--users", str(tmp_path / "absent.txt")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_what_remains_is_listed_with_the_day_on_which_it_goes(
    spec_path: Path, tmp_path: Path
) -> None:
    lake = Lake(str(tmp_path / "lake"), load_spec(spec_path))
    schema = schemas.table_schema(lake.spec, "user_event_counts")
    rows = pa.table({"user_id": ["u1", "u2"], "events": [3, 4], "day": [LAST, LAST]})
    for remaining in (rows, rows.slice(1)):
        arrow.replace_rows(lake, schema, remaining, f"day >= '{LAST}'", {})
    config = {"training": {"model": {"user_hash_buckets": 0}}}
    for seed, buckets in (("", 0), ("seed-1", 4096)):
        config["training"]["model"]["user_hash_buckets"] = buckets
        folder = tmp_path / "lake" / "models" / "gem" / seed / str(LAST)
        folder.mkdir(parents=True)
        (folder / "gem.json").write_text(json.dumps(config, indent=1))
    assert not [line for line in remaining_traces(lake, has_old_versions=True) if "report" in line]
    (tmp_path / "lake" / "report.html").write_text("<html></html>")
    lines = remaining_traces(lake, has_old_versions=True)
    assert [line for line in lines if line.startswith("report.html was made with the data")]
    gone = datetime.now(UTC).date() + timedelta(days=31)
    expected = f"old versions of user_event_counts hold them until a `gemline etl vacuum` of {gone}"
    assert [line for line in lines if line.startswith(expected)]
    with_users = [line for line in lines if "has a table of users" in line]
    assert [line.split()[0] for line in with_users] == [f"models/gem/seed-1/{LAST}"]
    vacuum_lake(lake, keep_days=0)
    lines = remaining_traces(lake, has_old_versions=True)
    assert not [line for line in lines if line.startswith("old versions")]
