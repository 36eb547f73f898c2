"""Bearer tokens with scopes and rate limits, and which addresses need them."""

import hmac
import ipaddress
import math
import os
import time
from collections.abc import Iterable
from typing import Annotated, Literal

from fastapi.responses import JSONResponse
from pydantic import Field, SecretStr, TypeAdapter, ValidationError
from starlette.authentication import (
    AuthCredentials,
    AuthenticationBackend,
    AuthenticationError,
    BaseUser,
)
from starlette.requests import HTTPConnection
from starlette.types import Scope

from etl.errors import UserError
from etl.spec.base import StrictModel
from ranking.serving.errors import error_response

TOKENS_VARIABLE = "GEMLINE_TOKENS"
PUBLIC_ROUTES = {"/", "/health", "/ready", "/docs", "/openapi.json"}  # routes that need no token
ROUTE_SCOPES = {
    "/rank": "rank",
    "/events": "events",
    "/users": "items",
    "/items": "items",
    "/forecast": "forecast",
    "/targeting": "forecast",
}


class Token(StrictModel):
    """A bearer token and its scopes.

    `rate_per_second` bounds the candidates that are ranked, the events and attribute versions that
    are posted, and the forecasts that are requested with it.
    """

    name: Annotated[str, Field(min_length=1)]
    token: Annotated[SecretStr, Field(min_length=32)]
    scopes: Annotated[
        frozenset[Literal["rank", "events", "items", "forecast"]], Field(min_length=1)
    ]
    rate_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def tokens_from_environment() -> tuple[Token, ...]:
    """The tokens in GEMLINE_TOKENS, a JSON list.

    Raises:
        UserError: The variable is not valid. The message does not contain its value.
    """
    text = os.environ.get(TOKENS_VARIABLE)
    if not text:
        return ()
    try:
        tokens = TypeAdapter(tuple[Token, ...]).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{TOKENS_VARIABLE}: {field or 'the list'}: {first['msg']}") from None
    secrets = {token.token.get_secret_value() for token in tokens}
    names = {token.name for token in tokens}
    if min(len(names), len(secrets)) < len(tokens):
        raise UserError(f"{TOKENS_VARIABLE}: two tokens have the same name or the same secret")
    return tokens


class RateLimitedUser(BaseUser):
    """A token as seen by one worker: a token bucket that holds at most one second's rate.

    A request of any cost is admitted while the budget is positive. It may overdraw the budget,
    which must then refill before the next request.
    """

    def __init__(self, token: Token, workers: int) -> None:
        self.token = token
        self.refill_per_second = (
            math.inf if token.rate_per_second is None else token.rate_per_second / workers
        )
        self.budget, self.refilled_at = self.refill_per_second, time.monotonic()

    def retry_after_seconds(self) -> float:
        """Refill the budget; return the seconds until a request is admitted, 0 if one is now."""
        now = time.monotonic()
        if self.refill_per_second != math.inf:
            refill = self.refill_per_second * (now - self.refilled_at)
            self.budget = min(self.refill_per_second, self.budget + refill)
        self.refilled_at = now
        return 0.0 if self.budget > 0 else max(1e-3, -self.budget / self.refill_per_second)

    def charge(self, cost: float) -> None:
        """Subtract the cost of a request from the budget."""
        self.budget -= cost


class BearerBackend(AuthenticationBackend):
    """Authenticates requests by their bearer token."""

    def __init__(self, tokens: Iterable[Token], workers: int) -> None:
        self.users = [RateLimitedUser(token, workers) for token in tokens]

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        """The scopes and the user of a request; None if it has no token.

        Raises:
            AuthenticationError: The header is malformed, or the token is unknown.
        """
        scheme, _, given = conn.headers.get("authorization", "").partition(" ")
        if not scheme:
            return None
        if scheme.lower() != "bearer":
            raise AuthenticationError("the authorization header must be: Bearer TOKEN")
        authenticated = None
        for user in self.users:  # without a break, so that the time reveals nothing
            secret = user.token.token.get_secret_value()
            if hmac.compare_digest(secret.encode(), given.encode()):
                authenticated = user
        if authenticated is None:
            raise AuthenticationError("unknown token")
        return AuthCredentials(sorted(authenticated.token.scopes)), authenticated


def unauthorized_response(_: HTTPConnection, error: Exception) -> JSONResponse:
    """The response to a request that is not authenticated."""
    return error_response(401, str(error), {"www-authenticate": "Bearer"})


def access_error(scope: Scope) -> JSONResponse | None:
    """The response to a request that its token does not allow; None if it is allowed.

    Without tokens in the environment, every request is allowed.
    """
    credentials = scope.get("auth")
    if credentials is None or scope["path"] in PUBLIC_ROUTES:
        return None
    if not credentials.scopes:
        return error_response(
            401, "send a token: Authorization: Bearer TOKEN", {"www-authenticate": "Bearer"}
        )
    needed = ROUTE_SCOPES.get(scope["path"])
    if needed and needed not in credentials.scopes:
        return error_response(403, f"this token lacks the scope {needed!r}")
    seconds = scope["user"].retry_after_seconds() if needed else 0.0
    if seconds:
        name = scope["user"].token.name
        retry = {"retry-after": str(math.ceil(seconds))}
        return error_response(429, f"token {name!r} exceeds its rate; retry later", retry)
    return None


def validate_exposure(host: str, allowed_hosts: Iterable[str]) -> None:
    """Raise UserError if other machines can reach the service without tokens or a host name."""
    tokens = tokens_from_environment()
    if _is_loopback(host):
        return
    if not tokens:
        raise UserError(
            f"--host {host} can be reached from other machines: set {TOKENS_VARIABLE} to the "
            "accepted tokens, or listen on 127.0.0.1"
        )
    if not list(allowed_hosts):
        raise UserError(
            f"--host {host} needs --allowed-hosts: the names by which clients reach the service"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
