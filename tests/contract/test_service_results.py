"""`freight batch results`, `cancel`, `resume`, `retry` and `delete`: what is kept, what runs again, what is refused."""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

from freight.core.job import State
from tests.harness import Finished, chat, code, content, parse_lines, wait_until
from tests.service import HOLDS, Endpoint, ServiceBox, chats, paused


@pytest.fixture(autouse=True)
def nothing_written(service: ServiceBox) -> Generator[None]:
    yield
    for path in service.folder.glob("*results.jsonl"):
        path.unlink()


def refused(done: Finished, status: int, says: str) -> None:
    """Assert that a command was refused as users see it."""
    assert (done.status, done.stdout) == (status, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert "\nhint: " in done.stderr


def test_results_of_a_finished_job_are_selected_by_only(service: ServiceBox, end: Endpoint) -> None:
    service.put("mixed", [*chats("a", "refuse always", "b"), b"{}"], end.url)
    service.ended("mixed")
    done = service.batch("results", "mixed")
    assert (done.status, done.stdout) == (0, "")
    assert "wrote mixed-results.jsonl: 4 records, 2 failed" in done.stderr
    whole = service.results("mixed-results.jsonl")
    assert [code(line) for line in whole] == [None, "InferenceFailed", None, "missing_custom_id"]
    # What the engine said when it refused stands in the response.
    assert (whole[1]["response"]["status_code"], whole[1]["response"]["body"]["error"]["message"]) == (400, "no: 1")
    for only, kept in (("ok", [0, 2]), ("failed", [1, 3])):
        shown = service.batch("results", "mixed", "--only", only, "--stdout")
        assert parse_lines(shown.stdout.encode()) == [whole[number] for number in kept]
    refused(service.batch("results", "mixed", "--only", "cut"), 2, "--only")


def test_results_replace_nothing_unless_forced(service: ServiceBox, end: Endpoint) -> None:
    service.put("kept", chats("a"), end.url)
    service.ended("kept")
    target = service.folder / "kept-results.jsonl"
    target.write_text("precious")
    refused(service.batch("results", "kept"), 2, "--force")
    assert target.read_text() == "precious"
    assert service.batch("results", "kept", "--force").status == 0
    assert [content(line) for line in service.results(target.name)] == ["a, 1"]
    assert not list(service.folder.glob("*.partial"))
    # It has the mode of any file of the user's, unlike what the service keeps.
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


REFUSED: Final = {
    "missing folder": (("-o", "nowhere/out.jsonl"), "mkdir -p"),
    "a folder": (("-o", "."), "is a folder"),
    "both": (("--stdout", "-o", "out.jsonl"), "leave one out"),
    "forced nothing": (("--stdout", "--force"), "leave one out"),
    "dash": (("-o", "-"), "--stdout"),
    "no name": (("-o", ""), "name a file"),
    "a device": (("-o", "/dev/null", "--force"), "not a regular file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_output_that_cannot_be_is_refused(name: str, service: ServiceBox) -> None:
    options, says = REFUSED[name]
    before = sorted(service.folder.iterdir())
    # Before anything is asked of the service.
    refused(service.batch("results", "any", *options), 2, says)
    assert sorted(service.folder.iterdir()) == before


def test_output_on_a_file_system_that_takes_none_fails_and_leaves_nothing(service: ServiceBox, end: Endpoint) -> None:
    service.put("kept", chats("a"), end.url)
    service.ended("kept")
    done = service.batch("results", "kept", "-o", "/proc/freight-results.jsonl")
    assert done.status in (1, 2)
    assert done.stderr.startswith("error: ")
    assert not Path("/proc/freight-results.jsonl").exists()


def test_unfinished_job_gives_results_only_when_partial_ones_will_do(service: ServiceBox, end: Endpoint) -> None:
    service.put("going", chats("a", "hold", "b"), end.url)
    service.until("going", lambda job: job.done == 2, "two are done")
    early = service.batch("results", "going")
    refused(early, 1, "job going is RUNNING: 2 of 3 records done")
    assert "--partial" in early.last_line()
    assert not (service.folder / "going-results.jsonl").exists()
    done = service.batch("results", "going", "--partial")
    assert (done.status, "2 of 3 records so far" in done.stderr) == (0, True)
    assert [line["custom_id"] for line in service.results("going-results.jsonl")] == ["0", "2"]
    shown = service.batch("results", "going", "--partial", "--stdout", "--only", "failed")
    assert (shown.status, shown.stdout) == (0, "")


def test_job_is_cancelling_until_nothing_of_it_runs(service: ServiceBox) -> None:
    service.put("stubborn", chats("a", HOLDS), "sim")
    service.until("stubborn", lambda job: job.done == 1, "one is done")
    service.put("next", chats("b"), "sim")
    [worker] = service.workers()
    with paused(worker):
        # It cannot stop now; the command returns all the same.
        done = service.batch("cancel", "stubborn")
        assert (done.status, done.stdout) == (0, "")
        assert "stubborn: cancelling; results so far are kept" in done.stderr
        assert service.job("stubborn").state == "CANCELLING"
        assert service.batch("cancel", "stubborn").status == 0
        assert service.job("stubborn").state == "CANCELLING"
        assert "CANCELLING" in service.freight("ps").stdout
        for command in ("resume", "retry"):
            refused(service.batch(command, "stubborn"), 1, "CANCELLING")
        refused(service.batch("delete", "stubborn", "-y"), 1, "CANCELLING")
        refused(service.batch("results", "stubborn"), 1, "CANCELLING")
        assert service.job("next").reason == f"{service.device} is held by stubborn"
        assert service.simengines()
    assert service.ended("stubborn").state == "CANCELLED"
    assert service.ended("next").state == "COMPLETED"
    # To do it again changes nothing.
    again = service.batch("cancel", "stubborn")
    assert (again.status, "stubborn: cancelled" in again.stderr) == (0, True)
    assert [event.state for event in service.job("stubborn").events].count("CANCELLED") == 1


def test_cancelled_job_lets_go_of_its_device(service: ServiceBox) -> None:
    service.put("held", [chat("a", HOLDS)], "sim")
    service.until_state("held", State.RUNNING)
    assert service.batch("cancel", "held").status == 0
    service.ended("held")
    assert not service.workers()
    assert not service.simengines()
    assert f"ok   device: {service.device}" in service.freight("doctor").stdout


def test_job_in_the_queue_is_cancelled_without_ever_running(service: ServiceBox, end: Endpoint) -> None:
    service.put("front", chats("hold"), end.url)
    service.until("front", lambda job: job.in_flight, "it runs")
    service.put("back", chats("a", "b"), end.url)
    assert service.batch("cancel", "back").status == 0
    ended = service.ended("back")
    assert (ended.state, ended.started_at, service.job("front").state) == ("CANCELLED", None, "RUNNING")
    codes = [code(line) for line in parse_lines(b"\n".join(service.lines("back")) + b"\n")]
    assert codes == ["batch_cancelled"] * 2
    assert end.seen["a"] == 0


def test_what_has_finished_is_neither_cancelled_nor_resumed(service: ServiceBox, end: Endpoint) -> None:
    service.put("over", [*chats("a"), b"{}"], end.url)
    before = service.ended("over")
    refused(service.batch("cancel", "over"), 1, "job over is COMPLETED already")
    resumed = service.batch("resume", "over")
    refused(resumed, 1, "job over is complete")
    assert "freight batch retry over" in resumed.last_line()
    # What intake refused is not run again.
    refused(service.batch("retry", "over"), 1, "no record of job over failed in a way that another try could mend")
    assert service.job("over") == before
    service.put("clean", chats("a"), end.url)
    assert service.ended("clean").failed == 0
    refused(service.batch("retry", "clean"), 1, "no record of job clean failed\nhint: see ")


def test_resume_runs_only_what_is_left(service: ServiceBox, end: Endpoint) -> None:
    service.put("again", chats("a", "refuse always", "hold", "b"), end.url)
    service.until("again", lambda job: job.done == 3, "three are done")
    assert service.batch("cancel", "again").status == 0
    service.ended("again")
    before = service.lines("again")
    end.let_go.set()
    done = service.batch("resume", "again")
    assert (done.status, done.stdout) == (0, "")
    assert "1 record to run" in done.stderr
    ended = service.ended("again")
    assert (ended.state, ended.done, ended.failed) == ("COMPLETED", 4, 1)
    after = service.lines("again")
    assert [after[number] for number in (0, 1, 3)] == [before[number] for number in (0, 1, 3)]
    assert content(json.loads(after[2])) == "hold, 2"
    assert dict(end.seen) == {"a": 1, "refuse always": 1, "b": 1, "hold": 2}


def test_resume_of_a_timed_out_job_begins_its_time_anew(service: ServiceBox) -> None:
    service.put("late", chats("a", HOLDS), "sim", timeout_s=1.0)
    assert service.ended("late").state == "TIMED_OUT"
    service.put("front", [chat("a", HOLDS)], "sim")
    service.until_state("front", State.RUNNING)
    assert service.batch("resume", "late").status == 0
    resumed = service.job("late")
    assert (resumed.state, resumed.ran_s) == ("QUEUED", 0.0)
    service.cancel("front")
    service.until_state("late", State.RUNNING)
    again = service.ended("late")
    assert (again.state, again.ran_s >= 1.0) == ("TIMED_OUT", True)


def test_retry_runs_only_errors_and_leaves_all_other_lines_as_they_are(service: ServiceBox, end: Endpoint) -> None:
    texts = ("a", "refuse once", "b", "refuse always")
    service.put("mended", [*chats(*texts), b'{"custom_id":"bad"}'], end.url)
    service.ended("mended")
    before = service.lines("mended")
    done = service.batch("retry", "mended")
    assert (done.status, done.stdout) == (0, "")
    ended = service.ended("mended")
    after = service.lines("mended")
    assert (ended.state, ended.done, ended.failed) == ("COMPLETED", 5, 2)
    assert [after[number] for number in (0, 2, 4)] == [before[number] for number in (0, 2, 4)]
    assert content(json.loads(after[1])) == "refuse once, 2"
    assert json.loads(after[3])["error"]["message"].endswith("no: 2")
    assert dict(end.seen) == {"a": 1, "refuse once": 2, "b": 1, "refuse always": 2}


def test_retry_says_how_many_records_it_runs(service: ServiceBox, end: Endpoint) -> None:
    service.put("front", chats("a", "refuse always", "refuse always"), end.url)
    service.ended("front")
    assert "2 records to run" in service.batch("retry", "front").stderr


def test_retried_job_does_not_count_what_runs_again_as_done(service: ServiceBox, end: Endpoint) -> None:
    service.put("mended", chats("a", "refuse once"), end.url)
    service.ended("mended")
    service.put("front", chats("hold"), end.url)
    service.until("front", lambda job: job.in_flight, "it runs")
    assert service.batch("retry", "mended").status == 0
    again = service.job("mended")
    assert (again.state, again.done, again.failed) == ("QUEUED", 1, 0)


def test_retry_of_a_cancelled_job_runs_what_was_not_reached_too(service: ServiceBox, end: Endpoint) -> None:
    service.put("both", chats("refuse once", "hold"), end.url)
    service.until("both", lambda job: job.failed == 1, "one has failed")
    service.cancel("both")
    service.ended("both")
    end.let_go.set()
    assert service.batch("retry", "both").status == 0
    ended = service.ended("both")
    assert (ended.state, ended.done, ended.failed) == ("COMPLETED", 2, 0)


def test_only_what_has_ended_is_deleted_and_only_with_a_yes(service: ServiceBox, end: Endpoint) -> None:
    job = service.put("doomed", chats("a", "hold"), end.url)
    service.until("doomed", lambda job: job.done == 1, "one is done")
    unfinished = service.batch("delete", "doomed", "-y")
    refused(unfinished, 1, "job doomed is RUNNING")
    assert "freight batch cancel doomed" in unfinished.last_line()
    end.let_go.set()
    service.ended("doomed")
    service.batch("results", "doomed")
    refused(service.batch("delete", "doomed"), 2, "-y")
    assert (service.data / "batch" / job.id).exists()
    assert service.batch("delete", "doomed", "-y").status == 0
    assert not (service.data / "batch" / job.id).exists()
    for command in ("status", "wait", "results", "cancel"):
        refused(service.batch(command, "doomed"), 3, "there is no job doomed")
    refused(service.batch("delete", "doomed", "-y"), 3, "there is no job doomed")
    refused(service.freight("logs", "doomed"), 3, "there is no job doomed")
    # What was written out stays.
    assert len(service.results("doomed-results.jsonl")) == 2


def test_cancelled_output_folder_gets_what_there_is(service: ServiceBox, end: Endpoint) -> None:
    (service.folder / "answers").mkdir()
    output = service.folder / "answers"
    service.put("cut", chats("a", "hold"), end.url, output=output)
    service.until("cut", lambda job: job.done == 1, "one is done")
    service.cancel("cut")
    service.ended("cut")
    written = output / "cut-results.jsonl"
    assert [code(line) for line in parse_lines(written.read_bytes())] == [None, "batch_cancelled"]
    # It is the job's own file, so that going on may replace it.
    end.let_go.set()
    assert service.batch("resume", "cut").status == 0
    wait_until(lambda: service.job("cut").state == "COMPLETED", "it is done")
    assert [code(line) for line in parse_lines(written.read_bytes())] == [None, None]
