"""A lake in an object store works as on a disk: tables, leases, checkpoints and rankers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from pathlib import Path
from typing import cast

import boto3
import numpy as np
import pytest
from upath import UPath

from etl.array_types import Float32
from etl.errors import TemporaryError, UserError, known_temporary_error
from etl.runtime.java import jar_folder
from etl.tables import arrow, atomic_io, model_schemas, schemas, step_state
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake
from etl.tables.lease import LEASE_TIMEOUT_SECONDS, Lease, acquire_lease, hold_leases
from etl.tables.maintenance import vacuum_lake
from etl.tables.schemas import table_registry
from etl.tables.table_schema import TableSchema
from etl.tables.uri import StoragePath, local_cache_path, read_text_if_exists, resolve_uri
from gemline import main
from ranking.registry.ranker import live_version, load_ranker
from tests.conftest import FIRST, GEM_FLAGS, LAST, ROOT
from training.distributed.process_group import process_group
from training.trainer import checkpoint
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.trainer import load_train_state

BUCKET = "s3://ads"
# In a process of its own, because delta-rs holds the GIL while it waits for a response.
SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0)
server.start()
print("http://%s:%s" % server.get_host_and_port(), flush=True)
input()
"""
SECOND, THIRD = FIRST + timedelta(days=1), FIRST + timedelta(days=2)
SPLIT = ["--train", f"{FIRST}:{SECOND}", "--calibration", f"{THIRD}", "--test", f"{LAST}"]
SPLIT += ["--data-until", f"{LAST}"]
SMALL = ["--model.encoded-events", "32", "--model.max-length", "32"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An S3 server with one bucket; yields its environment variables, which are set here, too."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert server.stdin and server.stdout
    environment = {
        "AWS_ENDPOINT_URL": next(line for line in server.stdout if line.startswith("http")).strip(),
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "GEMLINE_JARS": str(jar_folder()),
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="ads")
        yield environment
    server.stdin.close()
    server.wait(30)


@pytest.fixture(scope="module")
def remote_lake(lake: Lake, store: dict[str, str]) -> Lake:
    """A copy of the tables in the store."""
    root = f"{BUCKET}/lake"
    upload(Path(lake.root), root)
    return Lake(root, lake.spec)


def upload(folder: Path, url: str) -> None:
    root = resolve_uri(url)
    assert isinstance(root, UPath)
    root.fs.put(f"{folder}/", f"{root.path}/", recursive=True)


def differing_tables(expected: Lake, actual: Lake) -> list[str]:
    """Tables whose rows differ."""
    return [
        name
        for name, schema in table_registry(expected.spec).items()
        if expected.exists(name) and rows(expected, schema) != rows(actual, schema)
    ]


def click_logits(lake: Lake, day: date) -> Float32:
    """GEM's logits of a click on one day, in the order of impressions."""
    table = arrow.snapshot(lake, model_schemas.teacher_predictions(lake.spec)).read(day=day)
    logits = table.sort_by("impression_id")["logit_click"].to_numpy()
    return cast(Float32, logits)


def rows(lake: Lake, schema: TableSchema) -> list[str]:
    """The rows of a table as sorted text, without the paths of source files."""
    if not lake.exists(schema.name):
        return []
    columns = [name for name in schema.columns if name != "source_file"]
    return sorted(repr(row) for row in arrow.snapshot(lake, schema).read(columns).to_pylist())


def test_tables_are_read_written_pinned_and_vacuumed(remote_lake: Lake, lake: Lake) -> None:
    assert remote_lake.exists("events") and differing_tables(lake, remote_lake) == []
    schema = schemas.attributes(lake.spec, "user")
    stored = arrow.snapshot(remote_lake, schema)
    before = stored.read()
    day = before["day"][0]
    rows_of_day = before.filter([value == day for value in before["day"]])
    arrow.replace_rows(remote_lake, schema, rows_of_day.slice(1), f"day = '{day}'", {})
    assert arrow.snapshot(remote_lake, schema).read().num_rows == before.num_rows - 1
    step_state.pin_versions(remote_lake.root, "a run", {schema.name: stored.version})
    vacuum_lake(remote_lake, 0)
    assert arrow.snapshot(remote_lake, schema, stored.version).read().equals(before)
    step_state.unpin_versions(remote_lake.root, "a run")
    assert step_state.read_pins(remote_lake.root) == []
    vacuum_lake(remote_lake, 0)
    with pytest.raises(UserError, match="vacuumed"):
        arrow.snapshot(remote_lake, schema, stored.version).read()
    arrow.replace_rows(remote_lake, schema, rows_of_day, f"day = '{day}'", {})
    assert differing_tables(lake, remote_lake) == []


def test_writes_of_files_and_folders_are_atomic(store: dict[str, str]) -> None:
    file = resolve_uri(BUCKET, "folder", "file.json")
    with pytest.raises(RuntimeError):
        interrupt_a_write(file)
    assert not file.exists()
    atomic_io.write_text(file, "all of it")
    assert not atomic_io.create_if_absent(file, "another")
    assert atomic_io.create_if_absent(file.parent / "new.json", "")
    assert file.read_text() == "all of it"
    assert not local_cache_path(file).exists()
    assert atomic_io.download(file).read_text() == "all of it"
    atomic_io.write_text(file, "less of it")
    assert not local_cache_path(file).exists(), "an erasure leaves no copy of what it removed"
    folder = resolve_uri(BUCKET, "rankers", "one")
    staging = atomic_io.staging_folder(folder)
    (staging / "a.txt").write_text("a")
    atomic_io.publish_folder(staging, folder)
    assert (folder / "a.txt").read_text() == (local_path(folder) / "a.txt").read_text() == "a"
    atomic_io.remove_folder(folder)
    assert not folder.exists() and not local_path(folder).exists()


def interrupt_a_write(file: StoragePath) -> None:
    with atomic_io.replace_file(file) as temporary:
        temporary.write_text("half of")
        raise RuntimeError


def test_one_of_many_processes_acquires_a_free_lease(store: dict[str, str]) -> None:
    """First the lease is free; then its holder on another machine has stopped renewing it."""
    root = f"{BUCKET}/leased"

    def acquired_leases() -> list[Lease]:
        with ThreadPoolExecutor(4) as pool:
            attempts = list(pool.map(lambda _: try_acquire(root), range(4)))
        return [lease for lease in attempts if lease]

    (first,) = acquired_leases()
    assert acquired_leases() == []
    expired = first.holder.renewed_at - timedelta(seconds=2 * LEASE_TIMEOUT_SECONDS)
    elsewhere = first.holder.model_copy(
        update={"process_identity": "elsewhere 1", "renewed_at": expired}
    )
    file = resolve_uri(root, "_pipeline", "leases", "gem.00000001.json")
    file.write_text(elsewhere.model_dump_json())
    (second,) = acquired_leases()
    assert second.generation == 2
    with hold_leases(root, ["ingest"], "one"), pytest.raises(TemporaryError, match="run by one of"):
        acquire_lease(root, "ingest", "another")
    with hold_leases(root, ["ingest"], "another"):
        pass


def try_acquire(root: str) -> Lease | None:
    try:
        lease = acquire_lease(root, "gem", "competitor")
    except TemporaryError:
        return None
    assert isinstance(lease, Lease)
    return lease


@pytest.mark.proof
def test_gem_trains_as_on_a_disk_and_a_ranker_is_promoted(
    remote_lake: Lake, gem_lake: Lake, spec_path: Path
) -> None:
    """The same commands give the same numbers, also after a checkpoint was interrupted."""
    flags = ["--spec", str(spec_path), "--lake", remote_lake.root]
    train = ["train", "gem", *flags, *GEM_FLAGS, "--days"]
    assert main([*train, f"{FIRST}"]) == 0
    interrupt_a_checkpoint(remote_lake)
    assert main([*train, f"{SECOND}"]) == 0
    assert main(["teacher-predictions", *flags, "--days", f"{FIRST}:{THIRD}"]) == 0
    model_tables = {"teacher_predictions", "user_teacher_embeddings"}
    assert set(differing_tables(gem_lake, remote_lake)) <= model_tables
    expected, actual = click_logits(gem_lake, THIRD), click_logits(remote_lake, THIRD)
    assert np.isfinite(expected).sum() > 100
    np.testing.assert_allclose(expected, actual, atol=1e-4)
    for step in ("train", "promote"):
        sizes = SMALL if step == "train" else []
        assert main(["rank", step, *flags, *SPLIT, *sizes, "--surface", "feed"]) == 0
    assert load_ranker(live_version(remote_lake.root, "feed")).manifest.surface == "feed"


def interrupt_a_checkpoint(lake: Lake) -> None:
    """Write another GEM of the first day, without the manifest, as if killed before the end."""
    path = checkpoint.checkpoint_path(lake.root, FIRST)
    before = checkpoint.read_manifest(path, lake.spec.hash)
    with process_group():
        state, _ = load_train_state(lake, FIRST)
        for parameter in state.model.core.parameters():
            parameter.data.zero_()
        checkpointer = AsyncCheckpointer()
        checkpointer.save(path, state)
        assert checkpointer._in_progress
        checkpointer._in_progress[-1].result()  # all but the manifest is written
    assert before and checkpoint.read_manifest(path, lake.spec.hash) == before


def test_a_store_that_does_not_answer_does_not_look_empty(
    store: dict[str, str], spec_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = resolve_uri(BUCKET, "file.txt")
    assert isinstance(file, UPath)
    file.write_text("text")
    assert read_text_if_exists(file) == "text"
    assert read_text_if_exists(resolve_uri(BUCKET, "none.txt")) is None
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        file.fs.clear_instance_cache()
        unreachable = resolve_uri(BUCKET, "file.txt")
        try:
            with pytest.raises(Exception, match="Could not connect to the endpoint") as raised:
                read_text_if_exists(unreachable)
            assert "does not answer" in str(known_temporary_error(raised.value))
            flags = ["--spec", str(spec_path), "--lake", f"{BUCKET}/lake", "--days", f"{FIRST}"]
            assert main(["train", "gem", *flags]) == 75
        finally:
            file.fs.clear_instance_cache()


@pytest.mark.parametrize(
    ("url", "message"),
    [("nowhere://ads/lake", "cannot be read here"), ("s3://nobody/lake", "nobody")],
)
def test_an_unknown_store_or_bucket_is_a_user_error(
    store: dict[str, str],
    spec_path: Path,
    capsys: pytest.CaptureFixture[str],
    url: str,
    message: str,
) -> None:
    flags = ["--spec", str(spec_path), "--lake", url, "--days", f"{FIRST}"]
    assert main(["train", "gem", *flags]) == 2
    errors = capsys.readouterr().err.strip()
    assert message in errors and "\n" not in errors


@pytest.mark.proof
def test_the_pipeline_runs_in_an_object_store(
    lake: Lake, raw: Path, spec_path: Path, store: dict[str, str]
) -> None:
    logs, root = f"{BUCKET}/raw", f"{BUCKET}/pipeline"
    upload(raw, logs)
    command = [sys.executable, "-m", "gemline", "run", "--spec", str(spec_path)]
    command += ["--raw", logs, "--lake", root, "--scale", "tiny", "--days", f"{FIRST}:{LAST}"]
    env = os.environ | {"SPARK_CONF_DIR": str(ROOT / "conf" / "spark" / "s3")}
    first, second = (
        subprocess.run(
            command,
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        for _ in range(2)
    )
    assert first.returncode == 0, first.stdout[-3000:]
    assert second.returncode == 0, second.stdout[-3000:]
    assert differing_tables(lake, Lake(root, lake.spec)) == []
    assert all(live_version(root, surface).is_dir() for surface in lake.spec.ad_surfaces)
    for step in ("ingest: ", "online features: "):
        assert step in first.stdout and step not in second.stdout
