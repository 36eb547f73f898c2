"""A lake with another number of buckets: tables are rewritten, and hold what they held."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from etl.errors import UserError
from etl.spec import load_spec
from etl.tables.lake import REPARTITIONING, Lake, last_commit_metadata
from etl.tables.maintenance import plan_upgrade, set_spec_hash, upgrade_lake
from features.encoding.scalar import spark_xxhash64
from gemline import main
from tests.conftest import FIRST, GEM_FLAGS, LAST
from tests.pipeline import TABLES, rows

pytestmark = pytest.mark.spark
TABLES_BY_BUCKET = {"events", "impressions", "history", "examples", "teacher_predictions"}
NUM_BUCKETS = 8


@pytest.fixture
def new_spec_path(spec_path: Path, tmp_path: Path) -> Path:
    """The spec of the shared lake with more buckets."""
    spec = yaml.safe_load(spec_path.read_text()) | {"buckets": NUM_BUCKETS}
    path = tmp_path / "new.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


def rows_without_bucket(lake: Lake, name: str) -> list[dict[str, Any]]:
    return sorted(
        ({key: value for key, value in row.items() if key != "bucket"} for row in rows(lake, name)),
        key=repr,
    )


def bucket_of(user_id: str) -> int:
    return spark_xxhash64(user_id) % NUM_BUCKETS


def test_an_upgrade_rewrites_tables_and_keeps_gem_and_its_predictions(
    spark: object,
    own_gem_lake: Lake,
    spec_path: Path,
    new_spec_path: Path,
    raw: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is built again, and GEM is trained on the next day."""
    names = {*TABLES, "teacher_predictions", "user_teacher_embeddings"}
    names = {name for name in names if own_gem_lake.exists(name)}
    before = {name: rows_without_bucket(own_gem_lake, name) for name in names}
    inputs = last_commit_metadata(own_gem_lake.open("examples"))["inputs"]
    flags = ["--spec", str(new_spec_path), "--lake", own_gem_lake.root]
    command = ["upgrade", *flags, "--raw", str(raw), "--old-spec", str(spec_path), "--yes"]
    assert main([*command, "--days", f"{FIRST}:{LAST}"]) == 0
    output = capsys.readouterr().out
    assert "removed, to be rebuilt: nothing" in output
    assert "predictions for requests of the old spec: equal" in output
    upgraded = Lake(own_gem_lake.root, load_spec(new_spec_path))
    recorded = last_commit_metadata(upgraded.open("examples"))
    assert recorded == {"spec": upgraded.spec.hash, "inputs": inputs}, "as the last write recorded"
    for name in names:
        assert rows_without_bucket(upgraded, name) == before[name], name
    buckets = {row["impression_id"]: row["bucket"] for row in rows(upgraded, "examples")}
    for name in TABLES_BY_BUCKET & names:
        for row in rows(upgraded, name):
            in_examples = buckets.get(row.get("impression_id"), row["bucket"])
            expected = bucket_of(row["user_id"]) if "user_id" in row else in_examples
            assert row["bucket"] == expected, name
    assert main(["train", "gem", *flags, "--days", str(LAST), *GEM_FLAGS]) == 0


def test_a_table_cannot_be_read_until_it_is_rewritten_completely(
    spark: object, own: Lake, spec_path: Path, new_spec_path: Path
) -> None:
    """After an interruption, by commands of neither spec; the same command completes it."""
    old, new = own.spec, load_spec(new_spec_path)
    set_spec_hash(own, "events", REPARTITIONING)
    for spec in (old, new):
        with pytest.raises(UserError, match=r"table events in .* is being repartitioned"):
            Lake(own.root, spec).open("events")
    assert set(plan_upgrade(own.root, old, new).repartitioned_tables) == {
        "events", "impressions", "history", "examples",
    }  # fmt: skip
    flags = ["--spec", str(new_spec_path), "--lake", own.root, "--old-spec", str(spec_path)]
    assert main(["etl", "repartition", *flags]) == 0
    assert not plan_upgrade(own.root, old, new).repartitioned_tables
    upgrade_lake(own.root, old, new)
    partitions = {row["bucket"] for row in rows(Lake(own.root, new), "events")}
    assert len(partitions) > old.buckets
