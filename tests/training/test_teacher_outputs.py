"""Teacher outputs: scored by an earlier GEM, and visible from the end of the day on."""

import json
import shutil
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pyarrow as pa
import pytest
import torch
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.studies.trials import scratch_lake
from etl.errors import UserError
from etl.tables import arrow, model_schemas
from etl.tables.lake import SPEC_PROPERTY, Lake
from features.encoding.scalar import INT4_ZERO_POINT, dequantize_int4, quantize_int4
from tests.conftest import FIRST, LAST
from training.data.batch import Shuffle
from training.data.label_window import ALL_LABELS
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.teacher import outputs
from training.teacher.compressor import (
    MATRYOSHKA_WIDTHS,
    EmbeddingCompressor,
    RowSample,
    compressor_version,
    fit_compressor,
)
from training.teacher.embeddings import TeacherEmbeddings, load_teacher_embeddings
from training.teacher.ensemble import Teacher, TeacherScores, load_teacher
from training.teacher.outputs import write_teacher_outputs
from training.trainer import checkpoint
from training.trainer.resume import starting_point
from training.trainer.upgrade import latest_checkpoints, upgrade_teacher, upgraded_manifest

DAYS = (FIRST + timedelta(days=1), LAST)


@pytest.fixture
def scored_lake(own_gem_lake: Lake) -> Iterator[Lake]:
    """A lake in which a GEM of each day scored the day after it."""
    with process_group():
        yield own_gem_lake


def test_each_day_is_scored_by_the_gem_of_the_day_before(scored_lake: Lake) -> None:
    for schema in (model_schemas.teacher_predictions, model_schemas.user_teacher_embeddings):
        rows = arrow.snapshot(scored_lake, schema(scored_lake.spec)).read()
        until = {row["day"]: row["fm_trained_until"] for row in rows.to_pylist()}
        assert until == {DAYS[0] + timedelta(days=n): FIRST + timedelta(days=n) for n in range(3)}


def test_embeddings_of_a_day_are_visible_from_its_end_on(scored_lake: Lake) -> None:
    spec = scored_lake.spec
    table = arrow.snapshot(scored_lake, model_schemas.user_teacher_embeddings(spec)).read()
    rows = table.sort_by([("visible_ts", "ascending"), ("impression_ts", "ascending")]).to_pylist()
    num_found = 0
    assert rows and all(row["visible_ts"] == spec.day_end(row["day"]) for row in rows)
    embeddings = load_teacher_embeddings(scored_lake)
    reader = ExampleReader.latest(scored_lake)
    for batch in reader.batches([LAST], ALL_LABELS, 200, Shuffle(None)):
        first, stop = embeddings.latest(batch.user_ids, batch.as_of.numpy(), 8)
        for request, user in enumerate(batch.user_ids):
            as_of = int(batch.as_of[request])
            expected = [
                row["impression_ts"]
                for row in rows
                if row["user_id"] == user and row["visible_ts"] < as_of
            ]
            found = embeddings.impression_ts[first[request] : stop[request]]
            assert list(found) == expected[-8:]
            num_found += len(found)
    assert num_found > 100


def test_with_a_teacher_lag_an_older_gem_scores_the_day(scored_lake: Lake) -> None:
    write_teacher_outputs(scored_lake, (LAST, LAST), teacher_lag_days=1)
    schema = model_schemas.teacher_predictions(scored_lake.spec)
    rows = arrow.snapshot(scored_lake, schema).read(day=LAST)
    assert set(rows["fm_trained_until"].to_pylist()) == {LAST - timedelta(days=2)}


def test_an_objective_has_no_logits_until_gem_has_learned_labels_of_it(scored_lake: Lake) -> None:
    """As one that an upgrade has added; a GEM of an earlier version has no base rates at all.

    Nor has one after an upgrade that replaced all objectives.
    """
    path = checkpoint.checkpoint_path(scored_lake.root, LAST - timedelta(days=1))
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    assert set(manifest["base_rates"]) == {"click", "conversion", "long_view"}
    schema = model_schemas.teacher_predictions(scored_lake.spec)
    learned = {name: manifest["base_rates"][name] for name in ("click", "long_view")}
    cases: tuple[tuple[dict[str, float], bool, set[str]], ...] = (
        (learned, True, {"conversion"}),
        (learned, False, {"conversion"}),
        ({}, False, set()),
        ({}, True, set(manifest["base_rates"])),
    )
    for rates, records_base_rates, untrained in cases:
        update = {"base_rates": rates, "records_base_rates": records_base_rates}
        (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | update))
        write_teacher_outputs(scored_lake, (LAST, LAST))
        rows = arrow.snapshot(scored_lake, schema).read(day=LAST)
        counts = {name: rows[f"logit_{name}"].null_count for name in manifest["base_rates"]}
        assert counts == {name: len(rows) if name in untrained else 0 for name in counts}


def test_a_day_without_impressions_of_the_teachers_surface_has_no_rows(
    scored_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExampleReader, "batches", lambda *_: iter(()))
    assert write_teacher_outputs(scored_lake, (LAST, LAST)) == 0
    schema = model_schemas.teacher_predictions(scored_lake.spec)
    assert not scored_lake.rows_by_day(schema.name).get(LAST)
    assert scored_lake.rows_by_day(schema.name)[LAST - timedelta(days=1)]


def test_a_row_whose_gem_was_trained_on_its_day_is_refused(scored_lake: Lake) -> None:
    assert len(load_teacher_embeddings(scored_lake).sort_keys)
    schema = model_schemas.user_teacher_embeddings(scored_lake.spec)
    rows = arrow.snapshot(scored_lake, schema).read(day=LAST)
    column = rows.schema.get_field_index("fm_trained_until")
    leaking = rows.set_column(column, "fm_trained_until", pa.repeat(pa.scalar(LAST), len(rows)))
    arrow.replace_rows(scored_lake, schema, leaking, f"day = '{LAST}'", {})
    with pytest.raises(UserError, match="whose GEM was trained on their day"):
        load_teacher_embeddings(scored_lake)


def test_one_compressor_makes_the_embeddings_of_all_days(scored_lake: Lake) -> None:
    """Scoring a later day again changes neither its embeddings nor the compressor."""
    schema = model_schemas.user_teacher_embeddings(scored_lake.spec)
    rows = arrow.snapshot(scored_lake, schema).read(day=LAST)
    (compressor,) = (Path(scored_lake.root) / "models" / "compressor").iterdir()
    assert set(rows["compressor_version"].to_pylist()) == {compressor.stem}
    weights = compressor.read_bytes()
    write_teacher_outputs(scored_lake, (LAST, LAST))
    assert arrow.snapshot(scored_lake, schema).read(day=LAST).equals(rows)
    assert compressor.read_bytes() == weights


def test_hidden_layers_of_a_day_are_not_kept(
    scored_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[ref[torch.Tensor]] = []
    kept: list[int] = []
    score = Teacher.score

    def record(*arguments: Any) -> TeacherScores:
        kept.append(sum(hidden() is not None for hidden in scored))
        scores = score(*arguments)
        scored.append(ref(scores.output.hidden))
        return scores

    monkeypatch.setattr(Teacher, "score", record)
    write_teacher_outputs(scored_lake, (LAST, LAST), batch_rows=100)
    assert len(scored) > 3 and max(kept) <= 1
    shutil.rmtree(Path(scored_lake.root) / "models" / "compressor")
    num_scored, kept_to_fit, hidden = len(scored), list[int](), Teacher.hidden

    def record_hidden(*arguments: Any) -> torch.Tensor:
        kept_to_fit.append(sum(layer() is not None for layer in scored[num_scored:]))
        scored.append(ref(layers := hidden(*arguments)))
        return layers

    monkeypatch.setattr(Teacher, "hidden", record_hidden)
    write_teacher_outputs(scored_lake, (LAST, LAST), batch_rows=100)
    assert len(kept_to_fit) > 3 and max(kept_to_fit) <= 1 and max(kept) <= 1


def test_the_compressor_is_fitted_to_a_bounded_sample_for_any_batches(
    scored_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[torch.Tensor] = []
    fit = fit_compressor

    def record(compressor: EmbeddingCompressor, hidden: torch.Tensor, seed: int) -> None:
        fitted.append(hidden)
        fit(compressor, hidden, seed)

    monkeypatch.setattr(outputs, "fit_compressor", record)
    day_rows = scored_lake.rows_by_day("teacher_predictions")[LAST]
    for max_rows, batch_rows in ((10**6, 100), (50, 100), (50, 40)):
        shutil.rmtree(Path(scored_lake.root) / "models" / "compressor")
        monkeypatch.setattr(outputs, "MAX_FIT_ROWS", max_rows)
        write_teacher_outputs(scored_lake, (LAST, LAST), batch_rows=batch_rows)
    assert [len(hidden) for hidden in fitted] == [day_rows, 50, 50]
    torch.testing.assert_close(fitted[1], fitted[2])
    assert all((fitted[0] == row).all(1).any() for row in fitted[1])


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 12), st.integers(0, 3))
def test_a_sample_of_rows_is_bounded_and_does_not_depend_on_the_batches(
    sizes: list[int], max_rows: int, seed: int
) -> None:
    rows = torch.arange(float(sum(sizes)))[:, None]
    at_once, batched = RowSample(max_rows, seed), RowSample(max_rows, seed)
    at_once.add(rows)
    for batch in rows.split(sizes):
        batched.add(batch)
        assert batched.num_rows <= 2 * max_rows
    if len(rows):
        sampled = batched.rows()
        assert torch.equal(sampled, at_once.rows()) and len(sampled) == min(len(rows), max_rows)
        assert len(sampled.unique()) == len(sampled)


def test_each_row_is_equally_likely_to_be_in_a_sample() -> None:
    """Four of twenty rows: in a fifth of 2,000 samples each, within 5 standard errors."""
    counts = np.zeros(20)
    for seed in range(2000):
        sample = RowSample(4, seed)
        for batch in torch.arange(20.0)[:, None].split(3):
            sample.add(batch)
        counts[sample.rows().flatten().long().numpy()] += 1
    assert np.abs(counts / 2000 - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / 2000)


def test_settings_that_may_change_from_day_to_day_keep_the_compressor(scored_lake: Lake) -> None:
    """Of a training that starts; with another seed or item table it has other initial weights."""
    manifest = load_teacher(scored_lake, LAST - timedelta(days=1), LAST).manifest

    def version_with(**settings: object) -> str:
        training = manifest.training.model_copy(update=settings)
        return compressor_version(manifest.model_copy(update={"training": training}))

    version = compressor_version(manifest)
    assert version_with(workers=3, checkpoint_every=7, dense_lr=0.5) == version
    assert version not in {version_with(seed=7), version_with(item_table_rows=64)}


def test_an_upgrade_that_enlarges_the_item_table_keeps_all_embeddings(scored_lake: Lake) -> None:
    before = load_teacher_embeddings(scored_lake)
    ((_, manifest),) = latest_checkpoints(scored_lake)
    (report,) = upgrade_teacher(scored_lake, 2 * manifest.training.item_table_rows)
    assert report.manifest.training.item_table_rows > manifest.training.item_table_rows
    write_teacher_outputs(scored_lake, (LAST, LAST))
    after = load_teacher_embeddings(scored_lake)
    assert np.array_equal(after.sort_keys, before.sort_keys)
    assert len(list((Path(scored_lake.root) / "models" / "compressor").iterdir())) == 1


def test_a_gem_that_continues_with_longer_histories_keeps_the_compressor(
    scored_lake: Lake,
) -> None:
    """As do its later days and upgrades, whichever settings the training started with."""
    ((path, manifest),) = latest_checkpoints(scored_lake)
    of_spec = manifest.model_copy(update={"spec_max_length": manifest.training.max_length})
    (path / checkpoint.MANIFEST).write_text(of_spec.model_dump_json())
    reader = ExampleReader.latest(scored_lake)
    assert reader.history_length > (manifest.training.max_length or 0)
    config = manifest.training.model_copy(update={"max_length": None})
    continued, _ = starting_point(scored_lake, reader, (LAST, LAST), config)
    assert continued.training.max_length == reader.history_length
    assert compressor_version(continued) == compressor_version(manifest)
    upgraded = upgraded_manifest(scored_lake, continued, 2 * config.item_table_rows)
    assert compressor_version(upgraded) == compressor_version(manifest)


def test_embeddings_of_an_earlier_compressor_are_not_compared_with_new_ones(
    scored_lake: Lake,
) -> None:
    schema = model_schemas.user_teacher_embeddings(scored_lake.spec)
    rows = arrow.snapshot(scored_lake, schema).read(day=DAYS[0])
    column = rows.schema.get_field_index("compressor_version")
    earlier = rows.set_column(column, "compressor_version", pa.repeat("earlier", len(rows)))
    arrow.replace_rows(scored_lake, schema, earlier, f"day = '{DAYS[0]}'", {})
    loaded = load_teacher_embeddings(scored_lake)
    later = arrow.snapshot(scored_lake, schema).read()
    assert len(loaded.sort_keys) == later.num_rows - len(rows) > 0


def test_days_that_an_earlier_version_wrote_are_named_and_can_be_written_again(
    scored_lake: Lake,
) -> None:
    schema = model_schemas.user_teacher_embeddings(scored_lake.spec)
    rows = arrow.snapshot(scored_lake, schema).read().drop_columns(["compressor_version"])
    uri = scored_lake.table_uri(schema.name)
    shutil.rmtree(uri)
    DeltaTable.create(
        uri,
        rows.schema,
        partition_by=list(schema.partition_by),
        configuration={SPEC_PROPERTY: scored_lake.spec.hash},
        raise_if_key_not_exists=False,
    )
    write_deltalake(uri, rows, mode="append")
    with pytest.raises(UserError, match=r"lacks compressor_version, because an earlier version"):
        load_teacher_embeddings(scored_lake)
    write_teacher_outputs(scored_lake, DAYS)
    assert len(load_teacher_embeddings(scored_lake).sort_keys) == len(rows)


ROW = st.tuples(st.sampled_from("abc"), st.integers(0, 9))


@given(st.lists(ROW, max_size=20), st.lists(ROW, min_size=1, max_size=8), st.integers(0, 4))
def test_latest_embeddings_are_strictly_earlier(
    rows: list[tuple[str, int]], requests: list[tuple[str, int]], limit: int
) -> None:
    rows = sorted(rows)
    users = sorted({user for user, _ in rows})
    seconds = np.array([second for _, second in rows], np.int64)
    index = np.array([users.index(user) for user, _ in rows], np.int64)
    embeddings = TeacherEmbeddings(
        users=pa.array(users, pa.string()),
        sort_keys=(index << 33) + seconds,
        impression_ts=seconds,
        item_index=seconds,
        embedding_int4=np.zeros((len(rows), 1), np.uint8),
    )
    names = np.array([user for user, _ in requests], object)
    as_of = np.array([second for _, second in requests])
    first, stop = embeddings.latest(names, as_of, limit)
    for n, (user, second) in enumerate(requests):
        earlier = [t for u, t in rows if u == user and t < second]
        assert list(seconds[first[n] : stop[n]]) == earlier[max(0, len(earlier) - limit) :]


@given(st.integers(1, 5), st.integers(0, 9))
def test_int4_quantization_is_within_half_a_level(n: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).uniform(-1, 1, (n, 6)).astype(np.float32)
    stored = quantize_int4(numbers)
    assert stored.nbytes == numbers.size / 2
    assert np.abs(dequantize_int4(stored) - numbers).max() <= 1 / INT4_ZERO_POINT
    assert (quantize_int4(dequantize_int4(stored)) == stored).all()


@settings(max_examples=3)
@given(st.integers(0, 3))
def test_a_longer_prefix_reconstructs_more(seed: int) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(2000, 12) @ torch.randn(12, 24)
    compressor = EmbeddingCompressor(24)
    fit_compressor(compressor, hidden, seed)
    with torch.no_grad():
        stored = torch.from_numpy(dequantize_int4(quantize_int4(compressor(hidden).numpy())))
        target = compressor.scale(hidden)
        index = torch.arange(stored.shape[1])
        errors = [
            float((compressor.decoder(stored * (index < width)) - target).square().mean())
            for width in MATRYOSHKA_WIDTHS
        ]
    assert errors[0] > errors[1] > errors[2] and errors[0] < 0.7 and errors[2] < 0.3


def test_days_before_the_first_gem_are_not_scored(lake: Lake) -> None:
    with scratch_lake(lake) as own:
        assert write_teacher_outputs(own, (FIRST, date(2026, 1, 2))) == 0
        assert not len(load_teacher_embeddings(own).sort_keys)
