"""Cases of stopping: Ctrl-C, kill -9, torn files, time run out, and going on afterwards."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.contract.scenario import side_by_side
from tests.harness import CASES, Box, Engine, code, engine, engine_command, finish, model_toml, wait_until

INPUTS: Final = CASES / "inputs"
# Its server does not end on SIGTERM.
STUBBORN: Final = 'trap "" TERM; "$@" & wait; exec sleep 300'


def cancel24(box: Box, seconds: float) -> list[str]:
    """Write in.jsonl, 6 records answered at once and 18 that take `seconds`; return their custom_ids."""
    text = (INPUTS / "87_cancel24.jsonl").read_text().replace("STUB:sleep=5 ", f"STUB:sleep={seconds} ")
    (box.folder / "in.jsonl").write_text(text)
    return [json.loads(line)["custom_id"] for line in text.splitlines()]


def ids(box: Box, output: str = "out.jsonl") -> list[str]:
    """Return the custom_ids of a results file."""
    return [line["custom_id"] for line in box.results(output)]


def recorded(folder: Path) -> int:
    """Return how many requests engines that Freight started have received; they share one record file."""
    return len(Engine("", folder, None).received()) if (folder / "record").exists() else 0  # type: ignore[arg-type]


def of_kind(box: Box, words: str) -> list[psutil.Process]:
    """Return the box's processes whose command line has `words`."""
    return [process for process in box.processes() if words in " ".join(process.cmdline())]


@pytest.mark.parametrize("number", [pytest.param(82, id="case-82")])
@side_by_side
def test_ctrl_c_keeps_what_is_finished(number: int, box: Box, folder: Path) -> None:
    expected = cancel24(box, 2)
    box.configure(model_toml("local-model", engine="command", command=engine_command(folder)))
    run = box.start("run", "in.jsonl", "-o", "out.jsonl")
    wait_until(lambda: recorded(folder) == 24, "all are sent")
    asked = time.monotonic()
    run.send_signal(signal.SIGINT)
    done = finish(run)
    assert done.status == 130
    assert "6 of 24 records done, all of them kept" in done.stderr
    # It does not wait for what is in flight.
    assert time.monotonic() - asked < 10
    assert not box.processes()
    assert not (box.folder / "out.jsonl").exists()
    assert box.freight("run", "in.jsonl", "-o", "out.jsonl").status == 0
    assert ids(box) == expected
    assert recorded(folder) == 24 + 18


@pytest.mark.parametrize("number", [pytest.param(82, id="case-82")])
@side_by_side
def test_second_ctrl_c_exits_at_once(number: int, box: Box, folder: Path) -> None:
    cancel24(box, 60)
    command = ["sh", "-c", STUBBORN, "sh", *engine_command(folder)]
    box.configure(model_toml("local-model", engine="command", command=command))
    run = box.start("run", "in.jsonl", "-o", "out.jsonl")
    wait_until(lambda: recorded(folder) == 24, "all are sent")
    run.send_signal(signal.SIGINT)
    # Once its server was told to end, and stays: two signals at the same moment would be one.
    stays = ["sleep", "300"]
    wait_until(lambda: any(process.cmdline() == stays for process in box.processes()), "the server does not end")
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    assert finish(run, timeout=10).status == 130
    wait_until(lambda: not box.processes(), "nothing is left")


@pytest.mark.parametrize("number", [pytest.param(83, id="case-83")])
@pytest.mark.parametrize("victim", ["freight run", "freight.worker", "bench.simengine"])
@side_by_side
def test_kill_of_any_process_loses_and_repeats_nothing(number: int, victim: str, box: Box, folder: Path) -> None:
    expected = cancel24(box, 0.5)
    command = engine_command(folder, "--latency", "0.3")
    box.configure(model_toml("local-model", engine="command", command=command))
    arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--concurrency", "4")
    run = box.start(*arguments)
    wait_until(lambda: recorded(folder) >= 12, "a third is done")
    before = box.processes()
    [killed] = [process for process in before if victim in " ".join(process.cmdline())]
    killed.kill()
    if victim == "freight run":
        run.communicate()
        wait_until(lambda: not box.processes(), "all that it started is gone")
        run = box.start(*arguments)
    done = finish(run)
    assert done.status == 0
    assert ids(box) == expected
    assert not any(code(line) for line in box.results())
    # What was in flight, and what had come back and was not on disk yet.
    assert recorded(folder) <= 24 + 8
    # All processes of the one that was killed went with it.
    assert not box.processes()


@pytest.mark.parametrize("number", [pytest.param(84, id="case-84")])
@side_by_side
def test_torn_journal_costs_the_torn_record_at_most(number: int, box: Box, folder: Path) -> None:
    text = (INPUTS / "87_cancel24.jsonl").read_text().replace("STUB:sleep=5 ", "")
    (box.folder / "in.jsonl").write_text("".join(text.splitlines(keepends=True)[:8]))
    with engine(folder / "engine", "--latency", "0.6", "--count-prompts") as slow:
        arguments = ("run", "../in.jsonl", "-o", "out.jsonl", "--model", slow.url, "--concurrency", "1")
        first = box.folder / "whole"
        first.mkdir()
        run = box.start(*arguments, cwd=first)
        wait_until(lambda: slow.counts()["requests"] >= 6, "four are on disk")
        run.kill()
        run.communicate()
    with engine(folder / "again", "--count-prompts") as fast:
        for cut in (1, 7, 100):
            torn = box.folder / f"cut{cut}"
            shutil.copytree(first, torn)
            journals = list(torn.rglob("results.db-wal"))
            assert journals
            os.truncate(journals[0], journals[0].stat().st_size - cut)
            before = fast.counts()["requests"]
            done = box.freight(*arguments[:5], fast.url, *arguments[6:], cwd=torn)
            assert done.status == 0, done.stderr
            assert len(set(ids(box, f"cut{cut}/out.jsonl"))) == 8
            # Two were not reached, one was in flight, one may not have been on disk yet, one was torn.
            assert fast.counts()["requests"] - before <= 5


@pytest.mark.parametrize("number", [pytest.param(86, id="case-86")])
@side_by_side
def test_equal_prompts_stay_separate_records(number: int, box: Box, folder: Path) -> None:
    with engine(folder / "engine", "--latency", "0.5") as slow:
        file = str(INPUTS / "86_same_prompts.jsonl")
        arguments = ("run", file, "-o", "out.jsonl", "--model", slow.url, "--concurrency", "1")
        run = box.start(*arguments)
        wait_until(lambda: slow.counts()["requests"] >= 3, "two are done")
        run.kill()
        run.communicate()
        assert box.freight(*arguments).status == 0
        assert ids(box) == ["same-1", "same-2", "same-3", "same-4"]
        assert not any(code(line) for line in box.results())
        assert slow.counts()["requests"] <= 6


@pytest.mark.parametrize("number", [pytest.param(89, id="case-89")])
@side_by_side
def test_only_failures_run_again(number: int, box: Box, sim: Engine) -> None:
    text = (INPUTS / "89_fail_once.jsonl").read_text().replace('"ok"', '"fine"')
    (box.folder / "in.jsonl").write_text(text)
    arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url)
    first = box.freight(*arguments)
    assert (first.status, first.last_line()[:14]) == (0, "2 of 4 failed:")
    before = (box.folder / "out.jsonl").read_bytes().splitlines()
    again = box.freight(*arguments, "--retry-errors")
    assert again.status == 0
    assert "failed" not in again.stderr
    after = (box.folder / "out.jsonl").read_bytes().splitlines()
    assert (after[0], after[2]) == (before[0], before[2])
    assert [code(line) for line in box.results()] == [None] * 4
    asked = sim.counts()["by_prompt"]
    assert [asked[text] for text in ("fine", "STUB:400-once", "STUB:400-once again")] == [2, 2, 2]


@pytest.mark.parametrize("number", [pytest.param(90, id="case-90")])
@side_by_side
def test_time_that_runs_out_keeps_the_finished_part(number: int, box: Box, sim: Engine) -> None:
    expected = cancel24(box, 7)
    arguments = ("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url, "--timeout")
    done = box.freight(*arguments, "5s")
    assert done.status == 1
    assert "18 of 24" in done.stderr
    assert ids(box) == expected
    assert [code(line) for line in box.results()] == [None] * 6 + ["batch_expired"] * 18
    kept = (box.folder / "out.jsonl").read_bytes().splitlines()[:6]
    # Running time begins anew, and only what is unfinished runs.
    assert box.freight(*arguments, "60s").status == 0
    assert [code(line) for line in box.results()] == [None] * 24
    assert (box.folder / "out.jsonl").read_bytes().splitlines()[:6] == kept
    assert sim.counts()["by_prompt"]["ok 1"] == 1


@pytest.mark.parametrize("number", [pytest.param(93, id="case-93")])
@side_by_side
def test_engine_of_a_killed_worker_goes_with_it(number: int, box: Box, folder: Path) -> None:
    cancel24(box, 1)
    # A server with a child of its own, in a session of its own, is no harder to end.
    child = [sys.executable, "-c", "import os; os.setsid(); import time; time.sleep(300)", "a child"]
    command = ["sh", "-c", '"$@" & exec ' + " ".join(["env", *engine_command(folder)]), "sh", *child]
    box.configure(model_toml("local-model", engine="command", command=command))
    run = box.start("run", "in.jsonl", "-o", "out.jsonl")
    wait_until(lambda: recorded(folder) == 24, "all are sent")
    old = {process.pid for process in box.processes()} - {run.pid}
    [worker] = of_kind(box, "freight.worker")
    worker.kill()
    done = finish(run)
    assert done.status == 0
    assert len(ids(box)) == 24
    assert not any(psutil.pid_exists(pid) for pid in old)
    assert not box.processes()
