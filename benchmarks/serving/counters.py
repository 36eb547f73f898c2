"""One event and one ranking, in an hour of which the store holds millions of events, and none.

In CPU time, so that waiting for the disk, the same for both, does not hide the difference.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from benchmarks.result import Result
from benchmarks.serving.workload import ServingArgs, askers

if TYPE_CHECKING:
    from ranking.online.request import Asked
    from ranking.online.store import Store
    from ranking.package.ranker import Ranker

EVENTS, CANDIDATES, ROUNDS, WARM = 3_000_000, 500, 110, 10
HALF_HOUR = 1800


@dataclass
class Costs:
    """CPU seconds of each round: an event with its commit, features, a ranking with them."""

    event: list[float]
    features: list[float]
    ranking: list[float]

    def median(self, *parts: str) -> float:
        """The median of some parts together, the first rounds left out; in ms."""
        rounds = sum(np.array(getattr(self, part)[WARM:]) for part in parts)
        return 1e3 * float(np.median(rounds))


def measure(args: ServingArgs, result: Result) -> None:
    """Both stores in turn, half an hour after the last event that landed."""
    from etl.tables.place import here
    from ranking.online.live import stores
    from ranking.online.store import open_store
    from ranking.package.ranker import load
    from ranking.package.versions import answering

    lake = args.open_lake()
    ranker = load(answering(lake.root, args.surface))
    asked = askers(lake, args.surface, args.day, CANDIDATES, ROUNDS)
    folder = stores(lake.root).target
    assert folder
    with tempfile.TemporaryDirectory() as place:
        copies = []
        for name in ("none", "many"):
            Path(place, name).mkdir()
            source = open_store(here(folder), lake.spec)
            source.env.copy(str(Path(place, name)))
            source.close()
            copies.append(open_store(Path(place, name), lake.spec))
        now = copies[0].landed + HALF_HOUR
        asked = [replace(one, as_of=now) for one in asked]
        fill(copies[1], asked, args.surface)
        none, many = costs(copies, ranker, asked)
        for store in copies:
            store.close()
    report(none, many, result)


def fill(store: "Store", asked: Sequence["Asked"], surface: str) -> None:
    """Count events of the surface in this hour, on the items asked for, of users not asked for."""
    from ranking.online.build import item_parts
    from ranking.online.counters import LEVELS

    rng, counters, spec = np.random.default_rng(0), store.counters, store.spec
    items = pa.array(sorted({item for one in asked for item in one.candidates}))
    second = asked[0].as_of - 1 - rng.integers(0, HALF_HOUR, EVENTS)
    item = items.take(pa.array(rng.integers(0, len(items), EVENTS)))
    parts = item_parts(store, pa.chunked_array([item]), second)
    parts["surface"] = np.full(EVENTS, spec.surface_codes[surface])
    type_ = rng.integers(0, len(counters.codes), EVENTS)
    for table, pairs in counters.records(parts, second, type_):
        with store.writing() as txn:
            if table == LEVELS[0].table:  # the hours before stay
                pairs = [(name, txn.get(table, name) + rows) for name, rows in pairs]
            txn.put_all(table, pairs)


def costs(
    copies: Sequence["Store"], ranker: "Ranker", asked: Sequence["Asked"]
) -> tuple[Costs, Costs]:
    """Of each store, one round of one after a round of the other."""
    from ranking.online.assemble import Assembler
    from ranking.online.feed import Event, ingest_event

    found = Costs([], [], []), Costs([], [], [])
    type_ = next(iter(copies[0].spec.counters.events))
    for number, one in enumerate(asked):
        event = Event(
            f"bench-{number}", one.user, one.candidates[0], one.surface, type_,
            one.as_of * 1_000_000, one.as_of * 1_000_000,
        )  # fmt: skip
        for store, costs_of in zip(copies, found, strict=True):
            began = time.process_time()
            with store.writing() as txn:
                ingest_event(store, txn, event)
            committed = time.process_time()
            inputs = Assembler(store, ranker.manifest.reads)(one)
            assembled = time.process_time()
            ranker.rank(inputs.requests, inputs.candidates, inputs.bids.tolist(), inputs.goals)
            ended = time.process_time()
            costs_of.event.append(committed - began)
            costs_of.features.append(assembled - committed)
            costs_of.ranking.append(ended - assembled)
    return found


def report(none: Costs, many: Costs, result: Result) -> None:
    """The ratio of both, and what it is made of."""
    whole = [costs.median("event", "features", "ranking") for costs in (none, many)]
    parts = [costs.median("event", "features") for costs in (none, many)]
    result.rows += [
        (f"an event and a ranking, {EVENTS:,} events this hour",
         f"{whole[1]:.1f} ms, {whole[1] / whole[0]:.2f} times none",
         f"{whole[0]:.1f} ms with none", "<= 1.2 times"),
        ("the same without the ranker's programs", f"{parts[1]:.1f} ms: event "
         f"{many.median('event'):.2f}, features {many.median('features'):.1f}",
         f"{parts[0]:.1f} ms: {none.median('event'):.2f}, {none.median('features'):.1f}", ""),
    ]  # fmt: skip
    result.take("counter_cost_ratio", whole[1] / whole[0], "")
    result.take("counter_cost_without_programs_ratio", parts[1] / parts[0], "")
