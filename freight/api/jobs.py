"""Freight's own routes about jobs, under /api: uploads, jobs, and what jobs have to give."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse

from freight.api.ranges import IN_PARTS, UNCHANGED, download, tagged
from freight.api.replies import REFUSED, After, Key, Limit, Name, Who, json_of
from freight.control.output import Only
from freight.control.service import Service
from freight.core.paging import PAGE
from freight.core.view import (
    JobPage,
    JobRequest,
    JobStatus,
    NameList,
    Submitted,
    Upload,
)


def add_upload_routes(app: FastAPI, service: Service) -> None:
    """Add what takes inputs in."""

    async def send(request: Request, who: Who) -> Response:
        """Send an input, as the body: JSON Lines. It is kept for a day, until a job is made of it."""
        length = request.headers.get("content-length")
        return json_of(await service.receive(who, request.stream(), int(length) if length else None), 201)

    async def drop(upload: str, who: Who) -> Response:
        """Remove an upload that no job was made of."""
        service.drop_upload(who, upload)
        return Response(status_code=204)

    add = app.add_api_route
    add(
        "/api/uploads", send, methods=["POST"], response_model=Upload, status_code=201, responses=REFUSED,
        tags=["uploads"], openapi_extra={"requestBody": {"content": {"application/jsonl": {}}}},
    )  # fmt: skip
    add(
        "/api/uploads/{upload}", drop, methods=["DELETE"], status_code=204, responses=REFUSED,
        response_class=Response, tags=["uploads"],
    )  # fmt: skip


def add_job_routes(app: FastAPI, service: Service) -> None:
    """Add what makes, shows and changes jobs."""

    async def submit(
        request: JobRequest,
        who: Who,
        key: Key = None,
    ) -> Response:
        """Make a job of an upload. Answers when the input was checked; with the key of an earlier request, 200."""
        made = await service.submit(who, request, key)
        return json_of(made, 201 if made.is_new else 200)

    async def page(
        who: Who,
        state: str | None = None,
        model: str | None = None,
        name: Annotated[str | None, Query(description="How the name begins.")] = None,
        user: Annotated[str | None, Query(description="Whose they are; for admins.")] = None,
        created_after: Annotated[str | None, Query(description="RFC 3339; jobs of this very moment, too.")] = None,
        created_before: Annotated[str | None, Query(description="RFC 3339.")] = None,
        limit: Limit = PAGE,
        after: After = None,
    ) -> Response:
        """List jobs, the newest first; `state` is one of the states, or "active" for all that have not ended."""
        found = await service.finder.page(
            who, state, limit, after,
            model=model, name=name, user=user, created_after=created_after, created_before=created_before,
        )  # fmt: skip
        return json_of(found)

    async def names(who: Who, limit: Limit = PAGE, after: After = None) -> Response:
        """List the names of all jobs, in order; for admins, those of others as USER/NAME."""
        return json_of(await service.finder.names(who, limit, after))

    async def show(request: Request, name: Name, who: Who) -> Response:
        """Tell all about a job, known by its name, its id, or a unique prefix of the id."""
        return tagged(request, await service.finder.status(who, name))

    async def cancel(name: Name, who: Who) -> Response:
        """Cancel a job; what is done is kept."""
        return json_of(await service.cancel(who, name))

    async def resume(name: Name, who: Who) -> Response:
        """Go on with a job that was cancelled, failed or ran out of time."""
        return json_of(await service.resume(who, name))

    async def retry(name: Name, who: Who) -> Response:
        """Run again the records that ended in an error."""
        return json_of(await service.retry(who, name))

    async def delete(name: Name, who: Who) -> Response:
        """Forget a job that has ended, and all that is kept of it."""
        await service.delete(who, name)
        return Response(status_code=204)

    options: dict[str, Any] = {"responses": REFUSED, "tags": ["jobs"]}
    add = app.add_api_route
    add("/api/jobs", submit, methods=["POST"], response_model=Submitted, status_code=201, **options)
    add("/api/jobs", page, methods=["GET"], response_model=JobPage, **options)
    add("/api/names", names, methods=["GET"], response_model=NameList, **options)
    shown: dict[str, Any] = {**options, "responses": REFUSED | UNCHANGED}
    add("/api/jobs/{name}", show, methods=["GET"], response_model=JobStatus, **shown)
    add("/api/jobs/{name}", delete, methods=["DELETE"], status_code=204, response_class=Response, **options)
    for verb, route in (("cancel", cancel), ("resume", resume), ("retry", retry)):
        add(f"/api/jobs/{{name}}/{verb}", route, methods=["POST"], response_model=JobStatus, **options)


def add_stream_routes(app: FastAPI, service: Service) -> None:
    """Add what jobs have to give: results, and their workers' output."""

    async def results(
        request: Request, name: Name, who: Who, only: Only | None = None, partial: bool = False
    ) -> Response:
        """Return a job's results, JSON Lines in input order, or a Range of them once it has ended.

        Those of an unfinished job come with `partial` alone, and as far as the headers say.
        """
        return download(request, await service.streams.results(who, name, only, partial), "application/jsonl")

    async def logs(
        name: Name,
        who: Who,
        worker: Annotated[int | None, Query(ge=1)] = None,
        tail: Annotated[int | None, Query(ge=0)] = None,
        follow: bool = False,
    ) -> StreamingResponse:
        """Return what a job's workers and their model servers wrote, as it comes with `follow`."""
        pieces: AsyncIterator[bytes] = await service.streams.logs(who, name, worker, tail, follow)
        return StreamingResponse(pieces, media_type="text/plain; charset=utf-8")

    options: dict[str, Any] = {"responses": REFUSED, "tags": ["jobs"], "response_class": StreamingResponse}
    in_parts: dict[str, Any] = {**options, "responses": REFUSED | IN_PARTS}
    app.add_api_route("/api/jobs/{name}/results", results, methods=["GET"], **in_parts)
    app.add_api_route("/api/jobs/{name}/results", results, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/api/jobs/{name}/logs", logs, methods=["GET"], **options)
