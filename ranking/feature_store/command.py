"""The commands `gemline rank materialize` and `gemline rank check-consistency`."""

from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro
from pydantic import Field

from etl.cli.runner import DataUntilTime, LakeArgs, parse_data_until
from etl.errors import UserError


class MaterializeArgs(LakeArgs):
    """Build the online feature store from the tables."""

    data_until: DataUntilTime
    keep_newer: Annotated[
        bool,
        tyro.conf.arg(
            help="build nothing if the live store has later data and all that the rankers read"
        ),
    ] = False


class ConsistencyArgs(LakeArgs):
    """A day whose logged requests are compared."""

    day: Annotated[date, tyro.conf.arg(help="the day whose logged requests are compared")]
    max_requests: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="how many requests of the day, the first ones")
    ] = 1000


def materialize(args: MaterializeArgs) -> None:
    """Build the online feature store from the lake's tables; running services switch to it."""
    from ranking.feature_store.materialize import materialize, materialize_lease
    from ranking.feature_store.newer_store import newer_live_store

    lake = args.open_lake()
    data_until = parse_data_until(lake.spec, args.data_until)
    with materialize_lease(args.lake, "gemline rank materialize"):
        kept = newer_live_store(lake, data_until) if args.keep_newer else None
        print(f"online features: {kept or materialize(lake, data_until)}")


def check_consistency(args: ConsistencyArgs) -> None:
    """Compare online with offline features of a day's logged requests; exit 2 if any differ.

    A feature store with all data until the day before is built in the folder of temporary files.
    The day's events and versions of attributes are posted to it in the order of their ingest, and
    each request is read at its time, as the promoted rankers read it.
    """
    from ranking.feature_store import consistency
    from ranking.feature_store.materialize import (
        build_feature_store,
        promoted_manifests,
        required_lengths,
    )
    from ranking.student.config import InputLimits

    lake = args.open_lake()
    if not lake.count_rows("examples", (args.day, args.day)):
        raise UserError(f"{lake.root} has no examples of {args.day}: name a day that has requests")
    manifests = promoted_manifests(lake)
    lengths = required_lengths(manifests)
    limits = InputLimits.maximum([manifest.input_limits for manifest in manifests])
    with TemporaryDirectory(prefix="gemline-") as folder:
        store = build_feature_store(
            lake, Path(folder, "store"), lake.spec.day_start(args.day), lengths
        )
        report = consistency.check_consistency(store, lake, args.day, limits, args.max_requests)
        store.close()
    print(f"check-consistency: compared {report.num_requests:,} requests of {args.day}")
    if report.mismatches:
        raise UserError(f"online and offline features differ: {_most_frequent(report.mismatches)}")


def _most_frequent(mismatches: tuple[str, ...]) -> str:
    """The arrays that differ most often: `numeric in 3 requests (first in r7), …`."""
    requests: dict[str, list[str]] = {}
    for mismatch in mismatches:
        request, _, array = mismatch.rpartition(": ")
        requests.setdefault(array, []).append(request)
    by_frequency = sorted(requests.items(), key=lambda pair: -len(pair[1]))
    return ", ".join(
        f"{array} in {len(differing):,} requests (first in {differing[0]})"
        for array, differing in by_frequency[:5]
    )
