"""The forecast service: its routes, its page, and the switch to a new build.

Tokens, limits and error responses are those of the ranking service (ranking/serving).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from etl.errors import TemporaryError, UserError
from etl.spec.base import StrictModel
from etl.tables.lake import Lake
from ranking.forecast.forecaster import Forecaster
from ranking.forecast.pool import WorkerPool
from ranking.forecast.schemas import Forecast, ForecastRequest
from ranking.forecast.tables import (
    SAMPLE,
    quality_version,
    read_precisions,
    read_sample,
    read_tables,
    table_id,
    table_versions,
)
from ranking.forecast.worker import WorkerSettings
from ranking.serving.admission import BodyBuffer, WorkQueue
from ranking.serving.errors import error_response
from ranking.serving.middleware import protected_app
from ranking.serving.schemas import ErrorResponse, HealthResponse
from ranking.serving.settings import ServiceLimits

log = logging.getLogger("uvicorn.error")
REFRESH_SECONDS = 10.0
LOAD_TIMEOUT_SECONDS = 600.0  # for the workers of a new build to load their shards
FORECAST_COST = 100  # of a forecast in the queue, in candidates of the ranking service
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in (401, 403, 408, 411, 413, 422, 429, 503)
}


class TargetingAttributes(StrictModel):
    """What a targeting may name: values of each attribute, null for numbers; and the goals.

    Values of fewer than `forecast.min_users` users are left out. `in_target` has the true classes
    that may be wanted of users whom an attribute of labels selects.
    """

    attributes: dict[str, list[str | int] | None]
    in_target: dict[str, list[str]]
    goals: list[str]


class ForecastService:
    """The forecaster of the latest build, and the workers that hold its sample."""

    def __init__(self, lake: Lake, settings: WorkerSettings, num_workers: int) -> None:
        self.lake, self.settings, self.num_workers = lake, settings, num_workers
        self.forecaster: Forecaster | None = None
        self.pool: WorkerPool | None = None
        self._sample_table_id = ""
        self._quality_version: tuple[str, int] | None = None

    async def refresh(self) -> None:
        """Switch to a new build, if there is one, once its workers have loaded their shards.

        The workers before stop once they have answered the requests in flight.

        Raises:
            TemporaryError: The workers did not load their shards in time; they are stopped.
        """
        versions, sample_table_id = table_versions(self.lake), table_id(self.lake, SAMPLE)
        is_same_table = sample_table_id == self._sample_table_id  # else versions began again
        if self.forecaster and self.forecaster.tables.versions == versions and is_same_table:
            await self._refresh_precisions(self.forecaster)
            return
        quality = quality_version(self.lake)
        sample = await asyncio.to_thread(read_sample, self.lake, versions[SAMPLE])
        tables = await asyncio.to_thread(read_tables, self.lake, sample, versions)
        settings = self.settings.model_copy(update={"versions": versions})
        pool, before = await self._loaded_pool(settings), self.pool
        self.pool, self.forecaster = pool, Forecaster(tables, pool)
        self._sample_table_id, self._quality_version = sample_table_id, quality
        if before is not None:
            await before.drain()

    async def _refresh_precisions(self, forecaster: Forecaster) -> None:
        """Use the rates of a later `audience fit` with the build that is loaded."""
        quality = quality_version(self.lake)
        if quality == self._quality_version:
            return
        precisions = await asyncio.to_thread(read_precisions, self.lake)
        tables = replace(forecaster.tables, precisions=precisions)
        self.forecaster, self._quality_version = replace(forecaster, tables=tables), quality

    async def forecast(self, request: ForecastRequest) -> Forecast:
        """Answer a request from the current build, whose workers it keeps until it ends."""
        forecaster = self.current()
        assert self.pool
        with self.pool.in_use():
            return await forecaster.forecast(request)

    async def _loaded_pool(self, settings: WorkerSettings) -> WorkerPool:
        """A pool whose workers have loaded their shards."""
        pool = WorkerPool(settings, self.num_workers)
        try:
            await asyncio.wait_for(pool.wait_until_ready(), LOAD_TIMEOUT_SECONDS)
        except BaseException as error:
            await pool.close()
            if isinstance(error, TimeoutError):
                raise TemporaryError("workers did not load the new build in time") from None
            raise
        return pool

    def current(self) -> Forecaster:
        """The forecaster; raises TemporaryError while the first build is loaded."""
        if self.forecaster is None:
            raise TemporaryError("the forecast is being loaded; retry in a second")
        return self.forecaster


def create_app(
    service: ForecastService, limits: ServiceLimits, allowed_hosts: list[str]
) -> FastAPI:
    """The application, with tokens from the environment."""
    queue = WorkQueue(limits)
    app = protected_app(
        "Gemline forecasts", _lifespan(service, limits), queue, BodyBuffer(limits), allowed_hosts
    )
    app.add_exception_handler(UserError, _handle_user_error)
    add_routes(app, service, queue)
    return app


def _handle_user_error(_: Request, error: Exception) -> Response:
    return error_response(422, str(error))


def _lifespan(service: ForecastService, limits: ServiceLimits) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        task = asyncio.create_task(_refresh_periodically(service))
        yield {"limits": limits}
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if service.pool is not None:
            await service.pool.close()

    return lifespan


async def _refresh_periodically(service: ForecastService) -> None:
    while True:
        try:
            await service.refresh()
        except Exception:  # for example storage that temporarily does not respond
            log.exception("refresh failed; the service continues with what is loaded")
        await asyncio.sleep(REFRESH_SECONDS)


def add_routes(app: FastAPI, service: ForecastService, queue: WorkQueue) -> None:
    """Add the routes to an application."""

    @app.post("/forecast", responses=ERROR_RESPONSES)
    async def forecast(request: Request, body: ForecastRequest) -> Forecast:
        """Forecast the size of a segment, and what a campaign would win of it."""
        if "user" in request.scope:
            request.scope["user"].charge(1)
        with queue.admit(FORECAST_COST):
            return await service.forecast(body)

    @app.get("/targeting", responses=ERROR_RESPONSES)
    async def targeting() -> TargetingAttributes:
        """The attributes and values that a targeting may name, and the goals of campaigns."""
        forecaster = service.current()
        auction = forecaster.spec.auction
        listed = forecaster.tables.listed_values.items()
        return TargetingAttributes(
            attributes={name: None if values is None else list(values) for name, values in listed},
            in_target={n: list(by_class) for n, by_class in forecaster.tables.precisions.items()},
            goals=list(auction.goal_objectives) if auction else [],
        )

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        """The page with a targeting as a form."""
        return (files("ranking.forecast") / "page.html").read_text()

    @app.get("/health")
    async def health() -> HealthResponse:
        """Answer while the process is alive."""
        return HealthResponse(status="alive")

    @app.get("/ready", responses={503: {"model": HealthResponse}})
    async def ready(response: Response) -> HealthResponse:
        """Answer with 503 until a build is loaded."""
        if service.forecaster is not None:
            return HealthResponse(status="ready")
        response.status_code = 503
        return HealthResponse(status="the forecast is being loaded")
