"""The service's HTTP API as one application: its own routes under /api, the OpenAI API and the facility's."""

import re
from collections.abc import Callable
from typing import Final

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from freight import __version__
from freight.api.description import describe
from freight.api.facility import add_facility_routes
from freight.api.front import refuse, transport_of
from freight.api.jobs import add_job_routes, add_stream_routes, add_upload_routes
from freight.api.machine import add_machine_routes, add_service_routes, add_token_routes
from freight.api.openaibatches import add_openai_batch_routes, add_openai_model_routes
from freight.api.openaifiles import add_openai_file_routes
from freight.api.refusals import add_error_handlers
from freight.control.service import Service
from freight.errors import NotAllowed

_PORT: Final = re.compile(r":\d*$")
_HOSTS: Final = ("freight", "localhost", "127.0.0.1", "[::1]")


def make_app(service: Service, stop: Callable[[], None]) -> FastAPI:
    """Return the application; `stop` ends the service."""
    app = FastAPI(
        title="Freight",
        version=__version__,
        description="Batch LLM inference on your own hardware. Errors are `{error: {code, message, hint}}`.",
        openapi_url="/api/openapi.json",
        docs_url="/docs",
        redoc_url=None,
        # A redirect would name the service as it is known here, which may not be how its clients reach it.
        redirect_slashes=False,
    )
    app.add_middleware(_OwnersOnly)
    add_error_handlers(app)
    add_service_routes(app, service, stop)
    add_token_routes(app, service.accounts)
    add_machine_routes(app, service.machine)
    add_upload_routes(app, service)
    add_job_routes(app, service)
    add_stream_routes(app, service)
    add_openai_file_routes(app, service)
    add_openai_batch_routes(app, service)
    add_openai_model_routes(app, service)
    add_facility_routes(app, service)
    describe(app)
    return app


class _OwnersOnly:
    """Keeps browsers' pages out, should somebody make the socket reachable by TCP: a page of elsewhere names itself in
    Origin, or its own name in Host.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "http" and transport_of(scope) == "unix":
            headers = Headers(scope=scope)
            host = _PORT.sub("", headers.get("host", "")).lower()
            if "origin" in headers or host not in _HOSTS:
                words = "this API answers programs of its owner, and no web pages"
                answer = refuse(scope, 403, NotAllowed.code, words, f"send Host: {_HOSTS[0]}, and no Origin")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
