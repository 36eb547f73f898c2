"""`gemline forecast`: build the sample, forecast a campaign, serve forecasts over HTTP."""

import asyncio
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from etl.cli.runner import LakeArgs, holds_leases, parse_days_argument
from etl.errors import UserError
from ranking.serving.settings import LOOPBACK_HOSTS, HostPattern, ServiceLimits

if TYPE_CHECKING:
    from ranking.forecast.schemas import CampaignForecast, Forecast, Interval


class BuildArgs(LakeArgs):
    """Arguments of `forecast build`."""

    data_until: Annotated[date, tyro.conf.arg(help="last day of the scores and logs")]


@holds_leases("forecast")
def build(args: BuildArgs) -> None:
    """Sample the scored impressions of the latest days, and count their segments."""
    from etl.runtime.spark import spark_session
    from features.forecast.build import build_forecast
    from ranking.forecast.tables import require_forecast

    require_forecast(args.load_spec())
    lake = args.open_lake()
    spark_session("forecast")
    counts = build_forecast(lake, args.data_until)
    print("forecast: " + ", ".join(f"{table} {rows:,} rows" for table, rows in counts.items()))


class AskArgs(LakeArgs):
    """A targeting, and a campaign."""

    targeting: Annotated[
        str, tyro.conf.arg(help="condition, such as \"country = 'US' and hour between 8 and 20\"")
    ] = ""
    goal: Annotated[str | None, tyro.conf.arg(help="goal of the campaign")] = None
    bid: Annotated[
        tuple[float, ...], tyro.conf.arg(help="bids per event; several make a bid curve")
    ] = ()
    budget: Annotated[float | None, tyro.conf.arg(help="most spend of the flight")] = None
    frequency_cap: Annotated[
        int | None, tyro.conf.arg(help="most impressions of a user in the flight")
    ] = None
    in_target: Annotated[
        tuple[str, ...],
        tyro.conf.arg(help="true classes to reach, for a targeting by a data provider's labels"),
    ] = ()
    flight: Annotated[
        str | None, tyro.conf.arg(help="days first:last; default: those after the sample")
    ] = None
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="a line of JSON for each bid")] = False


def ask(args: AskArgs) -> None:
    """Forecast the users and impressions of a targeting, and what a campaign would win of them."""
    forecasts = asyncio.run(_forecasts(args))
    if args.as_json:
        for forecast in forecasts:
            print(forecast.model_dump_json())
        return
    _print_segment(forecasts[0])
    campaigns = [
        (bid, f.campaign) for bid, f in zip(args.bid, forecasts, strict=False) if f.campaign
    ]
    if campaigns:
        _print_campaigns(campaigns)
    for note in dict.fromkeys(note for forecast in forecasts for note in forecast.notes):
        print(f"note: {note}")


async def _forecasts(args: AskArgs) -> "list[Forecast]":
    from pydantic import ValidationError

    from ranking.forecast.forecaster import Forecaster
    from ranking.forecast.pool import open_forecast
    from ranking.forecast.schemas import ForecastRequest

    lake = args.open_lake()
    forecaster = Forecaster(*open_forecast(lake))
    first, last = parse_days_argument(args.flight, "--flight") if args.flight else (None, None)
    try:
        requests = [
            ForecastRequest(
                targeting=args.targeting, goal=args.goal, bid=bid, budget=args.budget,
                frequency_cap=args.frequency_cap, in_target=args.in_target, first_day=first,
                last_day=last,
            )
            for bid in args.bid or (None,)
        ]  # fmt: skip
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        flag = str(detail["loc"][-1]).replace("_", "-")
        raise UserError(f"--{flag}: {detail['msg']}") from None
    return [await forecaster.forecast(request) for request in requests]


def _print_segment(forecast: "Forecast") -> None:
    print(f"flight: {forecast.first_day} to {forecast.last_day}")
    print(f"users: {_text(forecast.users)}")
    print(f"impressions: {_text(forecast.impressions)}")
    if forecast.in_target_rate:
        rate = forecast.in_target_rate
        print(f"in-target rate: {rate.value:.3f} [{rate.low:.3f}, {rate.high:.3f}]")
    if forecast.users_in_target:
        print(f"users in the target: {_text(forecast.users_in_target)}")
    if forecast.users_by_sketch:
        print(f"users in the window by sketches: {_text(forecast.users_by_sketch)}")


def _print_campaigns(campaigns: "list[tuple[float, CampaignForecast]]") -> None:
    from rich.console import Console
    from rich.table import Table

    in_target = any(campaign.reach_in_target for _, campaign in campaigns)
    table = Table(
        *("bid", "reach [95 %]", *(["in the target [95 %]"] if in_target else [])),
        *("impressions [95 %]", "spend", "events", "cost an event [95 %]"),
    )
    for bid, campaign in campaigns:
        events = ", ".join(f"{name} {e.value:,.1f}" for name, e in campaign.events.items())
        each = campaign.cost_per_event
        cost = f"{each.value:,.4f} [{each.low:,.4f}, {each.high:,.4f}]" if each else ""
        reaches = [r for r in (campaign.reach, campaign.reach_in_target) if r is not None]
        table.add_row(
            f"{bid:g}", *map(_text, reaches), _text(campaign.impressions),
            f"{campaign.spend.value:,.2f}", events, cost,
        )  # fmt: skip
    Console().print(table)


def _text(interval: "Interval") -> str:
    return f"{interval.value:,.0f} [{interval.low:,.0f}, {interval.high:,.0f}]"


class ServeArgs(LakeArgs):
    """Serve forecasts over HTTP."""

    host: Annotated[str, tyro.conf.arg(help="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535), tyro.conf.arg(help="port to listen on")] = 8082
    allowed_hosts: Annotated[
        tuple[HostPattern, ...],
        tyro.conf.arg(help="host names that clients may use, in addition to those of this machine"),
    ] = ()
    workers: Annotated[
        int, Field(ge=1), tyro.conf.arg(help="processes that hold a part of the sample each")
    ] = 2
    limits: Annotated[ServiceLimits, tyro.conf.arg(help="limits of the service")] = ServiceLimits()


def serve(args: ServeArgs) -> None:
    """Serve forecasts, and a page with the targeting as a form, over HTTP."""
    import uvicorn

    from ranking.forecast.app import ForecastService, create_app
    from ranking.forecast.tables import table_versions
    from ranking.forecast.worker import WorkerSettings
    from ranking.serving.auth import validate_exposure
    from ranking.serving.server import UVICORN_OPTIONS, require_free_port

    validate_exposure(args.host, args.allowed_hosts)
    require_free_port(args.host, args.port)
    lake = args.open_lake()
    versions = table_versions(lake)  # fails here if there is no build
    spec = Path(args.spec).absolute()
    settings = WorkerSettings(spec=spec, lake=args.lake, versions=versions, shard=(0, args.workers))
    service = ForecastService(lake, settings, args.workers)
    hosts = [*LOOPBACK_HOSTS, *args.allowed_hosts]
    app = create_app(service, args.limits, hosts)
    uvicorn.run(app, host=args.host, port=args.port, **UVICORN_OPTIONS)


COMMANDS = {"forecast": {"build": build, "ask": ask, "serve": serve}}
