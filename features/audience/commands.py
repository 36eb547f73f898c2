"""`gemline audience`: labels of data providers, their quality, and what to buy by them.

Spark is imported only when a command runs that needs it.
"""

import json
from datetime import date
from typing import Annotated

import tyro
from pydantic import Field
from rich.console import Console
from rich.table import Table

from etl.cli.runner import LakeArgs, holds_leases, print_counts
from etl.commands import RawArgs
from etl.errors import UserError


def _require_audiences(args: LakeArgs) -> list[str]:
    names = list(args.load_spec().audiences)
    if not names:
        raise UserError(f"{args.spec} declares no audiences: see docs/guides/audiences.md")
    return names


@holds_leases("audience")
def count(args: RawArgs) -> None:
    """Load labels of data providers and audits, and count impressions by campaign and labels."""
    from etl.reports import AUDIENCE_REPORTS, load_reports
    from etl.runtime.spark import spark_session
    from etl.tables.day_order import days_in_order
    from features.audience.counts import count_audiences

    _require_audiences(args)
    lake = args.open_lake()
    with days_in_order(lake, "audience", args.day_range):
        spark_session("audience")
        loaded = load_reports(lake, args.raw, args.day_range, AUDIENCE_REPORTS)
        print_counts("audience", loaded | count_audiences(lake, args.day_range))


class AuditArgs(LakeArgs):
    """Arguments of a command that reads audits."""

    data_until: Annotated[date, tyro.conf.arg(help="last day of the audits and impressions")]


class FitArgs(AuditArgs):
    """Arguments of `audience fit`."""

    skip_unidentified: Annotated[
        bool,
        tyro.conf.arg(
            help="leave out audiences whose audits do not suffice, as the pipeline does, instead "
            "of writing nothing and exiting with 2"
        ),
    ] = False


@holds_leases("audience")
def fit(args: FitArgs) -> None:
    """Estimate how good each provider's labels are, from the audits of the spec's window."""
    from features.audience.estimate import AudienceFit, fit_audience, write_quality

    names, lake = _require_audiences(args), args.open_lake()
    fits: dict[str, AudienceFit] = {}
    refusals = []
    for name in names:
        try:
            fits[name] = fit_audience(lake, name, args.data_until)
        except UserError as error:
            refusals.append(str(error))
    if refusals and not args.skip_unidentified:
        raise UserError("\n".join(refusals))
    notes = [f"audience {name}: {note}" for name, found in fits.items() for note in found.notes]
    for line in (*refusals, *notes):
        print(f"note: {line}")
    print_counts("audience", {"audience_quality": write_quality(lake, fits, args.data_until)})


class ChooseArgs(AuditArgs):
    """Arguments of `audience choose`."""

    audience: Annotated[str, tyro.conf.arg(help="one of the spec's audiences")]
    target: Annotated[tuple[str, ...], tyro.conf.arg(help="true classes to reach")]
    impressions: Annotated[float, tyro.conf.arg(help="how many impressions to buy"), Field(gt=0)]
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON instead")] = False


def choose(args: ChooseArgs) -> None:
    """Which labels of each provider to buy for a target, and the in-target rate of them."""
    from features.audience.estimate import fit_audience
    from features.audience.quality import Supply, rank_purchases

    names = _require_audiences(args)
    if args.audience not in names:
        raise UserError(f"no audience is called {args.audience}; known: {', '.join(names)}")
    found = fit_audience(args.open_lake(), args.audience, args.data_until)
    columns = found.target_columns(args.target)
    supply = Supply(found.impressions, found.users, found.spec.min_count)
    purchases = rank_purchases(found.model, supply, columns, args.impressions)
    everyone = float(found.class_shares[columns].sum())
    if args.as_json:
        rows = [vars(purchase) for purchase in purchases]
        answer = {"rate_of_everyone": everyone, "purchases": rows, "notes": found.notes}
        print(json.dumps(answer))
        return
    table = Table("provider", "labels", "impressions", "in-target rate [95 %]", "lift")
    for purchase in purchases:
        table.add_row(
            purchase.provider,
            ", ".join(purchase.labels),
            f"{purchase.impressions:,.0f}",
            f"{purchase.rate:.3f} [{purchase.low:.3f}, {purchase.high:.3f}]",
            f"{purchase.rate / everyone:.2f}",
        )
    Console().print(table)
    print(f"in-target rate of all impressions: {everyone:.3f}")
    for note in found.notes:
        print(f"note: {note}")


COMMANDS = {"audience": {"count": count, "fit": fit, "choose": choose}}
