"""Errors as answers, in the shape of the route's family."""

from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope

from freight.api.auth import retry_after
from freight.api.front import refuse
from freight.errors import (
    Conflict,
    FreightError,
    NoSuchFile,
    NoSuchJob,
    NoSuchModel,
    NoSuchUpload,
    NotAllowed,
    TooLarge,
    TooMany,
    Unauthenticated,
    Unknown,
    UserError,
    WrongState,
)
from freight.store.database import STORAGE_ERRORS, StorageFull

_MOST_PART: Final = 100
_SEE: Final = "see GET /api/openapi.json for the API"
_STATUS: Final[tuple[tuple[type[FreightError], int], ...]] = (
    (Conflict, 409),
    (NoSuchUpload, 404),
    (NoSuchFile, 404),
    (Unknown, 404),
    (TooLarge, 413),
    (UserError, 400),
    (NoSuchJob, 404),
    (NoSuchModel, 404),
    (Unauthenticated, 401),
    (NotAllowed, 403),
    (WrongState, 409),
    (TooMany, 429),
    (StorageFull, 507),
)


def _shown(part: str | int) -> str:
    """Return a part of the place of a fault, which may be a key of the sender's own making."""
    text = str(part).encode(errors="replace").decode()
    return text if len(text) <= _MOST_PART else f"{text[:_MOST_PART]}…"


def _headers(error: FreightError) -> dict[str, str]:
    match error:
        case Unauthenticated():
            return {"www-authenticate": "Bearer"}
        case TooMany():
            return retry_after(error)
        case Conflict() | WrongState():
            return {"x-should-retry": "false"}
        case _:
            return {}


def _way(scope: Scope) -> str:
    """Return what to ask for in place of what is no route."""
    if scope["path"].startswith("/v1/"):
        return "only batches are served here, by /v1/files, /v1/batches and /v1/models"
    if scope["path"].startswith("/resource_server/") and scope["method"] == "POST":
        return (
            "batches are made by POST /resource_server/{cluster}/{framework}/v1/batches, and cancelled by POST "
            "/resource_server/v1/batches/{batch}/cancel; GET /resource_server/list-endpoints has the clusters"
        )
    return _SEE


def _allowed(app: FastAPI, scope: Scope) -> str:
    """Return the methods that a path has; Starlette names those of one route alone."""
    there = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in there for method in route.methods or ()}))


def add_error_handlers(app: FastAPI) -> None:
    """Have every error answered with its status, a stable code, what is wrong and the fix."""

    @app.exception_handler(FreightError)
    async def refused(request: Request, error: FreightError) -> Response:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 503)
        return refuse(request.scope, status, error.code, error.message, error.hint, _headers(error), error.param)

    async def storage_failed(request: Request, error: Exception) -> Response:
        words = f"the service's storage failed: {error}"
        return refuse(request.scope, 503, "operation_failed", words, "see freight doctor")

    for kind in STORAGE_ERRORS:
        if not issubclass(kind, FreightError):
            app.add_exception_handler(kind, storage_failed)

    @app.exception_handler(RequestValidationError)
    async def refuse_shape(request: Request, error: RequestValidationError) -> Response:
        # What is wrong and where, without the value: it may be a record's.
        places = [[_shown(part) for part in e["loc"]] for e in error.errors()[:5]]
        found = "; ".join(f"{'.'.join(at)}: {e['msg']}" for at, e in zip(places, error.errors(), strict=False))
        words = f"the request is not valid: {found}"
        param = next((at[1] for at in places if len(at) > 1), None)
        return refuse(request.scope, 400, UserError.code, words, _SEE, None, param)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        words = f"{request.method} {request.url.path}: {error.detail}"
        headers = {"allow": _allowed(app, request.scope)} if error.status_code == 405 else {}
        code, hint = ("too_large", "split it") if error.status_code == 413 else (UserError.code, _way(request.scope))
        return refuse(request.scope, error.status_code, code, words, hint, headers)

    @app.exception_handler(Exception)
    async def broke(request: Request, error: Exception) -> Response:
        words = f"a bug in the service: {type(error).__name__}"
        return refuse(request.scope, 500, "internal", words, "its log tells where: serve.log in the data folder")

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return refuse(request.scope, 400, UserError.code, "the client went away", None)

    # Only named for the decorators' sake.
    _ = refused, refuse_shape, refuse_route, broke, gone
