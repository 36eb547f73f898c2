"""`gemline bench data`: what the data plane costs, beside the alternative and the limit."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import tyro
from tqdm import tqdm

from benchmarks.result import Result
from etl.spec.base import Strict

COLUMNS = ("what", "ours", "beside", "ratio", "goal")


class DataBenchArgs(Strict):
    """Arguments of the benchmark."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(help="figures to take; all without")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench(args: DataBenchArgs) -> None:
    """Histories, storage, the reader, counters and joins beside their alternatives."""
    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[2]")
    from benchmarks.data import asof, counters, history, pipeline, reading, storage
    from etl.session import spark_session

    parts = {
        "pipeline": pipeline,
        "history": history,
        "storage": storage,
        "reading": reading,
        "counters": counters,
        "asof": asof,
    }
    result = Result("The data plane", COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        wanted = [name for name in parts if not args.only or name in args.only]
        for name in (told := tqdm(wanted, unit="part")):
            told.set_description(name)
            if name != "pipeline":
                spark_session("bench data")
            parts[name].measure(result, Path(folder))
    result.show(args.as_json)
