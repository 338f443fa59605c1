"""Cases of stopping jobs of the service: kill -9, time run out, cancel, and what comes of their results."""

import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Final

import psutil
import pytest

from freight.core.job import State
from tests.contract.scenario import side_by_side
from tests.contract.scripted import OK, Reply, scripted
from tests.contract.served import ask, held24, lines_of
from tests.contract.test_case_stopping import INPUTS, cancel24, of_kind, recorded
from tests.harness import PATIENCE_S, Engine, code, engine, engine_command, model_toml, wait_until
from tests.service import Endpoint, ServiceBox, endpoint, on_terminal, service_box

GOOD: Final = INPUTS / "00_good3.jsonl"


def own_engine(folder: Path, *options: str) -> str:
    """Return the entry of a model whose server Freight starts; what it receives is recorded in `folder`."""
    return model_toml("local-model", engine="command", command=engine_command(folder, *options))


def killed(process: psutil.Process) -> None:
    """Kill a process and wait until it is dead."""
    life = os.pidfd_open(process.pid)
    process.kill()
    assert select.select([life], [], [], PATIENCE_S)[0]
    os.close(life)


@pytest.mark.parametrize("number", [pytest.param(54, id="case-54")])
@side_by_side
def test_record_that_kills_the_engine_fails_alone(number: int, folder: Path) -> None:
    with service_box(folder / "own", own_engine(folder)) as box:
        file = INPUTS / "54_poison_logit_bias.jsonl"
        done = box.batch("submit", str(file), "--model", "local-model", "--name", "poison", "--wait")
        assert done.status == 0
        assert done.last_line().startswith("1 of 8 failed: worker_crashed: ")
        lines = lines_of(box, "poison")
        assert [line["custom_id"] for line in lines] == [f"poison-{n}" for n in range(1, 9)]
        assert [code(line) for line in lines] == [None, None, None, "worker_crashed", None, None, None, None]
        received = Engine("", folder, None).received()  # type: ignore[arg-type]
        assert sum(b"STUB:die Item 4." in body for _, body in received) == 3
        [failure] = box.job("poison").failures
        assert (failure.code, failure.count) == ("worker_crashed", 1)


@pytest.mark.parametrize("number", [pytest.param(69, id="case-69")])
@side_by_side
def test_loading_costs_no_record_a_try_and_is_shown(number: int, folder: Path) -> None:
    is_loaded, loads = threading.Event(), folder / "loads"
    # This one takes requests, and answers 503, long before its model is loaded.
    with scripted(lambda *_: OK if is_loaded.is_set() else Reply(503)) as eager:
        eager.health = lambda: 200 if is_loaded.is_set() else 503
        begin = ["sh", "-c", f'until test -e {loads}; do sleep 0.05; done; exec "$@"', "sh"]
        command = [*begin, *engine_command(folder, "--loading", "1")]
        with service_box(folder / "own", model_toml("local-model", engine="command", command=command)) as box:
            assert box.batch("submit", str(GOOD), "--model", eager.url, "--name", "eager").status == 0
            assert box.batch("submit", str(GOOD), "--model", "local-model", "--name", "loads").status == 0
            box.until("loads", lambda job: any("loading" in worker.note for worker in job.workers), "a worker loads")
            shown = box.batch("status", "loads").stdout
            assert "loading the model" in shown
            assert "STARTING" in shown
            box.until("eager", lambda job: any("503" in each.note for each in job.workers), "it says what it waits for")
            assert box.job("eager").done == box.job("eager").failed == 0
            wait_until(lambda: len(eager.arrivals) == 3, "each record was sent in vain")
            loads.touch()
            is_loaded.set()
            for name in ("loads", "eager"):
                job = box.ended(name)
                assert (job.state, job.failed) == (State.COMPLETED, 0)
                assert [code(line) for line in lines_of(box, name)] == [None] * 3
        # The own engine was left alone until it was ready; the other refused each record at least once.
        assert recorded(folder) == 3
        assert min(map(len, eager.arrivals.values())) >= 2


@pytest.mark.parametrize("number", [pytest.param(82, id="case-82")])
def test_ctrl_c_leaves_the_job_running(number: int, service: ServiceBox, end: Endpoint) -> None:
    expected = held24(service)
    for command in (("submit", "in.jsonl", "--model", end.url, "--name", "long", "--wait"), ("wait", "long")):
        status, shown = on_terminal(service, "batch", *command, until=b"6/24")
        assert status == 130
        assert b"error: interrupted; job long goes on" in shown
        assert b"hint: freight batch wait long" in shown
        job = service.until("long", lambda job: job.in_flight == 18, "nothing was taken back")
        assert (job.state, job.done) == (State.RUNNING, 6)
    end.let_go.set()
    assert service.batch("wait", "long").status == 0
    assert [line["custom_id"] for line in lines_of(service, "long")] == expected
    assert set(end.seen.values()) == {1}


@pytest.mark.parametrize("number", [pytest.param(83, id="case-83")])
@pytest.mark.parametrize("victim", ["freight serve", "freight.worker", "bench.simengine"])
@side_by_side
def test_kill_of_any_process_loses_and_repeats_nothing(number: int, victim: str, folder: Path) -> None:
    with service_box(folder / "own", own_engine(folder, "--latency", "0.3")) as box:
        expected = cancel24(box, 1)
        arguments = ("--model", "local-model", "--name", "job", "--concurrency", "4")
        assert box.batch("submit", "in.jsonl", *arguments).status == 0
        wait_until(lambda: recorded(folder) >= 12, "a third is done")
        [process] = of_kind(box, victim)
        killed(process)
        # Where it was the service, this starts the next.
        done = box.batch("wait", "job")
        assert done.status == 0
        assert ("started a Freight service" in done.stderr) == (victim == "freight serve")
        lines = lines_of(box, "job")
        assert [line["custom_id"] for line in lines] == expected
        assert not any(code(line) for line in lines)
        # What was in flight, and what had come back and was not on disk yet; a worker outlives the service.
        assert recorded(folder) <= 24 + (0 if victim == "freight serve" else 8)


@pytest.mark.parametrize("number", [pytest.param(84, id="case-84")])
@side_by_side
def test_torn_journal_costs_the_torn_record_at_most(number: int, folder: Path) -> None:
    with service_box(folder / "own") as box, endpoint() as end:
        held24(box)
        arguments = ("--model", end.url, "--name", "torn", "--concurrency", "1")
        assert box.batch("submit", "in.jsonl", *arguments).status == 0
        box.until("torn", lambda job: job.done == 6 and job.in_flight, "six are on disk, and one is on its way")
        for process in [*of_kind(box, "freight serve"), *box.workers()]:
            killed(process)
        [journal] = (box.data / "batch").rglob("results.db-wal")
        os.truncate(journal, journal.stat().st_size - 100)
        end.let_go.set()
        assert box.batch("wait", "torn").status == 0
        assert len({line["custom_id"] for line in lines_of(box, "torn") if not code(line)}) == 24
        # The one on its way ran again, and what the torn write held: one record, or two that came together.
        assert end.seen["hold 1"] == 2
        assert end.seen.total() <= 24 + 1 + 2


@pytest.mark.parametrize("number", [pytest.param(86, id="case-86")])
@side_by_side
def test_equal_prompts_stay_separate_records(number: int, folder: Path) -> None:
    let_go = threading.Event()

    def answer(_: str, times: int) -> Reply:
        if times == 3:
            let_go.wait(PATIENCE_S)
        return OK

    with service_box(folder / "own") as box, scripted(answer) as slow:
        arguments = ("--model", slow.url, "--name", "same", "--concurrency", "1")
        assert box.batch("submit", str(INPUTS / "86_same_prompts.jsonl"), *arguments).status == 0
        box.until("same", lambda job: job.done == 2 and job.in_flight, "two are done, and one is on its way")
        for process in [*of_kind(box, "freight serve"), *box.workers()]:
            killed(process)
        let_go.set()
        assert box.batch("wait", "same").status == 0
        lines = lines_of(box, "same")
        assert [line["custom_id"] for line in lines] == ["same-1", "same-2", "same-3", "same-4"]
        assert not any(code(line) for line in lines)
        assert slow.times("Reply with a colour.") == 4 + 1


@pytest.mark.parametrize("number", [pytest.param(87, id="case-87")])
def test_cancelled_job_has_a_line_for_every_record(number: int, service: ServiceBox, end: Endpoint) -> None:
    expected = held24(service)
    assert service.batch("submit", "in.jsonl", "--model", end.url, "--name", "long").status == 0
    service.until("long", lambda job: (job.done, job.in_flight) == (6, 18), "six are done")
    assert service.batch("cancel", "long").status == 0
    waited = service.batch("wait", "long")
    assert waited.status == 1
    assert "18 of 24 records were not reached" in waited.stderr
    job = service.job("long")
    assert (job.state, job.records, job.done, job.failed, job.in_flight) == (State.CANCELLED, 24, 6, 0, 0)
    lines = lines_of(service, "long")
    assert [line["custom_id"] for line in lines] == expected
    assert [code(line) for line in lines] == [None] * 6 + ["batch_cancelled"] * 18
    # Its place is free: another job gets it, though the server never answered.
    assert not job.workers
    assert service.batch("submit", str(GOOD), "--model", end.url, "--wait").status == 0


@pytest.mark.parametrize("number", [pytest.param(88, id="case-88")])
def test_cancelling_again_changes_nothing(number: int, service: ServiceBox, end: Endpoint) -> None:
    held24(service)
    assert service.batch("submit", "in.jsonl", "--model", end.url, "--name", "long").status == 0
    service.until("long", lambda job: job.done == 6, "six are done")
    for _ in range(3):
        answer = ask(service, "POST", "/api/jobs/long/cancel")
        assert (answer.status_code, answer.json()["state"][:6]) == (200, "CANCEL")
    service.ended("long")
    before = service.lines("long"), service.job("long")
    assert service.batch("cancel", "long").status == 0
    assert (service.lines("long"), service.job("long")) == before
    assert [event.event for event in before[1].events].count("cancel asked") == 1


@pytest.mark.parametrize("number", [pytest.param(88, id="case-88")])
def test_finished_and_unknown_jobs_cannot_be_cancelled(number: int, service: ServiceBox, end: Endpoint) -> None:
    assert service.batch("submit", str(GOOD), "--model", end.url, "--name", "done", "--wait").status == 0
    before = service.lines("done"), service.job("done")
    assert service.batch("cancel", "done").status == 1
    assert ask(service, "POST", "/api/jobs/done/cancel").status_code == 409
    assert (service.lines("done"), service.job("done")) == before
    assert service.batch("cancel", "no-such-job").status == 3
    assert ask(service, "POST", "/api/jobs/no-such-job/cancel").status_code == 404


@pytest.mark.parametrize("number", [pytest.param(89, id="case-89")])
def test_only_failures_run_again(number: int, service: ServiceBox, tmp_path: Path) -> None:
    with engine(tmp_path / "engine") as sim:
        file = INPUTS / "89_fail_once.jsonl"
        first = service.batch("submit", str(file), "--model", sim.url, "--name", "again", "--wait")
        assert (first.status, first.last_line()[:14]) == (0, "2 of 4 failed:")
        before = service.lines("again")
        assert [code(line) for line in lines_of(service, "again")] == [None, "InferenceFailed"] * 2
        assert service.batch("retry", "again").status == 0
        assert service.batch("wait", "again", "--fail-on-errors").status == 0
        after = service.lines("again")
        assert (after[0], after[2]) == (before[0], before[2])
        assert [code(line) for line in lines_of(service, "again")] == [None] * 4
        job = service.job("again")
        assert (job.done, job.failed, job.failures) == (4, 0, [])
        assert sim.counts()["requests"] == 4 + 2


@pytest.mark.parametrize("number", [pytest.param(90, id="case-90")])
@side_by_side
def test_time_that_runs_out_keeps_the_finished_part(number: int, folder: Path) -> None:
    with service_box(folder / "own") as box, endpoint() as end:
        expected = held24(box)
        assert box.batch("submit", "in.jsonl", "--model", end.url, "--name", "late", "--timeout", "5s").status == 0
        waited = box.batch("wait", "late")
        assert waited.status == 1
        assert "TIMED_OUT: 18 of 24 records were not reached" in waited.stderr
        lines = lines_of(box, "late")
        assert [line["custom_id"] for line in lines] == expected
        assert [code(line) for line in lines] == [None] * 6 + ["batch_expired"] * 18
        kept = box.lines("late")[:6]
        end.let_go.set()
        # Running time begins anew, and only what is unfinished runs.
        assert box.batch("resume", "late").status == 0
        assert box.batch("wait", "late").status == 0
        assert [code(line) for line in lines_of(box, "late")] == [None] * 24
        assert box.lines("late")[:6] == kept
        assert end.seen["ok 1"] == 1


@pytest.mark.parametrize("number", [pytest.param(93, id="case-93")])
@side_by_side
def test_engine_of_a_killed_worker_goes_with_it_and_the_next_job_starts(number: int, folder: Path) -> None:
    # A server with a child of its own, in a session of its own, is no harder to end.
    child = [sys.executable, "-c", "import os; os.setsid(); import time; time.sleep(300)", "a child"]
    command = ["sh", "-c", '"$@" & exec ' + " ".join(["env", *engine_command(folder)]), "sh", *child]
    with service_box(folder / "own", model_toml("local-model", engine="command", command=command)) as box:
        expected = cancel24(box, 3)
        assert box.batch("submit", "in.jsonl", "--model", "local-model", "--name", "job").status == 0
        assert box.batch("submit", str(GOOD), "--model", "local-model", "--name", "next").status == 0
        wait_until(lambda: recorded(folder) >= 24, "all are sent")
        [serve] = of_kind(box, "freight serve")
        old = {process.pid for process in box.processes()} - {serve.pid}
        [worker] = box.workers()
        worker.send_signal(signal.SIGKILL)
        for name in ("job", "next"):
            assert box.batch("wait", name).status == 0
        assert [line["custom_id"] for line in lines_of(box, "job")] == expected
        assert not any(psutil.pid_exists(pid) for pid in old)
        # No record was charged, and those that had come back did not run again.
        assert recorded(folder) <= 24 + 24 + 3
        wait_until(lambda: box.processes() == [serve], "nothing of the jobs is left")


@pytest.mark.parametrize("number", [pytest.param(94, id="case-94")])
def test_unfinished_job_gives_a_part_only_when_asked(number: int, service: ServiceBox, end: Endpoint) -> None:
    held24(service)
    assert service.batch("submit", "in.jsonl", "--model", end.url, "--name", "early").status == 0
    service.until("early", lambda job: job.done == 6, "six are done")
    output = service.folder / "early-results.jsonl"
    done = service.batch("results", "early")
    assert (done.status, done.stdout) == (1, "")
    assert "6 of 24 records done" in done.stderr
    assert not output.exists()
    assert ask(service, "GET", "/api/jobs/early/results").status_code == 409
    partial = service.batch("results", "early", "--partial")
    assert partial.status == 0
    assert "6 of 24 records so far" in partial.stderr
    assert [line["custom_id"] for line in service.results(output.name)] == [f"quick-{n}" for n in range(1, 7)]
    answer = ask(service, "GET", "/api/jobs/early/results?partial=true")
    assert (answer.headers["Freight-Records-Done"], answer.headers["Freight-Records-Total"]) == ("6", "24")
    end.let_go.set()
    service.ended("early")
    # The part is not taken for the whole, nor replaced unasked.
    assert service.batch("results", "early").status == 2
    assert len(service.results(output.name)) == 6
    assert service.batch("results", "early", "--force").status == 0
    assert len(service.results(output.name)) == 24
    output.unlink()


@pytest.mark.parametrize("number", [pytest.param(97, id="case-97")])
@side_by_side
def test_results_of_an_old_job_are_not_read_as_those_of_a_new_one(number: int, folder: Path) -> None:
    broken = model_toml("broken", engine="command", command=engine_command(folder, "--fail-start"))
    with service_box(folder / "own", own_engine(folder) + broken) as box:
        arguments = ("submit", str(GOOD), "--name", "a", "--ignore-record-model", "--model")
        assert box.batch(*arguments, "local-model", "--wait").status == 0
        assert box.batch("results", "a").status == 0
        output = box.folder / "a-results.jsonl"
        old, first = output.read_bytes(), box.job("a")
        assert box.batch(*arguments, "broken").status == 2
        assert box.job("a") == first
        assert box.batch("delete", "a", "-y").status == 0
        # Files that were written out are never deleted.
        assert output.read_bytes() == old
        assert box.batch(*arguments, "broken", "--wait").status == 1
        second = box.job("a")
        assert second.state == State.FAILED
        done = box.batch("results", "a")
        assert done.status == 2
        assert "a-results.jsonl exists already" in done.stderr
        assert output.read_bytes() == old
        assert box.batch("results", "a", "--force").status == 0
        lines = box.results("a-results.jsonl")
        assert [line["id"] for line in lines] == [f"{second.id}-{n}" for n in range(3)]
        assert [code(line) for line in lines] == ["batch_failed"] * 3
        assert first.id.encode() not in output.read_bytes()
