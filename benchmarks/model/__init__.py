"""`gemline bench model`: how fast GEM's blocks learn, beside the machine's limit, on one thread."""

from typing import Annotated

import tyro
from tqdm import tqdm

from benchmarks.result import Result
from etl.spec.base import Strict

COLUMNS = ("what", "ours", "limit", "share", "goal")


class ModelBenchArgs(Strict):
    """Arguments of the benchmark."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(help="parts to take; all without")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: ModelBenchArgs) -> None:
    """Wukong, sequence stacks, request-shaped training and exact resume."""
    import torch

    from benchmarks.model import requests, resume, sequence, wukong
    from training.parallel.memory import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    parts = {"wukong": wukong, "sequence": sequence, "requests": requests, "resume": resume}
    result = Result("The model, training on one thread", COLUMNS)
    for name in (told := tqdm([n for n in parts if not args.only or n in args.only], unit="part")):
        told.set_description(name)
        parts[name].measure(result)
    result.show(args.as_json)
