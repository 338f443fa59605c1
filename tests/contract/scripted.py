"""A server whose every answer a test decides, for what the simulated engine has no marker for."""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One answer."""

    status: int = 200
    body: bytes = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'
    headers: dict[str, str] = field(default_factory=dict[str, str])


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

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            models = {"object": "list", "data": [{"id": "local-model", "object": "model"}]}
            self._send(Reply(script.health() if self.path == "/health" else 200, json.dumps(models).encode()))

        def do_POST(self) -> None:
            self._send(script.take(self.rfile.read(int(self.headers["Content-Length"]))))

        def _send(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that goes away is no error of the test's."""

    with Server(("127.0.0.1", 0), Handler) as server:
        script.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield script
        finally:
            server.shutdown()
            thread.join()
