"""An HTTP server of the test's own process, whose every answer the test decides."""

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

# What a server of one model says to GET /v1/models.
MODELS: Final = json.dumps({"object": "list", "data": [{"id": "local-model", "object": "model"}]}).encode()


@dataclass(frozen=True)
class Reply:
    """One answer."""

    status: int = 200
    body: bytes = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'
    headers: dict[str, str] = field(default_factory=dict[str, str])


@contextmanager
def http_server(get: Callable[[str], Reply], post: Callable[[bytes], Reply]) -> Generator[str]:
    """Run a server for as long as the block takes, and give its URL.

    `get` is called with a request's path and `post` with its body, each in a thread of its connection.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(get(self.path))

        def do_POST(self) -> None:
            self._send(post(self.rfile.read(int(self.headers["Content-Length"]))))

        def _send(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with serving(Handler) as url:
        yield url


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Generator[str]:
    """Run a server with a handler of the caller's for as long as the block takes, and give its URL."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that goes away is no error of the test's."""

    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
