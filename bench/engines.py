"""Simulated engines of a benchmark's own."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
MODEL: Final = "local-model"
_POLL_S: Final = 0.01
_PATIENCE_S: Final = 60.0


@dataclass
class Simulated:
    """An engine that listens."""

    url: str
    child: subprocess.Popen[bytes]
    summary_file: Path

    def answered(self) -> int:
        """Return how many requests it has answered."""
        with urllib.request.urlopen(f"{self.url}/sim/counts", timeout=10) as reply:
            return json.load(reply)["answered"]

    def stop(self) -> dict[str, Any]:
        """End it; return what it has done and when."""
        if self.child.poll() is None:
            self.child.terminate()
            self.child.wait(_PATIENCE_S)
        return json.loads(self.summary_file.read_text())


@contextmanager
def simulated(folder: Path, options: Sequence[str], port: int = 0) -> Generator[Simulated]:
    """Run an engine for as long as the block takes."""
    folder.mkdir(parents=True, exist_ok=True)
    url_file, summary = folder / "url", folder / "summary.json"
    url_file.unlink(missing_ok=True)
    child = subprocess.Popen(
        [
            sys.executable, "-m", "bench.simengine", "--model", MODEL, "--port", str(port),
            "--port-file", str(url_file), "--summary", str(summary), *options,
        ],
        cwd=ROOT, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not url_file.exists():
            assert child.poll() is None, f"the engine ended with {child.returncode}"
            assert time.monotonic() < deadline, "the engine does not listen"
            time.sleep(_POLL_S)
        yield Simulated(url_file.read_text().strip(), child, summary)
    finally:
        child.kill()
        child.wait()
