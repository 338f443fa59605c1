"""Control plane, worker or model server killed at any moment: no process is left, whatever the server started."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from uuid import uuid4

import pytest

from freight.core.job import FINAL
from freight.launchers.cgroup import Group, own_folder
from tests.faults.bystanders import bystanders
from tests.faults.forker import forker_command, named, notes
from tests.faults.runs import records
from tests.faults.services import Served
from tests.faults.together import together
from tests.harness import engine_command, model_toml, wait_until
from tests.unit.test_cgroup import can_have_groups

KILLS = 100 if os.environ.get("FREIGHT_BIG_TESTS") else 10
SEED = 20251201
GONE_S = 5
# A kill comes so soon after a job was submitted, when its worker or its server is being started, or else after the
# server is there.
SOON_S = 1.0
LATER_S = 0.5
GRACE_S = 2
# Without a group of its own, what cleared its environment is found by its worker alone.
CLEARS = can_have_groups()


class Forking:
    """A service whose model server leaves a grandchild behind, and whose workers come and go."""

    def __init__(self, service: Served) -> None:
        self.service = service
        self.token = f"f{uuid4().hex}"
        self._jobs = 0
        command = engine_command(service.folder, "--digest", "--latency", "0.5")
        words = forker_command(service.folder, self.token, CLEARS, command, sys.executable)
        service.configure(model_toml("mine", engine="command", command=words))
        service.write("in.jsonl", records(2000))

    def next_job(self) -> None:
        """Submit a job, and cancel the one before, whatever it is at."""
        self._jobs += 1
        self.service.submit("in.jsonl", f"job{self._jobs}", concurrency=16)
        before = f"job{self._jobs - 1}"
        if self._jobs > 1 and self.service.state(before) not in FINAL:
            self.service.client.cancel(before)

    def grandchildren(self) -> int:
        """Return how many grandchildren there have been."""
        return len(notes(self.service.folder, "grandchild"))

    def comes_up(self, since: int) -> None:
        """Wait until a server has left a grandchild since there were so many."""
        wait_until(lambda: self.grandchildren() > since, "there is another grandchild")

    def runs(self) -> None:
        """Wait until the last job runs, be it on a worker that has lived on."""
        self.service.wait_state(f"job{self._jobs}", "RUNNING")

    def stop(self) -> None:
        """Stop the service, which need not run; then nothing may be left."""
        stopped = self.service.freight("stop")
        assert stopped.status == 0, stopped
        self.is_gone(GONE_S)

    def is_gone(self, within_s: float) -> None:
        """Wait until no process is left, neither by marker nor by name nor in a group."""
        wait_until(lambda: not self.left(), f"nothing is left of {self.token}", within_s)

    def left(self) -> list[int]:
        """Return the processes that are left."""
        found = [process.pid for process in self.service.processes()] + named(self.token)
        return found + [pid for group in self.groups() for pid in group.pids()]

    def groups(self) -> list[Group]:
        """Return the control groups that workers of this service have."""
        own = own_folder()
        workers = {worker for (worker,) in self.service.ask("SELECT id FROM worker")}
        found = own.glob("freight-*") if own is not None else ()
        return [Group(path) for path in found if path.name.removeprefix("freight-") in workers]

    def end(self) -> None:
        """End what a failed test left."""
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        for group in self.groups():
            wait_until(group.remove, "the group's folder is gone", 10)


def kill_service(forking: Forking, moments: random.Random) -> None:
    forking.service.kill()
    if moments.random() < 0.5:
        # Nobody restarts it.
        return
    forking.service.serve()
    forking.next_job()
    if moments.random() < 0.3:
        forking.runs()


def kill_worker(forking: Forking, moments: random.Random) -> None:
    kill_one(forking, moments, forking.service.workers)


def kill_server(forking: Forking, moments: random.Random) -> None:
    kill_one(forking, moments, forking.service.engines)


def kill_one(forking: Forking, moments: random.Random, find: Callable[[], list[int]]) -> None:
    wait_until(find, "there is one to kill")
    before = forking.grandchildren()
    for pid in find():
        os.kill(pid, signal.SIGKILL)
    if moments.random() < 0.3:
        forking.comes_up(before)


@pytest.mark.parametrize("kill", [kill_service, kill_worker, kill_server])
@together
def test_killed_at_any_moment_nothing_is_left_and_no_device_is_shared(
    service: Served, kill: Callable[[Forking, random.Random], None]
) -> None:
    print(f"seed {SEED}")
    moments = random.Random(SEED)
    with bystanders(uuid4().hex[:12], f"f{uuid4().hex}"):
        forking = Forking(service)
        try:
            for number in range(KILLS):
                service.serve()
                before = forking.grandchildren()
                forking.next_job()
                if number % 2:
                    forking.comes_up(before)
                moment = moments.uniform(0, LATER_S if number % 2 else SOON_S)
                time.sleep(moment)
                print(f"kill {number} after {moment:.2f} s, {forking.grandchildren()} grandchildren so far")
                kill(forking, moments)
                forking.stop()
                assert service.is_device_free()
                assert not forking.groups()
            assert notes(service.folder, "clash") == []
        finally:
            forking.end()


@together
def test_worker_that_no_control_plane_comes_back_for_ends_with_all_after_its_grace(service: Served) -> None:
    with bystanders(uuid4().hex[:12], f"f{uuid4().hex}"):
        forking = Forking(service)
        try:
            service.serve(_FREIGHT_ORPHAN_S=str(GRACE_S))
            forking.next_job()
            wait_until(lambda: named(forking.token), "the grandchild is there")
            wait_until(service.received, "the server is at work")
            service.kill()
            assert service.workers()
            forking.is_gone(GRACE_S + GONE_S)
            # The next one finds what is left of it: an empty folder.
            forking.stop()
            assert not forking.groups()
            assert service.is_device_free()
        finally:
            forking.end()
