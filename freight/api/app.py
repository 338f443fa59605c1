"""The service's JSON API under /api: what the command line, the dashboard and the Python client share."""

import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Final

import msgspec
from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from freight import __version__
from freight.control.finding import MOST_PAGE
from freight.control.machine import Machine
from freight.control.output import Only
from freight.control.service import Service
from freight.core.view import (
    DONE_HEADER,
    IDEMPOTENCY_HEADER,
    TOTAL_HEADER,
    DeviceList,
    ErrorBody,
    ErrorReply,
    JobPage,
    JobRequest,
    JobStatus,
    ServerInfo,
    Submitted,
    Upload,
    WorkerList,
)
from freight.errors import Conflict, FreightError, NoSuchJob, NotAllowed, UserError, WrongState
from freight.store.database import STORAGE_ERRORS, StorageFull

_PORT: Final = re.compile(r":\d*$")
_HOSTS: Final = ("freight", "localhost", "127.0.0.1", "[::1]")
_STATUS: Final[tuple[tuple[type[FreightError], int], ...]] = (
    (Conflict, 409),
    (UserError, 400),
    (NoSuchJob, 404),
    (NotAllowed, 403),
    (WrongState, 409),
    (StorageFull, 507),
)
_REFUSED: Final[dict[int | str, dict[str, Any]]] = {
    code: {"model": ErrorReply, "description": words}
    for code, words in (
        (400, "Refused: the request or the input is wrong."),
        (404, "There is no such job."),
        (409, "The job's state, or a name or key that is taken, does not allow it."),
        (503, "The service cannot do it now."),
        (507, "There is no room on the service's disk."),
    )
}


def make_app(service: Service, stop: Callable[[], None]) -> FastAPI:
    """Return the application; `stop` ends the service."""
    app = FastAPI(
        title="Freight",
        version=__version__,
        description="Batch LLM inference on your own hardware. Errors are `{error: {code, message, hint}}`.",
        openapi_url="/api/openapi.json",
        docs_url="/docs",
        redoc_url=None,
    )
    app.add_middleware(_OwnersOnly)
    _add_error_handlers(app)
    _add_service_routes(app, service, stop)
    _add_machine_routes(app, service.machine)
    _add_upload_routes(app, service)
    _add_job_routes(app, service)
    _add_stream_routes(app, service)
    return app


class _OwnersOnly:
    """Keeps browsers' pages out, should somebody make the socket reachable by TCP: a page of elsewhere names itself in
    Origin, or its own name in Host.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host = _PORT.sub("", headers.get("host", "")).lower()
            if "origin" in headers or host not in _HOSTS:
                words = "this API answers programs of its owner, and no web pages"
                await _error(403, NotAllowed.code, words, f"send Host: {_HOSTS[0]}, and no Origin")(
                    scope, receive, send
                )
                return
        await self._app(scope, receive, send)


class _ClosingResponse(StreamingResponse):
    """A stream that is closed when its request has ended, however it did."""

    def __init__(self, close: Callable[[], None], pieces: Iterator[bytes], **options: Any) -> None:
        super().__init__(pieces, **options)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(status: int, code: str, message: str, hint: str | None = None) -> Response:
    return _json(ErrorReply(error=ErrorBody(code=code, message=message, hint=hint)), status)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(FreightError)
    async def refuse(_: Request, error: FreightError) -> Response:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 503)
        return _error(status, error.code, error.message, error.hint)

    async def storage_failed(_: Request, error: Exception) -> Response:
        return _error(503, "operation_failed", f"the service's storage failed: {error}", "see freight doctor")

    for kind in STORAGE_ERRORS:
        if not issubclass(kind, FreightError):
            app.add_exception_handler(kind, storage_failed)

    @app.exception_handler(RequestValidationError)
    async def refuse_shape(_: Request, error: RequestValidationError) -> Response:
        # What is wrong and where, without the value: it may be a record's.
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        return _error(400, UserError.code, f"the request is not valid: {found}", "see /docs for the API")

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, UserError.code, f"{request.method} {request.url.path}: {error.detail}")

    @app.exception_handler(Exception)
    async def broke(_: Request, error: Exception) -> Response:
        words = f"a bug in the service: {type(error).__name__}"
        return _error(500, "internal", words, "its log tells where: serve.log in the data folder")

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: ClientDisconnect) -> Response:
        return _error(400, UserError.code, "the client went away")

    # Only named for the decorators' sake.
    _ = refuse, refuse_shape, refuse_route, broke, gone


def _add_service_routes(app: FastAPI, service: Service, stop: Callable[[], None]) -> None:
    async def version() -> Response:
        """Say which service this is."""
        return _json(service.info())

    async def end() -> Response:
        """End the service: unfinished jobs go on at its next start."""
        info = service.info()
        stop()
        return _json(info, 202)

    add = app.add_api_route
    add("/api/version", version, methods=["GET"], response_model=ServerInfo, tags=["service"])
    add("/api/stop", end, methods=["POST"], response_model=ServerInfo, status_code=202, tags=["service"])


def _add_machine_routes(app: FastAPI, machine: Machine) -> None:
    async def workers() -> Response:
        """List the workers there are, those of jobs and those that keep a model warm, and the pinned models."""
        return _json(machine.workers())

    async def devices() -> Response:
        """List the devices of the service's machine, and who has them."""
        return _json(await machine.devices())

    async def release(device: str) -> Response:
        """Let a device out of quarantine, whatever is left on it."""
        return _json(await machine.release(device))

    async def pin(model: str, workers: Annotated[int, Query(ge=1, le=10_000)] = 1) -> Response:
        """Have so many workers of a model up always."""
        return _json(await machine.pin(model, workers))

    async def unpin(model: str) -> Response:
        """Let the workers of a pinned model go when nobody needs them."""
        return _json(await machine.unpin(model))

    options: dict[str, Any] = {"responses": _REFUSED, "tags": ["machine"]}
    add = app.add_api_route
    add("/api/workers", workers, methods=["GET"], response_model=WorkerList, **options)
    add("/api/devices", devices, methods=["GET"], response_model=DeviceList, **options)
    add("/api/devices/{device:path}/release", release, methods=["POST"], response_model=DeviceList, **options)
    add("/api/pins/{model:path}", pin, methods=["PUT"], response_model=WorkerList, **options)
    add("/api/pins/{model:path}", unpin, methods=["DELETE"], response_model=WorkerList, **options)


def _add_upload_routes(app: FastAPI, service: Service) -> None:
    async def send(request: Request) -> Response:
        """Send an input, as the body: JSON Lines. It is kept for a day, until a job is made of it."""
        length = request.headers.get("content-length")
        return _json(await service.receive(request.stream(), int(length) if length else None), 201)

    async def drop(upload: str) -> Response:
        """Remove an upload that no job was made of."""
        service.drop_upload(upload)
        return Response(status_code=204)

    add = app.add_api_route
    add(
        "/api/uploads", send, methods=["POST"], response_model=Upload, status_code=201, responses=_REFUSED,
        tags=["uploads"], openapi_extra={"requestBody": {"required": True, "content": {"application/jsonl": {}}}},
    )  # fmt: skip
    add("/api/uploads/{upload}", drop, methods=["DELETE"], status_code=204, response_class=Response, tags=["uploads"])


def _add_job_routes(app: FastAPI, service: Service) -> None:
    async def submit(
        request: JobRequest, key: Annotated[str | None, Header(alias=IDEMPOTENCY_HEADER, max_length=255)] = None
    ) -> Response:
        """Make a job of an upload. Answers when the input was checked; with the key of an earlier request, 200."""
        made = await service.submit(request, key)
        return _json(made, 201 if made.is_new else 200)

    async def page(
        state: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_PAGE)] = 100,
        after: str | None = None,
    ) -> Response:
        """List jobs, the newest first; `state` is one of the states, or "active" for all that have not ended."""
        return _json(await service.finder.page(state, limit, after))

    async def names() -> Response:
        """List the names of all jobs."""
        return _json(await service.finder.names())

    async def show(name: str) -> Response:
        """Tell all about a job, known by its name, its id, or a unique prefix of the id."""
        return _json(await service.finder.status(name))

    async def cancel(name: str) -> Response:
        """Cancel a job; what is done is kept."""
        return _json(await service.cancel(name))

    async def resume(name: str) -> Response:
        """Go on with a job that was cancelled, failed or ran out of time."""
        return _json(await service.resume(name))

    async def retry(name: str) -> Response:
        """Run again the records that ended in an error."""
        return _json(await service.retry(name))

    async def delete(name: str) -> Response:
        """Forget a job that has ended, and all that is kept of it."""
        await service.delete(name)
        return Response(status_code=204)

    options: dict[str, Any] = {"responses": _REFUSED, "tags": ["jobs"]}
    add = app.add_api_route
    add("/api/jobs", submit, methods=["POST"], response_model=Submitted, status_code=201, **options)
    add("/api/jobs", page, methods=["GET"], response_model=JobPage, **options)
    add("/api/names", names, methods=["GET"], response_model=list[str], **options)
    add("/api/jobs/{name}", show, methods=["GET"], response_model=JobStatus, **options)
    add("/api/jobs/{name}", delete, methods=["DELETE"], status_code=204, response_class=Response, **options)
    for verb, route in (("cancel", cancel), ("resume", resume), ("retry", retry)):
        add(f"/api/jobs/{{name}}/{verb}", route, methods=["POST"], response_model=JobStatus, **options)


def _add_stream_routes(app: FastAPI, service: Service) -> None:
    async def results(name: str, only: Only | None = None, partial: bool = False) -> StreamingResponse:
        """Return a job's results, JSON Lines in input order; those of an unfinished one with `partial` alone."""
        stream = await service.streams.results(name, only, partial)
        headers = {DONE_HEADER: str(stream.done), TOTAL_HEADER: str(stream.total)}
        return _ClosingResponse(stream.close, stream.pieces, headers=headers, media_type="application/jsonl")

    async def logs(
        name: str,
        worker: Annotated[int | None, Query(ge=1)] = None,
        tail: Annotated[int | None, Query(ge=0)] = None,
        follow: bool = False,
    ) -> StreamingResponse:
        """Return what a job's workers and their model servers wrote, as it comes with `follow`."""
        pieces: AsyncIterator[bytes] = await service.streams.logs(name, worker, tail, follow)
        return StreamingResponse(pieces, media_type="text/plain; charset=utf-8")

    options: dict[str, Any] = {"responses": _REFUSED, "tags": ["jobs"], "response_class": StreamingResponse}
    app.add_api_route("/api/jobs/{name}/results", results, methods=["GET"], **options)
    app.add_api_route("/api/jobs/{name}/logs", logs, methods=["GET"], **options)
