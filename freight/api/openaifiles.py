"""Files of the OpenAI API: sent, looked at, listed, fetched and deleted, each by its user alone."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

from fastapi import FastAPI, Query, Request, Response

from freight.api.fileform import FileForm
from freight.api.front import FORM_BYTES
from freight.api.ranges import IN_PARTS, sent
from freight.api.replies import OPENAI_REFUSED, Who, json_of
from freight.control.keptfiles import NewFile
from freight.control.service import Service
from freight.core.openaifile import BATCH, EXPIRY_S, FileDeleted, FileList, FileObject, shown_name
from freight.errors import UserError

MOST_FILES: Final = 10_000
_PURPOSE: Final = "purpose"
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_CREATED: Final = "created_at"
_JSONL: Final = "application/jsonl"
_FORM: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["file", _PURPOSE],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "The input of batches: JSON Lines."},
        _PURPOSE: {"type": "string", "enum": [BATCH]},
        _ANCHOR: {"type": "string", "enum": [_CREATED]},
        _SECONDS: {"type": "integer", "minimum": EXPIRY_S[0], "maximum": EXPIRY_S[1]},
    },
}


def add_openai_file_routes(app: FastAPI, service: Service) -> None:
    """Add what keeps files, and what gives out those of batches."""

    async def create(request: Request, who: Who) -> Response:
        """Send a file, of which batches can be made until it is deleted or expires."""
        form = FileForm(request.headers.get("content-type"), (_PURPOSE, _ANCHOR, _SECONDS), _check)
        size = max(0, int(request.headers.get("content-length") or 0) - FORM_BYTES)
        return json_of(await service.files.receive(who, _file(form, request), size, lambda: _about(form)))

    async def page(
        who: Who,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_FILES)] = MOST_FILES,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """List your files, the newest first; `after` is the last file of the page before."""
        return json_of(await service.files.page(who, after, limit, order == "desc", purpose))

    async def show(file_id: str, who: Who) -> Response:
        """Return what is known of a file."""
        return json_of(await service.files.show(who, file_id))

    async def delete(file_id: str, who: Who) -> Response:
        """Forget a file. Batches that were made of it go on; a batch's results stay with it."""
        await service.files.delete(who, file_id)
        return json_of(FileDeleted(id=file_id))

    async def content(file_id: str, request: Request, who: Who) -> Response:
        """Return what is in a file."""
        headers = {"x-content-type-options": "nosniff", "content-disposition": "attachment"}
        return sent(request, await service.files.content(who, file_id), _JSONL, headers)

    options: dict[str, Any] = {"responses": OPENAI_REFUSED, "tags": ["files"]}
    parts: dict[str, Any] = {
        "responses": {200: {"content": {_JSONL: {}}}, **OPENAI_REFUSED, **IN_PARTS},
        "response_class": Response,
        "tags": ["files"],
    }
    body = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
    add = app.add_api_route
    add("/v1/files", create, methods=["POST"], response_model=FileObject, openapi_extra=body, **options)
    add("/v1/files", page, methods=["GET"], response_model=FileList, **options)
    add("/v1/files/{file_id}", show, methods=["GET"], response_model=FileObject, **options)
    add("/v1/files/{file_id}", delete, methods=["DELETE"], response_model=FileDeleted, **options)
    add("/v1/files/{file_id}/content", content, methods=["GET"], **parts)
    add("/v1/files/{file_id}/content", content, methods=["HEAD"], include_in_schema=False, **parts)


async def _file(form: FileForm, request: Request) -> AsyncIterator[bytes]:
    """Yield the file of a form in pieces; raise UserError for what is wrong with the form, and for what it lacks."""
    async for piece in form.file(request.stream()):
        yield piece
    if _PURPOSE not in form.fields:
        raise UserError("the form does not say what the file is for", f"send purpose={BATCH}").about(_PURPOSE)
    if (_ANCHOR in form.fields) != (_SECONDS in form.fields):
        raise UserError("expires_after lacks one of its parts", f"send {_ANCHOR} and {_SECONDS}").about("expires_after")


def _check(field: str, text: str) -> None:
    """Raise UserError for a field of the form that is not as it must be."""
    least, most = EXPIRY_S
    if field == _PURPOSE and text != BATCH:
        raise UserError(f"files are not kept here for {text[:50]!r}", f"purpose must be {BATCH!r}").about(_PURPOSE)
    if field == _ANCHOR and text != _CREATED:
        raise UserError(f"{_ANCHOR} is {text[:50]!r}", f"it must be {_CREATED!r}").about("expires_after")
    if field == _SECONDS and not (
        text.isascii() and text.isdecimal() and len(text) < 12 and least <= int(text) <= most
    ):
        raise UserError(f"{_SECONDS} is {text[:50]!r}", f"it must be from {least} to {most}").about("expires_after")


def _about(form: FileForm) -> NewFile:
    seconds = form.fields.get(_SECONDS)
    return NewFile(shown_name(form.filename or ""), None if seconds is None else int(seconds))
