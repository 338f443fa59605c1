"""The end of a model server that left a process behind: it is over only when that is gone, too."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final
from uuid import uuid4

import psutil
import pytest

from freight.engines.base import Address, ServerCommand
from freight.launchers.processes import MARKER
from freight.worker.supervise import ModelServer, become_subreaper
from tests.faults.forker import forker_command, named, notes
from tests.harness import ROOT, wait_until

KILLED: Final = "killed"


@pytest.mark.parametrize("how", [KILLED, "stopped"])
def test_server_s_end_is_over_when_all_that_it_left_behind_is_gone_and_reaped(tmp_path: Path, how: str) -> None:
    token = f"f{uuid4().hex}"
    # In a process of its own, as a worker is: orphans come to it.
    words = [sys.executable, "-m", "tests.faults.test_server_tree", str(tmp_path), token, how]
    done = subprocess.run(words, env={**os.environ, MARKER: token}, cwd=ROOT, capture_output=True, check=True)

    assert json.loads(done.stdout) == {"before": 2, "left": [], "children": []}
    assert named(token) == []


async def end(folder: Path, token: str, how: str) -> dict[str, object]:
    """Start a server that leaves a grandchild, end it, and return how many processes there were and which are left."""
    argv = forker_command(folder, token, False, ["sleep", "600"], sys.executable)
    server = ModelServer(ServerCommand(argv, {}, Address("http://localhost", None, "")))
    server.start()
    wait_until(lambda: named(token) and len(psutil.Process().children(recursive=True)) == 2, "the grandchild is there")
    before = psutil.Process().children(recursive=True)
    if how == KILLED:
        os.kill(int(notes(folder, "server")[0][0]), signal.SIGKILL)
        await server.exited()
    left = await server.stop(5.0)
    return {"before": len(before), "left": left, "children": [p.pid for p in psutil.Process().children()]}


if __name__ == "__main__":
    become_subreaper()
    print(json.dumps(asyncio.run(end(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))))
