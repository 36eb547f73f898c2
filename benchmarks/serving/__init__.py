"""`gemline bench serving`: how fast rankers answer, and whether live features are the tables'."""

from tqdm import tqdm

from benchmarks.result import Result
from benchmarks.serving.workload import ServingArgs

COLUMNS = ("what", "ours", "beside", "goal")


def bench(args: ServingArgs) -> None:
    """One request, the service under load, and a replay of logged requests."""
    from benchmarks.serving import batch, counters, load, program, replay

    parts = {
        "program": program, "counters": counters, "batch": batch, "service": load,
        "replay": replay,
    }  # fmt: skip
    result = Result(f"Rankers of {args.lake} at work", COLUMNS)
    for name in (told := tqdm([n for n in parts if not args.only or n in args.only], unit="part")):
        told.set_description(name)
        parts[name].measure(args, result)
    result.show(args.as_json)
