"""A lake in an object store is as one on a disk: tables, checkpoints, rankers, and what holds."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from pathlib import Path

import boto3
import numpy as np
import pytest

from etl.errors import TemporaryError, UserError
from etl.jars import jar_folder
from etl.known_failures import temporary_error
from etl.tables import arrow, atomic_io, contracts, pins
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake
from etl.tables.lease import EXPIRES_AFTER, Lease, acquire, held
from etl.tables.place import here, place, text_of
from etl.told import all_contracts
from etl.vacuum import vacuum
from gemline import main
from ranking.package.ranker import load
from ranking.package.versions import answering
from tests.conftest import FIRST, GEM_FLAGS, LAST, ROOT
from training.gem import load_trained
from training.loop import checkpoint
from training.loop.writer import Writer
from training.parallel.processes import process_group

BUCKET = "s3://ads"
# A process of its own: delta-rs holds Python's lock while it waits for an answer.
SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0)
server.start()
print("http://%s:%s" % server.get_host_and_port(), flush=True)
input()
"""
SECOND, THIRD = FIRST + timedelta(days=1), FIRST + timedelta(days=2)
SPLIT = ["--train", f"{FIRST}:{SECOND}", "--calibration", f"{THIRD}", "--test", f"{LAST}"]
SPLIT += ["--landed", f"{LAST}"]
SMALL = ["--model.events", "32", "--model.max-length", "32"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server that speaks S3, with one bucket; variables that name it, of this process too."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert server.stdin and server.stdout
    told = {
        "AWS_ENDPOINT_URL": next(line for line in server.stdout if line.startswith("http")).strip(),
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "who",
        "AWS_SECRET_ACCESS_KEY": "what",
        "AWS_REGION": "us-east-1",
        "GEMLINE_JARS": str(jar_folder()),
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="ads")
        yield told
    server.stdin.close()
    server.wait(30)


@pytest.fixture(scope="module")
def there(lake: Lake, store: dict[str, str]) -> Lake:
    """A copy of the tables in the store."""
    root = place(f"{BUCKET}/lake")
    root.fs.put(f"{lake.root}/", f"{root.path}/", recursive=True)
    return Lake(str(root), lake.spec)


def differing(one: Lake, other: Lake) -> list[str]:
    """Tables that do not hold the same rows."""
    return [
        name
        for name, contract in all_contracts(one.spec).items()
        if one.exists(name) and rows(one, contract) != rows(other, contract)
    ]


def logits_of_clicks(lake: Lake, day: date) -> np.ndarray:
    """GEM's logits of a day, in order of impressions."""
    found = arrow.snapshot(lake, contracts.knowledge(lake.spec)).read(day=day)
    return found.sort_by("impression_id")["logit_click"].to_numpy()


def rows(lake: Lake, contract) -> list[tuple]:
    if not lake.exists(contract.name):
        return []
    columns = [name for name in contract.columns if name != "source_file"]
    found = arrow.snapshot(lake, contract).read(columns).to_pylist()
    return sorted(map(repr, found))


def test_tables_are_read_written_pinned_and_cleaned_up(there: Lake, lake: Lake) -> None:
    assert there.exists("events") and differing(lake, there) == []
    contract = contracts.attributes(lake.spec, "user")
    stored = arrow.snapshot(there, contract)
    before = stored.read()
    day = f"day = '{before['day'][0]}'"
    some = before.filter([value == before["day"][0] for value in before["day"]])
    arrow.replace(there, contract, some.slice(1), day, {})
    assert arrow.snapshot(there, contract).read().num_rows == before.num_rows - 1
    pins.pin(there.root, "a run", {contract.name: stored.version})
    vacuum(there, 0)
    assert arrow.snapshot(there, contract, stored.version).read().equals(before)
    pins.unpin(there.root, "a run")
    assert pins.pinned(there.root) == []
    vacuum(there, 0)
    with pytest.raises(UserError, match="vacuumed"):
        arrow.snapshot(there, contract, stored.version).read()
    arrow.replace(there, contract, some, day, {})
    assert differing(lake, there) == []


def test_a_file_is_whole_or_not_there(store: dict[str, str]) -> None:
    one = place(BUCKET, "folder", "one.json")
    with pytest.raises(RuntimeError), atomic_io.replace_file(one) as temporary:
        temporary.write_text("half of")
        raise RuntimeError
    assert not one.exists()
    atomic_io.write_text(one, "all of it")
    assert not atomic_io.create_file(one, "another") and atomic_io.create_file(one.parent / "2", "")
    assert one.read_text() == "all of it"
    assert not here(one).exists()
    folder = place(BUCKET, "rankers", "one")
    staging = atomic_io.staging_folder(folder)
    (staging / "a.txt").write_text("a")
    atomic_io.publish_folder(staging, folder)
    assert (folder / "a.txt").read_text() == (local_path(folder) / "a.txt").read_text() == "a"
    atomic_io.remove_folder(folder)
    assert not folder.exists() and not local_path(folder).exists()


def test_one_of_many_takers_gets_a_lease(store: dict[str, str]) -> None:
    """Nobody had it; then its holder is on another machine and does not renew it."""
    root = f"{BUCKET}/leased"

    def taken() -> list[Lease]:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: attempt(root), range(4)))
        return [lease for lease in found if lease]

    (first,) = taken()
    assert taken() == []
    gone = first.holder.renewed - timedelta(seconds=2 * EXPIRES_AFTER)
    elsewhere = first.holder.model_copy(update={"process": "elsewhere 1", "renewed": gone})
    place(root, "_line", "leases", "gem.00000001.json").write_text(elsewhere.model_dump_json())
    (second,) = taken()
    assert second.generation == 2
    with held(root, ["ingest"], "one"), pytest.raises(TemporaryError, match="run by one of"):
        acquire(root, "ingest", "another")
    with held(root, ["ingest"], "another"):
        pass


def attempt(root: str) -> Lease | None:
    try:
        return acquire(root, "gem", "taker")
    except TemporaryError:
        return None


def test_gem_is_as_on_a_disk_and_a_ranker_answers(
    there: Lake, gem_lake: Lake, spec_path: Path
) -> None:
    """The same commands, the same numbers; a training that is killed while it writes hurts none."""
    where = ["--spec", str(spec_path), "--lake", there.root]
    train = ["train", "gem", *where, *GEM_FLAGS, "--days"]
    assert main([*train, f"{FIRST}"]) == 0
    begin_to_write_another(there)
    assert main([*train, f"{SECOND}"]) == 0
    assert main(["knowledge", *where, "--days", f"{FIRST}:{THIRD}"]) == 0
    assert set(differing(gem_lake, there)) <= {"knowledge", "user_knowledge"}
    one, other = (logits_of_clicks(own, THIRD) for own in (gem_lake, there))
    assert np.isfinite(one).sum() > 100
    np.testing.assert_allclose(one, other, atol=1e-4)
    for step in ("train", "promote"):
        small = SMALL if step == "train" else []
        assert main(["rank", step, *where, *SPLIT, *small, "--surface", "feed"]) == 0
    assert load(answering(there.root, "feed")).manifest.surface == "feed"


def begin_to_write_another(lake: Lake) -> None:
    """Over the GEM of the first day, as one that is killed before it is whole."""
    path = checkpoint.folder(lake.root, FIRST)
    before = checkpoint.read_manifest(path, lake.spec.hash)
    with process_group():
        trained, _ = load_trained(lake, FIRST)
        for weights in trained.model.core.parameters():
            weights.data.zero_()
        writer = Writer()
        writer.begin(path, trained)
        assert writer._running
        writer._running[-1].result()  # all but the manifest is written
    assert before and checkpoint.read_manifest(path, lake.spec.hash) == before


def test_a_store_that_does_not_answer_is_not_an_empty_one(
    store: dict[str, str], spec_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = place(BUCKET, "told.txt")
    one.write_text("told")
    assert text_of(one) == "told" and text_of(place(BUCKET, "none.txt")) is None
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        one.fs.clear_instance_cache()
        try:
            with pytest.raises(Exception, match="Could not connect to the endpoint") as raised:
                text_of(place(BUCKET, "told.txt"))
            assert "does not answer" in str(temporary_error(raised.value))
            words = ["--spec", str(spec_path), "--lake", f"{BUCKET}/lake", "--days", f"{FIRST}"]
            assert main(["train", "gem", *words]) == 75
        finally:
            one.fs.clear_instance_cache()


@pytest.mark.parametrize(
    ("lake", "said"),
    [("nowhere://ads/lake", "cannot be read here"), ("s3://nobody/lake", "nobody")],
)
def test_a_store_that_is_not_there_is_one_sentence(
    store: dict[str, str], spec_path: Path, capsys: pytest.CaptureFixture[str], lake: str, said: str
) -> None:
    words = ["--spec", str(spec_path), "--lake", lake, "--days", f"{FIRST}"]
    assert main(["train", "gem", *words]) == 2
    told = capsys.readouterr().err.strip()
    assert said in told and "\n" not in told


@pytest.mark.proof
def test_the_whole_line_runs_in_a_store(
    lake: Lake, raw: Path, spec_path: Path, store: dict[str, str]
) -> None:
    logs, root = place(BUCKET, "raw"), f"{BUCKET}/line"
    logs.fs.put(f"{raw}/", f"{logs.path}/", recursive=True)
    where = ["--spec", str(spec_path), "--raw", str(logs), "--lake", root, "--scale", "tiny"]
    words = [sys.executable, "-m", "gemline", "run", *where, "--days", f"{FIRST}:{LAST}"]
    env = os.environ | {"SPARK_CONF_DIR": str(ROOT / "conf" / "spark" / "s3")}
    said = []
    for _ in range(2):
        done = subprocess.run(
            words, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:]
        said.append(done.stdout)
    assert differing(lake, Lake(root, lake.spec)) == []
    assert all(answering(root, surface).is_dir() for surface in lake.spec.ad_surfaces)
    for step in ("ingest: ", "online features: "):
        assert step in said[0] and step not in said[1]
