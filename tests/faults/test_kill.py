"""Killed at any moment, the same command goes on, and runs no record again whose result it had."""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.runs import (
    Running,
    check_complete,
    committed,
    engines_of,
    nothing_left,
    received,
    records,
    without,
    workers_of,
)
from tests.harness import Box, engine, engine_command, model_toml, wait_until

COUNT = 300
WINDOW = 16
SLOW = ("--digest", "--latency", "0.03")
# What a kill may make run again: the requests in flight, and the answers that were not on disk yet.
MOST_AGAIN = 5 * WINDOW


def run(box: Box, model: str, output: str) -> Running:
    return Running(box, "in.jsonl", "-o", output, "--model", model, "--concurrency", str(WINDOW))


def kill_often(box: Box, model: str, record: Path, kills: int, seed: int) -> None:
    """Kill runs of a job at random moments until it is complete; more jobs until there were `kills`."""
    print(f"seed {seed} on {model}")
    moments = random.Random(seed)
    box.write("in.jsonl", records(COUNT))
    began = time.monotonic()
    assert run(box, model, "whole.jsonl").end().status == 0
    whole_s = time.monotonic() - began
    print(f"a run takes {whole_s:.1f} s")
    done = jobs = 0
    while done < kills:
        done += kill_one_job(box, model, record, moments, whole_s, f"out{jobs}.jsonl")
        jobs += 1
    print(f"{done} kills of {jobs} jobs on {model}, seed {seed}")


def kill_one_job(box: Box, model: str, record: Path, moments: random.Random, whole_s: float, output: str) -> int:
    """Kill and rerun one job until it is complete; return how often it was killed."""
    first, killed, status = len(received(record)), 0, -1
    while status != 0:
        sent = len(received(record))
        done = set(range(COUNT)) if (box.folder / output).exists() else committed(box.folder / output)
        moment = moments.uniform(0, whole_s)
        running = run(box, model, output)
        try:
            status = running.child.wait(moment)
        except subprocess.TimeoutExpired:
            running.signal(signal.SIGKILL)
            killed += 1
            print(f"killed after {moment:.2f} s with {len(done)} done before")
        finished = running.end()
        assert finished.status in (0, -signal.SIGKILL), finished
        status = finished.status
        without(received(record, sent), done)
        # Half of the time the next run meets what the killed one left behind.
        if moments.random() < 0.5:
            nothing_left(box)
    check_complete(box, COUNT, output)
    times = Counter(received(record, first))
    assert set(times) == set(range(COUNT))
    assert times.total() - COUNT <= killed * MOST_AGAIN
    nothing_left(box)
    return killed


def kill_on_an_endpoint(folder: Path, kills: int, seed: int) -> None:
    """Kill runs that talk to a server which runs already."""
    with engine(folder / "engine", *SLOW) as endpoint:
        kill_often(new_box(folder), endpoint.url, endpoint.folder / "record", kills, seed)


def kill_with_an_engine(folder: Path, kills: int, seed: int) -> None:
    """Kill runs that have started a server, which must go with them."""
    box = new_box(folder)
    box.configure(model_toml("mine", engine="command", command=engine_command(folder, *SLOW)))
    kill_often(box, "mine", folder / "record", kills, seed)


def new_box(folder: Path) -> Box:
    (folder / "box").mkdir(parents=True, exist_ok=True)
    return Box(folder / "box")


def test_runs_killed_at_random_moments_repeat_no_finished_record_and_leave_nothing(tmp_path: Path) -> None:
    # Most of the time goes in waiting, so they wait together.
    with ThreadPoolExecutor() as together:
        ends = [
            together.submit(kill_on_an_endpoint, tmp_path / "first", 10, 20250917),
            together.submit(kill_on_an_endpoint, tmp_path / "second", 10, 31415926),
            together.submit(kill_with_an_engine, tmp_path / "third", 7, 4711),
        ]
    for end in ends:
        end.result()


def started(box: Box, tmp_path: Path, at_least: int) -> Running:
    """Start a run with an engine of its own and wait until that has received `at_least` records."""
    box.configure(model_toml("mine", engine="command", command=engine_command(tmp_path, *SLOW)))
    box.write("in.jsonl", records(COUNT))
    running = run(box, "mine", "out.jsonl")
    wait_until(lambda: len(received(tmp_path / "record")) >= at_least, "the engine is at work")
    return running


def test_killed_worker_is_replaced_and_its_engine_swept(box: Box, tmp_path: Path) -> None:
    running = started(box, tmp_path, COUNT * 3 // 10)
    [worker], [model_server] = workers_of(box), engines_of(box)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: model_server not in engines_of(box), "its engine is gone")
    finished = running.end()
    assert finished.status == 0, finished
    assert "failed" not in finished.last_line()
    check_complete(box, COUNT)
    again = len(received(tmp_path / "record")) - COUNT
    assert again <= MOST_AGAIN
    nothing_left(box)


def test_killed_engine_is_started_again_and_charges_no_record(box: Box, tmp_path: Path) -> None:
    box.configure(model_toml("mine", engine="command", command=engine_command(tmp_path, *SLOW)))
    running = started(box, tmp_path, COUNT * 3 // 10)
    for _ in range(4):
        # A record that were charged for these would have failed after three.
        [model_server] = engines_of(box)
        before = len(received(tmp_path / "record"))
        os.kill(model_server, signal.SIGKILL)
        wait_until(lambda before=before: len(received(tmp_path / "record")) >= before + 30, "another is at work")
    finished = running.end()
    assert finished.status == 0, finished
    check_complete(box, COUNT)
    assert len(received(tmp_path / "record")) - COUNT <= 4 * WINDOW
    nothing_left(box)


def test_run_and_worker_killed_together_leave_no_engine_and_the_rerun_goes_on(box: Box, tmp_path: Path) -> None:
    running = started(box, tmp_path, COUNT * 3 // 10)
    [worker] = workers_of(box)
    os.kill(worker, signal.SIGKILL)
    running.kill()
    nothing_left(box)
    done, sent = committed(box.folder / "out.jsonl"), len(received(tmp_path / "record"))
    assert done
    assert run(box, "mine", "out.jsonl").end().status == 0
    without(received(tmp_path / "record", sent), done)
    check_complete(box, COUNT)
    nothing_left(box)
