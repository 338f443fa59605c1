"""Real model servers for benchmarks, and how long each was busy by what it says of itself."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bench.engines import MODEL, ROOT

VENV: Final = ROOT / "build" / "vllm"
CHECKPOINT: Final = ROOT / "build" / "checkpoint"
VLLM_VARIABLES: Final = {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
VLLM_ARGUMENTS: Final = ("--max-model-len", "2048", "--dtype", "bfloat16", "--served-model-name", MODEL)
PATIENCE_S: Final = 600.0
_LOOK_S: Final = 0.1
_RUNNING: Final = re.compile(r"^(?:vllm:num_requests_running|llamacpp:requests_processing)\S* (\S+)", re.MULTILINE)
_HITS: Final = re.compile(r"^vllm:prefix_cache_hits_total\S* (\S+)", re.MULTILINE)
_QUERIES: Final = re.compile(r"^vllm:prefix_cache_queries_total\S* (\S+)", re.MULTILINE)


def vllm_command(port: int, *more: str) -> list[str]:
    """Return the command line of a vLLM server."""
    program = str(VENV / "bin" / "vllm")
    return [program, "serve", str(CHECKPOINT), "--host", "127.0.0.1", "--port", str(port), *VLLM_ARGUMENTS, *more]


def llamacpp_command(port: int, model: Path, slots: int) -> list[str]:
    """Return the command line of a llama.cpp server."""
    return [sys.executable, "-m", "bench.llamacpp", str(model), str(port), str(slots)]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def page(url: str) -> str:
    """Return what a GET answers."""
    with urllib.request.urlopen(url, timeout=30) as reply:
        return reply.read().decode()


@contextmanager
def serving(argv: Sequence[str], port: int, log: Path) -> Generator[str]:
    """Run a server for as long as the block takes; gives its URL once it is healthy."""
    url = f"http://127.0.0.1:{port}"
    with log.open("ab") as output:
        child = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **VLLM_VARIABLES}, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _is_healthy(url):
            assert child.poll() is None, f"the server ended with {child.returncode}: {log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, "the server does not become ready"
            time.sleep(_LOOK_S)
        yield url
    finally:
        child.terminate()
        child.wait()


def _is_healthy(url: str) -> bool:
    with suppress(OSError):
        page(f"{url}/health")
        return True
    return False


def cached_share(url: str) -> float:
    """Return the share of prompts' tokens that a vLLM server found in its cache so far."""
    metrics = page(f"{url}/metrics")
    hits, queries = (sum(map(float, pattern.findall(metrics))) for pattern in (_HITS, _QUERIES))
    return hits / max(1.0, queries)


class Busy(threading.Thread):
    """Looks at a server's metrics; `seconds` is how long it was from the first running request to the last."""

    def __init__(self, url: str) -> None:
        """Watch the server at `url`."""
        super().__init__(daemon=True)
        self._url = url
        self._stop_asked = threading.Event()
        self._first = self._last = 0.0

    @property
    def seconds(self) -> float:
        """Return the time; it is known to twice the interval of the looks."""
        return self._last - self._first

    def run(self) -> None:
        """Look until told to stop."""
        while not self._stop_asked.wait(_LOOK_S):
            with suppress(OSError):
                if sum(map(float, _RUNNING.findall(page(f"{self._url}/metrics")))):
                    self._last = time.monotonic()
                    self._first = self._first or self._last

    def finish(self) -> float:
        """Stop; return the seconds."""
        self._stop_asked.set()
        self.join()
        return self.seconds
