"""The forecast service: tokens, refusals, worker processes that are killed, and its page."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import yaml
from fastapi.testclient import TestClient

from benchmarks.harness import SIMULATOR_SPEC
from benchmarks.studies.forecast_world import sampled_days
from etl.errors import TemporaryError
from etl.spec import load_spec
from etl.tables import arrow, audience_schemas, forecast_schemas
from etl.tables.lake import Lake
from gemline import main
from ranking.forecast.app import ForecastService, create_app
from ranking.forecast.forecaster import Forecaster
from ranking.forecast.pool import WorkerPool, open_forecast
from ranking.forecast.schemas import Forecast, ForecastRequest
from ranking.forecast.shard import Query
from ranking.forecast.sums import Estimate, SampleSums
from ranking.forecast.tables import (
    SAMPLE,
    read_precisions,
    read_sample,
    read_tables,
    table_versions,
)
from ranking.forecast.worker import WorkerSettings
from ranking.report.forecasts import forecast_section
from ranking.serving.auth import TOKENS_VARIABLE
from ranking.serving.settings import LOOPBACK_HOSTS, ServiceLimits
from tests.browser import BrowserPage
from tests.ranking.forecasts import SPEC, World
from tests.ranking.served import free_port
from tests.waiting import wait_for

TRAFFIC = {"goal": "traffic", "bid": 0.3}
THREE = "age = 'age01' and country = 'country00' and gender = 'gender00'"


@pytest.fixture(scope="module")
def world() -> World:
    return World(0, 6000)


@pytest.fixture(scope="module")
def settings(world: World, tmp_path_factory: pytest.TempPathFactory) -> WorkerSettings:
    """A lake with the tables of a small world."""
    root = tmp_path_factory.mktemp("forecast")
    lake = Lake(str(root / "lake"), SPEC)
    write_tables(lake, world)
    spec = root / "spec.yaml"
    dumped = SPEC.model_dump(mode="json", exclude_unset=True)
    spec.write_text(yaml.safe_dump(dumped, sort_keys=False))
    return WorkerSettings(spec=spec, lake=lake.root, versions=table_versions(lake), shard=(0, 2))


def write_tables(lake: Lake, world: World) -> None:
    last = world.tables.window[-1]
    sketches = [
        {"attribute": name, "value": value, "sketch": sketch.serialize(), "day": last}
        for (name, value), sketch in world.tables.sketches.sketches.items()
    ]
    supply = [
        {"surface": surface, "impressions": int(count), "day": day}
        for surface, by_day in world.tables.supply.items()
        for day, count in by_day.items()
    ]
    tables = [
        (forecast_schemas.forecast_margins, world.margins),
        (forecast_schemas.forecast_sketches, pa.Table.from_pylist(sketches)),
        (forecast_schemas.forecast_supply, pa.Table.from_pylist(supply)),
        (forecast_schemas.forecast_sample, world.sample),
    ]
    versions: dict[str, int] = {}
    for schema, rows in tables:
        contract = schema(lake.spec)
        has_day = "day" in rows.column_names
        dated = rows if has_day else rows.append_column("day", pa.array([last] * len(rows)))
        written = arrow.replace_rows(lake, contract, dated, "day IS NOT NULL", versions)
        versions[contract.name] = written


def service_of(settings: WorkerSettings) -> ForecastService:
    return ForecastService(Lake(settings.lake, SPEC), settings, 2)


@pytest.fixture
def client(settings: WorkerSettings) -> Iterator[TestClient]:
    app = create_app(service_of(settings), ServiceLimits(), [*LOOPBACK_HOSTS])
    with TestClient(app, "http://localhost") as client:
        wait_until_ready(client)
        yield client


def wait_until_ready(client: TestClient) -> None:
    deadline = time.monotonic() + 60
    while client.get("/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_service_answers_as_one_process_does_and_refuses_with_a_sentence(
    client: TestClient, settings: WorkerSettings, world: World
) -> None:
    body = {"targeting": THREE, "frequency_cap": 2, **TRAFFIC}
    served = client.post("/forecast", json=body).json()
    forecaster = Forecaster(*open_forecast(lake_of(settings)))
    alone = asyncio.run(forecaster.forecast(ForecastRequest.model_validate(body))).model_dump()
    for name in ("users", "impressions"):
        assert served[name] == pytest.approx(alone[name], rel=1e-6)
    for name in ("reach", "spend", "cost_per_event"):
        assert served["campaign"][name] == pytest.approx(alone["campaign"][name], rel=1e-6)
    wrong = client.post("/forecast", json={"targeting": "country = 'XX'"})
    assert wrong.status_code == 422 and "character 11" in wrong.json()["error"]
    assert client.post("/forecast", json={"bid": -1.0, "goal": "traffic"}).status_code == 422
    attributes = client.get("/targeting").json()["attributes"]
    assert attributes["hour"] == list(range(24))
    assert attributes["country"] == world.tables.listed_values["country"]
    assert len(attributes["country"]) < len(world.tables.domain["country"] or ())


@pytest.mark.parametrize("operator", ["<", "<=", ">", ">="])
def test_a_comparison_of_a_number_is_answered_by_the_workers(
    client: TestClient, world: World, operator: str
) -> None:
    body = {"targeting": f"signup_days {operator} 50"}
    served = client.post("/forecast", json=body)
    assert served.status_code == 200
    assert served.json()["users"]["value"] == pytest.approx(
        world.forecast(**body).users.value, rel=0.02
    )


def test_a_query_that_a_worker_cannot_answer_does_not_end_it(settings: WorkerSettings) -> None:
    async def run() -> None:
        pool = WorkerPool(settings, 2)
        await pool.wait_until_ready()
        days = tuple(sampled_days())
        before = [worker.process for worker in pool.workers]
        with pytest.raises(RuntimeError, match="no_such_column"):
            await pool.sums(Query("no_such_column > 1", (), days))
        assert (await pool.sums(Query("true", (), days))).answered == 1
        assert [worker.process for worker in pool.workers] == before
        await pool.close()

    asyncio.run(run())


def test_audits_of_a_provider_that_the_spec_no_longer_names_are_left_out(tmp_path: Path) -> None:
    spec = load_spec(SIMULATOR_SPEC)
    lake = Lake(str(tmp_path), spec)
    shared = {"audience": "age_band", "label": "18-24", "true_class": "18-24", "impressions": 100}
    figures = ("precision", "low", "high", "lift", "coverage", "information", "prior_weight")
    numbers = dict.fromkeys(figures, 0.5)
    rows = [
        shared | numbers | {"provider": provider, "day": date(2026, 1, 5)}
        for provider in ("acme", "gone")
    ]
    schema = audience_schemas.audience_quality(spec)
    arrow.replace_rows(lake, schema, pa.Table.from_pylist(rows), "day IS NOT NULL", {})
    (by_class,) = read_precisions(lake).values()
    assert by_class["18-24"]["18-24"].value == 0.5


def test_the_rates_of_an_audience_are_those_of_its_latest_day(tmp_path: Path) -> None:
    """On the last day, only another audience had enough audits."""
    spec = load_spec(SIMULATOR_SPEC)
    lake = Lake(str(tmp_path), spec)
    figures = ("low", "high", "lift", "coverage", "information", "prior_weight")
    numbers = dict.fromkeys(figures, 0.5)
    shared = {"provider": "acme", "label": "18-24", "true_class": "18-24", "impressions": 100}
    rows = [
        shared | numbers | {"audience": audience, "precision": rate, "day": date(2026, 1, day)}
        for audience, rate, day in (("age_band", 0.3, 4), ("age_band", 0.6, 5), ("other", 0.9, 6))
    ]
    schema = audience_schemas.audience_quality(spec)
    arrow.replace_rows(lake, schema, pa.Table.from_pylist(rows), "day IS NOT NULL", {})
    (by_class,) = read_precisions(lake).values()
    assert by_class["18-24"]["18-24"].value == 0.6


def test_a_later_fit_of_audiences_is_used_with_the_build_that_is_loaded(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        service = service_of(settings)
        await service.refresh()
        first, pool = service.current(), service.pool
        assert first.tables.precisions == {} and pool
        rates = {"ACME": {"young": {"young": Estimate(0.5, 0.4, 0.6)}}}
        monkeypatch.setattr("ranking.forecast.app.quality_version", lambda _: ("id", 1))
        monkeypatch.setattr("ranking.forecast.app.read_precisions", lambda _: rates)
        await service.refresh()
        assert service.current().tables.precisions == rates and service.pool is pool
        second = service.current()
        await service.refresh()
        assert service.current() is second
        await pool.close()

    asyncio.run(run())


def test_tokens_need_the_scope_of_forecasts(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {scope: f"{scope}-" + "x" * 32 for scope in ("forecast", "rank")}
    tokens = [{"name": s, "token": secret, "scopes": [s]} for s, secret in secrets.items()]
    monkeypatch.setenv(TOKENS_VARIABLE, json.dumps(tokens))
    app = create_app(service_of(settings), ServiceLimits(), [*LOOPBACK_HOSTS])
    with TestClient(app, "http://localhost") as client:
        wait_until_ready(client)
        for secret, status in ((None, 401), (secrets["rank"], 403), (secrets["forecast"], 200)):
            headers = {"authorization": f"Bearer {secret}"} if secret else {}
            assert client.post("/forecast", json={}, headers=headers).status_code == status
        assert client.get("/").status_code == 200  # the page, which has a field for the token


def test_a_killed_worker_is_answered_for_with_wider_intervals_and_comes_back(
    settings: WorkerSettings,
) -> None:
    async def run() -> None:
        lake = Lake(settings.lake, SPEC)
        sample = read_sample(lake, settings.versions[SAMPLE])
        pool = WorkerPool(settings, 2)
        await pool.wait_until_ready()
        forecaster = Forecaster(read_tables(lake, sample, settings.versions), pool)
        request = ForecastRequest(targeting=THREE, **TRAFFIC)  # type: ignore[arg-type]
        complete = await forecaster.forecast(request)
        process = pool.workers[0].process
        assert process
        os.kill(process.pid, signal.SIGKILL)
        part = await forecaster.forecast(request)
        assert part.answered_shards == 0.5 and any("wider" in note for note in part.notes)
        assert relative_width(part.users) > relative_width(complete.users)
        assert part.users.low < complete.users.value < part.users.high
        await process.wait()
        await pool.wait_until_ready()
        assert (await forecaster.forecast(request)) == complete
        await pool.close()

    def relative_width(interval: object) -> float:
        return (interval.high - interval.low) / interval.value  # type: ignore[attr-defined,no-any-return]

    asyncio.run(run())


def test_a_worker_that_cannot_be_started_is_retried(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, attempts = asyncio.create_subprocess_exec, []

    async def fails_once(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        attempts.append(args)
        if len(attempts) == 1:
            raise OSError(24, "Too many open files")
        return await start(*args, **options)

    async def run() -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", fails_once)
        monkeypatch.setattr("ranking.forecast.pool.RESTART_SECONDS", 0.0)
        pool = WorkerPool(settings, 1)
        async with asyncio.timeout(60):
            await pool.wait_until_ready()
        assert len(attempts) == 2
        await pool.close()

    asyncio.run(run())


def test_tables_that_were_replaced_are_loaded_though_their_versions_are_the_same(
    settings: WorkerSettings, tmp_path: Path
) -> None:
    """As after an erasure, which removes the tables with all their versions."""
    shutil.copytree(settings.lake, tmp_path / "lake")
    own = settings.model_copy(update={"lake": str(tmp_path / "lake")})

    async def run() -> None:
        service = service_of(own)
        await service.refresh()
        first = service.current()
        await service.refresh()
        assert service.current() is first, "nothing has changed"
        shutil.rmtree(own.lake)
        write_tables(Lake(own.lake, SPEC), World(1, 6000))
        await service.refresh()
        assert service.current() is not first
        assert service.current().tables.versions == first.tables.versions
        assert service.pool
        await service.pool.close()

    asyncio.run(run())


def test_a_request_in_flight_is_answered_by_the_build_that_it_began_with(
    settings: WorkerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(settings.lake, tmp_path / "lake")
    own = settings.model_copy(update={"lake": str(tmp_path / "lake")})
    request = ForecastRequest(targeting=THREE, **TRAFFIC)  # type: ignore[arg-type]
    sums = WorkerPool.sums

    async def run() -> None:
        gate = asyncio.Event()

        async def gated_sums(pool: WorkerPool, query: Query) -> SampleSums:
            if query.campaign:
                await gate.wait()
            return await sums(pool, query)

        service = service_of(own)
        await service.refresh()
        first, pool = service.current(), service.pool
        assert pool
        expected = await service.forecast(request)
        monkeypatch.setattr(WorkerPool, "sums", gated_sums)
        in_flight = asyncio.create_task(service.forecast(request))
        shutil.rmtree(own.lake)
        write_tables(Lake(own.lake, SPEC), World(1, 6000))
        switch = asyncio.create_task(service.refresh())
        async with asyncio.timeout(60):
            while service.current() is first:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        gate.set()
        assert await in_flight == expected
        await switch
        assert all(worker.process and worker.process.returncode for worker in pool.workers)
        assert await service.forecast(request) != expected
        assert service.pool
        await service.pool.close()

    asyncio.run(run())


def test_workers_that_do_not_load_a_build_in_time_are_stopped(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[WorkerPool] = []

    class RecordedPool(WorkerPool):
        def __init__(self, settings: WorkerSettings, num_workers: int) -> None:
            super().__init__(settings, num_workers)
            pools.append(self)

    async def run() -> None:
        service = service_of(settings)
        with pytest.raises(TemporaryError, match="in time"):
            await service.refresh()
        assert service.pool is None and service.forecaster is None
        (pool,) = pools
        for worker in pool.workers:
            assert worker.process is None or worker.process.returncode is not None

    monkeypatch.setattr("ranking.forecast.app.WorkerPool", RecordedPool)
    monkeypatch.setattr("ranking.forecast.app.LOAD_TIMEOUT_SECONDS", 0.2)
    asyncio.run(run())


def lake_with(settings: WorkerSettings, min_users: int) -> Lake:
    """The lake of the tables, with another size of segments that are reported."""
    assert SPEC.forecast
    forecast = SPEC.forecast.model_copy(update={"min_users": min_users})
    return Lake(settings.lake, SPEC.model_copy(update={"forecast": forecast}))


def test_the_report_has_every_surface_and_bid_of_enough_users(settings: WorkerSettings) -> None:
    section = forecast_section(lake_with(settings, 20))
    assert section and list(section.segments) == ["everyone", *SPEC.ad_surfaces]
    assert section.segments["everyone"].users.value > section.segments["reels"].users.value
    assert [curve.goal for curve in section.curves] == ["awareness", "sales", "traffic"]
    for curve in section.curves:
        assert curve.campaigns[-1].reach.value > curve.campaigns[0].reach.value
    assert section.figure.count("bid per event") == 3


def test_the_report_leaves_out_surfaces_and_bids_of_too_few_users(
    settings: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = forecast_section(lake_with(settings, 2800))
    assert section and list(section.segments) == ["everyone", "feed"]
    notes = section.segments["everyone"].notes
    assert "surface reels has too few users to report" in notes
    assert "4 of 8 bids for traffic win too few users to report" in notes
    assert all(0 < len(curve.bids) == len(curve.campaigns) < 8 for curve in section.curves)
    assert "<svg" in section.figure
    assert forecast_section(lake_with(settings, 10_000)) is None
    monkeypatch.setattr("ranking.report.forecasts.typical_bids", lambda *_: [1e-6])
    section = forecast_section(lake_with(settings, 20))
    assert section and section.curves == [] and section.figure == ""


def test_ask_prints_a_row_for_each_bid_or_a_line_of_json(
    settings: WorkerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--spec", str(settings.spec), "--lake", settings.lake, "--targeting", THREE]
    flags += ["--goal", "traffic", "--bid", "0.1", "0.3"]
    assert main(["forecast", "ask", *flags, "--json"]) == 0
    less, more = map(Forecast.model_validate_json, capsys.readouterr().out.splitlines())
    assert less.campaign and more.campaign and less.users == more.users
    assert less.campaign.reach.value < more.campaign.reach.value
    assert main(["forecast", "ask", *flags]) == 0
    printed = capsys.readouterr().out
    assert "flight: 2026-03-09 to 2026-03-15" in printed
    assert f"users: {more.users.value:,.0f} [{more.users.low:,.0f}" in printed
    assert "0.1 " in printed and f"{more.campaign.reach.value:,.0f} [" in printed


@pytest.mark.proof
def test_the_page_forecasts_in_a_browser(settings: WorkerSettings, tmp_path: Path) -> None:
    """Values are chosen in the form, and a link with a targeting that is wrong shows why."""
    if shutil.which("chromium") is None:
        pytest.skip("no Chromium on this machine")
    port = free_port()
    flags = ["--spec", str(settings.spec), "--lake", settings.lake, "--port", str(port)]
    service = subprocess.Popen([sys.executable, "-m", "gemline", "forecast", "serve", *flags])
    try:
        address = f"http://localhost:{port}"
        wait_for(lambda: is_ready(address), 60)
        with BrowserPage(f"{address}/", tmp_path / "form") as page:
            page.wait_until("!!document.querySelector('select[name=age]')")
            targeting = page.evaluate(CHOOSE_AGES)
            assert targeting == "age in ('age00', 'age01')"
            assert page.evaluate("document.getElementById('in_target').closest('label').hidden")
            page.evaluate(SUBMIT)
            page.wait_until("!!document.getElementById('curve')")
            shown = page.evaluate("document.getElementById('result').innerText")
            request = ForecastRequest(targeting=targeting, goal="traffic", bid=0.3)
            expected = Forecaster(*open_forecast(lake_of(settings))).forecast(request)
            users = asyncio.run(expected).users
            assert f"{users.value:,.0f}\t{users.low:,.0f} to {users.high:,.0f}" in shown
            assert "Impressions won" in shown
        with BrowserPage(f"{address}/?targeting=country%20=%20'XX'", tmp_path / "link") as page:
            page.wait_until(
                "document.getElementById('error')?.textContent.includes('character 11')"
            )
    finally:
        service.terminate()
        service.wait()


CHOOSE_AGES = """(() => {
  const select = document.querySelector("select[name=age]")
  for (const option of select.options) option.selected = ["age00", "age01"].includes(option.value)
  select.dispatchEvent(new Event("change"))
  return document.getElementById("targeting").value
})()"""
SUBMIT = """(() => {
  document.getElementById("goal").value = "traffic"
  document.getElementById("bid").value = 0.3
  document.querySelector("button").click()
})()"""


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/ready").status_code == 200
    except httpx.TransportError:
        return False


def lake_of(settings: WorkerSettings) -> Lake:
    return Lake(settings.lake, load_spec(settings.spec))
