"""Servers that cannot start, endpoints that go down, and services that are stopped or killed under their jobs."""

import json
import os
import signal
from pathlib import Path

import psutil

from freight.client.sync import Client
from freight.core.job import State
from tests.contract.scenario import side_by_side
from tests.contract.town import town
from tests.harness import chat, engine_command, model_toml, wait_until
from tests.service import HOLDS, ServiceBox, chats, endpoint, service_box


@side_by_side
def test_server_that_cannot_start_fails_its_job_with_its_last_words_and_the_next_job_is_fine(folder: Path) -> None:
    mended = folder / "mended"
    start = f'test -e {mended} || {{ echo "no usable device"; exit 7; }}; exec "$@"'
    sim = engine_command(folder)
    toml = model_toml("deaf", engine="command", command=["sh", "-c", start, "sh", *sim]) + model_toml(
        "sim", engine="command", command=sim
    )
    with service_box(folder / "own", toml) as box:
        assert box.freight("serve", "--background").status == 0
        box.put("bad", chats("a"), "deaf")
        # The same device is free for another while the first one's next start is not due.
        box.put("good", chats("a"), "sim")
        done = box.batch("wait", "bad")
        assert done.status == 1
        assert "FAILED: 1 of 1 records were not reached" in done.stderr
        assert "\nerror: the model server exited with status 7" in done.stderr
        assert box.ended("good").state == "COMPLETED"
        failed = box.job("bad")
        states = [event.state for event in failed.events]
        # Bounded starts; suspended until nothing holds the device; only then failed.
        assert states.count("STARTING") == 3
        assert states[-2:] == ["SUSPENDED", "FAILED"]
        assert "no usable device" in box.batch("status", "bad").stdout
        assert not box.simengines()
        assert "no usable device" in box.freight("logs", "bad").stdout
        assert [json.loads(line)["error"]["code"] for line in box.lines("bad")] == ["batch_failed"]
        mended.touch()
        assert box.batch("resume", "bad").status == 0
        assert box.ended("bad").state == "COMPLETED"


@side_by_side
def test_job_whose_endpoint_goes_down_is_suspended_with_the_reason_and_goes_on_by_itself(folder: Path) -> None:
    with service_box(folder / "own", 'engines.suspend_after = "1s"\n') as box, endpoint() as end:
        assert box.freight("serve", "--background").status == 0
        box.put("down", chats("a", "hold"), end.url)
        box.until("down", lambda job: job.done == 1 and job.in_flight, "one is done, and one on its way")
        end.is_well = False
        end.let_go.set()
        suspended = box.until_state("down", State.SUSPENDED)
        assert suspended.reason.startswith("no success for 1 s: ")
        assert "503" in suspended.reason
        assert f"SUSPENDED: {suspended.reason}" in box.batch("status", "down").stdout
        assert suspended.reason in box.freight("ps").stdout
        ran_s = suspended.ran_s
        end.is_well = True
        ended = box.ended("down")
        assert (ended.state, ended.done, ended.failed, ended.reason) == ("COMPLETED", 2, 0, "")
        assert end.seen["a"] == 1
        assert ran_s > 0


@side_by_side
def test_stopped_service_goes_on_where_it_was_at_its_next_start(folder: Path) -> None:
    with service_box(folder / "own") as box, endpoint() as end:
        assert box.freight("serve", "--background").status == 0
        box.put("kept", chats("a", "refuse always", "hold"), end.url)
        box.put("queued", chats("b"), end.url)
        box.until("kept", lambda job: job.done == 2, "two are done")
        stopped = box.freight("stop")
        assert (stopped.status, stopped.stdout) == (0, "")
        assert "unfinished jobs go on at the next start" in stopped.stderr
        assert not box.processes()
        assert box.freight("stop").status == 0
        end.let_go.set()
        # A command starts the next one, and the jobs go on.
        listed = json.loads(box.batch("list", "--json").stdout)
        assert {job["name"] for job in listed} == {"kept", "queued"}
        kept = box.ended("kept")
        assert (kept.state, kept.done, kept.failed) == ("COMPLETED", 3, 1)
        assert [event.event for event in kept.events].count("control plane stopped") == 1
        assert box.ended("queued").state == "COMPLETED"
        assert dict(end.seen) == {"a": 1, "refuse always": 1, "hold": 2, "b": 1}


@side_by_side
def test_killed_service_is_followed_by_one_that_takes_its_worker_over(folder: Path) -> None:
    with service_box(folder / "own", model_toml("sim", engine="command", command=engine_command(folder))) as box:
        assert box.freight("serve", "--background").status == 0
        box.put("held", chats("a", HOLDS), "sim", concurrency=1)
        before = box.until("held", lambda job: job.done == 1 and job.in_flight, "one is done, and one on its way")
        [server] = box.simengines()
        _kill_service(box)
        # The next command starts a service; nothing is loaded or asked again.
        assert box.batch("status", "held").status == 0
        after = box.until("held", lambda job: job.in_flight, "its worker has come back")
        assert [worker.id for worker in after.workers] == [worker.id for worker in before.workers]
        assert [process.pid for process in box.simengines()] == [server.pid]
        assert (after.state, after.done) == ("RUNNING", 1)
        assert (folder / "record").read_bytes().count(HOLDS.encode()) == 1
        box.clear()


@side_by_side
def test_stop_ends_what_a_killed_service_left(folder: Path) -> None:
    with service_box(folder / "own", model_toml("sim", engine="command", command=engine_command(folder))) as box:
        assert box.freight("serve", "--background").status == 0
        box.put("held", [chat("a", HOLDS)], "sim")
        box.until_state("held", State.RUNNING)
        _kill_service(box)
        assert box.workers()
        done = box.freight("stop")
        assert (done.status, "ended a worker that was left" in done.stderr) == (0, True)
        assert not box.processes()


def _kill_service(box: ServiceBox) -> None:
    with Client(box.server) as client:
        pid = client.version().pid
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "it is gone")


@side_by_side
def test_mistake_in_the_configuration_of_a_running_service_is_logged_once_and_breaks_nothing(folder: Path) -> None:
    with town(folder, f'[paths]\nalice = {{ read = ["{folder}/none"] }}') as place:
        log, good = place.box.data / "serve.log", place.box.config.read_text()
        wait_until(lambda: f"paths.alice.read grants {folder}/none, which does not exist" in log.read_text(), "warned")
        place.box.config.write_text(f"{good}\n[limits\n")
        sent = place.as_("alice", "POST", "/v1/files", files={"file": ("in.jsonl", b"{}\n")}, data={"purpose": "batch"})
        assert sent.status_code == 200, sent.text
        assert place.as_("alice", "GET", "/v1/models").status_code == 200
        place.job("alice")
        assert log.read_text().count("is not valid TOML") == 1
        assert "Traceback" not in log.read_text()
        place.box.config.write_text(good)
        place.job("alice")
        assert "the settings are good again" in log.read_text()
