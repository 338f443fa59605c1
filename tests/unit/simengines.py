"""What the tests of the simulated engine share: one that runs, and how it is asked over a real socket."""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.harness import ROOT, Json

CHAT = "/v1/chat/completions"
PATIENCE_S = 20


def command(*options: str) -> list[str]:
    """Return the command line that starts a simulated engine with `options`."""
    return [sys.executable, "-m", "bench.simengine", *options]


@dataclass
class Answer:
    """One HTTP answer, read whole."""

    status: int
    body: bytes
    headers: dict[str, str]

    def json(self) -> Json:
        """Return the body parsed."""
        return json.loads(self.body)

    def content(self) -> str:
        """Return the first choice's text."""
        return self.json()["choices"][0]["message"]["content"]


@dataclass
class Engine:
    """A running child process and one kept-alive connection to it."""

    child: subprocess.Popen[str]
    host: str
    port: int
    link: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        """Open nothing yet; http.client connects on the first request."""
        self.link = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Send one request and return its answer; drop the connection when that fails."""
        try:
            self.link.request(method, path, body, headers)
            got = self.link.getresponse()
            return Answer(got.status, got.read(), {name.lower(): value for name, value in got.getheaders()})
        except (OSError, http.client.HTTPException):
            self.link.close()
            raise

    def get(self, path: str, **headers: str) -> Answer:
        """GET `path`."""
        return self.ask("GET", path, None, **headers)

    def post(self, path: str, body: Json) -> Answer:
        """POST `body` as JSON."""
        return self.ask("POST", path, json.dumps(body).encode())

    def chat(self, text: str, **fields: Any) -> Answer:
        """Ask one user message."""
        return self.post(CHAT, chat_body(text, **fields))

    def counts(self) -> Json:
        """Return /sim/counts."""
        return self.get("/sim/counts").json()

    def wait_counts(self, true_of: Callable[[Json], bool]) -> Json:
        """Ask for the counts until `true_of` holds for them, and return them."""
        deadline = time.monotonic() + PATIENCE_S
        while not true_of(counts := self.counts()):
            assert time.monotonic() < deadline, counts
        return counts

    def metric(self, name: str) -> float:
        """Return the value of one metric."""
        lines = self.get("/metrics").body.decode().splitlines()
        (line,) = (line for line in lines if line.startswith(f"vllm:{name}{{"))
        return float(line.rpartition(" ")[2])

    def exit_status(self) -> int:
        """Wait for the child to end and return its status."""
        return self.child.wait(PATIENCE_S)


def chat_body(text: str, **fields: Any) -> Json:
    """Return a chat request with one user message."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


@contextmanager
def running(*options: str) -> Generator[Engine]:
    """Yield an engine started with `options` that has said where it listens; end it afterwards."""
    child = subprocess.Popen(command(*options), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    engine: Engine | None = None
    try:
        line = child.stdout.readline()
        assert line.startswith("listening on http://"), line
        host, _, port = line.strip().rpartition("/")[2].partition(":")
        engine = Engine(child, host, int(port))
        yield engine
    finally:
        if engine is not None:
            engine.link.close()
        child.kill()
        child.wait()
        child.stdout.close()


@contextmanager
def asking(engine: Engine, *texts: str) -> Generator[list[threading.Thread]]:
    """Ask each text on a connection of its own, in the background; failures are expected there."""

    def ask(text: str) -> None:
        other = Engine(engine.child, engine.host, engine.port)
        try:
            other.chat(text)
        except (OSError, http.client.HTTPException):
            pass
        finally:
            other.link.close()

    threads = [threading.Thread(target=ask, args=(text,), daemon=True) for text in texts]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        engine.child.kill()
        for thread in threads:
            thread.join(PATIENCE_S)
