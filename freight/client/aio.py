"""The client for asyncio."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
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
from freight.client.streams import AsyncResultStream, AsyncStream
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


class AsyncClient:
    """A connection to a Freight service, for asyncio. The methods are those of `Client`, which says more of each.

    async with AsyncClient() as client:
        job = (await client.submit("requests.jsonl", model="small")).job
        await client.wait(job.name)
        async for line in await client.results(job.name):
            ...
    """

    def __init__(self, server: str | None = None, token: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._address = find_service(server, token)
        self._timeout_s = timeout_s
        self._seen = calls.Seen()
        self._reach: Reach | None = None
        self._http: httpx.AsyncClient | None = None

    @property
    def server(self) -> str:
        """Where the service is: its URL, or the path of its socket."""
        return self._address.shown

    async def version(self) -> ServerInfo:
        """Return the version of the service, and for admins its process and data folder."""
        return await self._ask(calls.version())

    async def submit(
        self, file: Input, *, idempotency_key: str | None = None, **options: Unpack[JobOptions]
    ) -> Submitted:
        """Send an input and make a job of it; return the job, once its whole input is checked."""
        calls.check_key(idempotency_key)
        with outgoing(file) as sent:
            upload = await self.upload(sent.source, sent.size)
            try:
                sent.check_unchanged()
            except FreightError:
                await self.drop_upload(upload.id)
                raise
        return await self.create(calls.job_request(upload.id, sent.shown, options), idempotency_key=idempotency_key)

    async def upload(self, source: Source, size: int | None = None) -> Upload:
        """Send the bytes of an input, which a job can be made of within a day."""
        size = size_of(source) if size is None else size
        return await self._ask(calls.upload(size), _in_threads(pieces(source, size)))

    async def create(self, request: JobRequest, *, idempotency_key: str | None = None) -> Submitted:
        """Make a job of an upload; return it once the whole input is checked."""
        try:
            submitted = await self._ask(calls.create(request, idempotency_key))
        except (NoServer, ConnectionLost):
            raise  # The job may have been made all the same.
        except FreightError:
            await self.drop_upload(request.upload)
            raise
        if not submitted.is_new:
            await self.drop_upload(request.upload)
        return submitted

    async def drop_upload(self, upload: str) -> None:
        """Have the service forget an upload, if it can: no job will be made of it."""
        with suppress(FreightError):
            await self._ask(calls.delete_upload(upload))

    async def job(self, name: str) -> JobStatus:
        """Return all about one job."""
        call = calls.job(name)
        response = await self._send(self._seen.asking(call), None, False)
        etag = response.headers.get("etag")
        return self._seen.read(call, response.status_code, etag, response.content, self._address)

    async def jobs(self, state: str | None = None, **filters: Unpack[JobFilters]) -> AsyncIterator[JobSummary]:
        """Yield the jobs, the newest first; with `state` those in it, or with "active" those that are not final."""
        async for page in self._pages(lambda after: calls.jobs(state, filters, after)):
            for job in page.jobs:
                yield job

    async def wait(
        self,
        name: str,
        timeout: float | None = None,  # noqa: ASYNC109 - As in Client; and its error says how the job stands.
        on_status: Callable[[JobStatus], None] | None = None,
    ) -> JobStatus:
        """Return the job once it is in a final state; raise TimeoutError after `timeout` seconds."""
        patience = calls.Patience(timeout)
        status = await self.job(name)
        while True:
            if on_status is not None:
                on_status(status)
            pause = patience.pause_after(status)
            if pause is None:
                return status
            await asyncio.sleep(pause)
            status = await self.job(status.id)  # The name may have gone to another job by now.

    async def results(self, name: str, only: str | None = None, partial: bool = False) -> AsyncResultStream:
        """Return a job's results as a stream of lines, one for each record, in the order sent."""
        response = await self._stream(calls.results(name, only, partial))
        return AsyncResultStream(response, self._address)

    async def save_results(
        self,
        name: str,
        path: str | os.PathLike[str],
        only: str | None = None,
        partial: bool = False,
        force: bool = False,
    ) -> int:
        """Write a job's results to a file, which appears whole or not at all; return for how many records.

        Where the connection breaks, it goes on as `Client` does.
        """
        going = Going()
        with Saving(path, force) as saving:
            while True:
                try:
                    call = calls.results(name, only, partial, going.headers())
                    async with AsyncResultStream(await self._stream(call), self._address) as stream:
                        if going.begins(stream.etag, stream.is_rest):
                            saving.restart()
                        async for chunk in stream.chunks():
                            await asyncio.to_thread(saving.write, chunk)
                            going.came(len(chunk))
                    return stream.done
                except (ConnectionLost, NoServer) as error:
                    await asyncio.sleep(going.pause(error))

    async def cancel(self, name: str) -> JobStatus:
        """Stop a job, keeping its results; it is CANCELLING until its workers are gone."""
        return await self._ask(calls.change(name, "cancel"))

    async def resume(self, name: str) -> JobStatus:
        """Go on with a cancelled, failed or timed-out job: only its unfinished records run."""
        return await self._ask(calls.change(name, "resume"))

    async def retry(self, name: str) -> JobStatus:
        """Run those records of a finished job again that ended in an error."""
        return await self._ask(calls.change(name, "retry"))

    async def delete(self, name: str) -> None:
        """Delete a finished job, its input and its results."""
        await self._ask(calls.delete(name))

    async def logs(
        self, name: str, worker: int | None = None, tail: int | None = None, follow: bool = False
    ) -> AsyncStream:
        """Return what the model server of one of a job's workers wrote, as a stream of bytes."""
        return AsyncStream(await self._stream(calls.logs(name, worker, tail, follow)), self._address)

    async def models(self) -> list[ModelInfo]:
        """Return the registered models that one may run."""
        return [one async for page in self._pages(calls.models) for one in page.models]

    async def workers(self) -> list[WorkerStatus]:
        """Return the workers there are now, those of jobs and those that keep a model warm."""
        return (await self.machine()).workers

    async def machine(self) -> WorkerList:
        """Return the workers there are now, and the models that are to be up always."""
        pages = [page async for page in self._pages(calls.workers)]
        return replace(pages[0], workers=[one for page in pages for one in page.workers], next=None)

    async def pin(self, model: str, workers: int = 1) -> list[PinStatus]:
        """Have so many workers of a model up always, whether a job needs them or not; return all pins."""
        return (await self._ask(calls.pin(model, workers))).pins

    async def unpin(self, model: str) -> list[PinStatus]:
        """Let the workers of a pinned model go when nobody needs them; return the pins that are left."""
        return (await self._ask(calls.unpin(model))).pins

    async def devices(self) -> list[DeviceStatus]:
        """Return the devices of the service's machine, and who has them."""
        return [one async for page in self._pages(calls.devices) for one in page.devices]

    async def release_device(self, device: str) -> list[DeviceStatus]:
        """Let a device out of quarantine, whatever is left on it; return all devices."""
        return (await self._ask(calls.release_device(device))).devices

    async def create_token(
        self,
        user: str,
        role: str = "user",
        expires_s: float | None = None,
        label: str = "",
        groups: Sequence[str] = (),
    ) -> TokenMade:
        """Make a token for a user, good for `expires_s` seconds; only admins may. It is told this once."""
        request = TokenRequest(user=user, role=role, expires_s=expires_s, label=label, groups=list(groups))
        return await self._ask(calls.create_token(request))

    async def tokens(self) -> list[TokenInfo]:
        """Return the tokens that there are, without themselves; only admins may."""
        return [one async for page in self._pages(calls.tokens) for one in page.tokens]

    async def revoke_tokens(self, which: str) -> list[TokenInfo]:
        """End a token at once, by its id, or all tokens of a user; return those. Only admins may."""
        return (await self._ask(calls.revoke_tokens(which))).tokens

    async def stop(self) -> ServerInfo:
        """Ask the service to end, which it does a little later; unfinished jobs go on at its next start."""
        return await self._ask(calls.stop())

    async def close(self) -> None:
        """Close the connection. The next call opens another."""
        http, self._http = self._http, None
        reach, self._reach = self._reach, None
        if http is not None:
            await http.aclose()
        if reach is not None:
            reach.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _connected(self) -> httpx.AsyncClient:
        if self._http is None:
            socket = self._address.socket
            try:
                self._reach = Reach(socket) if socket else None
            except OSError as error:
                raise unreachable(self._address, error) from error
            path = self._reach.path if self._reach else None
            transport = httpx.AsyncHTTPTransport(verify=tls(self._address), trust_env=False, uds=path)
            self._http = httpx.AsyncClient(transport=transport, **settings(self._address, self._timeout_s))
        return self._http

    async def _send(self, call: Call[T], content: AsyncIterator[bytes] | None, stream: bool) -> httpx.Response:
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
                return await http.send(request, stream=stream)
        except NoServer:
            await self.close()  # The next try finds a service that was started in another place of the same name.
            raise

    async def _ask(self, call: Call[T], content: AsyncIterator[bytes] | None = None) -> T:
        response = await self._send(call, content, False)
        return calls.read(call, response.status_code, response.content, self._address)

    async def _pages(self, call: Callable[[str | None], Call[P]]) -> AsyncIterator[P]:
        """Yield the pages of a list; `call` asks for the one after a place."""
        page = await self._ask(call(None))
        yield page
        while page.next is not None:
            page = await self._ask(call(page.next))
            yield page

    async def _stream(self, call: Call[None]) -> httpx.Response:
        response = await self._send(call, None, True)
        if response.status_code >= 300:
            with speaking(self._address):
                body = await response.aread()
            await response.aclose()
            raise calls.problem(response.status_code, body, self._address)
        return response


async def _in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces without standing in the loop's way while they are read."""
    while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
        yield chunk
