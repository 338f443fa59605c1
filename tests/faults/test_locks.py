"""One run at a time has a state folder, and one a device; where flock is refused, too."""

import os
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.faults.runs import OUT, Running, check_complete, engines_of, nothing_left, received, records
from tests.harness import Box, engine, engine_command, model_toml, wait_until

COUNT = 200
SLOW = ("--digest", "--latency", "0.03")


@pytest.fixture
def no_flock(box: Box, tmp_path: Path) -> dict[str, str]:
    """Variables with which flock is refused for the files in the box's folder."""
    shim = tmp_path / "no_flock.so"
    source = Path(__file__).with_name("no_flock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(shim), "NO_FLOCK_UNDER": str(box.folder)}


@contextmanager
def held_up(*pids: int) -> Generator[None]:
    """Stop these processes for as long as the block takes, so that what waits for them cannot get on."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def check_second_run_is_refused(box: Box, tmp_path: Path, **variables: str) -> None:
    """Start a run, then the same once more; the first completes and the second changes nothing."""
    box.write("in.jsonl", records(COUNT))
    with engine(tmp_path / "engine", *SLOW) as endpoint:
        arguments = ("in.jsonl", "-o", OUT, "--model", endpoint.url, "--concurrency", "8")
        first = Running(box, *arguments, **variables)
        wait_until(lambda: endpoint.counts()["answered"] >= 20, "it is at work")
        with held_up(endpoint.child.pid):
            for options in ((), ("--fresh", "--force")):
                second = Running(box, *arguments, *options, **variables).end()
                assert second.status == 1, second
                assert f"process {first.child.pid} on " in second.stderr
            names = {path.name for path in (box.folder / f"{OUT}.freight").rglob("*")}
        while first.child.poll() is None:
            names |= {path.name for path in (box.folder / f"{OUT}.freight").rglob("*")}
        assert first.end().status == 0
        assert len(endpoint.received()) == COUNT
    assert not [name for name in names if name.endswith("-shm")]
    assert "results.db" in names
    check_complete(box, COUNT)
    nothing_left(box)


def test_second_run_on_the_same_state_is_refused_and_names_the_first(box: Box, tmp_path: Path) -> None:
    check_second_run_is_refused(box, tmp_path)


def test_second_run_is_refused_where_flock_is_too(box: Box, tmp_path: Path, no_flock: dict[str, str]) -> None:
    check_second_run_is_refused(box, tmp_path, **no_flock)


def test_run_killed_where_flock_is_refused_goes_on_at_once(box: Box, tmp_path: Path, no_flock: dict[str, str]) -> None:
    box.write("in.jsonl", records(COUNT))
    with engine(tmp_path / "engine", *SLOW) as endpoint:
        arguments = ("in.jsonl", "-o", OUT, "--model", endpoint.url, "--concurrency", "8")
        first = Running(box, *arguments, **no_flock)
        wait_until(lambda: endpoint.counts()["answered"] >= 60, "it is at work")
        first.kill()
        assert list((box.folder / f"{OUT}.freight").glob("owner"))
        assert Running(box, *arguments, **no_flock).end(20).status == 0
        assert len(endpoint.received()) <= COUNT + 40
    check_complete(box, COUNT)
    nothing_left(box)


@contextmanager
def two_runs(box: Box, tmp_path: Path) -> Generator[tuple[Running, Running]]:
    """Start a run, and another that needs the same device; the engine of the first is held up during the block."""
    box.configure(model_toml("mine", engine="command", command=engine_command(tmp_path, *SLOW)))
    box.write("in.jsonl", records(100))
    # One at a time, so that it is not done before its engine is held up.
    first = Running(box, "in.jsonl", "-o", OUT, "--model", "mine", "--concurrency", "1")
    wait_until(lambda: received(tmp_path / "record"), "the first has the device")
    with held_up(*engines_of(box)):
        second = Running(box, "in.jsonl", "-o", "second.jsonl", "--model", "mine")
        second.wait_for(f"{box.device} is held by process {first.child.pid}")
        assert second.child.poll() is None
        yield first, second


def test_second_run_on_a_device_waits_for_the_first_and_then_completes(box: Box, tmp_path: Path) -> None:
    with two_runs(box, tmp_path) as (first, second):
        pass
    assert first.end().status == 0
    assert second.end().status == 0
    assert len(received(tmp_path / "record")) == 200
    check_complete(box, 100)
    check_complete(box, 100, "second.jsonl")
    nothing_left(box)


def test_device_of_a_killed_run_goes_to_the_one_that_waits(box: Box, tmp_path: Path) -> None:
    with two_runs(box, tmp_path) as (first, second):
        first.kill()
    assert second.end().status == 0
    check_complete(box, 100, "second.jsonl")
    nothing_left(box)


def test_run_that_is_stopped_but_not_dead_keeps_its_state_and_its_device(box: Box, tmp_path: Path) -> None:
    with two_runs(box, tmp_path) as (first, second), held_up(first.child.pid):
        same = Running(box, "in.jsonl", "-o", OUT, "--model", "mine").end()
        assert same.status == 1, same
        assert f"process {first.child.pid}" in same.stderr
        assert second.child.poll() is None
    assert first.end().status == 0
    assert second.end().status == 0
    check_complete(box, 100)
    check_complete(box, 100, "second.jsonl")
