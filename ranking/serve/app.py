"""The service's routes."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    generate_latest,
    multiprocess,
)
from starlette.exceptions import HTTPException

from etl.errors import UserError
from ranking.online.database import StorageFullError
from ranking.serve.bodies import (
    ErrorBody,
    EventsBody,
    RankBody,
    RankingBody,
    StateBody,
    TakenBody,
    VersionBody,
)
from ranking.serve.guard import Guard, told
from ranking.serve.settings import Settings
from ranking.serve.worker import Worker

log = logging.getLogger("uvicorn.error")
RENEW_SECONDS = 2.0
REFUSALS = (400, 404, 411, 413, 422, 429, 507)
ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": ErrorBody} for code in REFUSALS}


def create() -> FastAPI:
    """The application of one worker; its settings come from the environment."""
    worker = Worker(Settings.told())

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        renewing = asyncio.create_task(_renew(worker))
        yield
        renewing.cancel()
        worker.close()

    app = FastAPI(title="Gemline", lifespan=living)
    app.state.worker = worker
    app.add_middleware(Guard, worker=worker)
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(StorageFullError, _storage_full)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    _asked(app, worker)
    _watched(app, worker)
    return app


def _asked(app: FastAPI, worker: Worker) -> None:
    @app.post("/rank", response_model=RankingBody, responses=ERRORS)
    async def rank(body: RankBody) -> Response:
        """Candidates, the best first."""
        ranking = await worker.run(lambda: worker.rank(body).model_dump_json())
        return Response(ranking, media_type="application/json")

    @app.post("/events", responses=ERRORS)
    async def events(body: EventsBody) -> TakenBody:
        """What happened; all of it is taken, or none."""
        return await worker.take(body)

    @app.post("/users", status_code=204, responses=ERRORS)
    async def users(body: VersionBody) -> None:
        """What is known of a user from now on."""
        await worker.learn("user", body)

    @app.post("/items", status_code=204, responses=ERRORS)
    async def items(body: VersionBody) -> None:
        """What is known of an item from now on, and what is bid for it."""
        await worker.learn("item", body)


def _watched(app: FastAPI, worker: Worker) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process answers."""
        return {"status": "alive"}

    @app.get("/ready", responses={503: {"model": StateBody}})
    async def ready(response: Response) -> StateBody:
        """Whether there is a ranker."""
        response.status_code = 200 if worker.rankers.versions else 503
        return worker.state

    @app.get("/version")
    async def version() -> StateBody:
        """What answers."""
        return worker.state

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus: of all workers together."""
        registry = REGISTRY
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


async def _renew(worker: Worker) -> None:
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        try:
            await worker.renew()
        except Exception:  # such as a store that does not answer: the next time it may
            log.exception("nothing new was taken up; what answers goes on")


def _user_error(_: Request, error: Exception) -> Response:
    return told(400, str(error))


def _storage_full(_: Request, error: Exception) -> Response:
    return told(507, str(error))


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return told(error.status_code, error.detail, dict(error.headers or {}))


def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return told(422, f"{where or 'the body'}: {first['msg']}")
