"""A full disk suspends a job and loses nothing; once there is room the same process goes on."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.faults.runs import (
    Running,
    check_complete,
    committed,
    nothing_left,
    received,
    records,
    without,
    workers_of,
)
from tests.faults.small_disk import SmallDisk, small_disk
from tests.harness import Box, Engine, chat, code, engine, engine_command, model_toml, wait_until

COUNT = 150


@pytest.fixture
def disk(tmp_path: Path) -> Generator[SmallDisk]:
    """A disk of four megabytes."""
    with small_disk(tmp_path) as mounted:
        yield mounted


@pytest.fixture
def slow(tmp_path: Path) -> Generator[Engine]:
    """An engine that takes its time."""
    with engine(tmp_path / "engine", "--digest", "--latency", "0.03") as running:
        yield running


def suspended_line(running: Running) -> str:
    """Wait until the run says that it is suspended, and return how it does."""
    running.wait_for("SUSPENDED", 20)
    return next(line for line in running.said().splitlines() if line.startswith("SUSPENDED"))


def start(box: Box, disk: SmallDisk, model: str, *options: str) -> Running:
    box.write("in.jsonl", records(COUNT))
    output = str(disk.path / "out.jsonl")
    return Running(box, "in.jsonl", "-o", output, "--model", model, "--concurrency", "8", *options)


def check_output(box: Box, disk: SmallDisk) -> None:
    check_complete(box, COUNT, str(disk.path / "out.jsonl"))


def test_disk_that_fills_up_at_work_suspends_the_job_until_there_is_room(
    box: Box, disk: SmallDisk, slow: Engine
) -> None:
    running = start(box, disk, slow.url)
    wait_until(lambda: slow.counts()["answered"] >= 40, "it is at work")
    disk.fill()
    assert "no space left" in suspended_line(running)
    assert running.child.poll() is None
    disk.free()
    finished = running.end()
    assert finished.status == 0, finished
    check_output(box, disk)
    assert len(slow.received()) == COUNT
    nothing_left(box)


def test_run_killed_on_a_full_disk_loses_nothing_that_was_on_it(box: Box, disk: SmallDisk, slow: Engine) -> None:
    running = start(box, disk, slow.url)
    wait_until(lambda: slow.counts()["answered"] >= 40, "it is at work")
    disk.fill()
    suspended_line(running)
    running.kill()
    nothing_left(box)
    done, sent = committed(disk.path / "out.jsonl"), len(slow.received())
    assert done
    disk.free()
    assert start(box, disk, slow.url).end().status == 0
    without(received(slow.folder / "record", sent), done)
    check_output(box, disk)


def test_ctrl_c_on_a_full_disk_stops_soon_and_the_rerun_goes_on(box: Box, disk: SmallDisk, slow: Engine) -> None:
    running = start(box, disk, slow.url)
    wait_until(lambda: slow.counts()["answered"] >= 40, "it is at work")
    disk.fill()
    suspended_line(running)
    running.signal(signal.SIGINT)
    assert running.ends_within(8).status == 130
    assert not box.processes()
    done, sent = committed(disk.path / "out.jsonl"), len(slow.received())
    assert done
    disk.free()
    assert start(box, disk, slow.url).end().status == 0
    without(received(slow.folder / "record", sent), done)
    check_output(box, disk)


def test_engine_that_dies_on_a_full_disk_is_started_again_once_there_is_room(
    box: Box, disk: SmallDisk, tmp_path: Path
) -> None:
    command = engine_command(tmp_path, "--digest", "--latency", "0.03", "--die-after", "100")
    box.configure(model_toml("mine", engine="command", command=command))
    running = start(box, disk, "mine")
    wait_until(lambda: len(received(tmp_path / "record")) >= 60, "the engine is at work")
    disk.fill()
    assert "no space left" in suspended_line(running)
    disk.free()
    finished = running.end()
    assert finished.status == 0, finished
    check_output(box, disk)
    nothing_left(box)


def test_worker_lost_while_its_results_wait_for_room_is_replaced_and_they_count_once(
    box: Box, disk: SmallDisk, tmp_path: Path
) -> None:
    command = engine_command(tmp_path, "--digest", "--latency", "0.03")
    box.configure(model_toml("mine", engine="command", command=command))
    running = start(box, disk, "mine")
    wait_until(lambda: len(received(tmp_path / "record")) >= 60, "the engine is at work")
    disk.fill()
    suspended_line(running)
    [worker] = workers_of(box)
    os.kill(worker, signal.SIGKILL)
    nothing_but(box, running)
    disk.free()
    finished = running.end()
    assert finished.status == 0, finished
    check_output(box, disk)
    nothing_left(box)


def test_worker_that_cannot_be_replaced_on_a_full_disk_is_once_there_is_room(
    box: Box, disk: SmallDisk, tmp_path: Path
) -> None:
    command = engine_command(tmp_path, "--digest", "--latency", "1")
    box.configure(model_toml("mine", engine="command", command=command))
    box.write("few.jsonl", records(12))
    running = Running(box, "few.jsonl", "-o", str(disk.path / "few"), "--model", "mine", "--concurrency", "6")
    wait_until(lambda: len(received(tmp_path / "record")) >= 6, "the engine is at work")
    disk.fill()
    [worker] = workers_of(box)
    os.kill(worker, signal.SIGKILL)
    assert "no space left" in suspended_line(running)
    assert {process.pid for process in box.processes()} == {running.child.pid}
    disk.free()
    finished = running.end()
    assert finished.status == 0, finished
    check_complete(box, 12, str(disk.path / "few"))


def nothing_but(box: Box, running: Running) -> None:
    """Wait until of the box's processes only the run itself is left."""
    wait_until(lambda: {process.pid for process in box.processes()} <= {running.child.pid}, "its worker is gone", 10)


def test_no_room_for_the_results_file_suspends_the_job_until_there_is(
    box: Box, disk: SmallDisk, tmp_path: Path
) -> None:
    with engine(tmp_path / "engine", "--digest") as fast:
        long = [record | {"custom_id": record["custom_id"] + "x" * 400} for record in records(COUNT)]
        long.append(chat("last", f"text {COUNT} STUB:sleep=2"))
        path = box.write("in.jsonl", long)
        output = disk.path / "out.jsonl"
        running = Running(box, str(path), "-o", str(output), "--model", fast.url)
        wait_until(lambda: len(committed(output)) == COUNT, "only the last is left")
        # Room for its row, but not for a file with all of these custom_ids.
        disk.fill(leaving=50_000)
        said = suspended_line(running)
        assert "no space left for the results file" in said, said
        assert not output.exists()
        assert running.child.poll() is None
        disk.free()
        finished = running.end()
        assert finished.status == 0, finished
        assert len(fast.received()) == COUNT + 1
    assert {code(result) for result in box.results(str(output))} == {None}
    assert [result["custom_id"] for result in box.results(str(output))] == [record["custom_id"] for record in long]


def test_start_on_a_full_disk_says_so_and_the_same_command_works_later(box: Box, disk: SmallDisk, slow: Engine) -> None:
    disk.fill()
    running = start(box, disk, slow.url)
    finished = running.end(20)
    assert finished.status == 1, finished
    assert "space" in finished.stderr
    assert not slow.received()
    nothing_left(box)
    disk.free()
    assert start(box, disk, slow.url).end().status == 0
    check_output(box, disk)
