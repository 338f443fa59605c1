"""A server whose every answer a test decides, for what the simulated engine has no marker for."""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tests.httpserver import MODELS, Reply, http_server

OK = Reply()


class Scripted:
    """The server: `answer` is asked with a request's user text and how often that has come; `health` with a status."""

    def __init__(self, answer: "Callable[[str, int], Reply]") -> None:
        self.answer = answer
        self.health: Callable[[], int] = lambda: 200
        self.arrivals: dict[str, list[float]] = {}
        self.lock = threading.Lock()
        self.url = ""

    def times(self, text: str) -> int:
        """Return how often a text has come."""
        return len(self.arrivals.get(text, ()))

    def take(self, body: bytes) -> Reply:
        """Answer a request."""
        text = json.loads(body)["messages"][-1]["content"]
        with self.lock:
            self.arrivals.setdefault(text, []).append(time.monotonic())
            return self.answer(text, len(self.arrivals[text]))


@contextmanager
def scripted(answer: Callable[[str, int], Reply]) -> Generator[Scripted]:
    """Run a server for as long as the block takes."""
    script = Scripted(answer)

    def get(path: str) -> Reply:
        return Reply(script.health() if path == "/health" else 200, MODELS)

    with http_server(get, script.take) as script.url:
        yield script
