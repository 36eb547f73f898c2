"""Batch scoring on Spark on one core, compared with the exported programs alone."""

import os
import shutil
import tempfile
import time
from itertools import islice
from pathlib import Path

from benchmarks.harness import BenchmarkResult
from benchmarks.studies.trials import symlinked_lake
from benchmarks.system.serving_args import ServingArgs
from etl.tables.atomic_io import local_path
from ranking.registry.ranker import live_pointer, live_version, load_ranker, rankers_folder
from ranking.scoring.batch import score_days
from ranking.scoring.scorer import SCORE_ROWS, Scorer
from training.data.label_window import ALL_LABELS
from training.data.sampling import Shuffle

PROGRAM_BATCHES = 40


def measure_batch_scoring(args: ServingArgs, result: BenchmarkResult) -> None:
    """`batch_ratio`: rows per second of all days of a surface, after one day to warm up."""
    os.environ["GEMLINE_SPARK_MASTER"] = "local[1]"
    lake = args.open_lake()
    ranker = live_version(lake.root, args.surface)
    with tempfile.TemporaryDirectory() as folder:
        scratch = symlinked_lake(lake, Path(folder, "lake"))
        rankers = local_path(rankers_folder(scratch.root, args.surface))
        shutil.copytree(local_path(ranker), rankers / ranker.name)
        live_pointer(scratch.root, args.surface).promote(ranker.name)
        scorer = Scorer.from_ranker(load_ranker(ranker), scratch)
        days = scorer.input_builder.reader.days()
        score_days(scratch, args.surface, (days[-1], days[-1]))
        start = time.perf_counter()
        rows = score_days(scratch, args.surface, (days[0], days[-1]))
        spark_speed = rows / (time.perf_counter() - start)
    program_speed = program_rows_per_second(scorer)
    result.rows.append(
        (
            f"Spark, one core, {rows:,} rows",
            f"{spark_speed:,.0f} rows/s",
            f"{program_speed:,.0f} rows/s, programs alone",
            ">= half",
        )
    )
    result.record("batch_ratio", spark_speed / program_speed, "")


def program_rows_per_second(scorer: Scorer) -> float:
    """Rows per second of the programs on batches with inputs built in advance."""
    reader, ranker = scorer.input_builder.reader, scorer.ranker
    batches = reader.batches(reader.days(), ALL_LABELS, SCORE_ROWS, Shuffle(None))
    inputs = [scorer.input_builder(batch) for batch in islice(batches, PROGRAM_BATCHES)]
    rows = sum(int(batch.candidate_index.mask.sum()) for batch in inputs)
    start = time.perf_counter()
    for batch in inputs:
        ranker.probabilities(ranker.user_state(batch.requests), batch.candidates)
    return rows / (time.perf_counter() - start)
