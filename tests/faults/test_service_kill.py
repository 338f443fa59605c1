"""A service killed at any moment: the next one goes on, workers live on with their models, and nothing is lost."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from contextlib import closing

from freight.store.processes import start_ticks
from tests.faults.runs import check_complete, records, without
from tests.faults.services import Served, refused, soon
from tests.faults.together import together
from tests.harness import finish, wait_until

COUNT = 2000
WINDOW = 16
KILLS = 20
SEED = 20251130
FEW = 300


@together
def test_service_killed_twenty_times_in_one_job_loses_no_record_and_loads_no_model_again(service: Served) -> None:
    print(f"seed {SEED}")
    moments = random.Random(SEED)
    service.own_engine("--latency", "0.05")
    service.write("in.jsonl", records(COUNT))
    service.serve()
    job = service.submit("in.jsonl", "many", concurrency=WINDOW)
    wait_until(service.received, "the engine is at work")
    for number in range(KILLS):
        moment = moments.uniform(0, 0.4)
        if number % 2:
            # Killed while it takes up what the one before left, or soon after.
            service.launch()
            moment += 0.4
        elif number:
            service.serve()
        time.sleep(moment)
        service.kill()
        done = service.committed(job.id)
        print(f"kill {number} after {moment:.2f} s with {len(done)} done")
        assert len(done) < COUNT, "the job was too short for all kills"
    service.serve()
    service.completes("many", COUNT)
    times = Counter(service.received())
    assert set(times) == set(range(COUNT))
    # Its worker lived on, so that nothing was in flight with a process that is gone.
    assert times.total() == COUNT
    assert service.starts() == 1
    assert service.freight("stop").status == 0
    service.nothing_left()


def started(service: Served, *engine: str, count: int = FEW, at_least: int = 1, **options: object) -> str:
    """Start a service and a job with an engine of its own; return the job's id once that has had so many records."""
    service.own_engine(*engine)
    service.write("in.jsonl", records(count))
    service.serve()
    job = service.submit("in.jsonl", "job", concurrency=WINDOW, **options)
    wait_until(lambda: len(service.received()) >= at_least, "the engine is at work")
    return job.id


def goes_on(service: Served, count: int = FEW) -> None:
    """Start the service again; its job must complete, and the service leave nothing when it is stopped."""
    service.serve()
    service.completes("job", count)
    assert service.freight("stop").status == 0
    service.nothing_left()


@together
def test_service_and_worker_killed_together_run_no_committed_record_again(service: Served) -> None:
    job = started(service, "--latency", "0.03", at_least=FEW // 3)
    [worker] = service.workers()
    os.kill(worker, signal.SIGKILL)
    service.kill()
    wait_until(lambda: not service.engines(), "the engine ended with its worker", 10)
    done, sent = service.committed(job), len(service.received())
    assert done
    goes_on(service)
    without(service.received()[sent:], done)
    assert len(service.received()) <= FEW + 5 * WINDOW
    assert service.starts() == 2


@together
def test_worker_killed_while_the_service_is_away_is_replaced_by_the_next(service: Served) -> None:
    job = started(service, "--latency", "0.03", at_least=FEW // 3)
    service.kill()
    done, sent = service.committed(job), len(service.received())
    for pid in (*service.workers(), *service.engines()):
        os.kill(pid, signal.SIGKILL)
    goes_on(service)
    without(service.received()[sent:], done)
    assert service.starts() == 2


@together
def test_service_killed_while_it_checks_an_input_checks_it_again_and_makes_one_job(service: Served) -> None:
    service.own_engine()
    # Blank lines are no records, but take time to read.
    path = service.write("in.jsonl", [*records(30), b"\n" * 2_000_000, *records(60)[30:]])
    service.serve()
    command = ("batch", "submit", str(path), "--model", "mine", "--name", "job", "--idempotency-key", "k1")
    submitting = service.start(*command)
    wait_until(lambda: service.ask("SELECT state FROM job") == [("VALIDATING",)], "the input is being read")
    service.kill()
    refused(finish(submitting), 1, "the connection to the service", "broke")
    assert service.ask("SELECT state, records FROM job") == [("VALIDATING", None)]
    service.serve()
    # The same request once more is the same job, though nobody has heard of the first one's outcome.
    again = service.freight(*command, "--json")
    assert again.status == 0, again
    assert json.loads(again.stdout)["is_new"] is False
    service.completes("job", 60)
    assert len(list((service.data / "batch").iterdir())) == 1
    assert service.uploads() == []


@together
def test_service_killed_while_a_model_loads_keeps_that_load(service: Served) -> None:
    service.own_engine("--loading", "3")
    service.write("in.jsonl", records(FEW))
    service.serve()
    service.submit("in.jsonl", "job")
    wait_until(service.starts, "the model loads")
    service.kill()
    assert service.ask("SELECT state FROM job") == [("STARTING",)]
    goes_on(service)
    assert service.starts() == 1


@together
def test_service_killed_while_it_cancels_a_job_ends_its_worker_and_cancels_it(service: Served) -> None:
    job = started(service, "--latency", "0.03", at_least=FEW // 3)
    workers = service.workers()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    service.client.cancel("job")
    service.kill()
    assert service.ask("SELECT state FROM job") == [("CANCELLING",)]
    service.serve()
    assert service.state("job") == "CANCELLING"
    for pid in workers:
        os.kill(pid, signal.SIGCONT)
    service.wait_state("job", "CANCELLED")
    assert service.workers() == service.engines() == []
    done, sent = service.committed(job), len(service.received())
    assert 0 < len(done) < FEW
    service.client.resume("job")
    service.completes("job", FEW)
    without(service.received()[sent:], done)


@together
def test_service_killed_while_it_writes_the_output_writes_it_again(service: Served) -> None:
    output = service.folder / "results"
    output.mkdir()
    service.own_engine()
    # Long answers, so that writing them takes a while.
    path = service.write("in.jsonl", [record | {"body": record["body"] | {"n": 128}} for record in records(2000)])
    service.serve()
    job = service.submit(path.name, "job", output=str(output))
    soon((output / f".job-results.jsonl.{job.id[:8]}.partial").exists, "the output is being written")
    os.kill(service.server.pid, signal.SIGSTOP)
    assert service.ask("SELECT state FROM job") == [("FINALIZING",)]
    service.kill()
    assert not (output / "job-results.jsonl").exists()
    service.serve()
    service.wait_state("job", "COMPLETED")
    check_complete(service, 2000, "results/job-results.jsonl")
    assert [path.name for path in output.iterdir()] == ["job-results.jsonl"]
    assert len(service.received()) == 2000


@together
def test_service_killed_in_an_upload_leaves_nothing_of_it(service: Served) -> None:
    service.serve()
    service.configure("")
    submitting = service.start("batch", "submit", "-", "--model", "http://127.0.0.1:1", stdin=subprocess.PIPE)
    assert submitting.stdin is not None
    for record in records(40):
        submitting.stdin.write(json.dumps(record) + "\n")
    submitting.stdin.flush()
    wait_until(service.uploads, "it is being sent")
    service.kill()
    refused(finish(submitting, "{}\n" * 100_000), 1, "broke", "nothing was submitted")
    service.serve()
    assert service.uploads() == []
    assert not list(service.client.jobs())


@together
def test_stop_without_a_service_ends_the_workers_that_a_killed_one_left(service: Served) -> None:
    job = started(service, "--latency", "0.03", at_least=FEW // 3)
    service.kill()
    done = service.committed(job)
    assert service.workers() and service.engines()
    stopped = service.freight("stop")
    assert stopped.status == 0, stopped
    assert "no service is running; ended a worker that was left" in stopped.stderr
    assert not service.processes()
    assert service.is_device_free()
    assert not list(service.runtime.iterdir())
    again = service.freight("stop")
    assert (again.status, again.stderr) == (0, "no service is running\n")
    sent = len(service.received())
    goes_on(service)
    without(service.received()[sent:], done)


@together
def test_worker_without_a_service_keeps_what_was_answered_meanwhile_and_hands_it_in(service: Served) -> None:
    job = started(service, "--latency", "0.5", count=60, at_least=WINDOW)
    service.kill()
    # What the engine has by now is answered while there is no service.
    assert len(service.committed(job)) < len(service.received())
    goes_on(service, 60)
    assert sorted(service.received()) == list(range(60))
    assert service.starts() == 1


@together
def test_machine_that_was_started_anew_goes_on_with_its_jobs(service: Served) -> None:
    job = started(service, "--latency", "0.03", at_least=FEW // 3)
    for pid in (service.server.pid, *service.workers(), *service.engines()):
        os.kill(pid, signal.SIGKILL)
    service.kill()
    wait_until(lambda: not service.processes(), "the machine is off")
    done, sent = service.committed(job), len(service.received())
    # A process of the new boot has the worker's old number, and the same start: only the boot tells them apart.
    with closing(sqlite3.connect(service.data / "catalog.db")) as catalog, catalog:
        [(text,)] = catalog.execute("SELECT process FROM worker")
        process = json.loads(text) | {"boot": "0" * 8, "pid": os.getpid(), "started": start_ticks(os.getpid())}
        catalog.execute("UPDATE worker SET process = ?", (json.dumps(process),))
    assert sorted(path.name for path in (service.data / "run").iterdir()) == ["api.sock", "control.sock"]
    goes_on(service)
    without(service.received()[sent:], done)
