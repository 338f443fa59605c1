"""A worker and all that its model server starts end together, and nothing else ends with them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from freight.core.device import Device, DeviceKind
from freight.launchers.base import WorkerPlace
from freight.launchers.cgroup import Group, find_group
from freight.launchers.devices import Inventory
from freight.launchers.local import LocalLauncher, LocalWorker
from freight.launchers.processes import MARKER
from freight.store.processes import start_ticks
from tests.faults.bystanders import bystanders, foreign
from tests.faults.forker import forker_command, named
from tests.harness import ROOT, wait_until
from tests.unit.test_cgroup import can_have_groups

CLEAR_S = 20
SWEEP_S = 20.0
needs_groups = pytest.mark.skipif(
    not can_have_groups(), reason="without control groups of its own nothing finds what cleared its environment"
)


@dataclass(frozen=True)
class Ground:
    """A launcher on a device of its own, and a folder for what a test's model server notes."""

    launcher: LocalLauncher
    device: Device
    folder: Path
    token: str
    servers: list[subprocess.Popen[bytes]]

    def start(self) -> LocalWorker:
        """Start a worker; no control plane answers it, so that it has no server but those that a test gives it."""
        assert self.launcher.take([self.device]) is None
        worker = uuid4().hex[:12]
        place = WorkerPlace(worker, self.folder / "none.sock", self.folder, self.folder / "log", (self.device,))
        started = self.launcher.start(place)
        group = group_of(started)
        if group is not None:
            wait_until(lambda: started.pid in group.pids(), "the worker has moved in")
        return started

    def serve(self, worker: LocalWorker, *, clear: bool) -> None:
        """Start a model server of the worker's that leaves a grandchild, as the worker itself would."""
        command = forker_command(self.folder, self.token, clear, ["sleep", "600"], sys.executable)
        environment = {**os.environ, MARKER: worker.identity()["holds"][0]["worker"], "PYTHONPATH": str(ROOT)}
        child = subprocess.Popen(command, env=environment, start_new_session=True)
        self.servers.append(child)
        group = group_of(worker)
        if group is not None:
            group.add(child.pid)
        wait_until(lambda: named(self.token), "the grandchild is there")

    def is_free(self) -> bool:
        """Return whether the device is nobody's."""
        if self.launcher.take([self.device]) is not None:
            return False
        self.launcher.release([self.device])
        return True


def group_of(worker: LocalWorker) -> Group | None:
    """Return a worker's control group."""
    path = worker.identity()["group"]
    return find_group(path) if path else None


@pytest.fixture
def ground(tmp_path: Path) -> Generator[Ground]:
    """A launcher; what a failed test leaves is ended."""
    device = Device(f"cpu:{os.getpid()}{uuid4().int % 1_000_000}", DeviceKind.CPU)
    locks = tmp_path / "locks"
    locks.mkdir()
    launcher = LocalLauncher(Inventory([device], []), locks, outlive=True)
    ground = Ground(launcher, device, tmp_path, f"f{uuid4().hex}", [])
    yield ground
    for pid in named(ground.token):
        os.kill(pid, signal.SIGKILL)
    for server in ground.servers:
        server.kill()
        server.wait()


def run(plot: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's steps, for which the launcher needs a loop."""
    asyncio.run(plot())


@needs_groups
@pytest.mark.parametrize("first", ["nothing", "worker"])
def test_grandchild_without_session_and_environment_is_gone_with_its_worker(ground: Ground, first: str) -> None:
    async def plot() -> None:
        worker = ground.start()
        ground.serve(worker, clear=True)
        group = group_of(worker)
        assert group is not None
        assert len(group.pids()) == 3
        with bystanders(worker.identity()["holds"][0]["worker"], ground.token):
            if first == "worker":
                os.kill(worker.pid, signal.SIGKILL)
                await worker.ended()
                assert named(ground.token)
            assert await worker.clear(CLEAR_S) == ()
            assert not named(ground.token)
        assert not group.path.exists()
        assert ground.is_free()

    run(plot)


def test_without_groups_what_kept_its_environment_is_gone_with_its_worker(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freight.launchers.local.make_group", lambda worker: None)

    async def plot() -> None:
        worker = ground.start()
        assert group_of(worker) is None
        ground.serve(worker, clear=False)
        with bystanders(worker.identity()["holds"][0]["worker"], ground.token):
            os.kill(worker.pid, signal.SIGKILL)
            assert await worker.clear(CLEAR_S) == ()
            assert not named(ground.token)
        assert ground.is_free()

    run(plot)


@needs_groups
def test_killed_at_once_ends_all_without_waiting(ground: Ground) -> None:
    async def plot() -> None:
        worker = ground.start()
        ground.serve(worker, clear=True)
        worker.kill()
        await worker.ended()
        wait_until(lambda: not named(ground.token), "the grandchild is gone", 10)
        assert await worker.clear(CLEAR_S) == ()

    run(plot)


@needs_groups
def test_next_control_plane_sweeps_what_a_dead_worker_left(ground: Ground) -> None:
    async def plot() -> None:
        worker = ground.start()
        ground.serve(worker, clear=True)
        identity = worker.identity()
        os.kill(worker.pid, signal.SIGKILL)
        await worker.ended()
        name = identity["holds"][0]["worker"]
        ground.launcher.release([ground.device])
        assert ground.launcher.adopt(name, identity) is None
        with bystanders(name, ground.token):
            await asyncio.to_thread(ground.launcher.sweep, name, identity, SWEEP_S)
            assert not named(ground.token)
        assert find_group(identity["group"]) is None
        assert ground.is_free()

    run(plot)


@needs_groups
def test_next_control_plane_adopts_a_worker_with_its_group(ground: Ground) -> None:
    async def plot() -> None:
        worker = ground.start()
        ground.serve(worker, clear=True)
        adopted = ground.launcher.adopt(worker.identity()["holds"][0]["worker"], worker.identity())
        assert adopted is not None
        assert group_of(adopted) == group_of(worker)
        assert await adopted.clear(CLEAR_S) == ()
        assert not named(ground.token)
        await worker.ended()

    run(plot)


def test_process_that_has_a_dead_worker_s_number_is_not_touched(ground: Ground) -> None:
    async def plot() -> None:
        worker = ground.start()
        identity = worker.identity()
        assert await worker.clear(CLEAR_S) == ()
        name = identity["holds"][0]["worker"]
        with foreign("sleep") as other:
            # What the catalog would tell if the dead worker had had this number.
            reused = {**identity, "process": {**identity["process"], "pid": other.pid}}
            assert start_ticks(other.pid) != identity["process"]["started"]
            assert ground.launcher.adopt(name, reused) is None
            await asyncio.to_thread(ground.launcher.sweep, name, reused, SWEEP_S)

    run(plot)


@needs_groups
def test_path_that_is_not_a_worker_s_group_is_left_alone_whatever_the_catalog_says(ground: Ground) -> None:
    async def plot() -> None:
        worker = ground.start()
        identity = worker.identity()
        assert await worker.clear(CLEAR_S) == ()
        own = Path(identity["group"]).parent
        other = own / f"somebody-{uuid4().hex}"
        other.mkdir()
        try:
            with foreign("sleep") as process:
                Group(other).add(process.pid)
                for path in (other, own, Path("/")):
                    wrong = {**identity, "group": str(path)}
                    await asyncio.to_thread(ground.launcher.sweep, identity["holds"][0]["worker"], wrong, SWEEP_S)
        finally:
            wait_until(Group(other).remove, "the folder is gone", 10)

    run(plot)
