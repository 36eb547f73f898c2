"""The application of one worker: its routes, and what stands before them."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPBearer
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    generate_latest,
    multiprocess,
)
from starlette.exceptions import HTTPException
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from etl.errors import TemporaryError, UserError
from ranking.online.database import StorageFullError
from ranking.serve.access import BearerBackend, tokens_of_environment, unauthorized
from ranking.serve.admission import Admission, Timing
from ranking.serve.bodies import (
    ErrorBody,
    EventsBody,
    ItemBody,
    RankBody,
    RankingBody,
    StateBody,
    StatusBody,
    TakenBody,
    UserBody,
    error_response,
)
from ranking.serve.health import report_state
from ranking.serve.settings import Settings
from ranking.serve.worker import Worker

log = logging.getLogger("uvicorn.error")
RENEW_SECONDS = 2.0
REFUSALS = (400, 401, 403, 404, 408, 411, 413, 422, 429, 503, 507)
ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": ErrorBody} for code in REFUSALS}


def create() -> FastAPI:
    """The application of one worker; its settings come from the environment."""
    settings, tokens = Settings.from_environment(), tokens_of_environment()
    worker = Worker(settings)
    locks = [Depends(HTTPBearer(auto_error=False))] if tokens else []  # shown in /docs
    app = FastAPI(title="Gemline", lifespan=_lifespan(worker), dependencies=locks)
    app.state.worker = worker
    # The middleware that is added last is the outermost.
    app.add_middleware(Admission, buffer=worker.buffer, queue=worker.queue)
    if tokens:
        backend = BearerBackend(tokens, settings.workers)
        app.add_middleware(AuthenticationMiddleware, backend=backend, on_error=unauthorized)
    hosts = list(settings.hosts)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.add_middleware(Timing)
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(TemporaryError, _temporary_error)
    app.add_exception_handler(StorageFullError, _storage_full)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    _add_work(app, worker)
    _add_state(app, worker)
    return app


def _lifespan(worker: Worker) -> Callable[[FastAPI], Any]:
    """What runs beside requests; its state holds what each connection reads (LimitedProtocol)."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
        tasks = [asyncio.create_task(_renew(worker)), asyncio.create_task(report_state(worker))]
        yield {"limits": worker.settings.limits}
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        worker.close()

    return lifespan


def _add_work(app: FastAPI, worker: Worker) -> None:
    def charge(request: Request, candidates: int) -> None:
        """Charge the token of a request, if it has one."""
        if "user" in request.scope:
            request.scope["user"].charge(candidates)

    @app.post("/rank", response_model=RankingBody, responses=ERRORS)
    async def rank(request: Request, body: RankBody) -> Response:
        """Rank candidates, the best first."""
        candidates = len(body.candidates)
        charge(request, candidates)
        ranking = await worker.queue.run(lambda: worker.rank(body).model_dump_json(), candidates)
        return Response(ranking, media_type="application/json")

    @app.post("/events", responses=ERRORS)
    async def events(request: Request, body: EventsBody) -> TakenBody:
        """Store events, all or none of them."""
        charge(request, len(body.events))
        return await worker.take(body)

    @app.post("/users", status_code=204, responses=ERRORS)
    async def users(request: Request, body: UserBody) -> None:
        """Set the attributes of a user."""
        charge(request, 1)
        await worker.update_user(body)

    @app.post("/items", status_code=204, responses=ERRORS)
    async def items(request: Request, body: ItemBody) -> None:
        """Set the attributes of an item, and what is bid for it."""
        charge(request, 1)
        await worker.update_item(body)


def _add_state(app: FastAPI, worker: Worker) -> None:
    @app.get("/health")
    async def health() -> StatusBody:
        """Whether the process answers."""
        return StatusBody(status="alive")

    @app.get("/ready", responses={503: {"model": StatusBody}})
    async def ready(response: Response) -> StatusBody:
        """Whether there is a ranker to answer with."""
        is_ready = bool(worker.rankers.versions)
        response.status_code = 200 if is_ready else 503
        return StatusBody(status="ready" if is_ready else "no ranker is loaded")

    @app.get("/version", responses=ERRORS)
    async def version() -> StateBody:
        """What this worker serves with, and what is wrong."""
        return worker.state

    @app.get("/metrics", response_class=PlainTextResponse, responses=ERRORS)
    async def metrics() -> Response:
        """Metrics of all workers together, for Prometheus."""
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
            log.exception("nothing new was loaded; the service goes on with what it has")


def _user_error(_: Request, error: Exception) -> Response:
    return error_response(400, str(error))


def _temporary_error(_: Request, error: Exception) -> Response:
    return error_response(503, str(error), {"retry-after": "1"})


def _storage_full(_: Request, error: Exception) -> Response:
    return error_response(507, str(error))


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, dict(error.headers or {}))


def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return error_response(422, f"{where or 'the body'}: {first['msg']}")
