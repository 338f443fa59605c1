"""A service of a benchmark's own."""

import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from freight import Client
from freight.errors import NoServer

ROOT = Path(__file__).resolve().parents[1]
_POLL_S = 0.01


@contextmanager
def serving(folder: Path, environment: Mapping[str, str]) -> Generator[Client]:
    """Run a service for as long as the block takes; `environment` has its data folder at `folder/data`.

    Gives a client once it answers. What it says goes to `folder/log`.
    """
    with (folder / "log").open("wb") as log:
        service = subprocess.Popen(
            [sys.executable, "-m", "freight", "serve"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    try:
        with Client(f"unix://{folder / 'data' / 'run' / 'api.sock'}") as client:
            while not _answers(client):
                assert service.poll() is None, (folder / "log").read_text()
                time.sleep(_POLL_S)
            yield client
    finally:
        service.terminate()
        service.wait()


def _answers(client: Client) -> bool:
    try:
        client.version()
    except NoServer:
        return False
    return True
