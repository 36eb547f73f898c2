"""Error responses: errors that are expected are JSON with one message, `{"error": ...}`.

A defect of the service is logged with its traceback and answered by Starlette: 500 and plain text.
"""

from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from etl.errors import TemporaryError, UserError
from ranking.feature_store.storage import StorageFullError

RETRY_AFTER = {"retry-after": "1"}
REFUSED_TEXTS = ("string_unicode", "string_too_long", "too_long")  # types of Pydantic's errors


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A response with an error message."""
    return JSONResponse({"error": message}, status, headers)


def add_exception_handlers(app: FastAPI) -> None:
    """Answer known errors with their status and message."""
    app.add_exception_handler(UserError, _handle_user_error)
    app.add_exception_handler(TemporaryError, _handle_temporary_error)
    app.add_exception_handler(StorageFullError, _handle_storage_full)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_error)


def _handle_user_error(_: Request, error: Exception) -> Response:
    return error_response(400, str(error))


def _handle_temporary_error(_: Request, error: Exception) -> Response:
    return error_response(503, str(error), RETRY_AFTER)


def _handle_storage_full(_: Request, error: Exception) -> Response:
    return error_response(507, str(error))


def _handle_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, error.headers)


def _handle_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()  # of an attribute, one for each type that it may have
    first = next((e for e in errors if e["type"] in REFUSED_TEXTS), errors[0])
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    return error_response(422, f"{field or 'the body'}: {first['msg']}")
