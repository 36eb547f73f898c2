"""Latency of ranking one request of 500 candidates on one core.

ONNX programs, the same programs compiled ahead of time (AOTInductor), and the student in eager
mode, once candidate by candidate and once with all candidates in one batch. Compiled and eager
programs have the weights of an untrained student: their latency does not depend on weights.

Batch scoring on Spark on one core, compared with the exported programs alone.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import date
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.harness import BenchmarkResult
from benchmarks.studies.trials import symlinked_lake
from benchmarks.system.model_blocks import count_flops
from benchmarks.system.request_load import quantile_ms, sample_requests
from benchmarks.system.serving_args import ServingArgs
from etl.errors import UserError
from etl.tables.atomic_io import local_path
from ranking.feature_store.fetch import FeatureFetcher, RankInputs
from ranking.feature_store.request import RankRequest
from ranking.feature_store.wal import FeatureStoreHandle
from ranking.registry.aot import CompiledProgram
from ranking.registry.onnx_programs import Program
from ranking.registry.programs import ExportableProgram, exportable_programs, require_compiler
from ranking.registry.ranker import (
    ExportedRanker,
    live_pointer,
    live_version,
    load_ranker,
    rankers_folder,
)
from ranking.scoring.batch import score_days
from ranking.scoring.scorer import SCORE_ROWS, Scorer, input_builder
from ranking.student.config import StudentConfig
from ranking.student.trained import TrainedStudent, new_student
from training.data.batch import Shuffle
from training.data.label_window import ALL_LABELS
from training.teacher.embeddings import TeacherEmbeddings
from training.trainer.throughput import peak_flops

CANDIDATES, REQUESTS, EAGER_REQUESTS, WARMUP_REQUESTS = 500, 210, 40, 10
EXAMPLE_ROWS = 64  # rows of the batch for tracing programs
VARIANT_BY_FIGURE = {
    "score_500_p99_ms": "onnx",
    "score_500_compiled_p99_ms": "compiled",
    "score_500_with_features_p99_ms": "with features",
}


def measure_scoring(args: ServingArgs, result: BenchmarkResult) -> None:
    """Latency of the programs alone, and with features from the store, over many requests."""
    torch.set_num_threads(1)
    lake = args.open_lake()
    ranker = load_ranker(live_version(lake.root, args.surface))
    handle = FeatureStoreHandle(lake.root, lake.spec)
    fetcher = FeatureFetcher(handle.store, ranker.manifest.input_limits)
    requests = sample_requests(lake, args.surface, args.day, CANDIDATES, REQUESTS)
    student = eager_student(args, ranker)
    compiled = compiled_ranker(ranker, student, args.day)
    seconds = time_requests(requests, fetcher, ranker, compiled)
    inputs = fetcher(requests[-1])
    eager_seconds = [time_eager(student, inputs, number) for number in range(EAGER_REQUESTS)]
    one_by_one = CANDIDATES * median(eager_seconds)
    in_one_batch = median(time_eager(student, inputs, slice(None)) for _ in range(EAGER_REQUESTS))
    flops = count_flops(lambda: time_eager(student, inputs, slice(None)))
    handle.close()
    limit_ms = 1e3 * flops / peak_flops()
    ratio, batch_ratio = (t / median(seconds["onnx"]) for t in (one_by_one, in_one_batch))
    result.rows += [
        (f"{CANDIDATES} candidates, ONNX", format_latency(seconds["onnx"]),
         f"limit {limit_ms:.2f} ms ({flops / 1e6:.0f} MFLOP)", "<= 5 ms"),
        (f"{CANDIDATES} candidates, compiled", format_latency(seconds["compiled"]), "", "<= 5 ms"),
        ("ONNX with features from the store", format_latency(seconds["with features"]), "", ""),
        ("one by one, eager", f"{ratio:.0f} times faster", f"{1e3 * one_by_one:.0f} ms", ">= 100"),
        ("in one batch, eager", f"{batch_ratio:.1f} times faster", f"{1e3 * in_one_batch:.1f} ms",
         ""),
    ]  # fmt: skip
    for key, variant in VARIANT_BY_FIGURE.items():
        result.record(key, p99_ms(seconds[variant]), "no C++ compiler")
    result.record("score_500_ratio", ratio, "")
    result.record("score_500_batch_ratio", batch_ratio, "")


def time_requests(
    requests: Sequence[RankRequest],
    fetcher: FeatureFetcher,
    ranker: ExportedRanker,
    compiled: ExportedRanker | None,
) -> dict[str, list[float]]:
    """Seconds of each request by variant, without the first ones to warm up.

    The order of ONNX and compiled programs alternates: the second finds the inputs in caches.
    """
    seconds: dict[str, list[float]] = {"onnx": [], "compiled": [], "with features": []}
    rankers = {"onnx": ranker} | ({"compiled": compiled} if compiled else {})
    for number, request in enumerate(requests):
        start = time.perf_counter()
        inputs = fetcher(request)
        fetch_seconds = time.perf_counter() - start
        for variant, programs in list(rankers.items())[:: -1 if number % 2 else 1]:
            seconds[variant].append(time_ranking(programs, inputs))
        seconds["with features"].append(fetch_seconds + seconds["onnx"][-1])
    return {variant: values[WARMUP_REQUESTS:] for variant, values in seconds.items()}


def p99_ms(seconds: Sequence[float]) -> float:
    """The 99th percentile in milliseconds; NaN without values."""
    return quantile_ms(seconds, 0.99)


def format_latency(seconds: Sequence[float]) -> str:
    """The 99th percentile and the median as text."""
    if not seconds:
        return "no C++ compiler"
    return f"p99 {p99_ms(seconds):.1f} ms, median {1e3 * median(seconds):.1f}"


def time_ranking(ranker: ExportedRanker, inputs: RankInputs) -> float:
    """Seconds of programs, calibration and auction."""
    start = time.perf_counter()
    ranker.rank(inputs.requests, inputs.candidates, inputs.bids)
    return time.perf_counter() - start


def eager_student(args: ServingArgs, ranker: ExportedRanker) -> TrainedStudent:
    """An untrained student of the ranker's sizes."""
    manifest = ranker.manifest
    config = StudentConfig(
        max_length=manifest.max_length,
        encoded_events=manifest.encoded_events,
        teacher_history_length=manifest.teacher_history_length,
        user_hash_buckets=manifest.user_hash_buckets,
    )
    reader = input_builder(ranker, args.open_lake()).reader
    student = new_student(reader, config, manifest.num_items, TeacherEmbeddings.empty())
    student.student.eval()
    return student


def time_eager(student: TrainedStudent, inputs: RankInputs, candidates: int | slice) -> float:
    """Seconds of the user's part and some candidates in eager mode."""
    if isinstance(candidates, int):
        candidates = slice(candidates, candidates + 1)
    start = time.perf_counter()
    lookup = student.lookup()
    with torch.no_grad():
        user = lookup.user_inputs(inputs.requests)
        items = lookup.candidate_inputs(slice_candidates(inputs.candidates, candidates))
        student.student.head(student.student(user, items))
    return time.perf_counter() - start


def slice_candidates(value: Any, candidates: slice) -> Any:
    """Some of the candidates of one request, in arrays, dicts, tuples and dataclasses of arrays."""
    if isinstance(value, np.ndarray):
        return value[:, candidates]
    if isinstance(value, dict):
        return {name: slice_candidates(part, candidates) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(slice_candidates(part, candidates) for part in value)
    parts = {f.name: slice_candidates(getattr(value, f.name), candidates) for f in fields(value)}
    return replace(value, **parts)


def compiled_ranker(
    ranker: ExportedRanker, student: TrainedStudent, day: date
) -> ExportedRanker | None:
    """The ranker with compiled programs of a student of its sizes; None without a C++ compiler."""
    try:
        require_compiler()
    except UserError:
        return None
    reader = student.input_builder.reader
    batch = next(reader.batches([day], ALL_LABELS, EXAMPLE_ROWS, Shuffle(None)))
    user_program, rank_program = exportable_programs(student, student.input_builder(batch))
    return replace(
        ranker,
        user_program=_compile_program(user_program, ranker.user_program),
        rank_program=_compile_program(rank_program, ranker.rank_program),
    )


def _compile_program(program: ExportableProgram, onnx_program: Program) -> CompiledProgram:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.pt2")
        program.compile_aot(path)
        return CompiledProgram(path.read_bytes(), "the compiled program", onnx_program)


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
        scorer = Scorer.from_ranker(load_ranker(ranker), scratch, lake.day_range("examples")[0])
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
        ranker.score(ranker.user_state(batch.requests), batch.candidates)
    return rows / (time.perf_counter() - start)
