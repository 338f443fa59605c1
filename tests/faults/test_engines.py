"""Model servers that crash, hang, never start, or are killed: what it costs the records, and how long it takes."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.faults.runs import (
    OUT,
    Running,
    ask,
    check_complete,
    engines_of,
    index_of,
    nothing_left,
    received,
    records,
)
from tests.harness import Box, Json, chat, code, engine_command, model_toml, wait_until

POISON = 17


@pytest.fixture
def mine(box: Box, tmp_path: Path) -> "Mine":
    """A box with a model whose engine Freight starts."""
    return Mine(box, tmp_path)


class Mine:
    """A model "mine" whose engine notes each of its starts in a file of its own."""

    def __init__(self, box: Box, folder: Path) -> None:
        self.box = box
        self.record = folder / "record"
        self.starts_file = folder / "starts"
        self._folder = folder

    def engine(self, *options: str, settings: str = "") -> None:
        """Set the options of the simulated engine, and further settings."""
        noting = ["sh", "-c", 'echo >> "$0"; exec "$@"', str(self.starts_file)]
        command = [*noting, *engine_command(self._folder, "--digest", *options)]
        self.box.configure(f"{settings}\n{model_toml('mine', engine='command', command=command)}")

    def starts(self) -> int:
        """Return how often an engine was started."""
        return len(self.starts_file.read_text()) if self.starts_file.exists() else 0

    def run(self, *options: str) -> Running:
        """Run in.jsonl."""
        return Running(self.box, "in.jsonl", "-o", OUT, "--model", "mine", *options)


def with_poison(marker: str) -> list[Json]:
    """Return thirty records of which one does what `marker` says to its engine."""
    given = records(30)
    given[POISON] = chat(f"r{POISON}", f"text {POISON} STUB:{marker}")
    return given


def check_only_the_poison_failed(box: Box) -> None:
    results = box.results(OUT)
    assert [result["custom_id"] for result in results] == [f"r{index}" for index in range(30)]
    failed = {index: code(result) for index, result in enumerate(results) if code(result)}
    assert failed == {POISON: "worker_crashed"}


def test_poison_record_fails_after_three_deaths_and_no_other(mine: Mine) -> None:
    mine.engine()
    mine.box.write("in.jsonl", with_poison("die"))
    finished = mine.run().end()
    assert finished.status == 0, finished
    check_only_the_poison_failed(mine.box)
    assert mine.starts() <= 4
    assert "1 of 30 failed" in finished.last_line()
    assert "worker_crashed" in finished.last_line()
    nothing_left(mine.box)


def test_deaths_charged_to_suspects_survive_a_kill_of_the_run(mine: Mine) -> None:
    mine.engine("--latency", "0.05")
    mine.box.write("in.jsonl", with_poison("die"))
    running = mine.run()
    wait_until(lambda: mine.starts() >= 3, "the poison has killed two engines")
    running.kill()
    nothing_left(mine.box)
    deaths = dict(ask(mine.box.folder / OUT, "SELECT idx, deaths FROM suspect"))
    assert deaths[POISON] == 2
    before, sent = mine.starts(), len(received(mine.record))
    finished = mine.run().end()
    assert finished.status == 0, finished
    check_only_the_poison_failed(mine.box)
    assert received(mine.record, sent).count(POISON) == 1
    assert mine.starts() - before <= 2


def test_engine_killed_from_outside_again_and_again_ends_the_job_and_charges_nothing(mine: Mine) -> None:
    mine.engine()
    mine.box.write("in.jsonl", with_poison("sigkill-self"))
    finished = mine.run().end(45)
    assert finished.status == 1, finished
    assert "FAILED" in finished.stderr
    assert "SIGKILL" in finished.stderr.partition("FAILED:")[2]
    results = mine.box.results(OUT)
    assert [code(result) for result in results] == [
        "batch_failed" if index == POISON else None for index in range(30)
    ]
    assert not ask(mine.box.folder / OUT, "SELECT idx FROM suspect")
    assert mine.starts() <= 12
    nothing_left(mine.box)
    device_is_free(mine.box)


def device_is_free(box: Box) -> None:
    """Assert that another run gets the device at once."""
    box.write("other.jsonl", records(1))
    model = model_toml("good", engine="command", command=engine_command(box.folder, "--digest"))
    box.configure(model)
    finished = box.freight("run", "other.jsonl", "-o", "other.out", "--model", "good")
    assert finished.status == 0, finished
    assert "is held by" not in finished.stderr


def test_engine_that_exits_at_start_is_tried_three_times_and_its_last_words_are_shown(mine: Mine) -> None:
    mine.engine("--fail-start")
    mine.box.write("in.jsonl", records(3))
    finished = mine.run().end(30)
    assert finished.status == 1, finished
    assert mine.starts() == 3
    closing = finished.stderr.partition("FAILED:")[2]
    assert "exited with status 7" in closing
    log = max((mine.box.folder / f"{OUT}.freight").rglob("*.log"), key=lambda path: path.stat().st_mtime)
    words = log.read_text().splitlines()
    assert words
    assert words[-1] in closing
    assert not (mine.box.folder / OUT).exists()
    nothing_left(mine.box)
    device_is_free(mine.box)


def test_command_that_does_not_exist_is_named(mine: Mine) -> None:
    mine.box.configure(model_toml("mine", engine="command", command=["no-such-server-here", "{socket}"]))
    mine.box.write("in.jsonl", records(3))
    finished = mine.run().end(30)
    assert finished.status in (1, 2)
    assert "no-such-server-here" in finished.stderr
    nothing_left(mine.box)


def test_engine_that_hangs_in_loading_is_given_up(mine: Mine) -> None:
    mine.engine("--hang-start", settings='[engines]\nstart_stall = "1s"')
    mine.box.write("in.jsonl", records(3))
    finished = mine.run().end(40)
    assert finished.status == 1, finished
    assert "hangs in loading" in finished.stderr
    assert mine.starts() == 3
    nothing_left(mine.box)
    device_is_free(mine.box)


def test_engine_that_hangs_at_work_is_restarted_and_charges_no_record(mine: Mine) -> None:
    mine.engine("--hang-at", "60", "--latency", "0.01", settings='[engines]\nstall = "2s"')
    mine.box.write("in.jsonl", records(200))
    finished = mine.run("--concurrency", "8").end()
    assert finished.status == 0, finished
    check_complete(mine.box, 200)
    # Each engine answers at least 50 and hangs with at most 8 under way; four hangs would have failed a record.
    assert 4 <= mine.starts() <= 5
    nothing_left(mine.box)


def test_model_file_that_is_no_gguf_is_refused_before_anything_starts(box: Box) -> None:
    box.write("in.jsonl", records(3))
    (box.folder / "model.gguf").write_bytes(b"PK\x03\x04 not a model")
    finished = box.freight("run", "in.jsonl", "-o", OUT, "--model", "model.gguf")
    assert finished.status == 2
    assert "model.gguf is not a GGUF model file" in finished.stderr
    assert not (box.folder / f"{OUT}.freight").exists()


def test_engine_that_does_not_heed_sigterm_is_gone_after_a_complete_run(mine: Mine) -> None:
    deaf = ["sh", "-c", 'trap "" TERM; "$@" & while :; do sleep 0.1; done', "sh"]
    command = [*deaf, *engine_command(mine.record.parent, "--digest")]
    mine.box.configure(model_toml("mine", engine="command", command=command))
    mine.box.write("in.jsonl", records(3))
    running = mine.run()
    wait_until(lambda: len(received(mine.record)) == 3, "all records were sent")
    [worker_and_engine] = [engines_of(mine.box)]
    assert worker_and_engine
    assert running.end().status == 0
    assert not mine.box.processes()


def test_grandchild_that_left_the_group_is_swept(mine: Mine) -> None:
    stray = mine.record.with_name("stray")
    leaving = ["sh", "-c", 'setsid sleep 600 & echo $! > "$0"; exec "$@"', str(stray)]
    command = [*leaving, *engine_command(mine.record.parent, "--digest", "--latency", "0.2")]
    mine.box.configure(model_toml("mine", engine="command", command=command))
    mine.box.write("in.jsonl", records(30))
    running = mine.run("--concurrency", "2")
    wait_until(lambda: received(mine.record), "it is at work")
    running.kill()
    nothing_left(mine.box)
    assert mine.run("--concurrency", "30").end().status == 0
    check_complete(mine.box, 30)
    nothing_left(mine.box)
