"""One request of 500 candidates on one core, beside candidate by candidate in eager mode.

ONNX beside the same programs compiled for this machine, whose weights are those of an untrained
student: how long they take does not depend on them.
"""

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.result import Result
from benchmarks.serving.workload import ServingArgs, askers

if TYPE_CHECKING:
    from ranking.online.assemble import Assembled, Assembler
    from ranking.online.request import Asked
    from ranking.package.ranker import Ranker
    from ranking.student.trained import TrainedStudent

CANDIDATES, REQUESTS, EAGER, WARM = 500, 210, 40, 10
KEYS = {
    "score_500_p99_ms": "programs",
    "score_500_compiled_p99_ms": "compiled",
    "score_500_with_features_p99_ms": "whole",
}


def measure(args: ServingArgs, result: Result) -> None:
    """Programs alone, and with features from the store, each over many requests."""
    import torch

    from benchmarks.model.limit import flops_of
    from benchmarks.serving.native import compiled_form
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
    student = eager_student(args, ranker)
    native = compiled_form(ranker, student, args.day)
    took, told = timed(asked, assemble, ranker, native), assemble(asked[-1])
    one_by_one = CANDIDATES * median([eager(student, told, n) for n in range(EAGER)])
    flops = flops_of(lambda: eager(student, told, slice(None)))
    live.close()
    limit = 1e3 * flops / peak()
    ratio = one_by_one / median(took["programs"])
    result.rows += [
        (f"{CANDIDATES} candidates, ONNX", told_of(took["programs"]),
         f"limit {limit:.2f} ms ({flops / 1e6:.0f} MFLOP)", "<= 5 ms"),
        (f"{CANDIDATES} candidates, compiled", told_of(took["compiled"]), "", "<= 5 ms"),
        ("ONNX with features from the store", told_of(took["whole"]), "", ""),
        ("one by one, eager", f"{ratio:.0f} times faster", f"{1e3 * one_by_one:.0f} ms", ">= 100"),
    ]  # fmt: skip
    for key, name in KEYS.items():
        result.take(key, p99(took[name]), "no C++ compiler")
    result.take("score_500_ratio", ratio, "")


def timed(
    asked: Sequence["Asked"], assemble: "Assembler", ranker: "Ranker", native: "Ranker | None"
) -> dict[str, list[float]]:
    """Seconds of requests, the first few to warm up left out."""
    took: dict[str, list[float]] = {"programs": [], "compiled": [], "whole": []}
    for one in asked:
        began = time.perf_counter()
        told = assemble(one)
        assembled = time.perf_counter() - began
        took["programs"].append(rank(ranker, told))
        took["whole"].append(assembled + took["programs"][-1])
        if native:
            took["compiled"].append(rank(native, told))
    return {name: seconds[WARM:] for name, seconds in took.items()}


def p99(seconds: Sequence[float]) -> float:
    """In ms; NaN of none."""
    return 1e3 * float(np.quantile(seconds, 0.99)) if seconds else float("nan")


def told_of(seconds: list[float]) -> str:
    """In words."""
    if not seconds:
        return "no C++ compiler"
    return f"p99 {p99(seconds):.1f} ms, median {1e3 * median(seconds):.1f}"


def median(values: list[float]) -> float:
    """Of seconds."""
    return float(np.median(values))


def rank(ranker: "Ranker", told: "Assembled") -> float:
    """Seconds of programs, calibration and auction."""
    began = time.perf_counter()
    ranker.rank(told.requests, told.candidates, told.bids.tolist(), told.goals)
    return time.perf_counter() - began


def eager_student(args: ServingArgs, ranker: "Ranker") -> "TrainedStudent":
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
