"""A service that is told to end: jobs go back to the queue, nothing is left, and the next start goes on."""

import os
import signal
import time
from collections import Counter

import pytest

from tests.faults.runs import records, without
from tests.faults.services import Served
from tests.faults.together import together
from tests.harness import engine_command, model_toml, wait_until

COUNT = 300
WINDOW = 8
SOON_S = 6.0


def at_work(service: Served) -> str:
    """Start a service and two jobs; return the id of the first once it is a third done."""
    service.write("in.jsonl", records(COUNT))
    service.write("next.jsonl", records(20))
    service.serve()
    job = service.submit("in.jsonl", "first", concurrency=WINDOW)
    service.submit("next.jsonl", "second")
    wait_until(lambda: len(service.received()) >= COUNT // 3, "the engine is at work")
    return job.id


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "freight stop"])
@together
def test_service_that_is_told_to_end_keeps_its_jobs_and_the_next_one_goes_on(service: Served, how: str) -> None:
    service.own_engine("--latency", "0.2")
    job = at_work(service)
    began = time.monotonic()
    if how == "freight stop":
        stopped = service.freight("stop")
        assert stopped.status == 0, stopped
        assert f"stopped (pid {service.server.pid}); unfinished jobs go on at the next start" in stopped.stderr
        assert service.server.poll() is not None, "it came back before the service had ended"
    else:
        service.server.send_signal(signal.Signals[how])
    assert service.server.wait(20) == 0, service.said()
    took = time.monotonic() - began
    assert took < SOON_S, f"took {took:.1f} s"
    service.nothing_left()
    assert service.ask("SELECT name, state FROM job ORDER BY name") == [("first", "QUEUED"), ("second", "QUEUED")]
    done, sent = service.committed(job), len(service.received())
    assert len(done) >= sent - WINDOW
    service.serve()
    service.completes("first", COUNT)
    service.completes("second", 20)
    without(service.received()[sent:-20], done)
    assert Counter(service.received()).total() <= COUNT + 20 + WINDOW


@together
def test_second_ctrl_c_ends_all_at_once_and_the_next_service_goes_on(service: Served) -> None:
    # A server that notes the first time that it is told to end, and stays: a clean stop has to wait for it.
    told = service.folder / "told"
    once = 'trap "[ -e $0 ] && exit; touch $0" TERM; "$@" & while :; do sleep 0.1; done'
    stays = ["sh", "-c", once, str(told)]
    command = [*stays, *engine_command(service.folder, "--digest", "--latency", "0.03")]
    service.configure(model_toml("mine", engine="command", command=command))
    job = at_work(service)
    service.server.send_signal(signal.SIGINT)
    wait_until(told.exists, "the server was told to end")
    assert service.server.poll() is None
    began = time.monotonic()
    service.server.send_signal(signal.SIGINT)
    assert service.server.wait(20) == 130
    wait_until(lambda: not service.processes(), "all processes are gone", 10)
    assert time.monotonic() - began < 3.0
    done, sent = service.committed(job), len(service.received())
    assert done
    service.serve()
    service.completes("first", COUNT)
    service.completes("second", 20)
    without(service.received()[sent:-20], done)
    assert service.freight("stop").status == 0
    service.nothing_left()


@together
def test_service_started_by_a_command_outlives_it_and_ends_with_stop(service: Served) -> None:
    service.own_engine("--latency", "0.1")
    service.write("in.jsonl", records(200))
    made = service.freight("batch", "submit", "in.jsonl", "--model", "mine", "--name", "job", "--concurrency", "4")
    assert made.status == 0, made
    [said] = [line for line in made.stderr.splitlines() if line.startswith("started a Freight service")]
    assert "stop it with: freight stop" in said
    pid = service.client.version().pid
    assert f"(pid {pid}, data {service.data}; " in said
    assert os.getsid(pid) == pid, "it has a session of its own, so that closing the terminal does not reach it"
    wait_until(service.received, "the engine is at work")
    assert service.freight("stop").status == 0
    service.nothing_left()
    assert service.ask("SELECT state FROM job") == [("QUEUED",)]
    waited = service.freight("batch", "wait", "job")
    assert waited.status == 0, waited
    service.completes("job", 200)
