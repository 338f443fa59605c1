"""A simulated engine of a benchmark's own."""

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_POLL_S = 0.01


@contextmanager
def engine(folder: Path, *options: str) -> Generator[str]:
    """Run an engine for as long as the block takes, and give its URL, which it writes to `folder/url`."""
    folder.mkdir(parents=True, exist_ok=True)
    url_file = folder / "url"
    running = subprocess.Popen(
        [sys.executable, "-m", "bench.simengine", "--port-file", str(url_file), *options],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        while not url_file.exists():
            assert running.poll() is None, "the engine ended"
            time.sleep(_POLL_S)
        yield url_file.read_text().strip()
    finally:
        running.terminate()
        running.wait()
