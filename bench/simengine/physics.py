"""Continuous batching in one step loop, with no clock and no sockets: who runs in which step, and how long it takes.

Each step, every running request makes one token, and what is left of the step's token budget goes to reading prompts,
first come first served. A step in which nothing begins or ends differs from the one before by a constant, so any
number of these is done at once: the cost is one of requests, not of tokens.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.simengine.blocks import BLOCK_TOKENS, BlockCache, blocks_of


@dataclass(frozen=True, slots=True)
class Physics:
    """What an engine is made of.

    A step takes `base_s`, and `prefill_s` for each token of a prompt, `context_s` for each token of context that is
    read, and `sequence_s` for each request that takes part.
    """

    base_s: float
    prefill_s: float
    context_s: float
    sequence_s: float
    max_num_seqs: int
    max_batched_tokens: int
    blocks: int
    max_model_len: int

    def __post_init__(self) -> None:
        """Raise ValueError for an engine that could come to a standstill."""
        if self.max_batched_tokens < self.max_num_seqs:
            raise ValueError(f"{self.max_batched_tokens} tokens a step are too few for {self.max_num_seqs} requests")
        if self.blocks * BLOCK_TOKENS < self.max_model_len:
            raise ValueError(f"{self.blocks} blocks cannot hold one request of {self.max_model_len} tokens")


@dataclass(slots=True, eq=False)
class Request:
    """One request and what becomes of it. `chain` has a key for each whole block of its prompt.

    `output_tokens` may be 0, for requests that only read; `tag` is the caller's own.
    """

    prompt_tokens: int
    output_tokens: int
    chain: Sequence[int] = ()
    tag: object = None
    cached_tokens: int = 0
    preemptions: int = 0
    admitted_at: float | None = None
    finished_at: float | None = None
    # How it stands, which is the engine's business: made before it was last admitted; of how many tokens that
    # was and how many are unread; the keys it holds; since which step it decodes and until which.
    generated: int = 0
    entry: int = -1
    prefill: int = 0
    unread: int = 0
    held: int = 0
    decodes_from: int = -1
    ends_at: int = -1
    gone: bool = False

    def fresh(self) -> "Request":
        """Return the same request, as nothing had become of it yet."""
        return Request(self.prompt_tokens, self.output_tokens, self.chain, self.tag)


@dataclass(slots=True)
class Totals:
    """What an engine has done so far. Queries and hits are in tokens."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0
    finished: int = 0


@dataclass(slots=True)
class _Decoding:
    """The requests that make a token each step, as sums: no step looks at each of them."""

    count: int = 0
    # Tokens of context that one step reads.
    context: int = 0
    # How many need another block at steps whose number leaves this rest.
    phases: list[int] = field(default_factory=lambda: [0] * BLOCK_TOKENS)

    def put(self, context: int, step: int, by: int) -> None:
        """Add one whose context is `context` before step `step`; take one out where `by` is -1."""
        self.count += by
        self.context += by * context
        self.phases[(step - context) % BLOCK_TOKENS] += by

    def blocks_for(self, step: int, steps: int) -> int:
        """Return the blocks that `steps` steps from `step` on take."""
        rounds, rest = divmod(steps, BLOCK_TOKENS)
        return rounds * self.count + sum(self.phases[(step + i) % BLOCK_TOKENS] for i in range(rest))

    def steps_within(self, step: int, blocks: int) -> int:
        """Return how many steps from `step` on need no more than `blocks` blocks; there must be a request."""
        rounds, left = divmod(blocks, self.count)
        steps = 0
        while (need := self.phases[(step + steps) % BLOCK_TOKENS]) <= left:
            left -= need
            steps += 1
        return rounds * BLOCK_TOKENS + steps


class Engine:
    """The state of one engine. Times are seconds of the caller's clock; nothing here reads one."""

    def __init__(self, physics: Physics) -> None:
        """Make an engine that has been asked nothing."""
        self.physics = physics
        self.cache = BlockCache(physics.blocks)
        self.totals = Totals()
        self._waiting: deque[Request] = deque()
        self._left_waiting = 0
        # In the order of admission: the last is the first to be preempted.
        self._running: dict[Request, None] = {}
        self._decoding = _Decoding()
        self._ends: list[tuple[int, int, Request]] = []
        # The one request of which only a part was read: no other is admitted before it has been.
        self._partial: Request | None = None
        # The first in the queue was refused for want of blocks, and none came free since.
        self._is_blocked = False
        self._entries = 0

    @property
    def running(self) -> int:
        """How many requests take part in the steps."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot or for blocks."""
        return len(self._waiting) - self._left_waiting

    @property
    def in_flight(self) -> int:
        """How many requests were added and have not ended."""
        return self.running + self.waiting

    @property
    def cache_use(self) -> float:
        """The share of the blocks that are in use, from 0 to 1."""
        return self.cache.in_use / self.cache.capacity

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue; raise ValueError for one that can never run."""
        length = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or length > self.physics.max_model_len:
            raise ValueError(f"request of {length} tokens; the engine takes up to {self.physics.max_model_len}")
        self._waiting.append(request)

    def drop(self, request: Request) -> None:
        """Forget a request that was added and has not finished."""
        if request.gone or request.finished_at is not None:
            return
        request.gone = True
        if request in self._running:
            self._leave(request)
        else:
            self._left_waiting += 1
            self._skip_gone()

    def step(self, now: float, until: float = math.inf) -> tuple[float, list[Request]]:
        """Do the step that begins at `now`; return how long it took and who finished at its end.

        Where nothing begins or ends it does as many as begin before `until`, up to the one in which a request ends.
        An engine with nothing to do returns no time.
        """
        if not self.in_flight:
            return 0.0, []
        steps = self._quiet_steps()
        if not steps:
            return self._eventful_step(now)
        if until < math.inf:
            steps = min(steps, self._steps_to_cover(until - now))
        seconds = self._quiet_seconds(steps)
        decoding = self._decoding
        self.cache.take_private(decoding.blocks_for(self.totals.steps, steps))
        self._pass(steps)
        return seconds, self._ended(now + seconds)

    def quiet_seconds(self) -> float:
        """Return how long nothing will begin or end, if nothing is added; 0 when that is not known."""
        steps = self._quiet_steps() if self._running else 0
        return self._quiet_seconds(steps) if steps else 0.0

    def _quiet_steps(self) -> int:
        """Return the steps up to the next end, if nobody can be admitted or must be preempted before; else 0."""
        if self._partial is not None or not self._decoding.count:
            return 0
        if self._waiting and not self._is_blocked and self.running < self.physics.max_num_seqs:
            return 0
        step, ends = self.totals.steps, self._ends
        while ends[0][1] != ends[0][2].entry:
            heapq.heappop(ends)  # It was preempted or dropped.
        return min(ends[0][0] - step, self._decoding.steps_within(step, self.cache.free))

    def _quiet_seconds(self, steps: int) -> float:
        growth = self.physics.context_s * self._decoding.count
        return steps * self._decode_s() + growth * (steps * (steps - 1) / 2)

    def _decode_s(self) -> float:
        physics, decoding = self.physics, self._decoding
        return physics.base_s + physics.sequence_s * decoding.count + physics.context_s * decoding.context

    def _steps_to_cover(self, span_s: float) -> int:
        """Return the fewest steps that take at least `span_s`, and at least one."""
        first, growth = self._decode_s(), self.physics.context_s * self._decoding.count
        if growth:
            half = first - growth / 2
            steps = (math.sqrt(half * half + 2 * growth * max(span_s, 0.0)) - half) / growth
        else:
            steps = span_s / first
        whole = max(1, math.ceil(steps))
        # The root is off by a rounding error at times.
        while self._quiet_seconds(whole) < span_s:
            whole += 1
        while whole > 1 and self._quiet_seconds(whole - 1) >= span_s:
            whole -= 1
        return whole

    def _eventful_step(self, now: float) -> tuple[float, list[Request]]:
        """Do one step in which a request may be preempted, read or admitted."""
        physics, decoding = self.physics, self._decoding
        was_preempted = self._make_room()
        self.cache.take_private(decoding.phases[self.totals.steps % BLOCK_TOKENS])
        seconds = self._decode_s()
        budget = physics.max_batched_tokens - decoding.count
        readers: list[Request] = []
        prefill = context = 0
        if self._partial is not None:
            readers.append(self._partial)
            self._partial = None
        while budget:
            reader = readers[-1] if readers and readers[-1].unread else None
            if reader is None:
                reader = None if was_preempted else self._admit(now)
                if reader is None:
                    break
                readers.append(reader)
            tokens = min(budget, reader.unread)
            context += reader.prefill - reader.unread
            reader.unread -= tokens
            budget -= tokens
            prefill += tokens
        seconds += physics.prefill_s * prefill + physics.context_s * context + physics.sequence_s * len(readers)
        self._pass(1)
        ended = self._ended(now + seconds)
        for reader in readers:
            if reader.unread:
                self._partial = reader
            elif self._has_read(reader):
                self._finish(reader, now + seconds, ended)
        return seconds, ended

    def _pass(self, steps: int) -> None:
        """Let every decoding request make a token in each of `steps` steps."""
        decoding = self._decoding
        decoding.context += decoding.count * steps
        self.totals.generation_tokens += decoding.count * steps
        self.totals.steps += steps

    def _make_room(self) -> bool:
        """Preempt the youngest until the others can go on; return whether any was."""
        was_preempted = False
        while self._decoding.phases[self.totals.steps % BLOCK_TOKENS] > self.cache.free:
            youngest = next(reversed(self._running))
            if youngest.decodes_from >= 0:
                youngest.generated = youngest.output_tokens - (youngest.ends_at - self.totals.steps)
            youngest.preemptions += 1
            self.totals.preemptions += 1
            self._leave(youngest)
            self._waiting.appendleft(youngest)
            was_preempted = True
        return was_preempted

    def _admit(self, now: float) -> Request | None:
        """Take the first of the queue in, when there is a slot and it fits; return it."""
        if not self._waiting or self._is_blocked or self.running >= self.physics.max_num_seqs:
            return None
        request = self._waiting[0]
        tokens = request.prompt_tokens + request.generated
        # The last token is always computed: the first new one comes out of it.
        hits = self.cache.match(request.chain, (tokens - 1) // BLOCK_TOKENS)
        held = self.cache.take(request.chain, hits, blocks_of(tokens))
        if held is None:
            self._is_blocked = True
            return None
        self._waiting.popleft()
        self._skip_gone()
        if request.admitted_at is None:
            request.admitted_at = now
            request.cached_tokens = hits * BLOCK_TOKENS
            self.totals.cache_queries += request.prompt_tokens
            self.totals.cache_hits += request.cached_tokens
        self._entries += 1
        request.entry = self._entries
        request.prefill, request.unread, request.held = tokens, tokens - hits * BLOCK_TOKENS, held
        self._running[request] = None
        return request

    def _has_read(self, reader: Request) -> bool:
        """Let a request whose prompt was read make its first token; return whether that was all."""
        totals = self.totals
        totals.generation_tokens += reader.output_tokens > 0
        if not reader.generated:
            totals.prompt_tokens += reader.prompt_tokens
        left = reader.output_tokens - reader.generated - 1
        if left <= 0:
            return True
        reader.decodes_from, reader.ends_at = totals.steps, totals.steps + left
        self._decoding.put(reader.prefill, totals.steps, 1)
        heapq.heappush(self._ends, (reader.ends_at, reader.entry, reader))
        return False

    def _ended(self, now: float) -> list[Request]:
        """Return those whose last token has been made."""
        ended: list[Request] = []
        ends = self._ends
        while ends and ends[0][0] <= self.totals.steps:
            _, entry, request = heapq.heappop(ends)
            if entry == request.entry:
                self._finish(request, now, ended)
        return ended

    def _finish(self, request: Request, now: float, ended: list[Request]) -> None:
        self._leave(request)
        request.finished_at = now
        self.totals.finished += 1
        ended.append(request)

    def _leave(self, request: Request) -> None:
        """Take a running request out and its blocks back."""
        context = request.prefill
        if request.decodes_from >= 0:
            context += self.totals.steps - request.decodes_from
            self._decoding.put(context, self.totals.steps, -1)
            request.decodes_from = -1
        if self._partial is request:
            self._partial = None
        self.cache.give_back(request.chain, request.held, blocks_of(context) - request.held)
        del self._running[request]
        request.entry = -1
        self._is_blocked = False

    def _skip_gone(self) -> None:
        """Take those that were dropped off the head of the queue."""
        while self._waiting and self._waiting[0].gone:
            self._waiting.popleft()
            self._left_waiting -= 1
            self._is_blocked = False
