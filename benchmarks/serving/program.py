"""One request of 500 candidates on one core, beside candidate by candidate in eager mode."""

import time
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.result import Result
from benchmarks.serving.asked import askers

if TYPE_CHECKING:
    from benchmarks.serving import ServingArgs
    from ranking.online.assemble import Assembled
    from ranking.package.ranker import Ranker
    from ranking.student.trained import TrainedStudent

CANDIDATES, REQUESTS, EAGER = 500, 200, 40


def measure(args: "ServingArgs", result: Result) -> None:
    """Programs alone, and with features from the store, each over many requests."""
    import torch

    from benchmarks.model.limit import flops_of
    from ranking.online.assemble import Assembler
    from ranking.online.live import Live
    from ranking.package.ranker import load
    from ranking.package.versions import answering
    from training.loop.cost import peak

    torch.set_num_threads(1)
    lake = args.open_lake()
    ranker, live = load(answering(lake.root, args.surface)), Live(lake.root, lake.spec)
    assemble = Assembler(live.store, ranker.manifest.reads)
    asked = askers(lake, args.surface, args.day, CANDIDATES, REQUESTS)
    for one in asked[:10]:
        rank(ranker, assemble(one))
    programs, whole = [], []
    for one in asked:
        began = time.perf_counter()
        told = assemble(one)
        between = time.perf_counter()
        rank(ranker, told)
        ended = time.perf_counter()
        programs.append(ended - between)
        whole.append(ended - began)
    student = eager_student(args, ranker)
    one_by_one = CANDIDATES * median([eager(student, told, n) for n in range(EAGER)])
    flops = flops_of(lambda: eager(student, told, slice(None)))
    live.store.close()
    limit = 1e3 * flops / peak()
    p99, mid = 1e3 * np.quantile(programs, 0.99), 1e3 * np.median(programs)
    ratio = 1e3 * one_by_one / mid
    result.rows += [
        (f"{CANDIDATES} candidates, programs", f"p99 {p99:.1f} ms, median {mid:.1f}",
         f"limit {limit:.2f} ms ({flops / 1e6:.0f} MFLOP)", "<= 5 ms"),
        ("with features from the store", f"p99 {1e3 * np.quantile(whole, 0.99):.1f} ms", "", ""),
        ("one by one, eager", f"{ratio:.0f} times faster", f"{1e3 * one_by_one:.0f} ms", ">= 100"),
    ]  # fmt: skip
    result.take("score_500_p99_ms", float(p99), "")
    result.take("score_500_with_features_p99_ms", float(1e3 * np.quantile(whole, 0.99)), "")
    result.take("score_500_ratio", float(ratio), "")


def median(values: list[float]) -> float:
    """Of seconds."""
    return float(np.median(values))


def rank(ranker: "Ranker", told: "Assembled") -> None:
    """Programs, calibration and auction."""
    ranker.rank(told.requests, told.candidates, told.bids, told.goals)


def eager_student(args: "ServingArgs", ranker: "Ranker") -> "TrainedStudent":
    """A student in torch of the same sizes: how long it takes does not depend on its weights."""
    from ranking.score import assembly_of
    from ranking.student.config import StudentConfig
    from ranking.student.trained import new_student
    from training.knowledge.earlier import Earlier

    told = ranker.manifest
    config = StudentConfig(
        max_length=told.max_length, events=told.events, before=told.before, user_rows=told.user_rows
    )
    reader = assembly_of(ranker, args.open_lake()).reader
    student = new_student(reader, config, told.items, Earlier.nothing())
    student.student.eval()
    return student


def eager(student: "TrainedStudent", told: "Assembled", which: int | slice) -> float:
    """Seconds for the user's part and some candidates."""
    import torch

    at = slice(which, which + 1) if isinstance(which, int) else which
    began, look_up = time.perf_counter(), student.look_up()
    with torch.no_grad():
        student.student.head(
            student.student(
                look_up.user(told.requests), look_up.candidates(some(told.candidates, at))
            )
        )
    return time.perf_counter() - began


def some(value: Any, at: slice) -> Any:
    """Some of the candidates of one request, whatever they are arrays of."""
    if isinstance(value, np.ndarray):
        return value[:, at]
    if isinstance(value, dict):
        return {name: some(one, at) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(some(one, at) for one in value)
    return replace(value, **{f.name: some(getattr(value, f.name), at) for f in fields(value)})
