"""GEM's knowledge as a table: scores and embeddings of impressions it has not learned from."""

import logging
from datetime import date

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from etl.spec.units import each_day
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import EVERYTHING
from training.gem import load_trained
from training.loop import checkpoint
from training.loop.checkpoint import Trained

log = logging.getLogger(__name__)


def write_knowledge(lake: Lake, days: tuple[date, date], batch_rows: int = 2048) -> int:
    """Replace the given days of `knowledge`, each scored by the newest GEM from before it.

    Days before the first trained GEM get none: students do without. Returns the rows written.
    Raises UserError where a day has no examples.
    """
    written = checkpoint.written(lake.root, lake.spec.hash)
    trained_until = [manifest.trained_until for _, manifest in written if manifest.complete]
    parts, versions = [], dict[str, object]()
    for day in each_day(*days):
        before = max((other for other in trained_until if other < day), default=None)
        if before is None:
            log.info("no GEM was trained before %s: no knowledge of it", day)
            continue
        trained, reader = load_trained(lake, before)
        reader.require(day, day)
        parts.append(_score_day(lake, reader, trained, day, batch_rows))
        versions = dict(reader.versions) | {"gem": trained.manifest.fm_version}
    contract = contracts.knowledge(lake.spec)
    rows = pa.concat_tables(parts) if parts else arrow_schema(contract).empty_table()
    where = f"day >= '{days[0]}' AND day <= '{days[1]}'"
    arrow.replace(lake, contract, rows, where, versions)
    return rows.num_rows


def _score_day(
    lake: Lake, reader: Reader, trained: Trained, day: date, batch_rows: int
) -> pa.Table:
    contract = contracts.knowledge(lake.spec)
    schema = arrow_schema(contract)
    tables = []
    buckets = tqdm(range(lake.spec.buckets), desc=f"knowledge {day}", unit="bucket", disable=None)
    for bucket in buckets:
        shard = (bucket, lake.spec.buckets)
        batches = reader.batches([day], EVERYTHING, batch_rows, Shuffle(None), shard)
        for batch in batches:
            with torch.no_grad():
                output = trained.model(batch)
            logits = output.logits.numpy()
            n, width = output.embedding.shape
            flat = pa.array(output.embedding.flatten().numpy())
            columns = {
                "impression_id": pa.array(batch.impressions, pa.string()),
                "fm_version": pa.repeat(trained.manifest.fm_version, n),
                "fm_trained_until": pa.repeat(pa.scalar(trained.manifest.trained_until), n),
                **{f"logit_{o}": logits[:, i] for i, o in enumerate(lake.spec.objectives)},
                "embedding": pa.ListArray.from_arrays(
                    np.arange(n + 1, dtype=np.int32) * width, flat
                ),
                "day": pa.repeat(pa.scalar(day), n),
                "bucket": pa.repeat(pa.scalar(bucket, pa.int32()), n),
            }
            tables.append(pa.table({k: columns[k] for k in contract.columns}).cast(schema))
    return pa.concat_tables(tables) if tables else schema.empty_table()
