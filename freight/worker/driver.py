"""Keeping a model server busy: requests in flight, tries, back-pressure, and the lines that come of it."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from freight.core.answer import (
    INFERENCE_FAILED,
    INVALID_RESPONSE,
    MAX_TRIES,
    REQUEST_TIMEOUT,
    BadAnswer,
    Line,
    Reply,
    answer_line,
    error_line,
    read_answer,
    refused_line,
    reply_kind,
)
from freight.core.messages import Lease, Returned
from freight.core.record import PATHS, ModelName, Outgoing, outgoing
from freight.core.window import Window
from freight.engines.base import EngineLoad
from freight.engines.client import (
    MOST_ANSWER_BYTES,
    EngineClient,
    HttpReply,
    NeverSent,
    TookTooLong,
    TooLarge,
    Unreachable,
    retry_after_s,
)

# Bytes of record lines that a worker holds at most, in flight and waiting.
HELD_BYTES: Final = 48_000_000
# Finished lines are sent off at this many, or this many bytes, if not sooner.
BULK_LINES: Final = 64
BULK_BYTES: Final = 4_000_000
_FIRST_BACKOFF_S: Final = 0.5
_BUSY_BACKOFF_S: Final = (1.0, 30.0)
# A server that asks to be asked again at once is asked after this.
_LEAST_RETRY_S: Final = 0.1
# A longer wait is told to who looks.
_TOLD_WAIT_S: Final = 5.0
_PROBE_PAUSE_S: Final = (0.5, 5.0)
# Records asked for beyond the window, by how fast they go.
_LOOKAHEAD_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Policy:
    """How requests are made. `record_timeout_s` is 0 for none; `jitter` returns a factor about 1."""

    model: ModelName
    record_timeout_s: float
    jitter: Callable[[], float]


class Driver:
    """Drives one server. `dies` tells, within a second, whether the server's process is ending."""

    def __init__(
        self, client: EngineClient, window: Window, policy: Policy, dies: Callable[[], Awaitable[bool]]
    ) -> None:
        self._client = client
        self._policy = policy
        self._dies = dies
        self.window = window
        self.wake = asyncio.Event()
        self.answers = 0
        self.trouble: str | None = None
        # What an attempt raised that it should not: its record would wait here for ever.
        self.fault: BaseException | None = None
        self._queue: deque[Lease] = deque()
        self._in_flight: dict[int, Lease] = {}
        # Those of them for which no connection could be made.
        self._unsent: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._delayed: dict[int, tuple[asyncio.TimerHandle, Lease]] = {}
        self._held_bytes = 0
        self._done: list[Line] = []
        self._done_bytes = 0
        self._busy = False  # It said 429, and has answered nothing since.
        self._busy_until = 0.0
        # Nothing goes out before this goes off.
        self._waiting: asyncio.TimerHandle | None = None
        self._busy_backoff_s = _BUSY_BACKOFF_S[0]
        self._probing: asyncio.Task[str | None] | None = None
        self._rate = 0.0
        self._rate_mark = (time.monotonic(), 0)
        self._paused = False

    def give(self, leases: list[Lease]) -> None:
        """Take on more records."""
        self._queue.extend(leases)
        self._held_bytes += sum(len(lease.line) for lease in leases)
        self._start_some()

    def room(self) -> int:
        """Return how many more records to ask for."""
        if self._paused or self.is_pushed_back() or self._held_bytes >= HELD_BYTES:
            return 0
        ahead = max(2, int(self._rate * _LOOKAHEAD_S))
        return max(0, self.window.limit + ahead - self.held())

    def held(self) -> int:
        """Return how many records are here unanswered."""
        return len(self._queue) + len(self._in_flight) + len(self._delayed)

    def holdings(self) -> list[Returned]:
        """Return all records that are here, those answered and not yet collected with them."""
        leases = [*self._queue, *self._in_flight.values(), *(lease for _, lease in self._delayed.values())]
        here = [Returned(lease.index, lease.tries) for lease in leases]
        return here + [Returned(line.index, 0) for line in self._done]

    def in_flight(self) -> int:
        """Return how many requests are with the server."""
        return len(self._in_flight)

    def note(self) -> str:
        """Return why no requests go out; "" while they do."""
        if self.trouble:
            return self.trouble
        wait_s = self._busy_until - time.monotonic() if self._waiting else 0.0
        return f"the server asks to wait {wait_s:.0f} s" if wait_s > _TOLD_WAIT_S and self.held() else ""

    def is_finished(self) -> bool:
        """Return whether all that was here is answered, and some of it not collected yet."""
        return bool(self._done) and not self.held()

    def looked(self, load: EngineLoad) -> None:
        """Take note of what the server says of itself; more requests may go out."""
        if not self._paused and not self.trouble:
            seen = (load.running, load.waiting, load.preemptions, load.cache_use)
            self.window.looked(time.monotonic(), len(self._in_flight), *seen)
            self._start_some()

    def collect(self) -> list[Line]:
        """Return the lines finished since the last call."""
        done, self._done, self._done_bytes = self._done, [], 0
        self._measure_rate()
        return done

    def pause(self) -> None:
        """Start no more requests until `resume`."""
        self._paused = True

    def resume(self, client: EngineClient) -> None:
        """Go on, with a server that may be another one."""
        self._client = client
        self._paused = self._busy = False
        # What the server before this one asked for does not bind it.
        self._waited()
        self._busy_backoff_s = _BUSY_BACKOFF_S[0]
        # One that is under way asks the server before this one.
        self._probing = None
        self.trouble = None
        self.window.resumed(time.monotonic())
        self._start_some()

    async def take_in_flight(self, patience_s: float = 0.0) -> list[Lease]:
        """Break off all requests and return their records, which are no longer held here.

        They have `patience_s` to end by themselves. Those that the server never saw are waiting again.
        """
        if patience_s and self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        unsent = [lease for lease in self._in_flight.values() if lease.index in self._unsent]
        taken = [lease for lease in self._in_flight.values() if lease.index not in self._unsent]
        self._in_flight.clear()
        self._unsent.clear()
        self._queue.extendleft(unsent)
        self._let_go(taken)
        return taken

    def take_waiting(self) -> list[Returned]:
        """Return the records with no request in flight, which are no longer held here."""
        for handle, _ in self._delayed.values():
            handle.cancel()
        taken = [*self._queue, *(lease for _, lease in self._delayed.values())]
        self._queue.clear()
        self._delayed.clear()
        self._let_go(taken)
        return [Returned(lease.index, lease.tries) for lease in taken]

    def _let_go(self, leases: list[Lease]) -> None:
        self._held_bytes -= sum(len(lease.line) for lease in leases)

    def _start_some(self) -> None:
        if self._paused or self.trouble or self._waiting is not None:
            return
        while self._queue and len(self._in_flight) < self.window.limit:
            lease = self._queue.popleft()
            self._in_flight[lease.index] = lease
            task = asyncio.create_task(self._attempt(lease))
            self._tasks.add(task)
            task.add_done_callback(self._attempted)
        if not self._queue:
            self.wake.set()

    def _attempted(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.fault = self.fault or fault
            self.wake.set()

    async def _attempt(self, lease: Lease) -> None:
        request = outgoing(lease.line, self._policy.model)
        began = time.monotonic()
        try:
            reply = await self._client.post(
                PATHS[request.endpoint], request.body, self._policy.record_timeout_s or None
            )
        except TookTooLong:
            message = f"no answer within {self._policy.record_timeout_s:g} s"
            self._finish(lease, error_line(lease.index, request.custom_id, REQUEST_TIMEOUT, message))
        except TooLarge:
            message = f"the engine's answer has more than {MOST_ANSWER_BYTES} bytes"
            self._finish(lease, error_line(lease.index, request.custom_id, INVALID_RESPONSE, message))
        except Unreachable as error:
            failed = error_line(lease.index, request.custom_id, INFERENCE_FAILED, f"no answer from the engine: {error}")
            if isinstance(error, NeverSent):
                self._unsent.add(lease.index)
            # A server that is ending is to blame itself; its records are reported with its death.
            if not await self._dies():
                self._unsent.discard(lease.index)
                await self._failed(lease, failed)
        else:
            await self._judge(lease, request, reply, began)

    async def _judge(self, lease: Lease, request: Outgoing, reply: HttpReply, began: float) -> None:
        request_id = reply.request_id or secrets.token_hex(16)
        kind = reply_kind(reply.status)
        if kind is Reply.BUSY:
            self._pushed_back(lease, retry_after_s(reply.retry_after, time.time()))
        elif kind is Reply.REFUSED:
            self._finish(lease, refused_line(lease.index, request.custom_id, reply.status, request_id, reply.body))
        elif kind is Reply.BROKEN:
            if reply.status == 503:
                self.window.pushed_back(time.monotonic())
            line = refused_line(lease.index, request.custom_id, reply.status, request_id, reply.body)
            await self._failed(lease, line)
        else:
            try:
                answer = read_answer(reply.body, request.endpoint, reply.status)
            except BadAnswer as error:
                line = error_line(lease.index, request.custom_id, INVALID_RESPONSE, str(error))
                await self._failed(lease, line)
                return
            now = time.monotonic()
            # A token that is read costs less than one that is made.
            work = answer.output_tokens + max(0, answer.input_tokens - answer.cached_tokens) // 4
            self.window.succeeded(now, now - began, len(self._in_flight), work)
            self._finish(lease, answer_line(lease.index, request.custom_id, reply.status, request_id, answer))

    def _finish(self, lease: Lease, line: Line) -> None:
        # Whatever came back for good, the server takes requests again.
        self._busy, self._busy_backoff_s = False, _BUSY_BACKOFF_S[0]
        del self._in_flight[lease.index]
        self._held_bytes -= len(lease.line)
        self.answers += 1
        self._done.append(line)
        self._done_bytes += len(line.tail)
        if len(self._done) >= BULK_LINES or self._done_bytes >= BULK_BYTES:
            self.wake.set()
        self._start_some()

    async def _failed(self, lease: Lease, line: Line) -> None:
        """An attempt broke; where the server's health probe fails, no try is charged.

        `line` is what the record gets if this was its last try.
        """
        trouble = await self._probe()
        if trouble:
            self.trouble = self.trouble or trouble
            self.window.pushed_back(time.monotonic())
            self._put_back(lease)
        elif lease.tries + 1 >= MAX_TRIES:
            self._finish(lease, line)
        else:
            self._retry_later(Lease(lease.index, lease.tries + 1, lease.line))

    def _retry_later(self, lease: Lease) -> None:
        delay = _FIRST_BACKOFF_S * 2 ** (lease.tries - 1) * self._policy.jitter()
        del self._in_flight[lease.index]
        handle = asyncio.get_running_loop().call_later(delay, self._retry_now, lease.index)
        self._delayed[lease.index] = (handle, lease)
        self._start_some()

    def _retry_now(self, index: int) -> None:
        _, lease = self._delayed.pop(index)
        self._queue.appendleft(lease)
        self._start_some()

    def _pushed_back(self, lease: Lease, wait_s: float | None) -> None:
        now = time.monotonic()
        self._busy = True
        if wait_s is None and self._waiting is None:
            # Once for all that one wave brings back.
            wait_s = self._busy_backoff_s * self._policy.jitter()
            self._busy_backoff_s = min(_BUSY_BACKOFF_S[1], self._busy_backoff_s * 2)
        self.window.pushed_back(now)
        if wait_s is not None:
            self._wait(max(_LEAST_RETRY_S, wait_s), now)
        self._put_back(lease)

    def _wait(self, wait_s: float, now: float) -> None:
        """Send nothing for so long, or for as long as was asked for before, if that is longer."""
        if self._waiting is not None:
            if now + wait_s <= self._busy_until:
                return
            self._waiting.cancel()
        self._busy_until = now + wait_s
        # The timer alone says when it is over: its clock is not quite the one above.
        self._waiting = asyncio.get_running_loop().call_later(wait_s, self._waited)

    def _waited(self) -> None:
        """Go on."""
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = None
        self._start_some()

    def _put_back(self, lease: Lease) -> None:
        del self._in_flight[lease.index]
        self._queue.appendleft(lease)
        self.wake.set()

    async def _probe(self) -> str | None:
        """Probe the server's health once for all who ask meanwhile; where it fails, watch for its recovery."""
        if self._probing is None:
            self._probing = asyncio.create_task(self._client.problem())
        probing = self._probing
        trouble = await asyncio.shield(probing)
        if self._probing is probing:
            self._probing = None
            if trouble and not self.trouble:
                self.trouble = trouble
                task = asyncio.create_task(self._recover())
                self._tasks.add(task)
                task.add_done_callback(self._attempted)
        return trouble

    async def _recover(self) -> None:
        pause_s, longest_s = _PROBE_PAUSE_S
        while self.trouble:
            await asyncio.sleep(pause_s)
            self.trouble = await self._client.problem()
            pause_s = min(longest_s, pause_s * 1.5)
        self.window.resumed(time.monotonic())
        self.wake.set()
        self._start_some()

    def is_pushed_back(self) -> bool:
        """Return whether the server takes no records now."""
        return self.trouble is not None or (self._busy and self.held() > 0)

    def _measure_rate(self) -> None:
        now, (since, answers) = time.monotonic(), self._rate_mark
        if now - since >= _LOOKAHEAD_S:
            self._rate = (self.answers - answers) / (now - since)
            self._rate_mark = (now, self.answers)
