"""Who may ask for what: bearer tokens with scopes and rates; where the service may listen."""

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
from etl.spec.base import Strict
from ranking.serve.bodies import error_response

TOKENS = "GEMLINE_TOKENS"
OPEN = {"/health", "/ready", "/docs", "/openapi.json"}  # routes that need no token
NEEDED = {"/rank": "rank", "/events": "events", "/users": "items", "/items": "items"}


class Token(Strict):
    """A bearer token, and what it is good for.

    `per_second` bounds the candidates that it has ranked, or the events and versions that it posts.
    """

    name: Annotated[str, Field(min_length=1)]
    token: Annotated[SecretStr, Field(min_length=32)]
    scopes: Annotated[frozenset[Literal["rank", "events", "items"]], Field(min_length=1)]
    per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def tokens_of_environment() -> tuple[Token, ...]:
    """The tokens in GEMLINE_TOKENS, a JSON list; raises UserError where it cannot be read.

    The error does not repeat what the variable holds.
    """
    text = os.environ.get(TOKENS)
    if not text:
        return ()
    try:
        found = TypeAdapter(tuple[Token, ...]).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{TOKENS}: {where or 'the list'}: {first['msg']}") from None
    secrets = {one.token.get_secret_value() for one in found}
    if len({one.name for one in found}) < len(found) or len(secrets) < len(found):
        raise UserError(f"{TOKENS}: two tokens have the same name or the same secret")
    return found


class Account(BaseUser):
    """A token in use by this worker: a budget that refills, of at most what one second allows.

    A request is let in while something is left, whatever it costs; the debt has to refill first.
    """

    def __init__(self, token: Token, workers: int) -> None:
        self.token = token
        self.rate = math.inf if token.per_second is None else token.per_second / workers
        self.left, self.seen = self.rate, time.monotonic()

    def wait_seconds(self) -> float:
        """Seconds until a request is let in; 0 if one is now."""
        now = time.monotonic()
        if self.rate != math.inf:
            self.left = min(self.rate, self.left + self.rate * (now - self.seen))
        self.seen = now
        return 0.0 if self.left > 0 else max(1e-3, -self.left / self.rate)

    def charge(self, cost: float) -> None:
        """Take the cost of a request from what is left."""
        self.left -= cost


class BearerBackend(AuthenticationBackend):
    """Finds the account of a request's bearer token."""

    def __init__(self, tokens: Iterable[Token], workers: int) -> None:
        self.accounts = [Account(token, workers) for token in tokens]

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        """The scopes and the account of a request; None where it names no token.

        Raises AuthenticationError for a token that is not known.
        """
        scheme, _, given = conn.headers.get("authorization", "").partition(" ")
        if not scheme:
            return None
        if scheme.lower() != "bearer":
            raise AuthenticationError("the authorization header is: Bearer TOKEN")
        found = None
        for account in self.accounts:  # all of them, so that the time tells nothing
            known = account.token.token.get_secret_value().encode()
            if hmac.compare_digest(known, given.encode()):
                found = account
        if found is None:
            raise AuthenticationError("this token is not known")
        return AuthCredentials(sorted(found.token.scopes)), found


def unauthorized(_: HTTPConnection, error: Exception) -> JSONResponse:
    """The response to a request that is not authenticated."""
    return error_response(401, str(error), {"www-authenticate": "Bearer"})


def access_refusal(scope: Scope) -> JSONResponse | None:
    """Why a request may not be made with its token, if it may not; without tokens all may be."""
    credentials = scope.get("auth")
    if credentials is None or scope["path"] in OPEN:
        return None
    if not credentials.scopes:
        return error_response(
            401, "send a token: Authorization: Bearer TOKEN", {"www-authenticate": "Bearer"}
        )
    needed = NEEDED.get(scope["path"])
    if needed and needed not in credentials.scopes:
        return error_response(403, f"this token lacks the scope {needed!r}")
    seconds = scope["user"].wait_seconds() if needed else 0.0
    if seconds:
        name = scope["user"].token.name
        retry = {"retry-after": str(math.ceil(seconds))}
        return error_response(429, f"token {name!r} is over its rate; ask again later", retry)
    return None


def check_exposure(host: str, allowed_hosts: Iterable[str]) -> None:
    """Raises UserError where other machines could reach the service and nothing protects it."""
    tokens = tokens_of_environment()
    if _is_loopback(host):
        return
    if not tokens:
        raise UserError(
            f"--host {host} can be reached from other machines: set {TOKENS} to the tokens that "
            "may ask, or listen on 127.0.0.1"
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
