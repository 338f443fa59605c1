"""A worker process that is started before anybody knows what for."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from freight.core.device import Device, DeviceKind
from freight.launchers.base import WorkerPlace
from freight.launchers.devices import Inventory
from freight.launchers.local import LocalLauncher
from freight.launchers.processes import marked
from freight.launchers.standby import STANDBY, Standby
from freight.worker.__main__ import GRACE
from tests.harness import PATIENCE_S, ROOT, wait_until

CPU = Device("cpu:0", DeviceKind.CPU)


@pytest.fixture
def standby() -> Generator[Standby]:
    made = Standby()
    yield made
    made.close()


def pid_of(standby: Standby) -> int:
    (process,) = marked(standby.worker)
    return process.pid


def place(tmp_path: Path, worker: str, *devices: Device) -> WorkerPlace:
    return WorkerPlace(worker, tmp_path / "control", tmp_path, tmp_path / "log", devices)


def started(launcher: LocalLauncher, place: WorkerPlace) -> int:
    """Start a worker, and end it; return its process id."""

    async def scenario() -> int:
        if place.devices:
            assert launcher.take(place.devices) is None
        worker = launcher.start(place)
        worker.kill()
        await worker.ended()
        await worker.clear(5.0)
        return worker.pid

    return asyncio.run(scenario())


def test_it_becomes_the_first_worker_and_no_other(tmp_path: Path, standby: Standby) -> None:
    launcher = LocalLauncher(Inventory((), ()), tmp_path, standby=standby)
    waiting = pid_of(standby)

    first, second = launcher.worker_id(), launcher.worker_id()
    assert first == standby.worker != second
    assert started(launcher, place(tmp_path, first)) == waiting
    assert not standby.is_waiting()
    assert started(launcher, place(tmp_path, second)) != waiting


def test_what_it_is_told_is_what_a_worker_is_started_with(tmp_path: Path, standby: Standby) -> None:
    log = tmp_path / "log"
    paths = ("--control", str(tmp_path / "nobody"), "--folder", str(tmp_path), "--log", str(log))
    process = standby.tell(["--worker", "w", *paths, "--parent", str(os.getpid())], {GRACE: "0.1"})

    assert process is not None
    assert process.wait(PATIENCE_S) == 0
    assert "no control plane for 0 s" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_worker_that_needs_a_device_is_a_process_of_its_own(tmp_path: Path, standby: Standby) -> None:
    launcher = LocalLauncher(Inventory((CPU,), ()), tmp_path, standby=standby)
    waiting = pid_of(standby)

    assert started(launcher, place(tmp_path, "w1", CPU)) != waiting
    assert standby.is_waiting()


def test_one_that_is_gone_is_replaced(tmp_path: Path, standby: Standby) -> None:
    launcher = LocalLauncher(Inventory((), ()), tmp_path, standby=standby)
    waiting = pid_of(standby)
    worker = launcher.worker_id()
    os.kill(waiting, signal.SIGKILL)
    wait_until(lambda: not standby.is_waiting(), "it is gone")

    assert started(launcher, place(tmp_path, worker)) != waiting


def test_one_that_nobody_needs_is_gone_when_it_is_closed(standby: Standby) -> None:
    standby.close()

    assert marked(standby.worker) == []
    assert not standby.is_waiting()


def test_it_ends_with_who_started_it_however_that_ends() -> None:
    script = (
        "from freight.launchers.standby import Standby\n"
        "import os, signal\n"
        "print(Standby().worker, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    starter = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)

    worker = starter.stdout.strip()
    assert starter.returncode == -signal.SIGKILL and worker
    wait_until(lambda: not marked(worker), "the process that stood by is gone")


def test_a_run_is_refused_with_nothing_left(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("no JSON\n")
    argv = [sys.executable, "-m", "freight", "run", "in.jsonl", "-o", "out.jsonl", "--model", "http://127.0.0.1:9"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FREIGHT_DATA": str(tmp_path / "data"), "PYTHONWARNINGS": ""}
    done = subprocess.run(argv, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, check=False)

    assert done.returncode == 2, done.stderr
    assert not [process for process in psutil.process_iter() if works_in(process, tmp_path)]


def works_in(process: psutil.Process, folder: Path) -> bool:
    """Return whether a process stands by in a folder."""
    with suppress(psutil.Error):
        return process.cmdline()[-1:] == [STANDBY] and process.cwd() == str(folder)
    return False
