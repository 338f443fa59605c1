"""The model servers of a long input come up while it is being checked, and are gone whatever comes of that."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from freight.control.inputs import SAMPLE_RECORDS
from tests.faults.runs import OUT, Running, answer, ask, engines_of, nothing_left, records
from tests.harness import Box, Json, chat, code, content, engine_command, model_toml, wait_until

COUNT = 30
# Zeros that are on no disk: a line that is over the limit and takes a while to read.
LONG_BYTES = 200_000_000
ENDLESS_BYTES = 20_000_000_000


@pytest.fixture
def mine(box: Box, tmp_path: Path) -> Box:
    """A box with a model whose server Freight starts."""
    box.configure(model_toml("mine", engine="command", command=engine_command(tmp_path, "--digest")))
    return box


def write_long(box: Box, zeros: int = LONG_BYTES, lines: Sequence[Json] = tuple(records(COUNT))) -> None:
    """Write good records, and a last line of zeros."""
    path = box.write("in.jsonl", lines)
    os.truncate(path, path.stat().st_size + zeros)


def test_server_starts_before_the_input_is_checked_and_serves_the_job(mine: Box) -> None:
    write_long(mine)
    finished = mine.freight("run", "in.jsonl", "-o", OUT, "--model", "mine")
    assert finished.status == 0, finished
    results = mine.results()
    assert [content(result) for result in results[:-1]] == [answer(index) for index in range(COUNT)]
    assert code(results[-1]) == "payload_too_large"
    [(started,)] = ask(mine.folder / OUT, "SELECT started_at FROM worker", "catalog.db")
    [(added,)] = ask(mine.folder / OUT, "SELECT created_at FROM job", "catalog.db")
    assert float(str(started)) < float(str(added))
    nothing_left(mine)
    # What the check refused stays refused: nothing is there to try again.
    again = mine.freight("run", "in.jsonl", "-o", OUT, "--model", "mine")
    assert again.last_line().startswith("1 of 31 failed: payload_too_large")
    assert "--retry-errors" not in again.stderr


def test_small_input_is_checked_before_anything_starts(mine: Box) -> None:
    mine.write("in.jsonl", records(COUNT))
    assert mine.freight("run", "in.jsonl", "-o", OUT, "--model", "mine").status == 0
    [(started,)] = ask(mine.folder / OUT, "SELECT started_at FROM worker", "catalog.db")
    [(added,)] = ask(mine.folder / OUT, "SELECT created_at FROM job", "catalog.db")
    assert float(str(started)) > float(str(added))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupt_while_the_input_is_checked_ends_the_server_too(mine: Box, number: int) -> None:
    write_long(mine, ENDLESS_BYTES)
    running = Running(mine, "in.jsonl", "-o", OUT, "--model", "mine")
    wait_until(lambda: engines_of(mine), "the server has started")
    running.signal(number)
    finished = running.ends_within(8)
    assert finished.status == 130
    assert "interrupted before any record ran" in finished.stderr
    assert not mine.processes()
    assert not (mine.folder / f"{OUT}.freight").exists()


def test_run_that_is_killed_while_its_input_is_checked_leaves_no_server(mine: Box) -> None:
    write_long(mine, ENDLESS_BYTES)
    running = Running(mine, "in.jsonl", "-o", OUT, "--model", "mine")
    wait_until(lambda: engines_of(mine), "the server has started")
    running.kill()
    write_long(mine)
    again = mine.freight("run", "in.jsonl", "-o", OUT, "--model", "mine")
    assert again.status == 0, again
    assert len(mine.results()) == COUNT + 1
    nothing_left(mine)


def test_input_that_changes_while_it_is_checked_ends_the_run_and_leaves_nothing(mine: Box) -> None:
    write_long(mine, ENDLESS_BYTES)
    running = Running(mine, "in.jsonl", "-o", OUT, "--model", "mine")
    wait_until(lambda: engines_of(mine), "the server has started")
    os.truncate(mine.folder / "in.jsonl", 1000)
    finished = running.end()
    assert finished.status == 1, finished
    assert "in.jsonl changed while it was being checked; no record has run" in finished.stderr
    assert not mine.processes()
    assert not (mine.folder / f"{OUT}.freight").exists()


def test_refused_input_ends_the_server_too(mine: Box) -> None:
    write_long(mine)
    finished = mine.freight("run", "in.jsonl", "-o", OUT, "--model", "mine", "--strict")
    assert finished.status == 2, finished
    assert "payload_too_large" in finished.stderr
    assert not mine.processes()


def test_server_that_does_not_come_up_is_tried_by_the_job_and_told_about(box: Box, tmp_path: Path) -> None:
    box.configure(model_toml("mine", engine="command", command=engine_command(tmp_path, "--fail-start")))
    write_long(box)
    finished = box.freight("run", "in.jsonl", "-o", OUT, "--model", "mine")
    assert finished.status == 1, finished
    assert "exited with status 7 while it was loading" in finished.stderr
    nothing_left(box)


def test_server_that_fits_only_the_first_records_gives_way_to_one_that_fits_all(box: Box) -> None:
    """There is one device, and llama.cpp is started in another way for embeddings."""
    lines = [chat(f"r{index}", "hello", max_tokens=1) for index in range(SAMPLE_RECORDS)]
    lines.append({"custom_id": "vector", "url": "/v1/embeddings", "body": {"input": "hello"}})
    write_long(box, lines=lines)
    finished = box.freight("run", "in.jsonl", "-o", OUT, "--model", "smollm2-135m")
    assert finished.status == 0, finished
    codes = [code(result) for result in box.results()]
    assert codes == [None] * len(lines) + ["payload_too_large"]
    assert len(ask(box.folder / OUT, "SELECT id FROM worker", "catalog.db")) == 2
    nothing_left(box)
