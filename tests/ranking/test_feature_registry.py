"""The feature registry: all features of the tables, who reads them, and how fresh they are."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from etl.errors import UserError
from etl.spec import load_spec
from etl.tables import arrow, feature_schemas, schemas
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake, arrow_schema
from features.schema import feature_schema
from gemline import main
from ranking.registry.features import registered_features, select_features
from ranking.registry.manifest import read_manifest as read_ranker_manifest
from ranking.registry.manifest import write_manifest
from ranking.registry.ranker import live_pointer, rankers_folder
from tests.conftest import LAST
from training.trainer import checkpoint


def promote(lake: Lake, surface: str, folder: Path) -> None:
    shutil.copytree(folder, local_path(rankers_folder(lake.root, surface) / "v1"))
    live_pointer(lake.root, surface).promote("v1")


def test_all_features_of_the_tables_are_listed(gem_lake: Lake) -> None:
    spec = gem_lake.spec
    examples, versions = schemas.examples(spec).columns, schemas.item_versions(spec).columns
    stored = {n for n in examples if n.startswith(("user_", "ctx_"))} - {
        "user_id",
        "user_known_since",
    }
    stored |= {f"item_{name}" for name in spec.attributes.item} | {
        counter.column for counter in spec.counters.columns
    }
    assert stored <= {*examples, *versions}
    listed = registered_features(gem_lake)
    assert {feature.name for feature in listed} == stored | set(spec.sequences)
    assert len(listed) == len({feature.name for feature in listed})
    by_name = {feature.name: feature for feature in listed}
    assert by_name["user_country"].sources == ("users",)
    assert by_name["ctx_device"].key == "request"
    assert by_name["behaviour"].newest_day == LAST


def test_the_models_of_a_feature_are_gem_and_live_rankers(own_gem_lake: Lake, folder: Path) -> None:
    assert {feature.models for feature in registered_features(own_gem_lake)} == {("gem",)}
    promote(own_gem_lake, "feed", folder)
    assert {feature.models for feature in registered_features(own_gem_lake)} == {("gem", "feed")}
    shutil.rmtree(Path(own_gem_lake.root, "models"))
    assert {feature.models for feature in registered_features(own_gem_lake)} == {("feed",)}


def test_attributes_of_events_are_read_in_histories_of_gem_and_by_counters(
    gem_lake: Lake, spec_path: Path, folder: Path, tmp_path: Path
) -> None:
    """A ranker reads no attributes in histories; nothing reads `note`."""
    declared = yaml.safe_load(spec_path.read_text())
    declared["attributes"]["event"] = {
        "quantity": {"type": "numeric"},
        "coupon": {"type": "categorical", "size": 8},
        "note": {"type": "categorical", "size": 8},
    }
    declared["history"] = {"attributes": ["coupon"]}
    declared["counters"]["aggregations"] = [
        {"function": "sum", "column": "quantity", "event": "conversion"}
    ]
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(declared, sort_keys=False))
    own = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))
    shutil.copytree(Path(gem_lake.root, "models", "gem"), Path(own.root, "models", "gem"))
    own_folder = Path(str(rankers_folder(own.root, "feed"))) / "v1"
    shutil.copytree(folder, own_folder)
    live_pointer(own.root, "feed").promote("v1")

    def readers() -> dict[str, tuple[str, ...]]:
        listed = [f for f in registered_features(own) if f.key == "event"]
        assert all((f.type, f.sources) == (types[f.name], ("events",)) for f in listed)
        return {feature.name: feature.models for feature in listed}

    types = {f"event_{n}": a["type"] for n, a in declared["attributes"]["event"].items()}
    assert readers() == dict.fromkeys(types, ()), "models of the spec without these attributes"
    ranker = read_ranker_manifest(own_folder)
    changed = ranker.model_copy(update={"spec": own.spec})
    write_manifest(own_folder, changed)
    assert readers() == dict.fromkeys(types, ()) | {"event_quantity": ("feed",)}
    path, gem = checkpoint.list_checkpoints(own.root, spec_hash=None)[-1]
    gem = gem.model_copy(update={"features": feature_schema(own.spec)})
    (path / checkpoint.MANIFEST).write_text(gem.model_dump_json())
    assert readers() == {
        "event_quantity": ("gem", "feed"), "event_coupon": ("gem",), "event_note": ()
    }  # fmt: skip


def test_owners_are_those_of_the_sources(
    own: Lake, spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = yaml.safe_load(spec_path.read_text())
    spec["sources"]["users"]["owner"] = "crm"
    owned = tmp_path / "owned.yaml"
    owned.write_text(yaml.safe_dump(spec, sort_keys=False))
    assert load_spec(owned).hash == load_spec(spec_path).hash, "owners affect no table"
    command = ["registry", "--spec", str(owned), "--lake", own.root, "--contains", "crm", "--json"]
    assert main(command) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {feature["name"] for feature in listed} == {
        f"user_{n}" for n in spec["attributes"]["user"]
    }
    assert all(feature["owners"] == ["crm"] and not feature["models"] for feature in listed)


def test_the_missing_share_is_that_of_all_surfaces_on_the_latest_day(own: Lake) -> None:
    schema, codes = feature_schemas.feature_statistics(own.spec), own.spec.surface_codes
    counts = {("feed", LAST): (80, 20), ("reels", LAST): (20, 0),
              ("feed", LAST - timedelta(days=1)): (10, 10)}  # fmt: skip
    rows = [
        {"surface": codes[surface], "feature": "ctx_device", "num_rows": num_rows,
         "num_missing": num_missing, "num_bins": 0, "bins": [], "counts": [], "day": day}
        for (surface, day), (num_rows, num_missing) in counts.items()
    ]  # fmt: skip
    arrow.replace_rows(own, schema, pa.Table.from_pylist(rows, arrow_schema(schema)), "true", {})
    shares = {f.name: f.missing_share for f in registered_features(own)}
    assert shares["ctx_device"] == pytest.approx(0.2)
    assert shares["ctx_hour"] is None


def test_features_are_selected_by_a_part_of_a_name(own: Lake) -> None:
    features = registered_features(own)
    assert select_features(features, "") == features
    assert [f.name for f in select_features(features, "country")] == ["user_country"]
    of_users = select_features(features, "users")
    assert [f.name for f in of_users] == [f"user_{name}" for name in own.spec.attributes.user]
    with pytest.raises(UserError, match="no feature, key, source, owner or model has 'nobody'"):
        select_features(features, "nobody")
