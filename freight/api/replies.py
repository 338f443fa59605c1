"""What the routes share: who asks, what is refused, and how answers are made."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final

import msgspec
from fastapi import Depends, Header, Query, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from freight.api.auth import account_of, admin_of
from freight.core.account import Account
from freight.core.paging import MOST_PAGE
from freight.core.view import IDEMPOTENCY_HEADER, ErrorReply, OpenAIErrorReply

REFUSED: Final[dict[int | str, dict[str, Any]]] = {
    code: {"model": ErrorReply, "description": words}
    for code, words in (
        (400, "Refused: the request or the input is wrong."),
        (401, "It does not show who asks."),
        (403, "Not for this user, or not from there."),
        (404, "There is no such job, or it is another user's."),
        (409, "The job's state, or a name or key that is taken, does not allow it."),
        (413, "The body is too large."),
        (429, "One of the user's limits is reached."),
        (503, "The service cannot do it now."),
        (507, "There is no room on the service's disk."),
    )
}

# The same on the routes of the OpenAI API, whose errors have another shape.
OPENAI_REFUSED: Final[dict[int | str, dict[str, Any]]] = {
    code: {**about, "model": OpenAIErrorReply} for code, about in REFUSED.items()
}


class ClosingResponse(StreamingResponse):
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


def json_of(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def named(
    name: str,
    user: Annotated[str | None, Query(max_length=128, description="Whose job it is; for admins.")] = None,
) -> str:
    """Return a job as it is looked up: NAME, or USER/NAME."""
    return name if user is None else f"{user}/{name}"


Who = Annotated[Account, Depends(account_of)]
Admin = Annotated[Account, Depends(admin_of)]
Name = Annotated[str, Depends(named)]
Limit = Annotated[int, Query(ge=1, le=MOST_PAGE, description="How many to list at most.")]
# An empty key names no request.
Key = Annotated[str | None, Header(alias=IDEMPOTENCY_HEADER, min_length=1, max_length=255)]
After = Annotated[str | None, Query(max_length=300, description="Where to go on: what `next` of another page said.")]
