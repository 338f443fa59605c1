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
from bench.simengine.batching import Batch
from bench.simengine.faults import Chance, Hang, Slow
from bench.simengine.markers import PREFIX, Deed, Link, Script, read_script
from bench.simengine.once import SeenPrompts
from bench.simengine.options import Options
from bench.simengine.physics import Request
from bench.simengine.prompt import NO_LIMIT, Work, read_work
from bench.simengine.record import Recorder
from bench.simengine.reply import Reply, error_reply

DIE_AFTER_STATUS: Final = 3
DIE_WHEN_READY_S: Final = 0.01

LOADING: Final = error_reply(503, "loading model")
CHAOS: Final = error_reply(503, "overloaded by chance", headers=b"Retry-After: 0\r\n")
UNAUTHORIZED: Final = error_reply(401, "incorrect API key provided", code="invalid_api_key")

_PLAIN: Final = Script()


class Task:
    """An answer that the physics has to make first; `reply` makes it of how many tokens were cached."""

    __slots__ = ("_ask", "_engine", "_path", "_script", "work")

    def __init__(self, engine: "Engine", path: str, ask: Ask, script: Script, work: Work) -> None:
        """Note what is to be answered."""
        self._engine = engine
        self._path = path
        self._ask = ask
        self._script = script
        self.work = work

    def reply(self, cached_tokens: int) -> Reply:
        """Return the answer."""
        self._ask.cached_tokens = cached_tokens
        return self._engine.scripted_answer(self._path, self._ask, self._script, self.work)


Outcome = Reply | Deed | Task | Hang


class Client(Link, Protocol):
    """A connection as the engine sees it; `jobs` are its requests that wait for their answer."""

    jobs: "set[Job]"

    def send(self, reply: Reply, *, keep_alive: bool) -> None:
        """Write `reply`, then close the connection unless it is to be kept."""
        ...


class Job:
    """A request that cannot be answered at once: it takes time, or waits for a slot."""

    __slots__ = ("client", "delay_s", "gone", "keep_alive", "outcome", "request", "started", "timer")

    def __init__(self, client: Client, outcome: Outcome | None, delay_s: float, keep_alive: bool) -> None:
        """Make a job; one whose outcome is None is never answered."""
        self.client = client
        self.outcome = outcome
        self.delay_s = delay_s
        self.keep_alive = keep_alive
        self.started = False
        self.gone = False
        self.timer: asyncio.TimerHandle | None = None
        # What the physics has of it, until that is done.
        self.request: Request | None = None


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
        self._chance = Chance(options.faults, options.seed) if options.faults else None
        self.batch: Batch | None = None
        if options.physics is not None:
            self.batch = Batch(options.physics, options.speed, loop, self._batch_done)
        self._waiting: deque[Job] = deque()
        self.by_prompt: Counter[str] = Counter()
        self.requests = self.answered = 0
        self.running = self.in_flight = self.in_flight_max = 0
        self.prompt_tokens = self.generation_tokens = 0
        # By the loop's clock, which is the machine's monotonic one; 0 until then.
        self.first_request_at = self.last_answer_at = 0.0
        self.ready_at = loop.time()
        self.stop_listening: Callable[[], None] = lambda: None

    def load(self) -> tuple[int, int]:
        """Return how many requests run, and how many were accepted and do not run yet."""
        if self.batch is None:
            return self.running, self.in_flight - self.running
        core = self.batch.look()
        return self.running + core.running, core.waiting

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
            # No request may be on its way to it: its end is no record's fault.
            self.stop_listening()
            # After what the connection has to write: the probe gets its answer.
            self._loop.call_later(DIE_WHEN_READY_S, os._exit, DIE_AFTER_STATUS)

    def post(self, client: Client, path: str, body: bytes, *, authorized: bool, keep_alive: bool) -> None:
        """Take one POST and answer it now, later or never, as the options and its markers say."""
        self.requests += 1
        if self.requests == 1:
            self.first_request_at = self._loop.time()
        if self._record is not None:
            self._record(path, body)
        if self.requests == self.options.die_after:
            os._exit(DIE_AFTER_STATUS)
        outcome, delay_s = self._decide(path, body, authorized)
        if self.hung or isinstance(outcome, Hang):
            self._queue(Job(client, None, 0, keep_alive))
        elif isinstance(outcome, Task):
            self._put_in_batch(client, outcome, delay_s + self.options.latency_s, keep_alive)
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
        if self.batch is not None and job.request is not None:
            self.batch.drop(job.request)
        elif job.started:
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
            return self._meet(path, READERS[path](body))
        except AskError as error:
            return error_reply(400, str(error), param=error.param), 0

    def _meet(self, path: str, ask: Ask) -> tuple[Outcome, float]:
        """Let what is left to chance go wrong, or else answer; raise AskError for a prompt that is too long."""
        options = self.options
        if options.count_prompts:
            self.by_prompt[ask.text] += 1
        if options.poison is not None and options.poison in ask.text:
            os._exit(DIE_AFTER_STATUS)
        if options.chaos and self._random.random() < options.chaos:
            return CHAOS, 0
        fault = self._chance.draw() if self._chance is not None else None
        if fault is not None and not isinstance(fault, Slow):
            return fault, 0
        outcome, delay_s = self._play(path, ask)
        return outcome, delay_s + (options.slow_s / options.speed if fault else 0)

    def _play(self, path: str, ask: Ask) -> tuple[Outcome, float]:
        """Return the answer, or what the markers in the text put in its place."""
        script = read_script(ask.text, self._seen.first_time) if PREFIX in ask.text else _PLAIN
        instead = script.deed or script.reply
        if instead:
            return instead, script.delay_s
        if self.options.profile is None:
            ask.prompt_tokens = ask.count_words()
            return self.scripted_answer(path, ask, script, None), script.delay_s
        physics = self.options.physics
        work = read_work(path, ask, self.options.lengths, physics.max_model_len if physics else NO_LIMIT)
        ask.prompt_tokens, ask.output_tokens = work.prompt_tokens, work.output_tokens
        if physics is not None:
            return Task(self, path, ask, script, work), script.delay_s
        return self.scripted_answer(path, ask, script, work), script.delay_s

    def scripted_answer(self, path: str, ask: Ask, script: Script, work: Work | None) -> Reply:
        """Return the answer, changed as its markers say."""
        content, finish = script.content, script.finish
        if work is not None:
            content = work.content(ask.copies) if content is None else content
            finish = "length" if work.was_cut else finish
        elif content is None:
            content = digest_text(ask.text) if self.options.digest else "ok"
        reply = ANSWERS[path](ask, ask.model or self.options.models[0], content, finish)
        return script.reshape(reply) if script.reshape else reply

    def _put_in_batch(self, client: Client, task: Task, delay_s: float, keep_alive: bool) -> None:
        """Let the physics say when the answer is there; it goes out `delay_s` later."""
        assert self.batch is not None
        job = Job(client, task, delay_s, keep_alive)
        job.request = task.work.request(job)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        client.jobs.add(job)
        self.batch.add(job.request)

    def _batch_done(self, request: Request) -> None:
        """Answer a request that the physics is done with."""
        job = request.tag
        assert isinstance(job, Job) and isinstance(job.outcome, Task)
        if job.gone:
            return
        job.request = None
        job.started = True
        self.running += 1
        reply = job.outcome.reply(request.cached_tokens)
        if job.delay_s:
            job.timer = self._loop.call_later(job.delay_s, self._finish, job, reply)
        else:
            self._finish(job, reply)

    def _process(self, client: Client, outcome: Reply | Deed, delay_s: float, keep_alive: bool) -> None:
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
            if isinstance(job.outcome, Reply) or callable(job.outcome):
                job.timer = self._loop.call_later(job.delay_s, self._finish, job, job.outcome)

    def _finish(self, job: Job, outcome: Reply | Deed) -> None:
        if self.hung:
            return  # Nothing that was under way when the engine hung gets its answer.
        job.client.jobs.discard(job)
        self.in_flight -= 1
        self.running -= 1
        self._deliver(job.client, outcome, job.keep_alive)
        self._start_waiting()

    def _deliver(self, client: Client, outcome: Reply | Deed, keep_alive: bool) -> None:
        if not isinstance(outcome, Reply):
            outcome(client)
            return
        self.prompt_tokens += outcome.prompt_tokens
        self.generation_tokens += outcome.completion_tokens
        if not outcome.missing_bytes:
            self.answered += 1
            self.last_answer_at = self._loop.time()
        client.send(outcome, keep_alive=keep_alive)
