"""The physics done the long way: every block an object, every step and every request by itself."""

from collections import deque
from dataclasses import dataclass, field

from bench.simengine.physics import Physics

BLOCK = 16


@dataclass(eq=False)
class Block:
    key: int | None = None
    users: int = 0


@dataclass(eq=False)
class Asked:
    """One request, and what became of it."""

    prompt: int
    output: int
    chain: list[int]
    made: int = 0
    computed: int = 0
    blocks: list[Block] = field(default_factory=list[Block])
    cached: int | None = None
    preempted: int = 0
    has_read: bool = False
    finished_at: float | None = None

    @property
    def target(self) -> int:
        """Tokens that must be computed before the next one is made."""
        return self.prompt + self.made


class Stepwise:
    """An engine that schedules as continuous batching does: the running first, oldest first, then the queue."""

    def __init__(self, physics: Physics) -> None:
        self.physics = physics
        self.free = deque(Block() for _ in range(physics.blocks))
        self.waiting: deque[Asked] = deque()
        self.running: list[Asked] = []

    def step(self) -> tuple[float, list[Asked]]:
        """Do one step; return its seconds and who finished."""
        budget = self.physics.max_batched_tokens
        batch: list[tuple[Asked, int]] = []
        was_preempted = False
        for asked in list(self.running):
            if asked not in self.running:
                continue
            tokens = min(budget, asked.target - asked.computed)
            while asked in self.running and not self._grow(asked, asked.computed + tokens):
                self._preempt(self.running[-1])
                was_preempted = True
            if asked in self.running:
                batch.append((asked, tokens))
                budget -= tokens
        while self.waiting and not was_preempted and budget and len(self.running) < self.physics.max_num_seqs:
            asked = self.waiting[0]
            if not self._admit(asked):
                break
            self.running.append(self.waiting.popleft())
            batch.append((asked, min(budget, asked.target - asked.computed)))
            budget -= batch[-1][1]
        return self._seconds(batch), self._compute(batch)

    def _seconds(self, batch: list[tuple[Asked, int]]) -> float:
        physics = self.physics
        reading = sum(tokens for asked, tokens in batch if not asked.has_read)
        return (
            physics.base_s
            + physics.prefill_s * reading
            + physics.context_s * sum(asked.computed for asked, _ in batch)
            + physics.sequence_s * len(batch)
        )

    def _compute(self, batch: list[tuple[Asked, int]]) -> list[Asked]:
        finished: list[Asked] = []
        for asked, tokens in batch:
            asked.computed += tokens
            if asked.computed == asked.target:
                asked.has_read = True
                asked.made += 1
                if asked.made >= asked.output:
                    finished.append(asked)
        for asked in finished:
            self._leave(asked)
        return finished

    def _admit(self, asked: Asked) -> bool:
        """Give a request the blocks of its whole prompt, as many as can from those that are there."""
        found = {block.key: block for block in self._all() if block.key is not None}
        hits: list[Block] = []
        for key in asked.chain[: (asked.target - 1) // BLOCK]:
            if key not in found:
                break
            hits.append(found[key])
        need = -(-asked.target // BLOCK) - len(hits)
        if need > len(self.free) - sum(not block.users for block in hits):
            return False
        for block in hits:
            if not block.users:
                self.free.remove(block)
            block.users += 1
        new = [self._new() for _ in range(need)]
        # A block that others can find already is not to be found a second time, unless it just had to go.
        there = {block.key for block in self._all()}
        for block, key in zip(new, asked.chain[len(hits) :], strict=False):
            block.key = None if key in there else key
        asked.blocks = hits + new
        asked.computed = (len(asked.blocks) - need) * BLOCK
        if asked.cached is None:
            asked.cached = asked.computed
        return True

    def _all(self) -> list[Block]:
        return [*self.free, *(block for asked in self.running for block in asked.blocks)]

    def _new(self) -> Block:
        block = self.free.popleft()
        block.key, block.users = None, 1
        return block

    def _grow(self, asked: Asked, tokens: int) -> bool:
        while len(asked.blocks) * BLOCK < tokens:
            if not self.free:
                return False
            asked.blocks.append(self._new())
        return True

    def _preempt(self, asked: Asked) -> None:
        self._leave(asked)
        asked.preempted += 1
        self.waiting.appendleft(asked)

    def _leave(self, asked: Asked) -> None:
        self.running.remove(asked)
        for block in reversed(asked.blocks):
            block.users -= 1
            if not block.users:
                self.free.append(block)
        asked.blocks, asked.computed, asked.has_read = [], 0, False
