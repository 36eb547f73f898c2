"""An application behind the checks of all services: hosts, tokens, and bounds on requests."""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ranking.serving.admission import (
    AdmissionMiddleware,
    BodyBuffer,
    RequestTimingMiddleware,
    WorkQueue,
)
from ranking.serving.auth import BearerBackend, tokens_from_environment, unauthorized_response
from ranking.serving.errors import add_exception_handlers


def protected_app(
    title: str,
    lifespan: Callable[[FastAPI], Any],
    queue: WorkQueue,
    buffer: BodyBuffer,
    allowed_hosts: Sequence[str],
    workers: int = 1,
) -> FastAPI:
    """An application without routes, with tokens from the environment.

    Args:
        title: The title of its API.
        lifespan: Its background tasks.
        queue: The queue to which requests are admitted.
        buffer: The bytes of requests in memory.
        allowed_hosts: Names by which it may be called.
        workers: Processes among which the rates of tokens are divided.
    """
    tokens = tokens_from_environment()
    security = [Depends(HTTPBearer(auto_error=False))] if tokens else []  # shown in /docs
    app = FastAPI(title=title, lifespan=lifespan, dependencies=security)
    # The middleware that is added last is the outermost.
    app.add_middleware(AdmissionMiddleware, buffer=buffer, queue=queue)
    if tokens:
        backend = BearerBackend(tokens, workers)
        app.add_middleware(
            AuthenticationMiddleware, backend=backend, on_error=unauthorized_response
        )
    hosts = list(allowed_hosts)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.add_middleware(RequestTimingMiddleware)
    add_exception_handlers(app)
    return app
