"""Model servers that never come up, or do not stay up: how often they are tried, where, and how their jobs end."""

import json
from collections import Counter
from typing import Final

import pytest

from freight.client.sync import Client
from freight.core.answer import BATCH_EXPIRED, BATCH_FAILED
from freight.core.view import JobStatus
from tests.faults.moody import Moody, details, places_of_starts, states
from tests.faults.runs import OUT, answer, check_complete, records
from tests.faults.services import Served, ask
from tests.faults.together import together
from tests.harness import Finished, Json, chat, code, content, wait_until
from tests.service import endpoint

COUNT: Final = 12
QUICK: Final = '[engines]\nstart_stall = "1s"\nstall = "2s"\n'
# The engine's options, what the job says in the end, and how often one worker tries before it gives up: a server that
# was up once is started again by its worker at first.
NEVER_UP: Final = {
    "hangs in loading": ("--hang-start", "hangs in loading"),
    "dies at once": ("--fail-start", "exited with status 7 while it was loading"),
    "opens its socket and is silent": ("--mute", "hangs in loading"),
}
NOT_FOR_LONG: Final = {
    "dies once it is ready": ("--die-when-ready", "exited with status 3, 3 times without an answer in between"),
    "answers its health probe only": ("--hang-at 1", "made no token for 2 s, 3 times without an answer in between"),
}
MOST_STARTS: Final = 3


def lines_of(service: Served, name: str) -> list[Json]:
    """Return the results of a job of the service."""
    with Client(f"unix://{service.socket}") as client, client.results(name) as stream:
        return [json.loads(line) for line in stream]


def check_codes(lines: list[Json], wanted: dict[str | None, int]) -> None:
    """Assert that a job's results are in order, each answer is the right one, and how many have which code."""
    assert [line["custom_id"] for line in lines] == [f"r{index}" for index in range(len(lines))]
    assert Counter(code(line) for line in lines) == wanted
    wrong = [line for index, line in enumerate(lines) if not code(line) and content(line) != answer(index)]
    assert not wrong


def check_failed(job: JobStatus, words: str) -> None:
    """Assert that a job was suspended before it failed, and says why with its server's last words."""
    assert states(job)[-2:] == ["SUSPENDED", "FAILED"], job.events
    assert words in job.reason.splitlines()[0]
    assert len(job.reason.splitlines()) > 1


def check_good_job_runs_everywhere(moody: Moody) -> None:
    """Assert that the next job gets all devices."""
    moody.service.submit("in.jsonl", "next", "good", workers=len(moody.devices))
    done = moody.service.completes("next", COUNT)
    places = {detail.rpartition(" on ")[2] for detail in details(done, "model loading")}
    # A job this short may be over before its second worker is started.
    assert places
    assert places <= set(moody.devices)


@pytest.mark.parametrize("case", NEVER_UP)
@together
def test_server_that_never_comes_up_is_tried_three_times_on_two_devices(case: str, service: Served) -> None:
    mood, words = NEVER_UP[case]
    moody = Moody(service, mood, QUICK, count=2)
    service.write("in.jsonl", records(COUNT))
    service.serve()
    service.submit("in.jsonl", "bad")
    job = service.wait_state("bad", "FAILED")
    check_failed(job, words)
    assert moody.starts() == MOST_STARTS
    assert len(details(job, "model loading")) == MOST_STARTS
    assert len(set(places_of_starts(service.data / "catalog.db"))) == 2
    first, second, _ = places_of_starts(service.data / "catalog.db")
    assert first != second
    shown = service.freight("batch", "status", "bad")
    assert f"this is start {MOST_STARTS}" in shown.stdout
    moody.check_all_free()
    check_codes(lines_of(service, "bad"), {BATCH_FAILED: COUNT})
    assert service.received() == []
    check_good_job_runs_everywhere(moody)


@pytest.mark.parametrize("case", NOT_FOR_LONG)
@together
def test_server_that_comes_up_and_never_answers_fails_its_job_and_no_record(case: str, service: Served) -> None:
    mood, words = NOT_FOR_LONG[case]
    moody = Moody(service, mood, QUICK)
    service.write("in.jsonl", records(COUNT))
    service.serve()
    service.submit("in.jsonl", "bad")
    job = service.wait_state("bad", "FAILED")
    check_failed(job, words)
    assert moody.starts() == MOST_STARTS * MOST_STARTS
    assert len(places_of_starts(service.data / "catalog.db")) == MOST_STARTS
    moody.check_all_free()
    check_codes(lines_of(service, "bad"), {BATCH_FAILED: COUNT})
    assert not ask(service.folder_of(job.id) / "results.db", "SELECT idx FROM suspect")
    # What was wrong with the server was no record's fault: once it is well, all are answered.
    moody.set("")
    service.client.resume("bad")
    service.completes("bad", COUNT)
    service.submit("in.jsonl", "next", "good")
    service.completes("next", COUNT)


@together
def test_answers_of_a_server_that_died_for_good_are_kept_and_do_not_run_again(service: Served) -> None:
    moody = Moody(service, "--fail-start", QUICK)
    moody.set("--die-after 4", start=1)
    service.write("in.jsonl", records(COUNT))
    service.serve()
    service.submit("in.jsonl", "bad", concurrency=1)
    job = service.wait_state("bad", "FAILED")
    check_failed(job, "exited with status 7 while it was loading")
    check_codes(lines_of(service, "bad"), {None: 3, BATCH_FAILED: COUNT - 3})
    # The first worker's second start counts as that worker's failure.
    assert moody.starts() == MOST_STARTS + 1
    before = service.received()
    assert before == [0, 1, 2, 3]
    moody.set("")
    service.client.resume("bad")
    service.completes("bad", COUNT)
    assert sorted(service.received()[len(before) :]) == list(range(3, COUNT))


@together
def test_server_that_dies_after_a_few_answers_again_and_again_gets_the_job_done(service: Served) -> None:
    moody = Moody(service, "--die-after 4", QUICK)
    service.write("in.jsonl", records(COUNT))
    service.serve()
    service.submit("in.jsonl", "flaps", concurrency=1)
    service.completes("flaps", COUNT)
    # Three answers a start.
    assert moody.starts() <= COUNT // 3 + 1
    assert not service.client.job("flaps").failures
    wait_until(lambda: not service.workers(), "its worker is gone", 10)
    moody.check_all_free()


@pytest.mark.parametrize("case", [*NEVER_UP, "dies once it is ready"])
@together
def test_run_of_a_server_that_would_not_start_ends_and_leaves_the_devices_to_the_next(
    case: str, service: Served
) -> None:
    mood, words = (NEVER_UP | NOT_FOR_LONG)[case]
    moody = Moody(service, mood, QUICK, count=1 if case in NOT_FOR_LONG else 2)
    service.write("in.jsonl", records(COUNT))
    done = run(service)
    assert done.status == 1, done
    said = done.stderr.partition("FAILED:")[2]
    assert words in said
    tries = MOST_STARTS if case in NEVER_UP else MOST_STARTS**2
    assert f"this is start {tries}" in said
    assert moody.starts() == tries
    [catalog] = (service.folder / f"{OUT}.freight").rglob("catalog.db")
    assert len(set(places_of_starts(catalog))) == len(moody.devices)
    assert not service.processes()
    moody.check_all_free()
    good = service.freight("run", "in.jsonl", "-o", "good.jsonl", "--model", "good")
    assert good.status == 0, good
    assert "held by" not in good.stderr
    moody.set("")
    assert run(service).status == 0
    check_complete(service, COUNT)


def run(service: Served, *options: str) -> Finished:
    """Run the moody model on one worker."""
    return service.freight("run", "in.jsonl", "-o", OUT, "--model", "mine", "--workers", "1", *options)


@together
def test_time_that_runs_out_while_the_model_loads_ends_the_job(service: Served) -> None:
    moody = Moody(service, "--loading 600")
    service.write("in.jsonl", records(COUNT))
    service.serve()
    service.submit("in.jsonl", "late", timeout_s=5.0)
    job = service.wait_state("late", "TIMED_OUT")
    assert "RUNNING" not in states(job)
    assert "--timeout 5 s" in job.reason
    moody.check_all_free()
    check_codes(lines_of(service, "late"), {BATCH_EXPIRED: COUNT})
    moody.set("")
    service.client.resume("late")
    service.completes("late", COUNT)


@together
def test_time_that_runs_out_during_the_work_keeps_what_is_answered(service: Served) -> None:
    moody = Moody(service, "--latency 1")
    service.write("in.jsonl", records(COUNT))
    service.serve()
    service.submit("in.jsonl", "late", timeout_s=6.0, concurrency=1)
    job = service.wait_state("late", "TIMED_OUT")
    assert "RUNNING" in states(job)
    moody.check_all_free()
    lines = lines_of(service, "late")
    done = {index for index, line in enumerate(lines) if code(line) is None}
    assert 0 < len(done) < COUNT
    check_codes(lines, {None: len(done), BATCH_EXPIRED: COUNT - len(done)})
    before = len(service.received())
    moody.set("")
    service.client.resume("late")
    service.completes("late", COUNT)
    assert not done.intersection(service.received()[before:])


@together
def test_run_whose_time_runs_out_goes_on_with_the_same_command(service: Served) -> None:
    moody = Moody(service, "--latency 1")
    service.write("in.jsonl", records(COUNT))
    late = run(service, "--timeout", "6s", "--concurrency", "1")
    assert late.status == 1, late
    assert "TIMED_OUT" in late.stderr
    assert not service.processes()
    moody.check_all_free()
    before = service.received()
    moody.set("")
    assert run(service).status == 0
    check_complete(service, COUNT)
    again = Counter(before + service.received()[len(before) :])
    # The one that was under way when the time ran out.
    assert sorted(again.values())[:-1] == [1] * (COUNT - 1)


@together
def test_time_in_which_a_job_is_suspended_does_not_count(service: Served) -> None:
    limit_s = 4.0
    Moody(service, "--latency 600", '[engines]\nsuspend_after = "1s"\n')
    service.write("in.jsonl", [chat("r0", "hold 0"), chat("r1", "plain 1")])
    service.serve()
    with endpoint() as far:
        service.submit("in.jsonl", "late", far.url, timeout_s=limit_s)
        service.wait_state("late", "RUNNING")
        wait_until(lambda: far.seen["plain 1"], "it is at work")
        far.is_well = False
        far.let_go.set()
        service.wait_state("late", "SUSPENDED")
        far.let_go.clear()
        # Its own limit passes, as another job shows that began later.
        service.write("other.jsonl", records(1))
        service.submit("other.jsonl", "clock", "mine", timeout_s=limit_s + 1)
        service.wait_state("clock", "TIMED_OUT")
        assert service.state("late") == "SUSPENDED"
        assert service.client.job("late").ran_s < limit_s
        far.is_well = True
        job = service.wait_state("late", "TIMED_OUT")
        assert states(job).count("RUNNING") == 2
        assert {code(line) for line in lines_of(service, "late")} == {None, BATCH_EXPIRED}
        service.client.resume("late")
        far.let_go.set()
        done = service.wait_state("late", "COMPLETED")
        assert (done.done, done.failed) == (2, 0)
