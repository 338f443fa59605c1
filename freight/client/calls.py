"""What can be asked of a service, each call written once for both clients, and how its answers are read."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypedDict, TypeVar, cast
from urllib.parse import quote

import msgspec

from freight.client.address import Address
from freight.core.account import is_user_name
from freight.core.job import FINAL
from freight.core.paging import MOST_PAGE
from freight.core.view import (
    IDEMPOTENCY_HEADER,
    DeviceList,
    ErrorReply,
    JobPage,
    JobRequest,
    JobStatus,
    ModelList,
    ServerInfo,
    Submitted,
    TokenList,
    TokenMade,
    TokenRequest,
    Upload,
    WorkerList,
)
from freight.errors import (
    Conflict,
    FreightError,
    NoServer,
    NoSuchJob,
    NoSuchUpload,
    NotAllowed,
    OperationError,
    TooLarge,
    TooMany,
    Unauthenticated,
    Unavailable,
    UserError,
    WrongState,
)

T = TypeVar("T")


class Page(Protocol):
    """Part of a list. `next` is where the next part begins, None at the end."""

    @property
    def next(self) -> str | None: ...


P = TypeVar("P", bound=Page)
NAME_RULE: Final = "letters, digits, '_', '.' and '-', 64 at most, the first a letter or digit"
PAGE_JOBS: Final = 100
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_JSON: Final = {"Content-Type": "application/json"}
_ERRORS: Final[dict[str, type[FreightError]]] = {
    kind.code: kind
    for kind in (
        UserError, Conflict, NoSuchJob, NoSuchUpload, NotAllowed, NoServer, OperationError, TooLarge, TooMany,
        Unavailable, WrongState,
    )
}  # fmt: skip
_SHOWN_BYTES: Final = 200


class ConnectionLost(OperationError):
    """The service went away in the middle of an answer."""


class JobOptions(TypedDict, total=False):
    """How a job is to be run; see `freight.core.view.JobRequest`. Times in seconds."""

    model: str | None
    name: str | None
    workers: int
    gpus: int | None
    pool: str
    timeout_s: float
    record_timeout_s: float
    concurrency: int
    strict: bool
    ignore_record_model: bool
    order: str
    dedupe: bool
    priority: int
    output: str | os.PathLike[str] | None
    notify: str | None


class JobFilters(TypedDict, total=False):
    """Which jobs are listed: of a model, with a name that begins so, of a user (for admins), created since
    `created_after` and before `created_before`, in RFC 3339.
    """

    model: str | None
    name: str | None
    user: str | None
    created_after: str | None
    created_before: str | None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and the type of what answers it (None for nothing).

    `is_slow`: the answer may take any time, so that it is waited for without a limit.
    """

    method: str
    path: str
    reply: type[T] | None = None
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes | None = None
    is_slow: bool = False


def version() -> Call[ServerInfo]:
    """Ask who answers."""
    return Call("GET", "/api/version", ServerInfo)


def stop() -> Call[ServerInfo]:
    """Ask the service to end."""
    return Call("POST", "/api/stop", ServerInfo)


def upload(size: int | None) -> Call[Upload]:
    """Send an input; the body is the caller's."""
    headers = {"Content-Type": "application/octet-stream"}
    if size is not None:
        headers["Content-Length"] = str(size)
    return Call("POST", "/api/uploads", Upload, headers=headers, is_slow=True)


def delete_upload(upload_id: str) -> Call[None]:
    """Throw an input away that no job uses."""
    return Call("DELETE", f"/api/uploads/{quote(upload_id, safe='')}")


def create(request: JobRequest, idempotency_key: str | None) -> Call[Submitted]:
    """Make a job of an upload; answered once the whole input is checked."""
    headers = dict(_JSON)
    if idempotency_key is not None:
        check_key(idempotency_key)
        headers[IDEMPOTENCY_HEADER] = idempotency_key
    return Call("POST", "/api/jobs", Submitted, headers=headers, body=msgspec.json.encode(request), is_slow=True)


def jobs(state: str | None, filters: JobFilters, after: str | None) -> Call[JobPage]:
    """Ask for a page of jobs, the newest first."""
    asked: dict[str, Any] = {"state": state, **filters}
    params = {key: str(value) for key, value in asked.items() if value is not None}
    return Call("GET", "/api/jobs", JobPage, _page(after, PAGE_JOBS) | params)


def _page(after: str | None, limit: int = MOST_PAGE) -> dict[str, str]:
    return {"limit": str(limit)} | ({"after": after} if after is not None else {})


def job(name: str) -> Call[JobStatus]:
    """Ask all about one job."""
    path, params = _job(name)
    return Call("GET", path, JobStatus, params)


def change(name: str, verb: str) -> Call[JobStatus]:
    """Ask to cancel, resume or retry a job."""
    path, params = _job(name)
    return Call("POST", f"{path}/{verb}", JobStatus, params)


def delete(name: str) -> Call[None]:
    """Ask to delete a job."""
    path, params = _job(name)
    return Call("DELETE", path, params=params, is_slow=True)


def results(name: str, only: str | None, partial: bool, headers: Mapping[str, str] | None = None) -> Call[None]:
    """Ask for a job's results, a stream; `headers` may ask for a part of them."""
    path, params = _job(name)
    params |= {"only": only} if only else {}
    params |= {"partial": "true"} if partial else {}
    return Call("GET", f"{path}/results", params=params, headers=headers or {})


def logs(name: str, worker: int | None, tail: int | None, follow: bool) -> Call[None]:
    """Ask for a worker's own output, a stream."""
    path, params = _job(name)
    asked = {"worker": worker, "tail": tail, "follow": "true" if follow else None}
    params |= {key: str(value) for key, value in asked.items() if value is not None}
    return Call("GET", f"{path}/logs", params=params, is_slow=True)


def models(after: str | None) -> Call[ModelList]:
    """Ask for a page of the models that one may run."""
    return Call("GET", "/api/models", ModelList, _page(after))


def workers(after: str | None) -> Call[WorkerList]:
    """Ask for a page of the workers there are."""
    return Call("GET", "/api/workers", WorkerList, _page(after))


def devices(after: str | None) -> Call[DeviceList]:
    """Ask for a page of the devices of the service's machine."""
    return Call("GET", "/api/devices", DeviceList, _page(after))


def release_device(device: str) -> Call[DeviceList]:
    """Ask to let a device out of quarantine."""
    return Call("POST", f"/api/devices/{quote(device, safe='')}/release", DeviceList)


def pin(model: str, workers: int) -> Call[WorkerList]:
    """Ask to have so many workers of a model up always."""
    return Call("PUT", f"/api/pins/{quote(model, safe='')}", WorkerList, {"workers": str(workers)}, is_slow=True)


def unpin(model: str) -> Call[WorkerList]:
    """Ask to let the workers of a pinned model go."""
    return Call("DELETE", f"/api/pins/{quote(model, safe='')}", WorkerList)


def create_token(request: TokenRequest) -> Call[TokenMade]:
    """Ask for a token for a user."""
    return Call("POST", "/api/tokens", TokenMade, headers=_JSON, body=msgspec.json.encode(request))


def tokens(after: str | None) -> Call[TokenList]:
    """Ask for a page of the tokens there are."""
    return Call("GET", "/api/tokens", TokenList, _page(after))


def revoke_tokens(which: str) -> Call[TokenList]:
    """Ask to end a token, by its id, or all of a user."""
    return Call("DELETE", f"/api/tokens/{quote(which, safe='')}", TokenList)


def check_key(idempotency_key: str | None) -> None:
    """Raise UserError for a key that cannot be sent."""
    if idempotency_key is not None and not re.fullmatch(r"[!-~]{1,255}", idempotency_key):
        raise UserError(
            f"the idempotency key {idempotency_key!r} cannot be sent",
            "use 1 to 255 letters, digits and signs of ASCII, without spaces",
        )


def is_name(text: str) -> bool:
    """Return whether a job may be called so."""
    return bool(_NAME.fullmatch(text))


def _job(name: str) -> tuple[str, dict[str, str]]:
    """Return where a job is, and the parameter that names its user, where `name` is USER/NAME."""
    user, _, own = name.rpartition("/")
    # Ids and their prefixes obey the rule too. Anything else might even lead to another place.
    if not is_name(own) or (user and not is_user_name(user)) or name.startswith("/"):
        raise NoSuchJob(f"there is no job {name!r}: that can be no job's name", "freight batch list names them")
    return f"/api/jobs/{quote(own, safe='')}", {"user": user} if user else {}


def job_request(upload_id: str, shown: str, options: JobOptions) -> JobRequest:
    """Return the job to make of an upload, its paths made absolute."""
    given = dict(options)
    given["model"], typed = _absolute_model(options.get("model"))
    output = options.get("output")
    given["output"] = str(Path(output).expanduser().absolute()) if output is not None else None
    return JobRequest(upload=upload_id, file=shown, typed=typed, **cast(Any, given))


def _absolute_model(model: str | None) -> tuple[str | None, str | None]:
    """Return the model, and the user's word for it when it is a path: that must mean the same to the service."""
    if not model or "://" in model:
        return model, None
    try:
        path = Path(model).expanduser()
        return (str(path.absolute()), model) if path.exists() else (model, None)
    except (OSError, RuntimeError, ValueError):
        return model, None


def read(call: Call[T], status: int, body: bytes, address: Address) -> T:
    """Return what answers a call; raise the error that the service tells of."""
    if status >= 300:
        raise problem(status, body, address)
    if call.reply is None:
        return cast(T, None)
    try:
        return msgspec.json.decode(body, type=call.reply)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _no_freight(address, f"{status} and {_start(body)}") from error


def problem(status: int, body: bytes, address: Address) -> FreightError:
    """Return the error that an answer tells of."""
    try:
        error = msgspec.json.decode(body, type=ErrorReply).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        if status in (401, 403):
            return {401: Unauthenticated, 403: NotAllowed}[status](
                f"the service at {address.shown} says {status}", "give a token that it knows in FREIGHT_TOKEN"
            )
        return _no_freight(address, f"{status} and {_start(body)}")
    kind = {401: Unauthenticated, 403: NotAllowed}.get(status) or _ERRORS.get(error.code, OperationError)
    return kind(error.message, _without_v1(status, error.code, address) or error.hint)


def _without_v1(status: int, code: str, address: Address) -> str | None:
    """Return the hint for who named the base URL of the OpenAI API, below which nothing else is."""
    base = re.fullmatch(r"(.+)/v1", address.url)
    wrong = base is not None and status == 404 and code == UserError.code
    return f"leave out /v1, which is for OpenAI's SDK: --server {base[1]}" if base and wrong else None


def _no_freight(address: Address, what: str) -> OperationError:
    return OperationError(
        f"{address.shown} does not answer as a Freight service of this version does: it sent {what}",
        "is it one? `freight --version` must be the same there and here",
    )


def _start(body: bytes) -> str:
    return repr(body[:_SHOWN_BYTES].decode(errors="replace")) if body else "nothing"


def pauses() -> Iterator[float]:
    """Yield the seconds to wait between looks at a job: short at first, for jobs that are."""
    pause = 0.1
    while True:
        yield pause
        pause = min(1.0, pause * 1.25)


class Seen:
    """The job that was looked at last: what has not changed since is not sent again."""

    def __init__(self) -> None:
        self._last: tuple[Call[JobStatus], str, JobStatus] | None = None

    def asking(self, call: Call[JobStatus]) -> Call[JobStatus]:
        """Return the call to make in place of `call`."""
        if self._last is None or self._last[0] != call:
            return call
        return replace(call, headers={**call.headers, "If-None-Match": self._last[1]})

    def read(self, call: Call[JobStatus], status: int, etag: str | None, body: bytes, address: Address) -> JobStatus:
        """Return what answers it, and keep it; `call` is as it was before `asking`."""
        if status == 304 and self._last is not None:
            return self._last[2]
        job = read(call, status, body, address)
        self._last = (call, etag, job) if etag else None
        return job


class Patience:
    """How long to wait between looks at a job, and in all (`timeout` seconds, None for ever)."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._until = None if timeout is None else time.monotonic() + timeout
        self._pauses = pauses()

    def pause_after(self, status: JobStatus) -> float | None:
        """Return the seconds to wait after this look; None when the job has ended.

        Raises TimeoutError when the time is up; the job goes on.
        """
        if status.state in FINAL:
            return None
        pause = next(self._pauses)
        if self._until is None or self._timeout is None:
            return pause
        left = self._until - time.monotonic()
        if left <= 0:
            words = f"job {status.name} is {status.state} after {self._timeout:g} s ({status.done} records done)"
            raise TimeoutError(words)
        return min(pause, left)
