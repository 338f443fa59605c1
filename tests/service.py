"""What the tests of the service share: a box with a service of its own, and an endpoint that waits to be told."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from freight.client.sync import Client
from freight.core.job import FINAL, State
from freight.core.view import JobStatus
from freight.errors import WrongState
from tests.harness import PATIENCE_S, Box, Finished, Json, chat, wait_until
from tests.httpserver import MODELS, Reply, http_server

SMALL: Final = "smollm2-135m"
# A record that keeps its worker, and so its device, until its job is cancelled.
HOLDS: Final = "STUB:sleep=600"


class ServiceBox(Box):
    """A box whose commands talk to a service on its own data folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder)
        self.data = folder / "data"
        self.socket = self.data / "run" / "api.sock"
        self.server = f"unix://{self.socket}"

    def configure(self, toml: str, pool: str = "") -> None:
        """Write the configuration file; the test's own device is declared at its end, with more about its pool."""
        self.config.write_text(f'{toml}\n[pools.local]\ndevices = ["{self.device}"]\n{pool}\n')

    def batch(self, *arguments: str, **more: Any) -> Finished:
        """Run `freight batch ARGUMENTS` to its end."""
        return self.freight("batch", *arguments, **more)

    def put(self, name: str, records: Iterable[Json | bytes], model: str, **options: Any) -> JobStatus:
        """Make a job without a command, where the command is not the point."""
        path = self.write(f"{name}.jsonl", records)
        with Client(self.server) as client:
            return client.submit(path, model=model, name=name, **options).job

    def job(self, name: str) -> JobStatus:
        """Return how a job stands."""
        with Client(self.server) as client:
            return client.job(name)

    def until(self, name: str, so: Callable[[JobStatus], object], what: str) -> JobStatus:
        """Wait until a job stands so, and return it."""
        seen: list[JobStatus] = []

        def look() -> object:
            seen[:] = [client.job(name)]
            return so(seen[0])

        with Client(self.server) as client:
            wait_until(look, f"{name}: {what}")
        return seen[0]

    def until_state(self, name: str, *states: State) -> JobStatus:
        """Wait until a job is in one of the states, and return it."""
        return self.until(name, lambda job: job.state in states, f"is {' or '.join(states)}")

    def ended(self, name: str) -> JobStatus:
        """Wait until a job has ended, and return it."""
        return self.until_state(name, *sorted(FINAL))

    def cancel(self, name: str) -> None:
        """Cancel a job."""
        with Client(self.server) as client:
            client.cancel(name)

    def names(self) -> list[str]:
        """Return the names of all jobs, the newest first."""
        with Client(self.server) as client:
            return [job.name for job in client.jobs()]

    def lines(self, name: str, only: str | None = None, partial: bool = False) -> list[bytes]:
        """Return the lines of a job's results."""
        with Client(self.server) as client, client.results(name, only, partial) as stream:
            return list(stream)

    def clear(self) -> None:
        """Cancel and delete all jobs, and forget uploads, so that the next test finds none."""
        with Client(self.server) as client:
            for job in client.jobs("active"):
                with suppress(WrongState):  # It has ended meanwhile.
                    client.cancel(job.id)
            for job in client.jobs():
                client.wait(job.id, PATIENCE_S)
                client.delete(job.id)
        for upload in (self.data / "uploads").iterdir():
            upload.unlink()

    def is_served(self) -> bool:
        """Return whether a service answers."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True

    def simengines(self) -> list[psutil.Process]:
        """Return the model servers that run."""
        return [process for process in self.processes() if "bench.simengine" in command_of(process)]

    def workers(self) -> list[psutil.Process]:
        """Return the workers that run."""
        return [process for process in self.processes() if "freight.worker" in command_of(process)]

    def stop(self) -> None:
        """End the service by `freight stop`."""
        assert self.freight("stop").status == 0

    def kill_all(self) -> None:
        """End whatever commands of this box left."""
        while left := self.processes():
            for process in left:
                with_process(process.kill)


def with_process(call: Callable[[], object]) -> None:
    """Call something about a process, which may be gone by now."""
    try:
        call()
    except psutil.NoSuchProcess:
        return


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; none where it is gone."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@contextmanager
def paused(process: psutil.Process | subprocess.Popen[str]) -> Generator[None]:
    """Keep a process from doing anything for as long as the block takes."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextmanager
def service_box(folder: Path, toml: str = "", pool: str = "") -> Generator[ServiceBox]:
    """Give a box whose service is stopped after the block; nothing of it may be left then."""
    box = ServiceBox(folder)
    box.configure(toml, pool)
    try:
        yield box
        box.stop()
        left = [command_of(process) for process in box.processes()]
        assert not left, left
    finally:
        box.kill_all()


class Endpoint:
    """An endpoint that answers at once, but for prompts that begin with "hold": those once they are let go."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: Counter[str] = Counter()
        self.models: list[str] = []
        self.is_well = True
        self.let_go = threading.Event()
        self.lock = threading.Lock()

    def reply(self, body: bytes) -> Reply:
        """Answer a request."""
        status, value = self.answer(body)
        return Reply(status, json.dumps(value).encode())

    def answer(self, body: bytes) -> tuple[int, Json]:
        """Answer a request, which is counted by its prompt."""
        request = json.loads(body)
        text = request["messages"][-1]["content"]
        with self.lock:
            self.seen[text] += 1
            self.models.append(request["model"])
            times = self.seen[text]
        if text.startswith("hold"):
            self.let_go.wait()
        if not self.is_well or (text.startswith("refuse once") and times == 1) or text.startswith("refuse always"):
            return 400 if self.is_well else 503, {"error": {"message": f"no: {times}", "type": "refused"}}
        message = {"role": "assistant", "content": f"{text}, {times}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}


@contextmanager
def endpoint() -> Generator[Endpoint]:
    """Run an endpoint for as long as the block takes."""
    ours = Endpoint()
    with http_server(lambda _: Reply(200 if ours.is_well else 503, MODELS), ours.reply) as ours.url:
        try:
            yield ours
        finally:
            ours.let_go.set()


def chats(*texts: str, **fields: Any) -> list[Json]:
    """Return a chat record for each text, with the text's number as its id."""
    return [chat(f"{number}", text, **fields) for number, text in enumerate(texts)]


def on_terminal(
    box: Box, *arguments: str, until: bytes = b"", number: signal.Signals = signal.SIGINT, **extra: str
) -> tuple[int, bytes]:
    """Run a command with its output and its errors on a terminal; return its status and what appeared there.

    It is sent the signal `number` once `until` has appeared.
    """
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "freight", *arguments],
        cwd=box.folder, env=box.environment(**{"TERM": "xterm-256color", "LINES": "30", **extra}),
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while select.select([ours], [], [], PATIENCE_S)[0]:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # The terminal's other side is closed.
            break
        if until and until not in shown and until in shown + piece:
            child.send_signal(number)
        shown += piece
    os.close(ours)
    return child.wait(PATIENCE_S), shown
