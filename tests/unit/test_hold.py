"""Holding devices: all or none, with real locks; and what is left on a device after a worker."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import pytest

from freight.core.device import Device, DeviceKind, Holder, Usage
from freight.launchers import local
from freight.launchers.cgroup import make_group
from freight.launchers.hold import Hold, Holds, read_hold
from freight.launchers.local import LocalLauncher, LocalWorker, WorkerIdentity
from freight.launchers.processes import MARKER
from freight.store.processes import identify

GB: Final = 10**9
ONE: Final = Device("GPU-one", DeviceKind.NVIDIA, "H100", 80 * GB, 0)
TWO: Final = Device("GPU-two", DeviceKind.NVIDIA, "H100", 80 * GB, 1)
CPU: Final = Device("cpu:0", DeviceKind.CPU)
TRAINS: Final = Holder(4321, "user eve: train.py")


class Looks:
    """Devices on which there is what the test says. `asked` counts how often each was looked at."""

    def __init__(self) -> None:
        self.on: dict[str, Usage] = {}
        self.asked: Counter[str] = Counter()

    def devices(self) -> Sequence[Device]:
        return (ONE, TWO, CPU)

    def usage(self, device: Device) -> Usage | None:
        self.asked[device.id] += 1
        return self.on.get(device.id)

    def environment(self, devices: Sequence[Device]) -> Mapping[str, str]:
        return {}


@pytest.fixture
def looks() -> Looks:
    return Looks()


@pytest.fixture
def holds(looks: Looks, tmp_path: Path) -> Generator[Holds]:
    made = Holds(looks, tmp_path)
    yield made
    made.let_go([ONE.id, TWO.id, CPU.id])


@pytest.fixture
def theirs(looks: Looks, tmp_path: Path) -> Generator[Holds]:
    """Those of another service on this machine."""
    made = Holds(looks, tmp_path)
    yield made
    made.let_go([ONE.id, TWO.id, CPU.id])


def test_devices_that_are_taken_are_taken_for_the_whole_host(holds: Holds, theirs: Holds) -> None:
    assert holds.take([ONE, CPU]) is None
    taken = theirs.take([CPU])
    assert taken is not None
    assert (taken[0], taken[1].pid) == (CPU.id, os.getpid())
    assert theirs.take([TWO]) is None


def test_of_several_devices_all_are_taken_or_none(holds: Holds, theirs: Holds) -> None:
    assert theirs.take([TWO]) is None
    taken = holds.take([ONE, TWO, CPU])
    assert taken is not None
    assert taken[0] == TWO.id
    # What was had already is free again.
    assert theirs.take([ONE, CPU]) is None


def test_a_device_that_is_held_here_is_not_taken_twice(holds: Holds) -> None:
    assert holds.take([ONE]) is None
    assert holds.take([ONE, TWO]) == (ONE.id, Holder(os.getpid(), "this service"))


def test_an_ask_that_fails_for_a_device_held_here_does_not_let_it_go(holds: Holds, theirs: Holds) -> None:
    assert holds.take([ONE]) is None
    assert holds.take([ONE]) is not None
    assert theirs.take([ONE]) is not None


@pytest.mark.parametrize(
    ("usage", "free"),
    [
        (None, True),
        (Usage(70 * GB), True),
        (Usage(1 * GB, (TRAINS,)), True),
        (Usage(9 * GB, (TRAINS,)), False),
        (Usage(None, (TRAINS,)), False),
        (Usage(80 * GB, (Holder(0, "it cannot be read"),)), False),
    ],
)
def test_a_device_on_which_a_stranger_computes_is_his(
    holds: Holds, theirs: Holds, looks: Looks, usage: Usage | None, free: bool
) -> None:
    if usage is not None:
        looks.on[ONE.id] = usage
    taken = holds.take([TWO, ONE])
    assert (taken is None) == free
    if usage is not None and not free:
        assert taken == (ONE.id, usage.holders[0])
        looks.on.clear()
        assert theirs.take([TWO, ONE]) is None


def test_each_hold_knows_what_was_on_its_device_before(holds: Holds, looks: Looks) -> None:
    looks.on = {ONE.id: Usage(3 * GB)}
    held = holds.begin("w", [ONE, CPU], None)
    assert held == (Hold("w", ONE.id, 3 * GB), Hold("w", CPU.id, None))
    assert [read_hold(msgspec.json.decode(msgspec.json.encode(hold))) for hold in held] == list(held)


def test_locks_are_handed_down_and_outlive_who_took_them(holds: Holds, theirs: Holds) -> None:
    assert holds.take([ONE, TWO]) is None
    locks = holds.locks_of([ONE.id, TWO.id, CPU.id])
    assert len(locks) == 2
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=locks) as child:
        holds.let_go([ONE.id, TWO.id])
        taken = theirs.take([ONE])
        assert taken is not None
        child.kill()
    assert theirs.take([ONE, TWO]) is None


@pytest.mark.parametrize(
    ("before", "now", "is_left"),
    [
        (Usage(1 * GB), Usage(1 * GB), False),
        (Usage(1 * GB), Usage(2 * GB), False),  # Within what a driver may keep back.
        (Usage(1 * GB), Usage(3 * GB), True),
        (Usage(9 * GB), Usage(1 * GB), False),
        (Usage(None), Usage(80 * GB), False),
        (Usage(1 * GB), Usage(None), False),
        (None, Usage(80 * GB), False),
    ],
)
def test_memory_that_does_not_come_back_is_left_there(
    holds: Holds, looks: Looks, before: Usage | None, now: Usage, is_left: bool
) -> None:
    if before is not None:
        looks.on[ONE.id] = before
    [hold] = holds.begin("w", [ONE], None)
    looks.on[ONE.id] = now
    left = holds.remains(hold)
    assert (left is not None) == is_left
    if left is not None:
        assert (left.device, left.pid, read_hold(left.hold)) == (ONE.id, None, hold)
        assert left.words == "2.0 GB more of its memory are in use than before"


def test_who_has_what_is_left_is_named(holds: Holds, looks: Looks) -> None:
    looks.on[ONE.id] = Usage(50 * GB, (TRAINS,))
    left = holds.remains(Hold("w", ONE.id, 0))
    assert left is not None
    assert left.pid == TRAINS.pid
    assert left.words.endswith(f", by process {TRAINS.pid} ({TRAINS.what})")


@contextmanager
def carrying(worker: str) -> Generator["subprocess.Popen[bytes]"]:
    """Run a process that carries a worker's marker."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, MARKER: worker},
    ) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child
        finally:
            child.kill()


def test_process_of_the_worker_itself_is_left_there_whatever_the_memory_says(holds: Holds) -> None:
    worker = f"left{os.getpid()}"
    with carrying(worker) as child:
        left = holds.remains(Hold(worker, CPU.id, None))
        assert left is not None
        assert (left.device, left.pid) == (CPU.id, child.pid)
        assert f"process {child.pid}" in left.words
    assert holds.remains(Hold(worker, CPU.id, None)) is None


def test_device_that_is_as_before_is_let_go_when_it_is_looked_at(holds: Holds, theirs: Holds, looks: Looks) -> None:
    looks.on[ONE.id] = Usage(1 * GB)
    assert holds.take([ONE]) is None
    [hold] = holds.begin("w", [ONE], None)
    assert not holds.look_again([hold])
    assert theirs.take([ONE]) is None


def test_device_that_is_not_as_before_is_held_from_the_first_look_on(holds: Holds, theirs: Holds, looks: Looks) -> None:
    hold = Hold("w", ONE.id, 1 * GB)
    looks.on[ONE.id] = Usage(60 * GB)
    assert holds.look_again([hold])
    looks.on[ONE.id] = Usage(1 * GB)
    assert theirs.take([ONE]) is not None
    assert not holds.look_again([hold])
    assert theirs.take([ONE]) is None


def test_device_that_somebody_has_taken_meanwhile_is_his(holds: Holds, theirs: Holds, looks: Looks) -> None:
    assert theirs.take([ONE]) is None
    looks.on[ONE.id] = Usage(60 * GB)
    assert not holds.look_again([Hold("w", ONE.id, 1 * GB)])
    assert theirs.locks_of([ONE.id])


def test_device_that_is_gone_has_nothing_left_on_it(holds: Holds) -> None:
    assert not holds.look_again([Hold("w", "GPU-gone", 1 * GB)])
    assert holds.locks_of(["GPU-gone"]) == ()


@contextmanager
def heir(holds: Holds, worker: str) -> Generator["subprocess.Popen[bytes]"]:
    """Run a process that carries a worker's marker and has inherited the lock of a device that is held no more."""
    assert holds.take([ONE]) is None
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        pass_fds=holds.locks_of([ONE.id]), env={**os.environ, MARKER: worker},
    ) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        holds.let_go([ONE.id])
        try:
            yield child
        finally:
            child.kill()


def test_device_whose_lock_a_process_of_its_worker_still_has_is_not_as_before(holds: Holds, theirs: Holds) -> None:
    worker = f"heir{os.getpid()}"
    with heir(holds, worker) as child:
        # As a service that adopted the worker looks: it never had the lock itself.
        [left] = theirs.look_again([Hold(worker, ONE.id, None)])
        assert (left.device, left.pid) == (ONE.id, child.pid)
    assert not theirs.look_again([Hold(worker, ONE.id, None)])
    assert holds.take([ONE]) is None


def test_device_that_is_freed_by_hand_can_be_taken_though_a_process_still_has_its_lock(
    holds: Holds, theirs: Holds
) -> None:
    worker = f"freed{os.getpid()}"
    with heir(holds, worker) as child:
        assert theirs.take([ONE]) is not None
        holds.free(Hold(worker, ONE.id, None))
        assert theirs.take([ONE]) is None
        # From now on it is held as any other.
        assert holds.take([ONE]) is not None
        assert child.poll() is None
    assert holds.take([ONE]) is not None


def test_device_that_is_freed_by_hand_is_free_for_all(holds: Holds, theirs: Holds) -> None:
    assert holds.take([ONE]) is None
    holds.free(Hold("w", ONE.id, None))
    assert theirs.take([ONE]) is None


def test_device_that_is_freed_by_hand_stays_with_who_has_taken_it_meanwhile(holds: Holds, theirs: Holds) -> None:
    assert theirs.take([ONE]) is None
    holds.free(Hold(f"long-gone{os.getpid()}", ONE.id, None))
    assert holds.take([ONE]) is not None


def ending(holds: Holds, worker: str, held: tuple[Hold, ...]) -> LocalWorker:
    """Return a worker whose own process has ended."""
    child = subprocess.Popen(["true"], start_new_session=True)
    return LocalWorker(worker, child.pid, child, holds, held, None)


def test_device_that_is_as_before_is_left_to_others_while_another_of_its_worker_is_not(
    holds: Holds, looks: Looks
) -> None:
    """Also to the next worker of the same service, whose hold on it must be neither taken for ours nor let go."""
    looks.on = {ONE.id: Usage(1 * GB), TWO.id: Usage(60 * GB)}
    held = (Hold("w", ONE.id, 1 * GB), Hold("w", TWO.id, 1 * GB))

    async def scenario() -> None:
        assert holds.take([ONE, TWO]) is None
        clearing = asyncio.create_task(ending(holds, f"clear{os.getpid()}", held).clear(30))
        async with asyncio.timeout(30):
            while holds.locks_of([ONE.id]):  # noqa: ASYNC110 - it is polled, as the harness does with processes.
                await asyncio.sleep(0.01)
            assert holds.take([ONE]) is None
            looks.on[ONE.id] = Usage(60 * GB)
            looked = looks.asked[ONE.id], looks.asked[TWO.id]
            while looks.asked[TWO.id] < looked[1] + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            looks.on[TWO.id] = Usage(1 * GB)
            assert await clearing == ()
            assert looks.asked[ONE.id] == looked[0]
            assert holds.locks_of([ONE.id])

    asyncio.run(scenario())


@pytest.mark.parametrize("within_s", [0.0, 0.1])
def test_sweep_of_what_cannot_be_ended_ends_in_time_and_tells_which_devices_that_has(
    looks: Looks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within_s: float
) -> None:
    asked: list[str] = []

    def never(worker: str, _: object) -> bool:
        asked.append(worker)
        return True

    monkeypatch.setattr(local, "end_all", never)
    looks.on = {ONE.id: Usage(1 * GB), TWO.id: Usage(60 * GB)}
    launcher = LocalLauncher(looks, tmp_path)
    with carrying(f"stuck{os.getpid()}") as child:
        process = identify(child.pid)
        held = (Hold(f"stuck{os.getpid()}", ONE.id, 1 * GB), Hold(f"stuck{os.getpid()}", TWO.id, 1 * GB))
        identity = msgspec.to_builtins(WorkerIdentity(process, "", held))
        remains = launcher.sweep(f"stuck{os.getpid()}", identity, within_s)
    assert [(left.device, left.pid) for left in remains] == [(ONE.id, child.pid), (TWO.id, child.pid)]
    assert asked
    for device, hold in zip((ONE, TWO), held, strict=True):
        launcher.let_go(device.id, msgspec.to_builtins(hold))


def test_sweep_that_can_look_for_nothing_does_not_break_who_asks(
    looks: Looks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> bool:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(local, "end_all", full)
    assert LocalLauncher(looks, tmp_path).sweep("w", None, 0.1) == ()


def test_sweep_of_a_worker_that_was_never_written_down_removes_its_group(looks: Looks, tmp_path: Path) -> None:
    group = make_group(f"w{os.getpid()}")

    assert LocalLauncher(looks, tmp_path).sweep(f"w{os.getpid()}", None, 5) == ()

    # Where the machine gives groups at all.
    assert group is None or not group.path.exists()
