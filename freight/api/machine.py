"""Routes about the service itself: what it is, its end, tokens, models, workers and devices."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response

from freight.api.replies import REFUSED, Admin, After, Limit, Who, json_of
from freight.control.accounts import Accounts
from freight.control.machine import Machine
from freight.control.service import Service
from freight.core.paging import PAGE
from freight.core.view import DeviceList, ModelList, ServerInfo, TokenList, TokenMade, TokenRequest, WorkerList


def add_service_routes(app: FastAPI, service: Service, stop: Callable[[], None]) -> None:
    """Add what tells of the service, and ends it."""

    async def version(who: Who) -> Response:
        """Say which service this is; its process and folder are for admins."""
        return json_of(service.info(who))

    async def end(who: Admin) -> Response:
        """End the service: unfinished jobs go on at its next start."""
        info = service.info(who)
        stop()
        return json_of(info, 202)

    async def models(who: Who, limit: Limit = PAGE, after: After = None) -> Response:
        """List the registered models that you may run."""
        return json_of(service.models.page(who, limit, after))

    add = app.add_api_route
    options: dict[str, Any] = {"responses": REFUSED, "tags": ["service"]}
    add("/api/version", version, methods=["GET"], response_model=ServerInfo, **options)
    add("/api/models", models, methods=["GET"], response_model=ModelList, **options)
    add("/api/stop", end, methods=["POST"], response_model=ServerInfo, status_code=202, **options)


def add_token_routes(app: FastAPI, accounts: Accounts) -> None:
    """Add what makes, lists and ends tokens."""

    async def make(request: TokenRequest, _: Admin) -> Response:
        """Make a token, which is told this once."""
        return json_of(await accounts.create(request), 201)

    async def tokens(_: Admin, limit: Limit = PAGE, after: After = None) -> Response:
        """List the tokens that were not revoked, without themselves."""
        return json_of(accounts.page(limit, after))

    async def revoke(which: str, _: Admin) -> Response:
        """End a token, by its id, or all tokens of a user, at once."""
        return json_of(TokenList(tokens=await accounts.revoke(which)))

    options: dict[str, Any] = {"responses": REFUSED, "tags": ["tokens"]}
    add = app.add_api_route
    add("/api/tokens", make, methods=["POST"], response_model=TokenMade, status_code=201, **options)
    add("/api/tokens", tokens, methods=["GET"], response_model=TokenList, **options)
    add("/api/tokens/{which}", revoke, methods=["DELETE"], response_model=TokenList, **options)


def add_machine_routes(app: FastAPI, machine: Machine) -> None:
    """Add what tells of workers and devices, and pins models."""

    async def workers(who: Who, limit: Limit = PAGE, after: After = None) -> Response:
        """List the workers there are, those of jobs and those that keep a model warm, and the pinned models."""
        return json_of(machine.workers(who, limit, after))

    async def devices(who: Who, limit: Limit = PAGE, after: After = None) -> Response:
        """List the devices of the service's machine, and who has them."""
        return json_of(await machine.devices(who, limit, after))

    async def release(device: str, who: Admin) -> Response:
        """Let a device out of quarantine, whatever is left on it."""
        await machine.release(device)
        return json_of(await machine.devices(who))

    async def pin(who: Admin, model: str, workers: Annotated[int, Query(ge=1, le=10_000)] = 1) -> Response:
        """Have so many workers of a model up always."""
        await machine.pin(model, workers)
        return json_of(machine.workers(who))

    async def unpin(model: str, who: Admin) -> Response:
        """Let the workers of a pinned model go when nobody needs them."""
        await machine.unpin(model)
        return json_of(machine.workers(who))

    options: dict[str, Any] = {"responses": REFUSED, "tags": ["machine"]}
    add = app.add_api_route
    add("/api/workers", workers, methods=["GET"], response_model=WorkerList, **options)
    add("/api/devices", devices, methods=["GET"], response_model=DeviceList, **options)
    add("/api/devices/{device:path}/release", release, methods=["POST"], response_model=DeviceList, **options)
    add("/api/pins/{model:path}", pin, methods=["PUT"], response_model=WorkerList, **options)
    add("/api/pins/{model:path}", unpin, methods=["DELETE"], response_model=WorkerList, **options)
