"""The teacher's outputs as tables: `teacher_predictions` and `user_teacher_embeddings`.

Each day is scored by an earlier teacher, which was not trained on the labels of that day. Rankers
read the tables; they never run GEM themselves. Logits are those of all models of the teacher,
embeddings those of its first GEM.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from tqdm import tqdm

from etl.array_types import Bytes, Float64
from etl.spec.model import DataSpec
from etl.spec.units import DayRange, date_range
from etl.tables import arrow, model_schemas
from etl.tables.lake import Lake, arrow_schema
from etl.tables.table_schema import TableSchema
from etl.tables.uri import StoragePath, resolve_uri
from features.encoding.scalar import quantize_int4
from training.data.batch import Batch, Shuffle
from training.data.label_window import ALL_LABELS
from training.teacher.blend import DayLogits
from training.teacher.compressor import (
    MAX_FIT_ROWS,
    EmbeddingCompressor,
    RowSample,
    compressor_version,
    fit_compressor,
    load_compressor,
    save_compressor,
)
from training.teacher.ensemble import Teacher, load_teacher
from training.trainer import checkpoint
from training.trainer.resume import learned_objectives
from training.trainer.state import Manifest

COMPRESSOR_SEED = 0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredDay:
    """A day's `teacher_predictions`, its impressions (n), and the embedding (n, w bytes) of each.

    `logits` are those of the teacher's parts.
    """

    predictions: pa.Table
    impressions: pa.Table
    embeddings: Bytes
    logits: DayLogits


def write_teacher_outputs(
    lake: Lake, days: DayRange, teacher_lag_days: int = 0, batch_rows: int = 2048
) -> int:
    """Score each day with the latest earlier GEM, and replace the day in both tables.

    Days without such a GEM keep the rows of an earlier one that is gone, as after an upgrade. If
    they have none, or no impressions of the surface that GEM was trained on, rankers train on them
    without a teacher. The rows of a day at a time are in memory. The first day of a training of GEM
    is scored twice: to fit the compressor, and to write it.

    Args:
        lake: The lake with the examples, the checkpoints, and the tables to write.
        days: First and last day to score.
        teacher_lag_days: Days by which the GEM of a day is older than necessary.
        batch_rows: Impressions that are scored together.

    Returns:
        The number of rows of `teacher_predictions`.

    Raises:
        UserError: Examples of a day are missing, or no checkpoint of GEM can be read or trusted.
    """
    checkpoints = checkpoint.list_checkpoints(lake.root, lake.spec.hash)
    checkpoint.check_readable(lake.root, checkpoints)
    trained_until = [manifest.trained_until for _, manifest in checkpoints if manifest.complete]
    num_rows = 0
    for day in date_range(*days):
        trained_before = day - timedelta(days=teacher_lag_days)
        teacher_day = max((last for last in trained_until if last < trained_before), default=None)
        if teacher_day is None:
            log.info("no GEM was trained before %s: %s is not scored", trained_before, day)
            for schema in _output_schemas(lake.spec):
                if not _has_rows_trained_before(lake, schema, day, trained_before):
                    _empty_day(lake, schema, day)
            continue
        teacher = load_teacher(lake, teacher_day, day)
        teacher.reader.require_days(day, day)
        scored = _score_day(lake, teacher, day, batch_rows)
        if scored is None:
            for schema in _output_schemas(lake.spec):
                _empty_day(lake, schema, day)
            continue
        if teacher.trees is not None:
            scored.logits.write(lake.root, day, lake.spec)
        _write_day(lake, day, teacher, scored)
        num_rows += len(scored.predictions)
    return num_rows


def _output_schemas(spec: DataSpec) -> tuple[TableSchema, TableSchema]:
    """The schemas of predictions and embeddings."""
    return model_schemas.teacher_predictions(spec), model_schemas.user_teacher_embeddings(spec)


def _empty_day(lake: Lake, schema: TableSchema, day: date) -> None:
    _replace_day(lake, schema, arrow_schema(schema).empty_table(), day, {})


def _has_rows_trained_before(
    lake: Lake, schema: TableSchema, day: date, trained_before: date
) -> bool:
    """Whether a day has rows, all of a GEM that was trained before a day."""
    if not lake.exists(schema.name):
        return False
    trained_until = arrow.snapshot(lake, schema).read(["fm_trained_until"], day=day)[0]
    return len(trained_until) > 0 and pc.max(trained_until).as_py() < trained_before


def _write_day(lake: Lake, day: date, teacher: Teacher, scored: ScoredDay) -> None:
    """Replace a day in both tables, with the versions of the tables that were read."""
    version = compressor_version(teacher.manifest)
    embeddings = _binary_array(scored.embeddings)
    rows = scored.impressions.append_column("teacher_embedding_int4", embeddings)
    rows = rows.append_column("compressor_version", pa.repeat(version, len(rows)))
    sources: dict[str, object] = dict(teacher.reader.table_versions)
    sources["gem"] = teacher.manifest.fm_version
    if teacher.trees is not None:
        weights = teacher.weights.round(4).tolist()
        sources["trees_weights"] = dict(zip(lake.spec.objectives, weights, strict=True))
    of_predictions, of_embeddings = _output_schemas(lake.spec)
    _replace_day(lake, of_predictions, scored.predictions, day, sources)
    _replace_day(lake, of_embeddings, _in_table_order(rows, of_embeddings), day, sources)


def _replace_day(
    lake: Lake, schema: TableSchema, rows: pa.Table, day: date, sources: Mapping[str, object]
) -> None:
    arrow.replace_rows(lake, schema, rows, f"day = '{day}'", sources)


def _score_day(lake: Lake, teacher: Teacher, day: date, batch_rows: int) -> ScoredDay | None:
    """Score all impressions of a day, bucket by bucket; None if the teacher reads none of them."""
    spec = lake.spec
    compressor = _day_compressor(lake, teacher, day, batch_rows)
    if compressor is None:
        return None
    schema = model_schemas.teacher_predictions(spec)
    objectives = trained_objectives(spec, teacher.manifest)
    predictions, impressions, embeddings, ids, parts = [], [], [], [], []
    buckets = range(spec.buckets)
    for bucket in tqdm(buckets, desc=f"teacher {day}", unit="bucket", disable=None):
        tree_scores = None
        for batch in _bucket_batches(teacher, day, bucket, batch_rows):
            tree_scores = tree_scores or teacher.score_trees(day, bucket)
            scores = teacher.score(batch, tree_scores)
            provenance = _provenance_columns(teacher.manifest, batch, day, bucket)
            logits = _logit_columns(spec, scores.logits, objectives)
            predictions.append(pa.table(provenance | logits).select(list(schema.columns)))
            impressions.append(pa.table(provenance | _impression_columns(spec, batch, day)))
            embeddings.append(_compressed(compressor, scores.output.hidden))
            ids.append(batch.impression_ids)
            parts.append((scores.gem, scores.trees))
    if not predictions:
        return None
    return ScoredDay(
        predictions=pa.concat_tables(predictions).cast(arrow_schema(schema)),
        impressions=pa.concat_tables(impressions),
        embeddings=np.concatenate(embeddings),
        logits=DayLogits(
            np.concatenate(ids), *(np.concatenate(part) for part in zip(*parts, strict=True))
        ),
    )


def trained_objectives(spec: DataSpec, manifest: Manifest) -> set[str]:
    """The objectives whose labels of a day a GEM was trained on; slow ones mature days later.

    An objective that an upgrade added is learned once labels of it were trained on.
    """
    learned = learned_objectives(manifest)
    # All impressions are before the end of the first day: their labels are final so long after it.
    after_first_day = spec.day_end(manifest.trained_until) - spec.day_end(manifest.trained_from)
    return {
        name
        for name, objective in spec.objectives.items()
        if name in learned
        and max(objective.label_maturity_seconds, spec.impression_delay) <= after_first_day
    }


def _provenance_columns(
    manifest: Manifest, batch: Batch, day: date, bucket: int
) -> dict[str, pa.Array]:
    """The key columns of the rows, and the version of the GEM that scored them."""
    n = len(batch)
    return {
        "impression_id": pa.array(batch.impression_ids, pa.string()),
        "fm_version": pa.repeat(manifest.fm_version, n),
        "fm_trained_until": pa.repeat(pa.scalar(manifest.trained_until), n),
        "day": pa.repeat(pa.scalar(day), n),
        "bucket": pa.repeat(pa.scalar(bucket, pa.int32()), n),
    }


def _logit_columns(spec: DataSpec, logits: Float64, trained: set[str]) -> dict[str, pa.Array]:
    """The teacher's logits by objective, null for objectives that it was not trained on."""
    columns = {}
    for name, column in zip(spec.objectives, logits.astype(np.float32).T, strict=True):
        values = pa.array(np.ascontiguousarray(column))
        columns[f"logit_{name}"] = values if name in trained else pa.nulls(len(values), values.type)
    return columns


def _impression_columns(spec: DataSpec, batch: Batch, day: date) -> dict[str, pa.Array]:
    """The user, item and time of each impression, and when its embedding may be used."""
    request = batch.request_index.numpy()
    return {
        "user_id": pa.array(batch.user_ids[request], pa.string()),
        "visible_ts": pa.repeat(spec.day_end(day), len(batch)),
        "impression_ts": pa.array(batch.as_of.numpy()[request]),
        "item_index": pa.array(batch.item_index.numpy()),
    }


def compressor_path(lake: str, version: str) -> StoragePath:
    """The file of a compressor."""
    return resolve_uri(lake, "models", "compressor", f"{version}.safetensors")


def _day_compressor(
    lake: Lake, teacher: Teacher, day: date, batch_rows: int
) -> EmbeddingCompressor | None:
    """The compressor of a teacher; None if there is none yet and the day has no impressions.

    If there is none, it is fitted to a sample of the day's hidden layers: once, so that the numbers
    of an embedding mean the same on all days. It may be fitted to the day that is scored, because
    it needs no labels and the embeddings are not visible before the day ends. Scoring the day a
    second time costs less than keeping all of its hidden layers.
    """
    path = compressor_path(lake.root, compressor_version(teacher.manifest))
    if path.is_file():
        return load_compressor(path)
    sample = RowSample(MAX_FIT_ROWS, COMPRESSOR_SEED)
    for bucket in range(lake.spec.buckets):
        for batch in _bucket_batches(teacher, day, bucket, batch_rows):
            sample.add(teacher.hidden(batch))
    if not sample.num_rows:
        return None
    hidden = sample.rows()
    compressor = EmbeddingCompressor(hidden.shape[1])
    fit_compressor(compressor, hidden, COMPRESSOR_SEED)
    save_compressor(compressor, path)
    return compressor


def _bucket_batches(teacher: Teacher, day: date, bucket: int, batch_rows: int) -> Iterator[Batch]:
    """The batches of a bucket of a day, always in the same order."""
    shard = (bucket, teacher.reader.lake.spec.buckets)
    return teacher.reader.batches([day], ALL_LABELS, batch_rows, Shuffle(None), shard)


@torch.no_grad()
def _compressed(compressor: EmbeddingCompressor, hidden: Tensor) -> Bytes:
    """The embeddings (n, w bytes) of hidden layers (n, M)."""
    return quantize_int4(compressor(hidden).numpy())


def _binary_array(rows: Bytes) -> pa.Array:
    """Rows of bytes (n, w) as one binary value each (n)."""
    data = pa.py_buffer(np.ascontiguousarray(rows))
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(rows.shape[1]), len(rows), [None, data])
    return fixed.cast(pa.binary())


def _in_table_order(rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Rows with the columns and the row order of a table."""
    rows = rows.select(list(schema.columns)).cast(arrow_schema(schema))
    return rows.sort_by([(name, "ascending") for name in ("bucket", *schema.order_by)])
