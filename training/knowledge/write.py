"""`knowledge` and `user_knowledge`: what GEM says of impressions it has not learned from."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from etl.spec.model import DataSpec
from etl.spec.units import each_day
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from etl.tables.place import Place, listed, place
from etl.tables.schema import arrow_schema
from features.four_bits import packed
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import EVERYTHING
from training.gem import load_trained
from training.knowledge.compress import Compressor, fit, load, save
from training.loop import checkpoint
from training.loop.checkpoint import Manifest, Trained
from training.model.gem import Output

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Told:
    """What a GEM says of a day: `knowledge`, and rows of `user_knowledge` with `hidden` (n, M)."""

    knowledge: pa.Table
    users: pa.Table
    hidden: torch.Tensor


def write_knowledge(
    lake: Lake, days: tuple[date, date], stale: int = 0, batch_rows: int = 2048
) -> int:
    """Replace the given days of both tables, each scored by the newest GEM from before it.

    With `stale` that GEM is so many days older. Days before the first trained GEM get none:
    students do without. Returns the rows of `knowledge`. Raises UserError where a day has no
    examples.
    """
    written = checkpoint.written(lake.root, lake.spec.hash)
    trained_until = [manifest.trained_until for _, manifest in written if manifest.complete]
    parts, versions = [], dict[str, object]()
    for day in each_day(*days):
        latest = day - timedelta(days=stale)
        before = max((other for other in trained_until if other < latest), default=None)
        if before is None:
            log.info("no GEM was trained before %s: no knowledge of %s", latest, day)
            continue
        trained, reader = load_trained(lake, before)
        reader.require(day, day)
        told = _score_day(lake, reader, trained, day, batch_rows)
        parts.append((told.knowledge, _compressed(lake, told, day)))
        versions = dict(reader.versions) | {"gem": trained.manifest.fm_version}
    where = f"day >= '{days[0]}' AND day <= '{days[1]}'"
    tables = contracts.knowledge(lake.spec), contracts.user_knowledge(lake.spec)
    for number, contract in enumerate(tables):
        found = [part[number] for part in parts]
        rows = pa.concat_tables(found) if found else arrow_schema(contract).empty_table()
        arrow.replace(lake, contract, rows, where, versions)
    return sum(knowledge.num_rows for knowledge, _ in parts)


def compressor_path(lake: str, day: date) -> Place:
    """Where the compressor of a day's knowledge lies."""
    return place(lake, "models", "compressor", f"{day}.safetensors")


def _compressed(lake: Lake, told: Told, day: date) -> pa.Table:
    """The day's `user_knowledge`; its compressor goes on from that of the day before.

    It learns without labels from the day that it compresses, which is told when the day is over.
    """
    folder = compressor_path(lake.root, day).parent
    earlier = [path for path in listed(folder, "*.safetensors") if path.stem < f"{day}"]
    width = told.hidden.shape[1]
    compressor = load(earlier[-1]) if earlier else Compressor(width)
    if len(compressor.scale.mean) != width:
        compressor = Compressor(width)
    fit(compressor, told.hidden, day.toordinal())
    save(compressor, compressor_path(lake.root, day))
    with torch.no_grad():
        stored = packed(compressor(told.hidden).numpy())
    bytes_ = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(stored.shape[1]), len(stored), [None, pa.py_buffer(np.ascontiguousarray(stored))]
    )
    contract = contracts.user_knowledge(lake.spec)
    rows = told.users.append_column("kept", bytes_.cast(pa.binary()))
    rows = rows.select(list(contract.columns)).cast(arrow_schema(contract))
    return rows.sort_by([(name, "ascending") for name in ("bucket", *contract.order_by)])


def _score_day(lake: Lake, reader: Reader, trained: Trained, day: date, batch_rows: int) -> Told:
    contract = contracts.knowledge(lake.spec)
    knowledge, users, hidden = [], [], []
    buckets = tqdm(range(lake.spec.buckets), desc=f"knowledge {day}", unit="bucket", disable=None)
    for bucket in buckets:
        shard = (bucket, lake.spec.buckets)
        for batch in reader.batches([day], EVERYTHING, batch_rows, Shuffle(None), shard):
            with torch.no_grad():
                output = trained.model(batch)
            shared = _provenance(trained, batch, day, bucket)
            said = _said(output, lake.spec.objectives, learned(lake.spec, trained.manifest))
            knowledge.append(pa.table(shared | said).select(list(contract.columns)))
            users.append(pa.table(shared | _shown(lake, batch, day)))
            hidden.append(output.hidden)
    return Told(
        pa.concat_tables(knowledge).cast(arrow_schema(contract)),
        pa.concat_tables(users),
        torch.cat(hidden),
    )


def _provenance(trained: Trained, batch: Batch, day: date, bucket: int) -> dict[str, pa.Array]:
    """Which rows these are, and by whom they were scored."""
    manifest, n = trained.manifest, len(batch)
    return {
        "impression_id": pa.array(batch.impressions, pa.string()),
        "fm_version": pa.repeat(manifest.fm_version, n),
        "fm_trained_until": pa.repeat(pa.scalar(manifest.trained_until), n),
        "day": pa.repeat(pa.scalar(day), n),
        "bucket": pa.repeat(pa.scalar(bucket, pa.int32()), n),
    }


def learned(spec: DataSpec, manifest: Manifest) -> set[str]:
    """The objectives of which a GEM has seen the labels of a day: slow ones ripen days later."""
    until, first_day = spec.day_end(manifest.trained_until), spec.day_end(manifest.trained_from)
    told = spec.objectives.items()
    return {name for name, label in told if first_day + label.ripens_after <= until}


def _said(output: Output, objectives: Iterable[str], known: set[str]) -> dict[str, pa.Array]:
    """GEM's logits of the objectives that it knows, and embeddings."""
    n, width = output.embedding.shape
    flat = pa.array(output.embedding.flatten().numpy())
    logits = output.logits.numpy()
    return {
        **{
            f"logit_{o}": pa.array(logits[:, i]) if o in known else pa.nulls(n, pa.float32())
            for i, o in enumerate(objectives)
        },
        "embedding": pa.ListArray.from_arrays(np.arange(n + 1, dtype=np.int32) * width, flat),
    }


def _shown(lake: Lake, batch: Batch, day: date) -> dict[str, pa.Array]:
    """Who was shown what, when, and from when on that may be told."""
    request = batch.request.numpy()
    return {
        "user_id": pa.array(batch.users[request], pa.string()),
        "visible_ts": pa.repeat(lake.spec.day_end(day), len(batch)),
        "shown_ts": pa.array(batch.as_of.numpy()[request]),
        "item_ix": pa.array(batch.item.numpy()),
    }
