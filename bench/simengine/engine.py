"""The simulated engine: takes POSTs, decides what each gets, and when.

It knows no sockets: a connection hands it whole requests and gets replies back.
"""

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Final, Protocol

from bench.simengine.answers import ANSWERS, digest_text
from bench.simengine.asks import READERS, Ask, AskError
from bench.simengine.markers import PREFIX, Deed, Link, Script, read_script
from bench.simengine.once import SeenPrompts
from bench.simengine.options import Options
from bench.simengine.record import Recorder
from bench.simengine.reply import Reply, error_reply

DIE_AFTER_STATUS: Final = 3
DIE_WHEN_READY_S: Final = 0.01

LOADING: Final = error_reply(503, "loading model")
CHAOS: Final = error_reply(503, "overloaded by chance", headers=b"Retry-After: 0\r\n")
UNAUTHORIZED: Final = error_reply(401, "incorrect API key provided", code="invalid_api_key")

Outcome = Reply | Deed


class Client(Link, Protocol):
    """A connection as the engine sees it; `jobs` are its requests that wait for their answer."""

    jobs: "set[Job]"

    def send(self, reply: Reply, *, keep_alive: bool) -> None:
        """Write `reply`, then close the connection unless it is to be kept."""
        ...


class Job:
    """A request that cannot be answered at once: it takes time, or waits for a slot."""

    __slots__ = ("client", "delay_s", "gone", "keep_alive", "outcome", "started", "timer")

    def __init__(self, client: Client, outcome: Outcome | None, delay_s: float, keep_alive: bool) -> None:
        """Make a job; one whose outcome is None is never answered."""
        self.client = client
        self.outcome = outcome
        self.delay_s = delay_s
        self.keep_alive = keep_alive
        self.started = False
        self.gone = False
        self.timer: asyncio.TimerHandle | None = None


class Engine:
    """Counts, slots and timers of one simulated engine."""

    def __init__(self, options: Options, loop: asyncio.AbstractEventLoop) -> None:
        """Start an engine that has been asked nothing; its loading time begins now."""
        self.options = options
        self._loop = loop
        self.mute = options.mute
        self._loaded_at = loop.time() + options.loading_s
        self._record: Callable[[str, bytes], None] | None = None
        if options.record is not None:
            self._record = Recorder(options.record).append
        self._seen = SeenPrompts(options.once_file)
        self._random = Random(options.seed)
        self._waiting: deque[Job] = deque()
        self.by_prompt: Counter[str] = Counter()
        self.requests = self.answered = 0
        self.running = self.in_flight = self.in_flight_max = 0
        self.prompt_tokens = self.generation_tokens = 0

    @property
    def waiting(self) -> int:
        """Requests accepted that have no slot yet."""
        return self.in_flight - self.running

    @property
    def hung(self) -> bool:
        """Whether the engine has stopped answering for good."""
        return 0 < self.options.hang_at <= self.requests

    def is_loading(self) -> bool:
        """Return whether the model is still loading."""
        return bool(self.options.loading_s) and self._loop.time() < self._loaded_at

    def health_answered(self) -> None:
        """Note that /health was answered; an engine that is to die once it is ready says nothing more, and does so."""
        if self.options.die_when_ready and not self.is_loading():
            self.mute = True
            # After what the connection has to write: the probe gets its answer.
            self._loop.call_later(DIE_WHEN_READY_S, os._exit, DIE_AFTER_STATUS)

    def post(self, client: Client, path: str, body: bytes, *, authorized: bool, keep_alive: bool) -> None:
        """Take one POST and answer it now, later or never, as the options and its markers say."""
        self.requests += 1
        if self._record is not None:
            self._record(path, body)
        if self.requests == self.options.die_after:
            os._exit(DIE_AFTER_STATUS)
        outcome, delay_s = self._decide(path, body, authorized)
        if self.hung:
            self._queue(Job(client, None, 0, keep_alive))
        elif not isinstance(outcome, Reply) and not delay_s:
            outcome(client)  # A death or a reset waits for no slot.
        elif outcome is UNAUTHORIZED or outcome is LOADING:
            self._deliver(client, outcome, keep_alive)
        else:
            self._process(client, outcome, delay_s + self.options.latency_s, keep_alive)

    def forget(self, job: Job) -> None:
        """Drop a job whose client is gone, and free its slot."""
        job.gone = True
        self.in_flight -= 1
        if job.started:
            if job.timer is not None:
                job.timer.cancel()
            self.running -= 1
            self._start_waiting()

    def _decide(self, path: str, body: bytes, authorized: bool) -> tuple[Outcome, float]:
        """Return what this request gets, and after how many seconds of its own."""
        if not authorized:
            return UNAUTHORIZED, 0
        if self.is_loading():
            return LOADING, 0
        if path not in READERS:
            return error_reply(404, f"no such path: {path}"), 0
        try:
            ask = READERS[path](body)
        except AskError as error:
            return error_reply(400, str(error), param=error.param), 0
        if self.options.count_prompts:
            self.by_prompt[ask.text] += 1
        if self.options.chaos and self._random.random() < self.options.chaos:
            return CHAOS, 0
        return self._play(path, ask)

    def _play(self, path: str, ask: Ask) -> tuple[Outcome, float]:
        """Return the answer, or what the markers in the text put in its place."""
        if PREFIX not in ask.text:
            return self._answer(path, ask), 0
        script = read_script(ask.text, self._seen.first_time)
        return script.deed or script.reply or self._scripted_answer(path, ask, script), script.delay_s

    def _answer(self, path: str, ask: Ask, content: str | None = None, finish: str = "stop") -> Reply:
        if content is None:
            content = digest_text(ask.text) if self.options.digest else "ok"
        return ANSWERS[path](ask, ask.model or self.options.models[0], content, finish)

    def _scripted_answer(self, path: str, ask: Ask, script: Script) -> Reply:
        reply = self._answer(path, ask, script.content, script.finish)
        return script.reshape(reply) if script.reshape else reply

    def _process(self, client: Client, outcome: Outcome, delay_s: float, keep_alive: bool) -> None:
        """Give the request a slot for `delay_s`, then deliver; at once when it can be."""
        if delay_s or (self.options.slots and self.running >= self.options.slots):
            self._queue(Job(client, outcome, delay_s, keep_alive))
            return
        self.in_flight_max = max(self.in_flight_max, self.in_flight + 1)
        self._deliver(client, outcome, keep_alive)

    def _queue(self, job: Job) -> None:
        """Take the job in, and start it when a slot is free."""
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        job.client.jobs.add(job)
        self._waiting.append(job)
        self._start_waiting()

    def _start_waiting(self) -> None:
        slots = self.options.slots
        while self._waiting and (not slots or self.running < slots):
            job = self._waiting.popleft()
            if job.gone:
                continue
            self.running += 1
            job.started = True
            if job.outcome is not None:
                job.timer = self._loop.call_later(job.delay_s, self._finish, job, job.outcome)

    def _finish(self, job: Job, outcome: Outcome) -> None:
        if self.hung:
            return  # Nothing that was under way when the engine hung gets its answer.
        job.client.jobs.discard(job)
        self.in_flight -= 1
        self.running -= 1
        self._deliver(job.client, outcome, job.keep_alive)
        self._start_waiting()

    def _deliver(self, client: Client, outcome: Outcome, keep_alive: bool) -> None:
        if not isinstance(outcome, Reply):
            outcome(client)
            return
        self.prompt_tokens += outcome.prompt_tokens
        self.generation_tokens += outcome.completion_tokens
        if not outcome.missing_bytes:
            self.answered += 1
        client.send(outcome, keep_alive=keep_alive)
