"""The ASGI application of one worker: its routes and middleware."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    generate_latest,
    multiprocess,
)

from ranking.serving.middleware import protected_app
from ranking.serving.schemas import (
    ErrorResponse,
    EventsRequest,
    EventsResponse,
    HealthResponse,
    ItemAttributesRequest,
    RankRequestBody,
    RankResponse,
    UserAttributesRequest,
    WorkerStatus,
)
from ranking.serving.server import report_status
from ranking.serving.settings import Settings
from ranking.serving.worker import Worker

log = logging.getLogger("uvicorn.error")
REFRESH_SECONDS = 2.0
ERROR_CODES = (400, 401, 403, 404, 408, 411, 413, 422, 429, 503, 507)
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse} for code in ERROR_CODES
}


def create_app() -> FastAPI:
    """Create the application of one worker, with settings and tokens from the environment."""
    settings = Settings.from_environment()
    worker = Worker(settings)
    app = protected_app(
        "Gemline",
        _lifespan(worker),
        worker.work_queue,
        worker.body_buffer,
        settings.allowed_hosts,
        settings.workers,
    )
    app.state.worker = worker
    add_routes(app, worker)
    return app


def add_routes(app: FastAPI, worker: Worker) -> None:
    """Add all routes to an application; a worker is needed only once a request is answered."""
    _add_inference_routes(app, worker)
    _add_status_routes(app, worker)


def _lifespan(worker: Worker) -> Callable[[FastAPI], Any]:
    """Background tasks of a worker. The lifespan state passes its limits to LimitedProtocol."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        tasks = [
            asyncio.create_task(_refresh_periodically(worker)),
            asyncio.create_task(report_status(worker)),
        ]
        try:
            yield {"limits": worker.settings.limits}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            worker.close()

    return lifespan


def _add_inference_routes(app: FastAPI, worker: Worker) -> None:
    def charge(request: Request, cost: int) -> None:
        """Charge the cost of a request to its token, if it has one."""
        if "user" in request.scope:
            request.scope["user"].charge(cost)

    @app.post("/rank", response_model=RankResponse, responses=ERROR_RESPONSES)
    async def rank(request: Request, body: RankRequestBody) -> Response:
        """Rank candidates, the best first."""
        num_candidates = len(body.candidates)
        charge(request, num_candidates)
        response = await worker.work_queue.run(
            lambda: worker.rank(body).model_dump_json(), num_candidates
        )
        return Response(response, media_type="application/json")

    @app.post("/events", responses=ERROR_RESPONSES)
    async def events(request: Request, body: EventsRequest) -> EventsResponse:
        """Ingest events, all or none of them."""
        charge(request, len(body.events))
        return await worker.ingest_events(body)

    @app.post("/users", status_code=204, responses=ERROR_RESPONSES)
    async def users(request: Request, body: UserAttributesRequest) -> None:
        """Set the attributes of a user."""
        charge(request, 1)
        await worker.upsert_user_attributes(body)

    @app.post("/items", status_code=204, responses=ERROR_RESPONSES)
    async def items(request: Request, body: ItemAttributesRequest) -> None:
        """Set the attributes, the bid and the goal of an item."""
        charge(request, 1)
        await worker.upsert_item_attributes(body)


def _add_status_routes(app: FastAPI, worker: Worker) -> None:
    @app.get("/health")
    async def health() -> HealthResponse:
        """Answer while the process is alive."""
        return HealthResponse(status="alive")

    @app.get("/ready", responses={503: {"model": HealthResponse}})
    async def ready(response: Response) -> HealthResponse:
        """Answer with 503 until a ranker is loaded."""
        if worker.rankers.versions:
            return HealthResponse(status="ready")
        response.status_code = 503
        return HealthResponse(status="no ranker is loaded")

    @app.get("/version", responses=ERROR_RESPONSES)
    async def version() -> WorkerStatus:
        """The spec, features and rankers of this worker, and load failures."""
        return worker.status

    @app.get("/metrics", response_class=PlainTextResponse, responses=ERROR_RESPONSES)
    async def metrics() -> Response:
        """Metrics of all workers, for Prometheus."""
        registry = REGISTRY
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


async def _refresh_periodically(worker: Worker) -> None:
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        try:
            await worker.refresh()
        except Exception:  # for example storage that temporarily does not respond
            log.exception("refresh failed; the service continues with what is loaded")
