"""What tests share: the real command as a child process, and simulated engines for it to talk to."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.simengine.record import read_record

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "cases"
PATIENCE_S = 60

Json = dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    status: int
    stdout: str
    stderr: str

    def last_line(self) -> str:
        """Return the last line of standard error."""
        return self.stderr.rstrip("\n").rpartition("\n")[2]


class Box:
    """A folder in which commands run as a user of their own would: own data, own configuration, own devices."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        # A device of this test's own, so that tests do not wait for each other's.
        self.device = f"cpu:{os.getpid()}{time.monotonic_ns() % 1_000_000}"
        self.configure("")

    def configure(self, toml: str) -> None:
        """Write the configuration file; the test's own device is declared at its end."""
        self.config.write_text(f'{toml}\n[pools.local]\ndevices = ["{self.device}"]\n')

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment of a command."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FREIGHT_")}
        own = {"FREIGHT_CONFIG": str(self.config), "FREIGHT_DATA": str(self.folder / "data")}
        return {**kept, **own, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "", **extra}

    def start(
        self, *arguments: str, stdin: Any = subprocess.DEVNULL, cwd: Path | None = None, **extra: str
    ) -> subprocess.Popen[str]:
        """Start `freight ARGUMENTS` in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "freight", *arguments],
            cwd=cwd or self.folder,
            env=self.environment(**extra),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def freight(
        self,
        *arguments: str,
        stdin: str | None = None,
        timeout: float = PATIENCE_S,
        cwd: Path | None = None,
        **extra: str,
    ) -> Finished:
        """Run `freight ARGUMENTS` to its end."""
        source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
        return finish(self.start(*arguments, stdin=source, cwd=cwd, **extra), stdin, timeout)

    def write(self, name: str, records: Iterable[Json | bytes]) -> Path:
        """Write a JSON Lines file; bytes are taken as whole lines."""
        path = self.folder / name
        with path.open("wb") as file:
            for record in records:
                line = record if isinstance(record, bytes) else json.dumps(record, separators=(",", ":")).encode()
                file.write(line + b"\n")
        return path

    def results(self, name: str = "out.jsonl") -> list[Json]:
        """Return the lines of a results file; each must be strict JSON on one line."""
        return parse_lines((self.folder / name).read_bytes())

    def processes(self) -> list[psutil.Process]:
        """Return the processes that commands of this box started and that still run."""
        mark = f"FREIGHT_CONFIG={self.config}".encode()
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            except OSError:
                continue
            if mark in environ.split(b"\0"):
                found.append(process)
        return found


def finish(child: subprocess.Popen[str], stdin: str | None = None, timeout: float = PATIENCE_S) -> Finished:
    """Wait for a command that was started, and return how it ended."""
    try:
        stdout, stderr = child.communicate(stdin, timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        stdout, stderr = child.communicate()
        raise AssertionError(f"{child.args} took over {timeout} s; it said: {stderr}") from None
    assert "Traceback" not in stderr, stderr
    return Finished(child.returncode, stdout, stderr)


def imports(box: Box, program: str, *arguments: str, **extra: str) -> tuple[Finished, set[str]]:
    """Run `python -m PROGRAM ARGUMENTS` in a box; return how it ended, and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", program, *arguments],
        env=box.environment(**extra), cwd=box.folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    names = re.findall(r"^import time: .*\| +([\w.]+)$", done.stderr, re.MULTILINE)
    return Finished(done.returncode, done.stdout, done.stderr), set(names)


def parse_lines(content: bytes) -> list[Json]:
    """Return the objects of JSON Lines, which must be strict JSON and end with a newline."""
    if not content:
        return []
    assert content.endswith(b"\n")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in the results")

    return [json.loads(line, parse_constant=refuse) for line in content[:-1].decode().split("\n")]


def chat(custom_id: str, text: str = "ok", **fields: Any) -> Json:
    """Return a chat record with one user message."""
    body = {"messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def content(result: Json) -> str:
    """Return the text that a result's first choice has."""
    return result["response"]["body"]["choices"][0]["message"]["content"]


def code(result: Json) -> str | None:
    """Return a result's error code; None for an answer."""
    return result["error"]["code"] if result["error"] else None


@dataclass
class Engine:
    """A simulated engine that runs, and what it has received."""

    url: str
    folder: Path
    child: subprocess.Popen[bytes] = field(repr=False)

    def received(self) -> list[tuple[str, bytes]]:
        """Return (path, body) of every request, in order of arrival."""
        return read_record(self.folder / "record")

    def counts(self) -> Json:
        """Return the engine's own counts."""
        with urllib.request.urlopen(f"{self.url}/sim/counts", timeout=10) as reply:
            return json.load(reply)

    def stop(self) -> None:
        """End the engine."""
        self.child.terminate()
        self.child.wait(10)


@contextmanager
def engine(folder: Path, *options: str, port: int = 0, record: bool = True) -> Generator[Engine]:
    """Run a simulated engine, for as long as the block takes; it records what it receives unless told not to."""
    folder.mkdir(parents=True, exist_ok=True)
    url_file = folder / "url"
    url_file.unlink(missing_ok=True)
    child = subprocess.Popen(
        [
            sys.executable, "-m", "bench.simengine", "--port", str(port), "--port-file", str(url_file),
            *(("--record", str(folder / "record")) if record else ()), *options,
        ],
        cwd=ROOT,
    )  # fmt: skip
    try:
        wait_until(url_file.exists, "the engine listens")
        yield Engine(url_file.read_text().strip(), folder, child)
    finally:
        child.kill()
        child.wait(10)


def engine_command(folder: Path, *options: str) -> list[str]:
    """Return the command line of an engine that Freight starts itself, for a model entry with engine = "command"."""
    return [
        sys.executable, "-m", "bench.simengine", "--socket", "{socket}", "--record", str(folder / "record"), *options,
    ]  # fmt: skip


def model_toml(name: str, **entry: Any) -> str:
    """Return a [models.NAME] table; JSON's values are TOML's for texts, numbers, lists and truth."""
    values = "\n".join(f"{key} = {json.dumps(value)}" for key, value in entry.items())
    return f"[models.{name}]\n{values}\n"


def wait_until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until a condition of another process holds; it has no way to tell us."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {patience_s} s: {what}"
        time.sleep(0.02)
