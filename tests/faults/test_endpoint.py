"""Servers that run already: down at the start, down in between, too slow; and jobs whose time runs out."""

import re
import time
from pathlib import Path

from tests.faults.runs import (
    OUT,
    Running,
    check_complete,
    committed,
    free_port,
    nothing_left,
    received,
    records,
    without,
)
from tests.harness import Box, code, engine, wait_until

COUNT = 200
SLOW = ("--digest", "--latency", "0.05")


def test_endpoint_that_is_down_is_named_at_once_and_waited_for(box: Box, tmp_path: Path) -> None:
    port = free_port()
    box.write("in.jsonl", records(20))
    running = Running(box, "in.jsonl", "-o", OUT, "--model", f"http://127.0.0.1:{port}")
    running.wait_for(f"waiting for http://127.0.0.1:{port}", 5)
    with engine(tmp_path / "engine", "--digest", port=port):
        finished = running.end()
    assert finished.status == 0, finished
    check_complete(box, 20)


def test_endpoint_that_goes_and_comes_back_costs_no_record_a_try(box: Box, tmp_path: Path) -> None:
    box.write("in.jsonl", records(COUNT))
    with engine(tmp_path / "engine", *SLOW) as endpoint:
        port = int(endpoint.url.rpartition(":")[2])
        running = Running(box, "in.jsonl", "-o", OUT, "--model", endpoint.url, "--concurrency", "8")
        wait_until(lambda: endpoint.counts()["answered"] >= 30, "it is at work")
    # Each time down would cost those under way a try, and three are all there are.
    for _ in range(3):
        sent = len(received(tmp_path / "engine" / "record"))
        with engine(tmp_path / "engine", *SLOW, port=port) as endpoint:
            record = endpoint.folder / "record"
            wait_until(lambda sent=sent, record=record: len(received(record)) >= sent + 20, "it goes on")
    with engine(tmp_path / "engine", *SLOW, port=port):
        finished = running.end()
    assert finished.status == 0, finished
    assert "failed" not in finished.last_line()
    check_complete(box, COUNT)
    nothing_left(box)


def test_job_without_success_is_suspended_and_goes_on_by_itself_and_that_time_does_not_count(
    box: Box, tmp_path: Path
) -> None:
    box.configure('[engines]\nsuspend_after = "0.5s"')
    box.write("in.jsonl", records(100))
    limit_s = 6.0
    with engine(tmp_path / "engine", *SLOW) as endpoint:
        port = int(endpoint.url.rpartition(":")[2])
        arguments = ("in.jsonl", "-o", OUT, "--model", endpoint.url, "--concurrency", "2", "--timeout", f"{limit_s}s")
        running = Running(box, *arguments)
        wait_until(lambda: endpoint.counts()["answered"] >= 10, "it is at work")
    running.wait_for("SUSPENDED", 15)
    since = time.monotonic()
    [line] = [line for line in running.said().splitlines() if line.startswith("SUSPENDED")]
    assert "no success for 0.5 s" in line
    assert re.search("refused|connect", line), line
    wait_until(lambda: time.monotonic() - since > limit_s, "more than the job's time has passed")
    assert running.child.poll() is None, running.said()
    with engine(tmp_path / "engine", "--digest", port=port):
        finished = running.end()
    assert finished.status == 0, finished
    check_complete(box, 100)


def test_timeout_keeps_what_is_answered_and_the_same_command_goes_on(box: Box, tmp_path: Path) -> None:
    box.write("in.jsonl", records(60))
    with engine(tmp_path / "engine", "--digest", "--latency", "0.3") as endpoint:
        arguments = ("in.jsonl", "-o", OUT, "--model", endpoint.url, "--concurrency", "6", "--timeout", "2s")
        finished = Running(box, *arguments).end()
        assert finished.status == 1, finished
        assert "TIMED_OUT" in finished.stderr
        codes = [code(result) for result in box.results(OUT)]
        assert len(codes) == 60
        done = {index for index, found in enumerate(codes) if found is None}
        assert done == committed(box.folder / OUT)
        assert set(codes) == {None, "batch_expired"}
        nothing_left(box)
        sent, runs = len(endpoint.received()), 1
        while (finished := Running(box, *arguments).end()).status == 1:
            runs += 1
            assert runs < 10, finished
        assert finished.status == 0, finished
        without(received(endpoint.folder / "record", sent), done)
    check_complete(box, 60)
