"""The client for ordinary, blocking code."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Final, Self, TypeVar, Unpack

import httpx

from freight.client import calls
from freight.client.address import Reach, find_service
from freight.client.calls import Call, ConnectionLost, JobFilters, JobOptions, P
from freight.client.outgoing import Input, Source, outgoing, pieces, size_of
from freight.client.saving import Going, Saving
from freight.client.streams import ResultStream, Stream
from freight.client.transport import limits, settings, speaking, tls, unreachable
from freight.core.view import (
    DeviceStatus,
    JobRequest,
    JobStatus,
    JobSummary,
    ModelInfo,
    PinStatus,
    ServerInfo,
    Submitted,
    TokenInfo,
    TokenMade,
    TokenRequest,
    Upload,
    WorkerList,
    WorkerStatus,
)
from freight.errors import FreightError, NoServer

T = TypeVar("T")
TIMEOUT_S: Final = 120.0


class Client:
    """A connection to a Freight service.

        with Client() as client:
            job = client.submit("requests.jsonl", model="small").job
            client.wait(job.name)
            for line in client.results(job.name):
                ...

    `server` is `http(s)://HOST:PORT` or `unix:///PATH/api.sock`; by default FREIGHT_SERVER, else the socket of the
    user's own service. `token` is by default FREIGHT_TOKEN, or what the file named by FREIGHT_TOKEN_FILE holds.
    `timeout_s` bounds the wait for an answer, but for those that may take any time, such as the check of an input.

    Jobs are named by their name, their id, or a unique prefix of the id. Every method raises a `FreightError`:
    `NoServer` when none answers, `NoSuchJob`, `WrongState` when the job's state does not allow it, `UserError` for
    what is refused, `NotAllowed`, and `OperationError` for the rest. Nothing is tried again by itself.
    """

    def __init__(self, server: str | None = None, token: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._address = find_service(server, token)
        self._timeout_s = timeout_s
        self._seen = calls.Seen()
        self._reach: Reach | None = None
        self._http: httpx.Client | None = None

    @property
    def server(self) -> str:
        """Where the service is: its URL, or the path of its socket."""
        return self._address.shown

    @property
    def is_named(self) -> bool:
        """Whether the service was named, rather than the user's own taken."""
        return self._address.is_named

    @property
    def is_local(self) -> bool:
        """Whether the service is on this machine, behind a Unix socket."""
        return self._address.socket is not None

    def version(self) -> ServerInfo:
        """Return the version of the service, and for admins its process and data folder."""
        return self._ask(calls.version())

    def submit(self, file: Input, *, idempotency_key: str | None = None, **options: Unpack[JobOptions]) -> Submitted:
        """Send an input and make a job of it; return the job, once its whole input is checked.

        `file` is the path of a JSON Lines file, a file open for reading bytes, or pieces of bytes. `options` are
        those of `freight.core.view.JobRequest`: model, name, workers, timeout_s, priority, output and so on. With
        an `idempotency_key`, asking again gives the first job back instead of a second one.
        """
        calls.check_key(idempotency_key)
        with outgoing(file) as sent:
            upload = self.upload(sent.source, sent.size)
            try:
                sent.check_unchanged()
            except FreightError:
                self.drop_upload(upload.id)
                raise
        return self.create(calls.job_request(upload.id, sent.shown, options), idempotency_key=idempotency_key)

    def upload(self, source: Source, size: int | None = None) -> Upload:
        """Send the bytes of an input, which a job can be made of within a day.

        `source` is a file open for reading bytes, or pieces of bytes; `size` says how many bytes come, if known.
        """
        size = size_of(source) if size is None else size
        return self._ask(calls.upload(size), pieces(source, size))

    def create(self, request: JobRequest, *, idempotency_key: str | None = None) -> Submitted:
        """Make a job of an upload; return it once the whole input is checked."""
        try:
            submitted = self._ask(calls.create(request, idempotency_key))
        except (NoServer, ConnectionLost):
            raise  # The job may have been made all the same.
        except FreightError:
            self.drop_upload(request.upload)
            raise
        if not submitted.is_new:
            self.drop_upload(request.upload)
        return submitted

    def drop_upload(self, upload: str) -> None:
        """Have the service forget an upload, if it can: no job will be made of it."""
        with suppress(FreightError):
            self._ask(calls.delete_upload(upload))

    def job(self, name: str) -> JobStatus:
        """Return all about one job."""
        call = calls.job(name)
        response = self._send(self._seen.asking(call), None, False)
        etag = response.headers.get("etag")
        return self._seen.read(call, response.status_code, etag, response.content, self._address)

    def jobs(self, state: str | None = None, **filters: Unpack[JobFilters]) -> Iterator[JobSummary]:
        """Yield the jobs, the newest first; with `state` those in it, or with "active" those that are not final.

        `filters` are those of `freight.client.calls.JobFilters`: model, name, user, created_after, created_before.
        """
        for page in self._pages(lambda after: calls.jobs(state, filters, after)):
            yield from page.jobs

    def wait(
        self, name: str, timeout: float | None = None, on_status: Callable[[JobStatus], None] | None = None
    ) -> JobStatus:
        """Return the job once it is in a final state, which may be FAILED, CANCELLED or TIMED_OUT.

        `timeout` is in seconds; a TimeoutError is raised when it runs out, and the job goes on. `on_status` is
        called with what each look at the job shows.
        """
        patience = calls.Patience(timeout)
        status = self.job(name)
        while True:
            if on_status is not None:
                on_status(status)
            pause = patience.pause_after(status)
            if pause is None:
                return status
            time.sleep(pause)
            status = self.job(status.id)  # The name may have gone to another job by now.

    def results(self, name: str, only: str | None = None, partial: bool = False) -> ResultStream:
        """Return a job's results as a stream of lines, one for each record, in the order sent.

        `only` is "ok" or "failed". An unfinished job gives what there is so far with `partial`, else WrongState.
        """
        response = self._stream(calls.results(name, only, partial))
        return ResultStream(response, self._address)

    def save_results(
        self,
        name: str,
        path: str | os.PathLike[str],
        only: str | None = None,
        partial: bool = False,
        force: bool = False,
    ) -> int:
        """Write a job's results to a file, which appears whole or not at all; return for how many records.

        What stands at `path` is replaced only with `force`. Where the connection breaks, those of a job that has ended
        go on a few times from where they were.
        """
        going = Going()
        with Saving(path, force) as saving:
            while True:
                try:
                    call = calls.results(name, only, partial, going.headers())
                    with ResultStream(self._stream(call), self._address) as stream:
                        if going.begins(stream.etag, stream.is_rest):
                            saving.restart()
                        for chunk in stream.chunks():
                            saving.write(chunk)
                            going.came(len(chunk))
                    return stream.done
                except (ConnectionLost, NoServer) as error:
                    time.sleep(going.pause(error))

    def cancel(self, name: str) -> JobStatus:
        """Stop a job, keeping its results; it is CANCELLING until its workers are gone."""
        return self._ask(calls.change(name, "cancel"))

    def resume(self, name: str) -> JobStatus:
        """Go on with a cancelled, failed or timed-out job: only its unfinished records run."""
        return self._ask(calls.change(name, "resume"))

    def retry(self, name: str) -> JobStatus:
        """Run those records of a finished job again that ended in an error."""
        return self._ask(calls.change(name, "retry"))

    def delete(self, name: str) -> None:
        """Delete a finished job, its input and its results."""
        self._ask(calls.delete(name))

    def logs(self, name: str, worker: int | None = None, tail: int | None = None, follow: bool = False) -> Stream:
        """Return what the model server of one of a job's workers wrote, as a stream of bytes.

        `worker` counts from 1; `tail` limits it to the last lines; with `follow` it goes on until the job ends.
        """
        return Stream(self._stream(calls.logs(name, worker, tail, follow)), self._address)

    def models(self) -> list[ModelInfo]:
        """Return the registered models that one may run."""
        return [one for page in self._pages(calls.models) for one in page.models]

    def workers(self) -> list[WorkerStatus]:
        """Return the workers there are now, those of jobs and those that keep a model warm."""
        return self.machine().workers

    def machine(self) -> WorkerList:
        """Return the workers there are now, and the models that are to be up always."""
        pages = list(self._pages(calls.workers))
        return replace(pages[0], workers=[one for page in pages for one in page.workers], next=None)

    def pin(self, model: str, workers: int = 1) -> list[PinStatus]:
        """Have so many workers of a model up always, whether a job needs them or not; return all pins."""
        return self._ask(calls.pin(model, workers)).pins

    def unpin(self, model: str) -> list[PinStatus]:
        """Let the workers of a pinned model go when nobody needs them; return the pins that are left."""
        return self._ask(calls.unpin(model)).pins

    def devices(self) -> list[DeviceStatus]:
        """Return the devices of the service's machine, and who has them."""
        return [one for page in self._pages(calls.devices) for one in page.devices]

    def release_device(self, device: str) -> list[DeviceStatus]:
        """Let a device out of quarantine, whatever is left on it; return all devices."""
        return self._ask(calls.release_device(device)).devices

    def create_token(
        self,
        user: str,
        role: str = "user",
        expires_s: float | None = None,
        label: str = "",
        groups: Sequence[str] = (),
    ) -> TokenMade:
        """Make a token for a user, good for `expires_s` seconds; only admins may. It is told this once."""
        request = TokenRequest(user=user, role=role, expires_s=expires_s, label=label, groups=list(groups))
        return self._ask(calls.create_token(request))

    def tokens(self) -> list[TokenInfo]:
        """Return the tokens that there are, without themselves; only admins may."""
        return [one for page in self._pages(calls.tokens) for one in page.tokens]

    def revoke_tokens(self, which: str) -> list[TokenInfo]:
        """End a token at once, by its id, or all tokens of a user; return those. Only admins may."""
        return self._ask(calls.revoke_tokens(which)).tokens

    def stop(self) -> ServerInfo:
        """Ask the service to end, which it does a little later; unfinished jobs go on at its next start."""
        return self._ask(calls.stop())

    def close(self) -> None:
        """Close the connection. The next call opens another."""
        if self._http is not None:
            self._http.close()
        if self._reach is not None:
            self._reach.close()
        self._http = self._reach = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> httpx.Client:
        if self._http is None:
            socket = self._address.socket
            try:
                self._reach = Reach(socket) if socket else None
            except OSError as error:
                raise unreachable(self._address, error) from error
            path = self._reach.path if self._reach else None
            transport = httpx.HTTPTransport(verify=tls(self._address), trust_env=False, uds=path)
            self._http = httpx.Client(transport=transport, **settings(self._address, self._timeout_s))
        return self._http

    def _send(self, call: Call[T], content: Iterator[bytes] | None, stream: bool) -> httpx.Response:
        http = self._connected()
        request = http.build_request(
            call.method,
            call.path,
            params=dict(call.params) or None,
            headers=dict(call.headers),
            content=call.body if content is None else content,
            timeout=limits(None if call.is_slow else self._timeout_s),
        )
        try:
            with speaking(self._address):
                return http.send(request, stream=stream)
        except NoServer:
            self.close()  # The next try finds a service that was started in another place of the same name.
            raise

    def _ask(self, call: Call[T], content: Iterator[bytes] | None = None) -> T:
        response = self._send(call, content, False)
        return calls.read(call, response.status_code, response.content, self._address)

    def _pages(self, call: Callable[[str | None], Call[P]]) -> Iterator[P]:
        """Yield the pages of a list; `call` asks for the one after a place."""
        page = self._ask(call(None))
        yield page
        while page.next is not None:
            page = self._ask(call(page.next))
            yield page

    def _stream(self, call: Call[None]) -> httpx.Response:
        response = self._send(call, None, True)
        if response.status_code >= 300:
            with speaking(self._address):
                body = response.read()
            response.close()
            raise calls.problem(response.status_code, body, self._address)
        return response
