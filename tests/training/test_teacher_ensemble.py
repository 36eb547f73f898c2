"""A teacher of several seeds and trees: its predictions, and that weights do not look ahead."""

import shutil
from collections.abc import Iterable, Iterator
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from benchmarks.harness import SIMULATOR_SPEC
from benchmarks.system.warm_start import manifest_of
from etl.errors import UserError
from etl.signature import SIGNING_KEY_VARIABLE, TRUSTED_KEY_VARIABLE
from etl.spec import load_spec
from etl.spec.units import date_range
from etl.tables import arrow, atomic_io, label_schemas, model_schemas, schemas
from etl.tables.lake import Lake, arrow_schema
from etl.tables.maintenance import upgrade_lake
from tests.conftest import FIRST, LAST
from tests.dags.test_upgrade import new_counter, write_changed_spec
from tests.training.test_labels_learned_once import delay_labels
from tests.world import World, copy_of
from training.baseline import feature_names_of, load_tabular
from training.config import TeacherConfig, TrainConfig
from training.data.batch import Shuffle
from training.data.label_window import ALL_LABELS, LabelWindow
from training.distributed.process_group import process_group
from training.teacher import ensemble
from training.teacher.blend import blend, blend_weights, day_logits_path, fit_blend_weight
from training.teacher.ensemble import (
    load_teacher,
    remove_old_models,
    train_teacher,
    train_teacher_trees,
)
from training.teacher.outputs import write_teacher_outputs
from training.teacher.trees import load_trees, train_trees, trees_reader
from training.trainer import checkpoint
from training.trainer.throughput import Timeline
from training.trainer.trainer import load_train_state
from training.trainer.upgrade import upgrade_teacher

SECOND, THIRD = FIRST + timedelta(days=1), FIRST + timedelta(days=2)
CONFIG = TrainConfig(
    scale="tiny", width_multiplier=0.5, max_length=8, batch_rows=256,
    teacher=TeacherConfig(seeds=2, blend="lightgbm"),
)  # fmt: skip


@given(st.integers(0, 2**16), st.floats(0, 2), st.floats(0, 2))
def test_the_weight_has_the_least_logloss(seed: int, gem_noise: float, tree_noise: float) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.normal(-1, 1, 400)
    labels = (rng.random(400) < expit(truth)).astype(float)
    gem, trees = (truth + noise * rng.normal(size=400) for noise in (gem_noise, tree_noise))

    def logloss(weight: float) -> float:
        z = blend(gem, trees, weight)
        return float((np.logaddexp(0, z) - labels * z).mean())

    best = logloss(fit_blend_weight(gem, trees, labels))
    assert best <= min(map(logloss, np.linspace(0, 1, 21))) + 1e-9


def test_without_evidence_gem_is_alone() -> None:
    logits = np.arange(3.0)
    assert fit_blend_weight(logits, -logits, np.zeros(3)) == 0
    assert fit_blend_weight(*np.zeros((3, 0))) == 0


@pytest.fixture(scope="module")
def taught(shared_world: World, lake: Lake) -> Iterator[Lake]:
    """A lake whose days were scored by two GEMs and trees of all days before."""

    def build(folder: Path) -> None:
        copy = copy_of(lake, folder / "lake")
        with process_group():
            train_teacher(copy, (FIRST, THIRD), CONFIG, Timeline())
            train_teacher_trees(copy, (FIRST, THIRD), CONFIG)
            write_teacher_outputs(copy, (FIRST, LAST))

    folder = shared_world.folder("teacher", build)
    with process_group():
        yield Lake(str(folder / "lake"), lake.spec)


def test_predictions_are_the_blend_of_the_mean_of_all_seeds_and_the_trees(taught: Lake) -> None:
    spec = taught.spec
    (first, reader), (second, _) = (load_train_state(taught, THIRD, member) for member in (0, 1))
    assert first.manifest.training.seed + 1 == second.manifest.training.seed
    inputs = trees_reader(taught, CONFIG)
    tabular = load_tabular(inputs, [LAST], ALL_LABELS)
    trees = load_trees(taught, THIRD, feature_names_of(inputs))
    tree_logits = trees.logits(tabular, tuple(spec.objectives))
    tree_rows = dict(zip(tabular.impression_ids, tree_logits, strict=True))
    weights = blend_weights(taught, THIRD, LAST, 14)
    assert any(weights.values())
    table = (
        arrow.snapshot(taught, model_schemas.teacher_predictions(spec)).read(day=LAST).to_pylist()
    )
    stored = {row["impression_id"]: row for row in table}
    for batch in reader.batches([LAST], ALL_LABELS, 512, Shuffle(None)):
        members = [s.model(batch).logits.detach().double().numpy() for s in (first, second)]
        for row, impression in enumerate(batch.impression_ids):
            for column, name in enumerate(spec.objectives):
                gem = (members[0][row, column] + members[1][row, column]) / 2
                expected = gem
                if weights[name]:
                    expected = blend(gem, tree_rows[impression][column], weights[name])
                assert stored[impression][f"logit_{name}"] == pytest.approx(expected, abs=1e-4)


def test_only_objectives_with_a_day_of_labels_have_logits(taught: Lake) -> None:
    """Labels are final an hour after their impression: those of a day on the day after it."""
    objectives = {"click", "conversion", "long_view"}
    assert set(taught.spec.objectives) == objectives
    schema = model_schemas.teacher_predictions(taught.spec)
    for day, trained in ((SECOND, set()), (THIRD, objectives), (LAST, objectives)):
        rows = arrow.snapshot(taught, schema).read(day=day)
        assert len(rows)
        counts = {name: rows[f"logit_{name}"].null_count for name in objectives}
        assert counts == {name: 0 if name in trained else len(rows) for name in objectives}


def test_the_first_scored_day_has_no_evidence_for_the_trees(taught: Lake) -> None:
    assert set(load_teacher(taught, FIRST, SECOND).weights) == {0}


def test_the_weight_of_a_day_depends_only_on_labels_known_before_it(
    taught: Lake, tmp_path: Path
) -> None:
    """Neither the logits of later days nor labels that mature after training change it."""
    own = copy_of(taught, tmp_path / "lake")
    before = blend_weights(own, SECOND, THIRD, 14)
    assert any(before.values())
    day_logits_path(own.root, LAST).unlink()
    day_logits_path(own.root, THIRD).unlink()
    schema = label_schemas.impressions(own.spec)
    rows = arrow.snapshot(own, schema).read()
    known = LabelWindow(0, own.spec.day_end(SECOND))
    for name in own.spec.objectives:
        mature = known.contains(rows[f"label_mature_ts_{name}"].to_numpy() // 10**6)
        label = rows[f"label_{name}"].to_numpy(zero_copy_only=False)
        changed = np.where(mature, label, 1 - label)
        index = rows.schema.get_field_index(f"label_{name}")
        field = rows.schema.field(index)
        rows = rows.set_column(index, field, [changed.astype(field.type.to_pandas_dtype())])
    arrow.replace_rows(own, schema, rows, "true", {})
    assert blend_weights(own, SECOND, THIRD, 14) == before


def test_days_that_were_scored_before_an_objective_was_added_are_no_evidence_for_it(
    taught: Lake, tmp_path: Path
) -> None:
    own = copy_of(taught, tmp_path / "lake")
    before = blend_weights(own, SECOND, THIRD, 14)
    added = max(before, key=lambda name: before[name])
    path = Path(str(day_logits_path(own.root, SECOND)))
    table = pq.read_table(path).drop_columns([f"logit_{added}", f"trees_{added}"])
    pq.write_table(table, path)
    assert blend_weights(own, SECOND, THIRD, 14) == before | {added: 0.0}


@pytest.mark.usefixtures("taught")  # which has the process group
def test_without_final_labels_on_the_first_day_gem_scores_the_second_one_alone(
    own: Lake, tmp_path: Path
) -> None:
    """As if each label became final a day later: the teacher trains the same days as GEM alone."""
    delay_labels(own, own.spec.objectives, 1)
    gem_alone = copy_of(own, tmp_path / "gem_alone")
    blended = TeacherConfig(blend="lightgbm")
    predictions = []
    for lake, teacher in ((gem_alone, TeacherConfig()), (own, blended)):
        config = CONFIG.model_copy(update={"teacher": teacher})
        for day in (FIRST, SECOND):
            train_teacher(lake, (day, day), config, Timeline())
            train_teacher_trees(lake, (day, day), config)
        assert write_teacher_outputs(lake, (SECOND, THIRD)) > 0
        schema = model_schemas.teacher_predictions(lake.spec)
        predictions.append(arrow.snapshot(lake, schema).read().drop_columns("fm_version"))
    first, second = load_teacher(own, FIRST, SECOND), load_teacher(own, SECOND, THIRD)
    assert first.trees is not None and not first.trees.boosters
    assert second.trees is not None and second.trees.boosters
    assert predictions[0].equals(predictions[1])


def test_a_day_without_impressions_has_no_trees_of_its_own(own: Lake) -> None:
    DeltaTable(own.table_uri("examples")).delete(f"day = '{SECOND}'")
    teacher = TeacherConfig(blend="lightgbm", blend_days=1)
    train_trees(own, SECOND, CONFIG.model_copy(update={"teacher": teacher}))
    features = feature_names_of(trees_reader(own, CONFIG))
    assert not load_trees(own, SECOND, features).boosters


def test_trees_learn_only_labels_that_are_final_on_their_day(taught: Lake, tmp_path: Path) -> None:
    own = copy_of(taught, tmp_path / "lake")
    files = sorted(Path(own.root, "models", "gem", "trees", f"{FIRST}").glob("*.txt"))
    before = [file.read_text() for file in files]
    schema = label_schemas.impressions(own.spec)
    rows = arrow.snapshot(own, schema).read()
    arrow.replace_rows(own, schema, rows.filter(rows["day"].to_numpy() <= FIRST), "true", {})
    shutil.rmtree(files[0].parent)
    train_trees(own, FIRST, CONFIG)
    assert files and [file.read_text() for file in files] == before


def write_manifests(lake: Lake, days: Iterable[date], config: TrainConfig) -> None:
    """Checkpoints of GEM until some days, without tensors."""
    trained = manifest_of(lake.spec, config)
    for day in days:
        folder = Path(str(checkpoint.checkpoint_path(lake.root, day)))
        folder.mkdir(parents=True)
        manifest = trained.model_copy(update={"trained_until": day, "complete": True})
        (folder / checkpoint.MANIFEST).write_text(manifest.model_dump_json())


def test_trees_are_trained_only_until_days_of_which_there_is_a_gem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No teacher has trees of the earlier days of a joint training, which has one checkpoint."""
    lake = Lake(str(tmp_path), load_spec(SIMULATOR_SPEC))
    fitted: list[date] = []
    write_manifests(lake, [THIRD], CONFIG)
    monkeypatch.setattr(ensemble, "train_trees", lambda _lake, day, _config: fitted.append(day))
    train_teacher_trees(lake, (FIRST, THIRD), CONFIG)
    assert fitted == [THIRD]


@pytest.mark.parametrize(("keep_days", "blend_days"), [(7, 14), (30, 60), (30, 14)])
def test_clean_keeps_the_logits_that_weights_of_kept_teachers_are_fitted_on(
    tmp_path: Path, keep_days: int, blend_days: int
) -> None:
    """Those of the first day that the oldest of these teachers scores, and of all later ones."""
    lake = Lake(str(tmp_path), load_spec(SIMULATOR_SPEC))
    days = [FIRST + timedelta(days=n) for n in range(100)]
    teacher = TeacherConfig(blend="lightgbm", blend_days=blend_days)
    write_manifests(lake, days, TrainConfig(scale="tiny", teacher=teacher))
    files = {day: Path(str(day_logits_path(lake.root, day))) for day in days}
    for file in files.values():
        file.parent.mkdir(exist_ok=True)
        file.touch()
    remove_old_models(lake, keep_days)
    _, oldest = checkpoint.list_checkpoints(lake.root, lake.spec.hash)[0]
    assert oldest.trained_until > FIRST + timedelta(days=blend_days)
    first_scored = oldest.trained_until + timedelta(days=1)
    left = [day for day, file in files.items() if file.exists()]
    assert left == list(date_range(first_scored - timedelta(days=blend_days), days[-1]))


def test_changed_trees_are_refused(taught: Lake, tmp_path: Path) -> None:
    own = copy_of(taught, tmp_path / "lake")
    file = next(Path(own.root, "models", "gem", "trees", f"{THIRD}").glob("*.txt"))
    file.write_text(file.read_text().replace("leaf_value=", "leaf_value=9", 1))
    with pytest.raises(UserError, match="not the file that was saved"):
        load_teacher(own, THIRD, LAST)
    manifest = file.parent / "trees.json"
    manifest.write_text(manifest.read_text().replace(own.spec.hash, "of-an-earlier-spec"))
    with pytest.raises(UserError, match="run `gemline train gem` for the next day"):
        load_teacher(own, THIRD, LAST)
    shutil.rmtree(file.parent)
    with pytest.raises(UserError, match="trees until 2026-01-03 are missing"):
        load_teacher(own, THIRD, LAST)


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest", "unsigned"])
def test_damaged_trees_are_repaired_by_training_again(
    taught: Lake, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = copy_of(taught, tmp_path / "lake")
    folder = Path(own.root, "models", "gem", "trees", f"{FIRST}")
    file = next(folder.glob("*.txt"))
    before = file.read_text()
    if damage == "changed":
        file.write_text(before.replace("leaf_value=", "leaf_value=9", 1))
    elif damage == "missing":
        file.unlink()
    elif damage == "manifest":
        (folder / "trees.json").write_text("{}")
    else:
        key = Ed25519PrivateKey.generate()
        monkeypatch.setenv(SIGNING_KEY_VARIABLE, key.private_bytes_raw().hex())
        monkeypatch.setenv(TRUSTED_KEY_VARIABLE, key.public_key().public_bytes_raw().hex())
    train_trees(own, FIRST, CONFIG)
    assert file.read_text() == before
    load_trees(own, FIRST, feature_names_of(trees_reader(own, CONFIG)))


def test_the_number_of_seeds_cannot_change_from_one_day_to_the_next(
    taught: Lake, tmp_path: Path
) -> None:
    own = copy_of(taught, tmp_path / "lake")
    teacher = TeacherConfig(seeds=3, blend="lightgbm")
    config = CONFIG.model_copy(update={"teacher": teacher})
    with pytest.raises(UserError, match="seeds"):
        train_teacher(own, (LAST, LAST), config, Timeline())


def test_trees_of_earlier_days_are_kept_when_tables_grow(taught: Lake, tmp_path: Path) -> None:
    own = copy_of(taught, tmp_path / "lake")
    manifest = Path(own.root, "models", "gem", "trees", f"{FIRST}", "trees.json")
    before = manifest.stat().st_mtime_ns
    schema = label_schemas.impressions(own.spec)
    arrow.replace_rows(own, schema, arrow.snapshot(own, schema).read(), "true", {})
    train_trees(own, FIRST, CONFIG)
    assert manifest.stat().st_mtime_ns == before


def test_an_upgrade_replaces_the_gems_of_all_seeds(taught: Lake, tmp_path: Path) -> None:
    own = copy_of(taught, tmp_path / "lake")
    larger = 2 * CONFIG.item_table_rows
    reports = upgrade_teacher(own, larger)
    members = [load_train_state(own, THIRD, member)[0].manifest.training for member in (0, 1)]
    assert [report.is_equal for report in reports] == [True, True]
    assert [training.item_table_rows for training in members] == [larger, larger]
    assert [training.seed for training in members] == [CONFIG.seed, CONFIG.seed + 1]
    assert not list(Path(own.root, "models", "gem").rglob(f"{SECOND}/gem.json"))


def test_an_upgrade_carries_over_the_last_day_that_all_seeds_have_learned(
    taught: Lake, tmp_path: Path
) -> None:
    """A run that was killed between two members leaves one of them a day behind."""
    own = copy_of(taught, tmp_path / "lake")
    atomic_io.remove_folder(checkpoint.checkpoint_path(own.root, THIRD, member=1))
    reports = upgrade_teacher(own, 2 * CONFIG.item_table_rows)
    assert [report.manifest.trained_until for report in reports] == [SECOND, SECOND]
    for member in (0, 1):
        left = checkpoint.list_checkpoints(own.root, own.spec.hash, member)
        assert [manifest.trained_until for _, manifest in left] == [SECOND]


def test_an_upgrade_that_fails_for_one_seed_removes_no_checkpoint_of_another(
    taught: Lake, tmp_path: Path
) -> None:
    """It can be repeated with the day before, once the damaged checkpoint is removed."""
    own = copy_of(taught, tmp_path / "lake")
    damaged = Path(str(checkpoint.checkpoint_path(own.root, THIRD, member=1)))
    next(damaged.rglob("*.safetensors")).write_bytes(b"")
    larger = 2 * CONFIG.item_table_rows
    with pytest.raises(checkpoint.DamagedCheckpointError):
        upgrade_teacher(own, larger)
    left = [m.trained_until for _, m in checkpoint.list_checkpoints(own.root, own.spec.hash)]
    assert left == [FIRST, SECOND, THIRD]
    shutil.rmtree(damaged)
    reports = upgrade_teacher(own, larger)
    assert [report.manifest.trained_until for report in reports] == [SECOND, SECOND]


def test_an_upgrade_refuses_seeds_that_have_learned_no_common_day(
    taught: Lake, tmp_path: Path
) -> None:
    own = copy_of(taught, tmp_path / "lake")
    for day, member in ((FIRST, 0), (SECOND, 1), (THIRD, 1)):
        atomic_io.remove_folder(checkpoint.checkpoint_path(own.root, day, member=member))
    before = sorted(Path(own.root, "models", "gem").rglob(checkpoint.MANIFEST))
    with pytest.raises(UserError, match="no day that all of them have learned"):
        upgrade_teacher(own)
    assert sorted(Path(own.root, "models", "gem").rglob(checkpoint.MANIFEST)) == before


def test_after_an_upgrade_gem_scores_alone_until_there_are_new_trees(
    taught: Lake, spec_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trees of another spec without an upgrade of GEM from it stay an error."""
    own = with_new_counter(copy_of(taught, tmp_path / "lake"), spec_path)
    upgrade_teacher(own)
    assert write_teacher_outputs(own, (LAST, LAST)) > 0
    assert "scored by GEM alone, because the teacher's trees until 2026-01-03" in caplog.text
    schema = model_schemas.teacher_predictions(own.spec)
    rows = arrow.snapshot(own, schema).read(day=LAST)
    assert rows["logit_click"].null_count == 0
    stored = {row["impression_id"]: row for row in rows.to_pylist()}
    (first, reader), (second, _) = (load_train_state(own, THIRD, member) for member in (0, 1))
    for batch in reader.batches([LAST], ALL_LABELS, 512, Shuffle(None)):
        members = [s.model(batch).logits.detach().double().numpy() for s in (first, second)]
        found = [
            [stored[impression][f"logit_{name}"] for name in own.spec.objectives]
            for impression in batch.impression_ids
        ]
        np.testing.assert_allclose(found, (members[0] + members[1]) / 2, atol=1e-4)
    train_teacher(own, (LAST, LAST), CONFIG, Timeline())
    train_teacher_trees(own, (LAST, LAST), CONFIG)
    next_day = load_teacher(own, LAST, LAST + timedelta(days=1))
    assert next_day.trees is not None and next_day.weights.any()
    assert next_day.manifest.upgraded_from == ()
    manifest = Path(own.root, "models", "gem", "trees", f"{THIRD}", "trees.json")
    manifest.write_text(manifest.read_text().replace(taught.spec.hash, "of-another-lake"))
    with pytest.raises(UserError, match="check --spec and --lake"):
        load_teacher(own, THIRD, LAST)


def with_new_counter(lake: Lake, spec_path: Path) -> Lake:
    """A lake that was upgraded to a spec with another window, of which the counters are zero."""
    new = load_spec(write_changed_spec(spec_path, Path(lake.root, "new.yaml"), new_counter))
    rows = arrow.snapshot(lake, schemas.examples(lake.spec)).read()
    upgrade_lake(lake.root, lake.spec, new)
    upgraded, schema = Lake(lake.root, new), schemas.examples(new)
    for field in arrow_schema(schema):
        if field.name not in rows.column_names:
            zeros = pa.array(np.zeros(len(rows)), field.type)
            rows = rows.append_column(field, zeros)
    arrow.replace_rows(upgraded, schema, rows.select(list(schema.columns)), "true", {})
    return upgraded


def test_logits_of_a_day_are_those_of_its_predictions(taught: Lake) -> None:
    """The file that later weights are fitted on has a row for each prediction of the day."""
    scored = arrow.snapshot(taught, model_schemas.teacher_predictions(taught.spec)).read(day=THIRD)
    kept = pq.read_table(day_logits_path(taught.root, THIRD))
    assert sorted(kept["impression_id"].to_pylist()) == sorted(scored["impression_id"].to_pylist())
