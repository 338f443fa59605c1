"""`freight batch wait`: how it ends, and that the job does not mind."""

import gc
import os
import signal
import subprocess
import time
from typing import Final

import pytest

from freight.cli import waiting
from freight.client.sync import Client
from freight.core.view import JobStatus
from freight.errors import NoServer
from tests.harness import chat, finish
from tests.service import HOLDS, Endpoint, ServiceBox, chats, on_terminal, paused

CTRL_C_S: Final = 2.0


def waiting_behind(service: ServiceBox, end: Endpoint, name: str) -> subprocess.Popen[str]:
    """Make a job that waits for another one, and return a command that waits for it, once it has said so."""
    service.put("front", chats("hold"), end.url)
    service.until("front", lambda job: job.in_flight, "it runs")
    service.put(name, chats("a"), end.url)
    service.until(name, lambda job: job.reason, "it says why it waits")
    child = service.start("batch", "wait", name)
    assert child.stderr is not None
    assert child.stderr.readline() == f"QUEUED 0/1 · {end.url} is held by front\n"
    return child


def test_finished_job_exits_0_and_failed_records_only_count_when_asked(service: ServiceBox, end: Endpoint) -> None:
    service.put("fair", chats("a", "refuse always", "b"), end.url)
    done = service.batch("wait", "fair")
    assert (done.status, done.stdout) == (0, "")
    assert "2 of 3 records answered" in done.stderr
    assert "freight batch results fair" in done.stderr
    assert done.last_line() == "1 of 3 failed: InferenceFailed (400): the engine answered 400: no: 1"
    strict = service.batch("wait", "fair", "--fail-on-errors")
    assert (strict.status, strict.last_line()) == (6, done.last_line())
    service.put("clean", chats("a"), end.url)
    assert service.batch("wait", "clean", "--fail-on-errors").status == 0


def test_job_whose_records_all_failed_is_completed_and_says_so_plainly(service: ServiceBox, end: Endpoint) -> None:
    service.put("dud", chats("refuse always", "refuse always"), end.url)
    done = service.batch("wait", "dud")
    assert (done.status, service.job("dud").state) == (0, "COMPLETED")
    assert "no record was answered" in done.stderr
    assert done.last_line().startswith("2 of 2 failed: ")


def test_cancelled_job_exits_1(service: ServiceBox, end: Endpoint) -> None:
    service.put("stopped", chats("a", "hold"), end.url)
    service.until("stopped", lambda job: job.done == 1, "one is done")
    waiting = service.start("batch", "wait", "stopped", "--fail-on-errors")
    assert service.batch("cancel", "stopped").status == 0
    done = finish(waiting)
    assert (done.status, done.stdout) == (1, "")
    assert "CANCELLED: 1 of 2 records were not reached" in done.stderr


def test_timed_out_job_exits_1_and_says_why(service: ServiceBox) -> None:
    service.write("in.jsonl", [chat("a", HOLDS)])
    made = service.batch("submit", "in.jsonl", "--model", "sim", "--timeout", "500ms", "--name", "late")
    assert made.status == 0
    done = service.batch("wait", "late")
    assert done.status == 1
    assert "TIMED_OUT: 1 of 1 records were not reached" in done.stderr
    assert "\nerror: the job's time ran out (--timeout 0.5 s)\nhint: " in done.stderr
    assert "freight batch resume late" in done.stderr
    assert [line.split(b'"code":"')[1][:13] for line in service.lines("late")] == [b"batch_expired"]


def test_unknown_job_exits_3(service: ServiceBox) -> None:
    done = service.batch("wait", "nothing")
    assert (done.status, done.stdout) == (3, "")
    assert done.stderr.startswith("error: there is no job nothing\nhint: ")


def test_timeout_exits_124_and_the_job_goes_on(service: ServiceBox, end: Endpoint) -> None:
    service.put("long", chats("a", "hold"), end.url)
    service.until("long", lambda job: job.done == 1, "one is done")
    done = service.batch("wait", "long", "--timeout", "300ms")
    assert (done.status, done.stdout) == (124, "")
    assert "still RUNNING after 0.3s, 1 of 2 records done; it goes on" in done.stderr
    assert done.last_line() == "hint: freight batch wait long"
    assert service.job("long").state == "RUNNING"
    end.let_go.set()
    assert service.batch("wait", "long", "--timeout", "1m").status == 0


def test_ctrl_c_exits_130_at_once_and_the_job_goes_on(service: ServiceBox, end: Endpoint) -> None:
    waiting = waiting_behind(service, end, "long")
    began = time.monotonic()
    os.killpg(waiting.pid, signal.SIGINT)
    done = finish(waiting)
    assert time.monotonic() - began < CTRL_C_S
    assert (done.status, done.stdout) == (130, "")
    assert done.stderr == "error: interrupted; job long goes on\nhint: freight batch wait long\n"
    assert service.job("long").state == "QUEUED"
    end.let_go.set()
    assert service.ended("long").state == "COMPLETED"


def test_ctrl_c_on_a_terminal_takes_the_bar_away(service: ServiceBox, end: Endpoint) -> None:
    service.put("long", chats("hold"), end.url)
    service.until("long", lambda job: job.in_flight, "it runs")
    status, shown = on_terminal(service, "batch", "wait", "long", until=b"RUNNING 0/1")
    assert (status, shown.count(b"Traceback")) == (130, 0)
    assert b"error: interrupted; job long goes on" in shown
    # The cursor that the bar had hidden is back.
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") > -1
    assert service.job("long").state == "RUNNING"


def test_job_that_is_deleted_meanwhile_exits_3_even_when_its_name_lives_on(service: ServiceBox, end: Endpoint) -> None:
    waiting = waiting_behind(service, end, "gone")
    with paused(waiting):
        service.clear()
        service.put("gone", chats("b"), end.url)
        service.ended("gone")
    done = finish(waiting)
    assert done.status == 3
    assert "job gone was deleted while it was waited for" in done.stderr


def test_several_wait_for_one_job(service: ServiceBox, end: Endpoint) -> None:
    job = service.put("shared", chats("hold"), end.url)
    service.until("shared", lambda job: job.in_flight, "it runs")
    waiting = [service.start("batch", "wait", name) for name in ("shared", job.id, job.id[:8])]
    end.let_go.set()
    assert [finish(child).status for child in waiting] == [0, 0, 0]


def test_status_watch_goes_on_until_the_end(service: ServiceBox, end: Endpoint) -> None:
    service.put("watched", chats("a", "hold"), end.url)
    service.until("watched", lambda job: job.done == 1, "one is done")
    watching = service.start("batch", "status", "watched", "--watch")
    assert watching.stdout is not None
    first = watching.stdout.readline()
    assert first.startswith("RUNNING 1/2")
    end.let_go.set()
    done = finish(watching)
    assert (done.status, done.stdout.splitlines()[-1].split()[:2]) == (0, ["COMPLETED", "2/2"])


# httpx's own way of trying a socket leaves it to the garbage collector where nobody listens.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_who_gives_up_on_a_service_that_they_named_is_not_told_to_start_one(
    service: ServiceBox, end: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.put("left", chats("hold"), end.url)
    monkeypatch.setattr(waiting, "AWAY_S", 0.0)
    notes: list[str] = []

    def show(_: JobStatus) -> None:
        if not notes:
            service.stop()

    with Client(service.server) as client, pytest.raises(NoServer) as caught:
        waiting.follow(client, "left", None, show, notes.append)
    hint = caught.value.hint
    del caught
    gc.collect()
    assert "went away" in notes[0] and hint == "see that it runs; freight batch wait left"
    end.let_go.set()
    assert service.freight("serve", "--background").status == 0


def test_waiting_outlives_a_restart_of_the_service(service: ServiceBox, end: Endpoint) -> None:
    waiting = waiting_behind(service, end, "patient")
    service.stop()
    assert waiting.stderr is not None
    assert "went away" in waiting.stderr.readline()
    end.let_go.set()
    assert service.freight("serve", "--background").status == 0
    done = finish(waiting)
    assert (done.status, "the service is back" in done.stderr) == (0, True)
    assert "1 of 1 records answered" in done.stderr
