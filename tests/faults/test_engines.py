"""Model servers that crash, hang, never start, or are killed: what it costs the records, and how long it takes."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.faults.runs import OUT, Running, ask, check_complete, nothing_left, received, records, workers_of
from tests.harness import Box, Finished, Json, chat, code, engine_command, model_toml, wait_until

POISON = 17


class Mine:
    """A box with a model "mine" whose engine Freight starts; each start is noted in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "record"
        self._starts = folder / "starts"
        (folder / "box").mkdir()
        self.box = Box(folder / "box")

    def engine(self, *options: str, settings: str = "") -> None:
        """Set the options of the simulated engine, and further settings."""
        self.command(*engine_command(self.folder, "--digest", *options), settings=settings)

    def command(self, *command: str, settings: str = "") -> None:
        """Set the command that is the engine, and further settings."""
        noting = ["sh", "-c", 'echo >> "$0"; exec "$@"', str(self._starts)]
        self.box.configure(f"{settings}\n{model_toml('mine', engine='command', command=[*noting, *command])}")

    def starts(self) -> int:
        """Return how often an engine was started."""
        return len(self._starts.read_text()) if self._starts.exists() else 0

    def run(self, *options: str) -> Running:
        """Run in.jsonl."""
        return Running(self.box, "in.jsonl", "-o", OUT, "--model", "mine", *options)


@pytest.fixture
def mine(tmp_path: Path) -> Mine:
    """A box with a model whose engine Freight starts."""
    return Mine(tmp_path)


class Slow(dict[str, tuple[Mine, Running]]):
    """Runs that spend their time waiting, and so wait together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, given: list[Json], *options: str, settings: str = "", window: str = "auto") -> None:
        """Start a run of the simulated engine with these options."""
        (self._folder / name).mkdir()
        mine = Mine(self._folder / name)
        mine.box.write("in.jsonl", given)
        if options:
            mine.engine(*options, settings=settings)
        else:
            mine.box.configure(model_toml("mine", engine="command", command=["no-such-server-here", "{socket}"]))
        self[name] = mine, mine.run("--concurrency", window)

    def end(self, name: str) -> tuple[Mine, Finished]:
        """Return a run that has ended, with nothing left of it."""
        mine, running = self[name]
        finished = running.end()
        assert not mine.box.processes()
        return mine, finished


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Generator[Slow]:
    """Start all runs of this module that take long, at once."""
    runs = Slow(tmp_path_factory.mktemp("slow"))
    runs.add("exits", records(3), "--fail-start")
    runs.add("loads for ever", records(3), "--hang-start", settings='[engines]\nstart_stall = "1s"')
    runs.add("missing", records(3))
    runs.add("killed", with_poison("sigkill-self"), "--latency", "0")
    stalls = ("--hang-at", "60", "--latency", "0.01")
    runs.add("stalls", records(200), *stalls, settings='[engines]\nstall = "2s"', window="8")
    yield runs
    for _, running in runs.values():
        running.give_up()


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
    mine.engine("--latency", "0.3")
    mine.box.write("in.jsonl", with_poison("die"))
    running = mine.run()
    wait_until(lambda: mine.starts() >= 3, "the poison has killed two engines")
    before = len(received(mine.record))
    # The third engine is handed records, others first, once the deaths are on disk.
    wait_until(lambda: len(received(mine.record)) > before, "the third engine is at work")
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


def test_engine_killed_from_outside_again_and_again_ends_the_job_and_charges_nothing(slow: Slow) -> None:
    mine, finished = slow.end("killed")
    assert finished.status == 1, finished
    assert "SIGKILL" in finished.stderr.partition("FAILED:")[2]
    results = mine.box.results(OUT)
    assert {code(result) for result in results} == {None, "batch_failed"}
    assert code(results[POISON]) == "batch_failed"
    assert not ask(mine.box.folder / OUT, "SELECT idx FROM suspect")
    # All but the last three starts have answered something.
    assert mine.starts() <= len(results) + 3
    device_is_free(mine)


def device_is_free(mine: Mine) -> None:
    """Assert that another run gets the device at once."""
    mine.engine()
    mine.box.write("other.jsonl", records(1))
    finished = mine.box.freight("run", "other.jsonl", "-o", "other.out", "--model", "mine")
    assert finished.status == 0, finished
    assert "is held by" not in finished.stderr


def test_engine_that_exits_at_start_is_tried_three_times_and_its_last_words_are_shown(slow: Slow) -> None:
    mine, finished = slow.end("exits")
    assert finished.status == 1, finished
    assert mine.starts() == 3
    closing = finished.stderr.partition("FAILED:")[2]
    assert "exited with status 7" in closing
    log = max((mine.box.folder / f"{OUT}.freight").rglob("*.log"), key=lambda path: path.stat().st_mtime)
    words = log.read_text().splitlines()
    assert words
    assert words[-1] in closing
    assert not (mine.box.folder / OUT).exists()
    device_is_free(mine)


def test_command_that_does_not_exist_is_named(slow: Slow) -> None:
    _, finished = slow.end("missing")
    assert finished.status == 1, finished
    assert "no-such-server-here" in finished.stderr.partition("FAILED:")[2]


def test_engine_that_hangs_in_loading_is_given_up(slow: Slow) -> None:
    mine, finished = slow.end("loads for ever")
    assert finished.status == 1, finished
    assert "hangs in loading" in finished.stderr.partition("FAILED:")[2]
    assert mine.starts() == 3
    device_is_free(mine)


def test_engine_that_hangs_at_work_is_restarted_and_charges_no_record(slow: Slow) -> None:
    mine, finished = slow.end("stalls")
    assert finished.status == 0, finished
    check_complete(mine.box, 200)
    # Each engine hangs with eight records under way; three hangs would have failed one that was charged.
    assert 4 <= mine.starts() <= 5


def test_model_file_that_is_no_gguf_is_refused_before_anything_starts(box: Box) -> None:
    box.write("in.jsonl", records(3))
    (box.folder / "model.gguf").write_bytes(b"PK\x03\x04 not a model")
    finished = box.freight("run", "in.jsonl", "-o", OUT, "--model", "model.gguf")
    assert finished.status == 2
    assert "model.gguf is not a GGUF model file" in finished.stderr
    assert not (box.folder / f"{OUT}.freight").exists()


def test_stray_child_of_an_engine_is_gone_after_kills_and_after_an_end(mine: Mine) -> None:
    engine = engine_command(mine.folder, "--digest", "--latency", "0.2")
    mine.command("sh", "-c", 'setsid sleep 600 & exec "$@"', "sh", *engine)
    mine.box.write("in.jsonl", records(30))
    running = mine.run("--concurrency", "2")
    wait_until(lambda: received(mine.record), "it is at work")
    running.kill()
    nothing_left(mine.box)
    running, sent = mine.run("--concurrency", "2"), len(received(mine.record))
    wait_until(lambda: len(received(mine.record)) > sent, "it is at work again")
    # With its worker killed too nobody is left to end the stray, until the next run does.
    os.kill(workers_of(mine.box)[0], signal.SIGKILL)
    running.kill()
    assert mine.run("--concurrency", "30").end().status == 0
    assert not mine.box.processes()
    check_complete(mine.box, 30)
