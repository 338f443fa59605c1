"""A worker's window on simulated engines, in virtual time: who is sent when, who answers when, what a look shows."""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from bench.simengine.physics import Engine, Physics, Request
from freight.core.window import Window

# What an answer takes to be read and the next request to get there.
ROUND_TRIP_S = 0.005
DOWN_S = 60.0
AFTER_PUSH_BACK_S = 1.0


def lognormal(count: int, seed: int, prompt: int = 300, output: int = 200, sigma: float = 0.7) -> list[Request]:
    """Return requests whose lengths are lognormal about these medians, up to four times as long; none shares."""
    random = Random(seed)

    def draw(median: int) -> int:
        return max(1, min(4 * median, round(median * random.lognormvariate(0, sigma))))

    return [Request(draw(prompt), draw(output)) for _ in range(count)]


def work_of(request: Request) -> int:
    """Return the tokens that an answer counts as."""
    return request.output_tokens + (request.prompt_tokens - request.cached_tokens) // 4


@dataclass(slots=True)
class Client:
    """One worker: its window, whether it can see the engine's metrics, and what it has still to send.

    `sizes` are the window's at each look, or at each answer where it cannot look.
    """

    window: Window
    requests: Iterator[Request]
    is_sighted: bool = True
    in_flight: int = 0
    sent: dict[Request, float] = field(default_factory=dict[Request, float])
    sizes: list[int] = field(default_factory=list[int])

    def later_half(self) -> list[int]:
        """Return the sizes of the later half of its looks."""
        return self.sizes[len(self.sizes) // 2 :]


class World:
    """One engine and its clients. `restarts_at`: all that is in the engine is lost then, and it is gone for DOWN_S.

    `most_in_flight`: the engine answers 429 to what would be more than that.
    """

    def __init__(self, physics: Physics, restarts_at: float | None = None, most_in_flight: int | None = None) -> None:
        self.now = 0.0
        self.answered = self.push_backs = 0
        self._physics = physics
        self._engine = Engine(physics)
        self._most_in_flight = most_in_flight
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        self._owners: dict[Request, Client] = {}
        self._is_up = True
        if restarts_at is not None:
            self._plan(restarts_at, self._goes_down)

    @property
    def preemptions(self) -> int:
        """How often the engine put a request back."""
        return self._engine.totals.preemptions

    def run(self, clients: Sequence[Client]) -> float:
        """Run until all is answered; return the time."""
        for client in clients:
            self._fill(client)
            if client.is_sighted:
                self._plan(client.window.look_s(), lambda client=client: self._look(client))
        while any(client.in_flight for client in clients):
            while self._agenda and self._agenda[0][0] <= self.now:
                heapq.heappop(self._agenda)[2]()
            until = self._agenda[0][0] if self._agenda else math.inf
            if not self._engine.in_flight:
                self.now = until
                continue
            seconds, ended = self._engine.step(self.now, until)
            self.now += seconds
            for request in ended:
                self._answer(request)
        return self.now

    def _plan(self, at: float, what: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._agenda, (at, self._planned, what))

    def _fill(self, client: Client) -> None:
        while client.in_flight < client.window.limit and (request := next(client.requests, None)) is not None:
            client.in_flight += 1
            self._send(client, request, ROUND_TRIP_S)

    def _send(self, client: Client, request: Request, delay_s: float) -> None:
        client.sent[request] = self.now
        self._owners[request] = client
        self._plan(self.now + delay_s, lambda: self._arrive(request))

    def _arrive(self, request: Request) -> None:
        client = self._owners[request]
        if not self._is_up:
            return
        if self._most_in_flight is not None and self._engine.in_flight >= self._most_in_flight:
            self.push_backs += 1
            client.window.pushed_back(self.now)
            self._send(client, request, AFTER_PUSH_BACK_S)
        else:
            self._engine.add(request)

    def _answer(self, request: Request) -> None:
        client = self._owners.pop(request)
        latency_s = self.now - client.sent.pop(request)
        client.window.succeeded(self.now, latency_s, client.in_flight, work_of(request))
        client.in_flight -= 1
        self.answered += 1
        if not client.is_sighted:
            client.sizes.append(client.window.limit)
        self._fill(client)

    def _look(self, client: Client) -> None:
        if self._is_up:
            engine = self._engine
            seen = (engine.running, engine.waiting, engine.totals.preemptions, engine.cache_use)
            client.window.looked(self.now, client.in_flight, *seen)
            self._fill(client)
        client.sizes.append(client.window.limit)
        self._plan(self.now + client.window.look_s(), lambda: self._look(client))

    def _goes_down(self) -> None:
        self._engine, self._is_up = Engine(self._physics), False
        self._plan(self.now + DOWN_S, self._comes_up)

    def _comes_up(self) -> None:
        self._is_up = True
        owners, self._owners = self._owners, {}
        for client in {id(client): client for client in owners.values()}.values():
            client.window.resumed(self.now)
        for request, client in owners.items():
            del client.sent[request]
            self._send(client, request.fresh(), ROUND_TRIP_S)


def took(
    physics: Physics, requests: Iterable[Request], window: Window, is_sighted: bool = True
) -> tuple[float, Client]:
    """Return how long one worker takes for the requests, and the worker."""
    client = Client(window, fresh(requests), is_sighted)
    return World(physics).run([client]), client


def fresh(requests: Iterable[Request]) -> Iterator[Request]:
    """Yield the requests as nothing had become of them yet."""
    return (request.fresh() for request in requests)


def peak_s(physics: Physics, requests: Sequence[Request]) -> float:
    """Return how long the engine takes with everything in flight at once."""
    return took(physics, requests, Window.fixed(len(requests)), is_sighted=False)[0]


def sized(physics: Physics, slots: int) -> Physics:
    """Return the same engine with so many slots."""
    return replace(physics, max_num_seqs=slots, max_batched_tokens=max(physics.max_batched_tokens, slots))
