"""What the fault tests of the service share: a service that is started, killed and looked into."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from freight import Client
from freight.core.device import Holder
from freight.core.job import FINAL
from freight.core.view import JobStatus
from freight.errors import FreightError
from freight.launchers.locks import lock_device, lock_folder
from freight.store.sockets import listener_pid
from tests.faults.runs import check_complete, received, with_words
from tests.harness import PATIENCE_S, Box, Finished, engine_command, model_toml, wait_until


class Served(Box):
    """A box with a service. Its commands have sockets in `runtime`, so that what they leave there can be seen."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.data = folder / "data"
        self.socket = self.data / "run" / "api.sock"
        # Not below the box: the paths of sockets must be short.
        self.runtime = Path(tempfile.mkdtemp(prefix="frt"))
        self.record = folder / "record"
        self.log = folder / "served.log"
        self._starts = folder / "starts"
        self._children: list[subprocess.Popen[bytes]] = []
        self._client: Client | None = None

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment of a command."""
        return super().environment(**{"TMPDIR": str(self.runtime), "FREIGHT_DATA": str(self.data), **extra})

    def keep_data_in(self, folder: Path) -> None:
        """Have the service's data in another folder, from its first start on."""
        self.data = folder
        self.socket = folder / "run" / "api.sock"

    def own_engine(self, *options: str, keep_warm: str = "") -> None:
        """Have a model `mine` that Freight starts itself; its starts are counted and its requests recorded."""
        noted = ["sh", "-c", 'echo started >> "$0"; exec "$@"', str(self._starts)]
        command = [*noted, *engine_command(self.folder, "--digest", *options)]
        toml = model_toml("mine", engine="command", command=command)
        self.configure(toml)
        if keep_warm:
            self.config.write_text(f'{self.config.read_text()}keep_warm = "{keep_warm}"\n')

    def starts(self) -> int:
        """Return how often the model server was started."""
        return len(self._starts.read_text().splitlines()) if self._starts.exists() else 0

    def received(self) -> list[int]:
        """Return the indices of the records that the model's own server received."""
        return received(self.record)

    @property
    def client(self) -> Client:
        """A client of the service."""
        if self._client is None:
            self._client = Client(f"unix://{self.socket}")
        return self._client

    def launch(self, **extra: str) -> subprocess.Popen[bytes]:
        """Start `freight serve` in the foreground, and do not wait for it."""
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "freight", "serve"],
                cwd=self.folder,
                env=self.environment(**extra),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def serve(self, **extra: str) -> subprocess.Popen[bytes]:
        """Start `freight serve` in the foreground and wait until it answers."""
        child = self.launch(**extra)
        wait_until(lambda: child.poll() is not None or self.answers(), "the service answers")
        assert child.poll() is None, self.said()
        return child

    def answers(self) -> bool:
        """Return whether a service answers."""
        if listener_pid(self.socket) is None:
            return False
        try:
            return self.client.version().pid is not None
        except FreightError:
            self.disconnect()
            return False

    @property
    def server(self) -> subprocess.Popen[bytes]:
        """The service that was started last."""
        return self._children[-1]

    def kill(self) -> None:
        """Kill the service as nothing can be warned of, and wait until it is dead."""
        self.server.kill()
        self.server.wait()
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection; the next call of the client makes another."""
        if self._client is not None:
            self._client.close()

    def said(self) -> str:
        """Return what services of this box have said, those in the background too."""
        files = [file for file in (self.log, self.data / "serve.log") if file.exists()]
        return "".join(file.read_text() for file in files)

    def submit(self, file: str, name: str, model: str = "mine", **options: Any) -> JobStatus:
        """Make a job of a file of the box."""
        return self.client.submit(self.folder / file, name=name, model=model, **options).job

    def state(self, name: str) -> str:
        """Return the state of a job."""
        return self.client.job(name).state

    def wait_state(self, name: str, *states: str) -> JobStatus:
        """Wait until a job is in one of the states; it must not end in another."""
        seen = [self.client.job(name)]

        def there() -> bool:
            seen.append(self.client.job(name))
            return seen[-1].state in states or seen[-1].state in FINAL

        wait_until(there, f"{name} is {' or '.join(states)}")
        assert seen[-1].state in states, seen[-1]
        return seen[-1]

    def completes(self, name: str, count: int) -> JobStatus:
        """Wait until a job of `records` is complete, and check its results."""
        done = self.wait_state(name, "COMPLETED")
        output = f"{name}-checked.jsonl"
        self.client.save_results(name, self.folder / output, force=True)
        check_complete(self, count, output)
        return done

    def folder_of(self, job: str) -> Path:
        """Return where the service keeps a job, known by its id."""
        return self.data / "batch" / job

    def ask(self, query: str, *bindings: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query on the catalog, whether or not a service has it."""
        return ask(self.data / "catalog.db", query, *bindings)

    def committed(self, job: str) -> set[int]:
        """Return the indices of the records of a job, known by its id, whose results are on disk."""
        return {index for (index,) in ask(self.folder_of(job) / "results.db", "SELECT idx FROM result")}

    def uploads(self) -> list[str]:
        """Return the names of the files in the folder of uploads."""
        return sorted(path.name for path in (self.data / "uploads").iterdir())

    def workers(self) -> list[int]:
        """Return the pids of the worker processes."""
        return with_words(self, "freight.worker")

    def engines(self) -> list[int]:
        """Return the pids of the model servers, without the shell that was to become one."""
        return with_words(self, "bench.simengine")

    def nothing_left(self) -> None:
        """Wait until no process, no socket, no runtime folder and no hold on the device is left."""
        wait_until(lambda: not self.processes(), "all processes are gone", 10)
        assert not list(self.runtime.iterdir())
        if (self.data / "run").exists():
            assert not list((self.data / "run").iterdir())
        assert self.is_device_free()

    def is_device_free(self) -> bool:
        """Return whether the box's device is held by nobody."""
        held = lock_device(self.device, lock_folder())
        if isinstance(held, Holder):
            return False
        os.close(held)
        return True

    def end(self) -> None:
        """Kill all that runs, and remove the folder for sockets. What was said must hold no traceback."""
        self.disconnect()
        # Two looks: what is killed may have been about to start another.
        for _ in range(2):
            for process in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for child in self._children:
            child.wait()
        shutil.rmtree(self.runtime, ignore_errors=True)
        said = self.said()
        assert "Traceback" not in said, said


@contextmanager
def served(folder: Path) -> Generator[Served]:
    """A box for a service, for as long as the block takes."""
    (folder / "box").mkdir(parents=True)
    box = Served(folder / "box")
    try:
        yield box
    except Exception as error:
        error.add_note(f"the service said: {box.said()[-4000:]}")
        raise
    finally:
        box.end()


@contextmanager
def device_in_use(service: Served) -> Generator[None]:
    """Hold the device, so that jobs stay in the queue for as long as the block takes."""
    held = lock_device(service.device, lock_folder())
    assert not isinstance(held, Holder)
    try:
        yield
    finally:
        os.close(held)


def ask(database: Path, query: str, *bindings: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query on a database that others may have open."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10)) as connection:
        return list(connection.execute(query, bindings))


def refused(done: Finished, status: int, *words: str) -> None:
    """Assert that a command was refused in words, with a way out; `words` are among them."""
    assert done.status == status, done
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")], done
    assert [line for line in lines if line.startswith("hint: ")], done
    for word in words:
        assert word in done.stderr, (word, done)


def soon(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait as `wait_until`, but look without a pause, for what does not last."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {patience_s} s: {what}"
