"""Engines in virtual time: how long a list of requests takes on them, under a rule of who gets what.

`python -m bench.simengine.virtual FILE --profile b200-30b --engines 4` prints what an ideal shared queue would take
for a batch file: no network, no waiting, every slot filled the moment it is free.
"""

import argparse
import heapq
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from bench.simengine.asks import READERS
from bench.simengine.blocks import BLOCK_TOKENS
from bench.simengine.options import add_profile, physics_of
from bench.simengine.physics import Engine, Physics, Request
from bench.simengine.prompt import NO_LIMIT, Lengths, read_work

# Gives the engine of that number its next request, or None when there will be no more for it.
Rule = Callable[[int], Request | None]


@dataclass(frozen=True, slots=True)
class Machine:
    """One engine that takes part: from when, how fast, and with how many requests in flight at most (0: its slots)."""

    physics: Physics
    ready_s: float = 0.0
    speed: float = 1.0
    window: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to. The cached share is of all tokens of prompts."""

    makespan_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    cached_share: float
    preemptions: int
    by_engine: list[int]


def shared_queue(requests: Iterable[Request]) -> Rule:
    """Return the rule by which every engine takes the next of one queue."""
    queue = iter([request.fresh() for request in requests])
    return lambda _engine: next(queue, None)


def static_shards(requests: Sequence[Request], engines: int) -> Rule:
    """Return the rule by which each engine has a contiguous part, equal in number, and no more."""
    shards = [iter([request.fresh() for request in part]) for part in _parts(requests, engines)]
    return lambda engine: next(shards[engine], None)


def stretches(requests: Sequence[Request], engines: int) -> Rule:
    """Return the rule by which each engine has a contiguous part, and takes half of the longest one after it."""
    parts = [deque(request.fresh() for request in part) for part in _parts(requests, engines)]

    def take(engine: int) -> Request | None:
        if not parts[engine]:
            longest = max(parts, key=len)
            stolen = [longest.pop() for _ in range(-(-len(longest) // 2))]
            parts[engine] = deque(reversed(stolen))
        return parts[engine].popleft() if parts[engine] else None

    return take


def _parts(requests: Sequence[Request], engines: int) -> list[Sequence[Request]]:
    cuts = [len(requests) * number // engines for number in range(engines + 1)]
    return [requests[begin:end] for begin, end in pairwise(cuts)]


def run(machines: Sequence[Machine], rule: Rule) -> Outcome:
    """Run all that `rule` gives out; an engine asks for more at each step's end when it has room for it."""
    engines = [Engine(machine.physics) for machine in machines]
    agenda = [(machine.ready_s, number) for number, machine in enumerate(machines)]
    heapq.heapify(agenda)
    finished: list[list[Request]] = [[] for _ in machines]
    makespan_s = 0.0
    while agenda:
        now, number = heapq.heappop(agenda)
        engine, machine = engines[number], machines[number]
        window = machine.window or machine.physics.max_num_seqs
        while engine.in_flight < window and (request := rule(number)) is not None:
            engine.add(request)
        if not engine.in_flight:
            continue
        seconds, ended = engine.step(now)
        now += seconds / machine.speed
        finished[number] += ended
        if ended:
            makespan_s = max(makespan_s, now)
        heapq.heappush(agenda, (now, number))
    return _outcome(makespan_s, engines, finished)


def _outcome(makespan_s: float, engines: list[Engine], finished: list[list[Request]]) -> Outcome:
    ended = [request for each in finished for request in each]
    prompt_tokens = sum(request.prompt_tokens for request in ended)
    return Outcome(
        makespan_s=makespan_s,
        requests=len(ended),
        prompt_tokens=prompt_tokens,
        output_tokens=sum(request.output_tokens for request in ended),
        cached_share=sum(request.cached_tokens for request in ended) / max(1, prompt_tokens),
        preemptions=sum(engine.totals.preemptions for engine in engines),
        by_engine=[len(each) for each in finished],
    )


def best_cached_share(requests: Iterable[Request]) -> float:
    """Return the cached share that one engine with endless blocks would come to, in any order."""
    seen: set[int] = set()
    tokens = cached = 0
    for request in requests:
        most = (request.prompt_tokens - 1) // BLOCK_TOKENS
        hits = 0
        for key in request.chain[:most]:
            if key not in seen:
                break
            hits += 1
        seen.update(request.chain)
        tokens += request.prompt_tokens
        cached += hits * BLOCK_TOKENS
    return cached / max(1, tokens)


def read_requests(path: Path, lengths: Lengths | None = None, context: int = NO_LIMIT) -> Iterator[Request]:
    """Yield the requests of a batch file as an engine with a profile reads them; each is tagged with its prompt."""
    with path.open("rb") as file:
        for raw in file:
            line = json.loads(raw)
            body = json.dumps(line["body"]).encode()
            work = read_work(line["url"], READERS[line["url"]](body), lengths, context)
            yield work.request(work.prompt)


ORDERS: dict[str, Callable[[Request], object] | None] = {
    "input": None,
    "prefix": lambda request: request.tag,
    "longest": lambda request: -request.output_tokens,
}
RULES: dict[str, Callable[[Sequence[Request], int], Rule]] = {
    "shared": lambda requests, _engines: shared_queue(requests),
    "shards": static_shards,
    "stretches": stretches,
}


def main() -> None:
    """Run a file in virtual time and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.simengine.virtual", description=main.__doc__)
    parser.add_argument("file", type=Path)
    add_profile(parser)
    parser.add_argument("--engines", type=int, default=1, metavar="K")
    parser.add_argument("--ready", type=float, action="append", metavar="S", help="when an engine is; repeatable")
    parser.add_argument("--slower", type=float, action="append", metavar="X", help="an engine's speed; repeatable")
    parser.add_argument("--order", choices=ORDERS, default="input")
    parser.add_argument("--rule", choices=RULES, default="shared")
    given = parser.parse_args()
    physics = physics_of(given)
    if physics is None:
        parser.error("--profile is needed")
    requests = list(read_requests(given.file, given.lengths, physics.max_model_len))
    best = best_cached_share(requests)
    key = ORDERS[given.order]
    if key is not None:
        requests.sort(key=key)  # type: ignore[arg-type]
    machines = [Machine(physics)] * given.engines
    for number, seconds in enumerate(given.ready or ()):
        machines[number] = replace(machines[number], ready_s=seconds)
    for number, speed in enumerate(given.slower or ()):
        machines[number] = replace(machines[number], speed=speed)
    outcome = run(machines, RULES[given.rule](requests, given.engines))
    json.dump({**asdict(outcome), "best_cached_share": best}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
