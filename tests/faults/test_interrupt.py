"""Ctrl-C and SIGTERM: the first stops cleanly, the second at once; nothing is left running."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

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
from tests.harness import Box, chat, engine, engine_command, model_toml, wait_until

COUNT = 300
SLOW = ("--digest", "--latency", "0.03")
SOON_S = 5.0


def interrupted_at(text: str) -> int:
    """Return the number of records that the closing message says are done."""
    [count] = re.findall(rf"interrupted with (\d+) of {COUNT} records done", text)
    return int(count)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_first_signal_keeps_what_is_done_and_the_rerun_does_the_rest(box: Box, tmp_path: Path, number: int) -> None:
    record = tmp_path / "record"
    box.configure(model_toml("mine", engine="command", command=engine_command(tmp_path, *SLOW)))
    box.write("in.jsonl", records(COUNT))
    arguments = ("in.jsonl", "-o", OUT, "--model", "mine", "--concurrency", "8")
    running = Running(box, *arguments)
    wait_until(lambda: len(received(record)) >= 100, "the engine is at work")
    running.signal(number)
    stopped = running.ends_within(SOON_S)
    assert stopped.status == 130
    assert not box.processes()
    done, sent = committed(box.folder / OUT), len(received(record))
    assert interrupted_at(stopped.stderr) == len(done) >= sent - 8
    assert not (box.folder / OUT).exists()
    assert Running(box, *arguments).end().status == 0
    without(received(record, sent), done)
    assert len(received(record, sent)) == COUNT - len(done)
    check_complete(box, COUNT)


def test_second_signal_exits_at_once_with_nothing_left_running(box: Box, tmp_path: Path) -> None:
    # A server that notes that it was told to end, and stays: a clean stop has to wait for it.
    told = tmp_path / "told"
    stays = ["sh", "-c", 'trap "touch $0" TERM; "$@" & while :; do sleep 0.1; done', str(told)]
    box.configure(model_toml("mine", engine="command", command=[*stays, *engine_command(tmp_path, *SLOW)]))
    box.write("in.jsonl", records(COUNT))
    running = Running(box, "in.jsonl", "-o", OUT, "--model", "mine", "--concurrency", "8")
    wait_until(lambda: len(received(tmp_path / "record")) >= 100, "the engine is at work")
    running.signal(signal.SIGINT)
    wait_until(told.exists, "the server was told to end")
    running.wait_for("stopping: waiting for the model server to end (Ctrl-C ends it at once)")
    running.signal(signal.SIGINT)
    finished = running.ends_within(2.0)
    assert finished.status == 130
    assert finished.last_line() == "ended at once; what is done is kept, and the same command goes on"
    nothing_left(box)
    assert committed(box.folder / OUT)


def test_ctrl_c_while_waiting_for_an_endpoint_leaves_nothing(box: Box) -> None:
    box.write("in.jsonl", records(3))
    running = Running(box, "in.jsonl", "-o", OUT, "--model", f"http://127.0.0.1:{free_port()}")
    running.wait_for("waiting for")
    running.signal(signal.SIGINT)
    stopped = running.ends_within(SOON_S)
    assert stopped.status == 130
    assert "interrupted" in stopped.stderr
    assert sorted(path.name for path in box.folder.iterdir()) == ["config.toml", "in.jsonl"]
    assert not box.processes()


def test_ctrl_c_while_waiting_for_a_device_leaves_the_holder_alone(box: Box, tmp_path: Path) -> None:
    box.configure(
        model_toml("mine", engine="command", command=engine_command(tmp_path, "--digest", "--latency", "0.05"))
    )
    box.write("in.jsonl", records(COUNT))
    holder = Running(box, "in.jsonl", "-o", OUT, "--model", "mine", "--concurrency", "4")
    wait_until(lambda: received(tmp_path / "record"), "the first run has the device")
    waiting = Running(box, "in.jsonl", "-o", "other.jsonl", "--model", "mine")
    waiting.wait_for(f"process {holder.child.pid}")
    waiting.signal(signal.SIGINT)
    stopped = waiting.ends_within(SOON_S)
    assert stopped.status == 130
    assert interrupted_at(stopped.stderr) == 0
    assert holder.end().status == 0
    check_complete(box, COUNT)
    nothing_left(box)


@pytest.mark.parametrize("shape", ["many lines", "one endless line"])
def test_ctrl_c_during_intake_of_a_large_file_stops_soon(box: Box, tmp_path: Path, shape: str) -> None:
    path = box.write("in.jsonl", records(30))
    if shape == "many lines":
        block = b"".join(b'{"custom_id":"c","body":{"messages":[]}}\n' for _ in range(100_000))
        with path.open("ab") as file:
            for _ in range(40):
                file.write(block)
    else:
        os.truncate(path, 40 << 30)  # A hole: it takes no room.
    with engine(tmp_path / "engine") as endpoint:
        running = Running(box, "in.jsonl", "-o", OUT, "--model", endpoint.url)
        wait_until(lambda: list((box.folder / f"{OUT}.freight").glob("*/results.db")), "intake has begun")
        running.signal(signal.SIGINT)
        stopped = running.ends_within(SOON_S)
        assert stopped.status == 130
        assert "interrupted" in stopped.stderr
        assert not (box.folder / f"{OUT}.freight").exists()
        assert not box.processes()
        assert not endpoint.received()


def test_hangup_stops_cleanly_too(box: Box, tmp_path: Path) -> None:
    with engine(tmp_path / "engine", *SLOW) as endpoint:
        box.write("in.jsonl", [*records(COUNT), chat("last", "STUB:sleep=60 text 300")])
        running = Running(box, "in.jsonl", "-o", OUT, "--model", endpoint.url)
        wait_until(lambda: endpoint.counts()["answered"] >= COUNT, "only one is left")
        running.signal(signal.SIGHUP)
        stopped = running.ends_within(SOON_S)
    assert stopped.status == 130
    assert f"interrupted with {COUNT} of {COUNT + 1} records done" in stopped.stderr
    assert committed(box.folder / OUT) == set(range(COUNT))
    assert not box.processes()


def test_ctrl_c_while_standard_input_is_silent_stops_soon(box: Box) -> None:
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as silent:
        running = Running(box, "-", "-o", OUT, "--model", "http://127.0.0.1:1", stdin=silent.stdout)
        wait_until(lambda: list((box.folder / f"{OUT}.freight").glob("input*")), "it reads standard input")
        running.signal(signal.SIGINT)
        try:
            stopped = running.ends_within(SOON_S)
        finally:
            silent.kill()
    assert stopped.status == 130
    assert not (box.folder / f"{OUT}.freight").exists()
