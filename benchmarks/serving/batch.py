"""Batch scoring on Spark on one core, beside the exported programs alone."""

import os
import shutil
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.result import Result
from benchmarks.serving.workload import ServingArgs

if TYPE_CHECKING:
    from ranking.score import Scorer

BATCHES = 40


def measure(args: ServingArgs, result: Result) -> None:
    """All days of a surface, in a lake of its own, after one day to warm up."""
    from etl.tables.atomic_io import local_path
    from ranking.batch import score_days
    from ranking.package.ranker import load
    from ranking.package.versions import answering, current, versions
    from ranking.score import Scorer
    from training.trials import linked

    os.environ["GEMLINE_SPARK_MASTER"] = "local[1]"
    lake = args.open_lake()
    ranker = answering(lake.root, args.surface)
    with tempfile.TemporaryDirectory() as place:
        own = linked(lake, Path(place, "lake"))
        copies = local_path(versions(own.root, args.surface))
        shutil.copytree(local_path(ranker), copies / ranker.name)
        current(own.root, args.surface).swap(ranker.name)
        scorer = Scorer.of(load(ranker), own)
        days = scorer.assembly.reader.days()
        score_days(own, args.surface, (days[-1], days[-1]))
        began = time.perf_counter()
        rows = score_days(own, args.surface, (days[0], days[-1]))
        spark = rows / (time.perf_counter() - began)
    alone = programs_alone(scorer)
    told = f"{spark:,.0f} rows/s", f"{alone:,.0f} rows/s, programs alone"
    result.rows.append((f"Spark, one core, {rows:,} rows", *told, ">= half"))
    result.take("batch_ratio", spark / alone, "")


def programs_alone(scorer: "Scorer") -> float:
    """Rows a second of batches that were assembled before."""
    from ranking.score import SCORE_ROWS
    from training.data.parts import Shuffle
    from training.data.ripened import EVERYTHING

    reader, ranker = scorer.assembly.reader, scorer.ranker
    batches = reader.batches(reader.days(), EVERYTHING, SCORE_ROWS, Shuffle(None))
    inputs = [scorer.assembly(batch) for batch in islice(batches, BATCHES)]
    began = time.perf_counter()
    for one in inputs:
        ranker.probabilities(ranker.state(one.requests), one.candidates)
    return sum(int(one.rows.there.sum()) for one in inputs) / (time.perf_counter() - began)
