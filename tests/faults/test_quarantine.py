"""Cards on which something is left when their worker has ended: kept from everybody until that is gone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from freight.client.sync import Client
from freight.core.job import State
from freight.core.view import JobStatus
from tests.faults.together import together
from tests.gpubox import MUCH_MB, GpuBox, gpu_box
from tests.harness import chat, finish, wait_until
from tests.service import HOLDS, chats

# After this a device that is not as before is kept, and after this it is looked at again.
SOON: Final = '[devices]\nrelease_timeout = "0.5s"\nquarantine_retry = "0.2s"\n'
RARELY: Final = SOON.replace("0.2s", "1h")


@contextmanager
def own_box(folder: Path, devices: str = SOON, count: int = 1) -> Generator[GpuBox]:
    """Run a service with models of one card and of two."""
    with gpu_box(folder / "own", count) as box:
        box.configure(devices + box.model("single", gpus=1) + box.model("pair", gpus=2))
        box.serve()
        yield box


@contextmanager
def stranger() -> Generator[int]:
    """Run a process that a driver may say is on a card; return its pid."""
    with subprocess.Popen([sys.executable, "-c", "input()", "leftover.py"], stdin=subprocess.PIPE) as child:
        try:
            yield child.pid
            assert child.poll() is None, "it is not ours to end"
        finally:
            child.kill()


def leave(box: GpuBox, name: str = "leaves", model: str = "single", pid: int | None = None) -> JobStatus:
    """Run a job during which memory of a card is taken that does not come back; return the job when it has ended."""
    box.put(name, [chat("1", HOLDS)], model)
    running = box.until_state(name, State.RUNNING)
    card = running.workers[0].devices[0]
    if pid is None:
        box.cards.change(card, used_mb=MUCH_MB)
    else:
        box.cards.change(card, processes={pid: MUCH_MB})
    box.cancel(name)
    return box.ended(name)


def restore(box: GpuBox) -> None:
    """Give all memory back."""
    for uuid in box.uuids:
        box.cards.change(uuid, used_mb=4, processes={})


def waiting_for_it(box: GpuBox, name: str) -> JobStatus:
    """Wait until a job says that it waits for the quarantine."""
    seen = box.until(name, lambda job: "quarantine" in job.reason, "it says that it waits for the quarantine")
    assert seen.state == "QUEUED"
    return seen


def kill_service(box: GpuBox) -> None:
    """Kill the service."""
    with Client(box.server) as client:
        pid = client.version().pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not box.is_served(), "it is gone")


@together
def test_card_that_is_not_as_before_is_kept_its_job_ends_and_the_next_starts_once_it_is(tmp_path: Path) -> None:
    with own_box(tmp_path) as box:
        assert leave(box).state == "CANCELLED"
        [uuid] = box.uuids
        shown = box.gpus()[uuid]
        assert (shown["state"], shown["job"]) == ("quarantined", None)
        assert "62.9 GB more of its memory are in use than before" in shown["holder"]
        box.put("next", chats("a"), "single")
        waiting = waiting_for_it(box, "next")
        assert waiting.reason == f"GPU 0 is held by the quarantine ({shown['holder']})"
        assert f"freight gpus release {uuid}" in " ".join(box.freight("gpus", COLUMNS="400").stdout.split())
        assert len(box.starts()) == 1
        restore(box)
        assert box.ended("next").state == "COMPLETED"
        assert box.gpus()[uuid]["state"] == "free"


@together
def test_process_that_has_the_memory_is_named_and_lives_on(tmp_path: Path) -> None:
    with own_box(tmp_path) as box, stranger() as pid:
        leave(box, pid=pid)
        shown = box.gpus()[box.uuids[0]]
        assert (shown["state"], shown["pid"]) == ("quarantined", pid)
        assert f"by process {pid} (user " in shown["holder"]
        assert "leftover.py" in shown["holder"]
        box.put("next", chats("a"), "single")
        assert f"process {pid}" in waiting_for_it(box, "next").reason
        restore(box)
        assert box.ended("next").state == "COMPLETED"


@together
def test_who_has_the_memory_is_kept_up_to_date(tmp_path: Path) -> None:
    with own_box(tmp_path) as box, stranger() as first, stranger() as second:
        leave(box, pid=first)
        [uuid] = box.uuids
        box.cards.change(uuid, processes={second: MUCH_MB})
        wait_until(lambda: box.gpus()[uuid]["pid"] == second, "the other is named")
        restore(box)
        wait_until(lambda: box.gpus()[uuid]["state"] == "free", "it is free")


@together
def test_release_by_hand_gives_the_card_to_the_next_job(tmp_path: Path) -> None:
    with own_box(tmp_path, RARELY) as box:
        leave(box)
        [uuid] = box.uuids
        box.put("next", chats("a"), "single")
        waiting_for_it(box, "next")
        done = box.freight("gpus", "release", uuid)
        assert (done.status, done.stdout, done.stderr) == (0, "", f"{uuid}: released\n")
        # What is left there counts as what was there before.
        assert box.ended("next").state == "COMPLETED"
        wait_until(lambda: box.gpus()[uuid]["state"] == "free", "it is free")
        again = box.freight("gpus", "release", "0")
        assert again.status == 1, again
        assert f"{uuid} is in no quarantine" in again.stderr
        unknown = box.freight("gpus", "release", "GPU-nosuch")
        assert unknown.status == 2, unknown
        box.stop()
        assert box.freight("gpus", "release", uuid).status == 5


@together
def test_other_card_serves_meanwhile_and_a_job_for_both_waits(tmp_path: Path) -> None:
    with own_box(tmp_path, count=2) as box:
        leave(box)
        [kept] = [uuid for uuid, device in box.gpus().items() if device["state"] == "quarantined"]
        box.put("large", chats("a"), "pair")
        waiting_for_it(box, "large")
        box.put("small", chats("a"), "single")
        wait_until(lambda: box.job("small").state == "COMPLETED" or "kept for" in box.job("small").reason, "it runs")
        restore(box)
        assert [box.ended(name).state for name in ("large", "small")] == ["COMPLETED"] * 2
        assert kept in box.uuids


@together
def test_only_the_card_of_several_on_which_something_is_left_is_kept(tmp_path: Path) -> None:
    with own_box(tmp_path, count=2) as box:
        assert leave(box, model="pair").state == "CANCELLED"
        assert sorted(device["state"] for uuid, device in box.gpus().items() if uuid in box.uuids) == [
            "free", "quarantined",
        ]  # fmt: skip
        box.put("next", chats("a"), "single")
        assert box.ended("next").state == "COMPLETED"
        restore(box)
        box.put("both", chats("a"), "pair")
        assert box.ended("both").state == "COMPLETED"


@pytest.mark.parametrize("back", [False, True], ids=["still there", "back meanwhile"])
@together
def test_quarantine_outlives_a_service_that_is_killed(tmp_path: Path, back: bool) -> None:
    with own_box(tmp_path) as box:
        leave(box)
        [uuid] = box.uuids
        since = box.gpus()[uuid]
        box.put("next", chats("a"), "single")
        waiting_for_it(box, "next")
        kill_service(box)
        if back:
            restore(box)
        box.serve()
        if not back:
            assert box.gpus()[uuid] == since
            waiting_for_it(box, "next")
            assert len(box.starts()) == 1
            restore(box)
        assert box.ended("next").state == "COMPLETED"


@together
def test_card_of_a_worker_that_died_with_its_service_is_kept_by_the_next_one(tmp_path: Path) -> None:
    with own_box(tmp_path) as box:
        box.put("job", chats("a", "STUB:sleep=1"), "single", concurrency=1)
        box.until_state("job", State.RUNNING)
        [uuid] = box.uuids
        box.cards.change(uuid, used_mb=MUCH_MB)
        kill_service(box)
        for process in (*box.workers(), *box.simengines()):
            process.kill()
        box.serve()
        wait_until(lambda: box.gpus()[uuid]["state"] == "quarantined", "it is kept")
        waiting_for_it(box, "job")
        restore(box)
        assert box.ended("job").state == "COMPLETED"


@together
def test_cards_of_an_adopted_worker_are_looked_at_as_any_others(tmp_path: Path) -> None:
    with own_box(tmp_path, count=2) as box:
        box.put("job", [chat("1", HOLDS)], "pair")
        box.until_state("job", State.RUNNING)
        kill_service(box)
        box.serve()
        wait_until(lambda: {box.gpus()[uuid]["state"] for uuid in box.uuids} == {"leased"}, "its cards are leased")
        box.until("job", lambda job: job.state == "RUNNING" and job.workers, "it goes on")
        box.cards.change(box.uuids[0], used_mb=MUCH_MB)
        box.cancel("job")
        assert box.ended("job").state == "CANCELLED"
        assert [box.gpus()[uuid]["state"] for uuid in box.uuids] == ["quarantined", "free"]
        assert len(box.starts()) == 1
        restore(box)
        wait_until(lambda: box.gpus()[box.uuids[0]]["state"] == "free", "it is free")


@together
def test_card_is_kept_from_other_data_folders_too(tmp_path: Path) -> None:
    with own_box(tmp_path) as box, gpu_box(tmp_path / "other") as other:
        other.cards, other.uuids = box.cards, box.uuids
        other.configure(other.model("single", gpus=1))
        other.serve()
        leave(box)
        other.put("theirs", chats("a"), "single")
        waiting = other.until("theirs", lambda job: "process" in job.reason, "it names who has it")
        assert "serve" in waiting.reason
        restore(box)
        assert other.ended("theirs").state == "COMPLETED"


@together
def test_worker_that_is_killed_while_something_stays_on_its_card_leaves_its_job_to_another(tmp_path: Path) -> None:
    with own_box(tmp_path, count=2) as box:
        box.put("job", [chat("1", "STUB:sleep=2")], "single")
        running = box.until_state("job", State.RUNNING)
        [kept] = running.workers[0].devices
        box.cards.change(kept, used_mb=MUCH_MB)
        [worker] = box.workers()
        worker.kill()
        done = box.ended("job")
        assert (done.state, done.failed) == ("COMPLETED", 0)
        assert [cards[0] for _, cards in box.starts()][1] != kept
        assert box.gpus()[kept]["state"] == "quarantined"
        restore(box)
        wait_until(lambda: box.gpus()[kept]["state"] == "free", "it is free")


@together
def test_slack_of_the_driver_is_no_reason_to_keep_a_card(tmp_path: Path) -> None:
    with own_box(tmp_path) as box:
        box.put("job", [chat("1", HOLDS)], "single")
        box.until_state("job", State.RUNNING)
        box.cards.change(box.uuids[0], used_mb=200)
        box.cancel("job")
        assert box.ended("job").state == "CANCELLED"
        assert box.gpus()[box.uuids[0]]["state"] == "free"


@together
def test_stop_of_the_service_keeps_the_quarantine_for_the_next_one(tmp_path: Path) -> None:
    with own_box(tmp_path) as box:
        leave(box)
        box.stop()
        assert not box.processes()
        # Without a service nobody holds it; the memory itself shows.
        shown = json.loads(box.freight("gpus", "--json").stdout)["devices"][0]
        assert shown["memory_used"] == MUCH_MB << 20
        box.serve()
        assert box.gpus()[box.uuids[0]]["state"] == "quarantined"
        restore(box)
        wait_until(lambda: box.gpus()[box.uuids[0]]["state"] == "free", "it is free")


@contextmanager
def killed_run(folder: Path, devices: str, count: int = 1) -> Generator[tuple[GpuBox, str, tuple[str, ...]]]:
    """Kill a run whose card's memory does not come back; give the box, the card, and what was run."""
    with gpu_box(folder / "own", count) as box:
        box.configure(devices + box.model("single", gpus=1))
        box.write("in.jsonl", chats("a", "STUB:sleep=2"))
        command = ("run", "in.jsonl", "-o", "out.jsonl", "--model", "single", "--workers", "1")
        child = box.start(*command)
        wait_until(box.starts, "its server starts")
        [[_, [uuid]]] = box.starts()
        box.cards.change(uuid, used_mb=MUCH_MB)
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        wait_until(lambda: not box.processes(), "all of it is gone")
        yield box, uuid, command


def held_by_run(box: GpuBox, uuid: str, child: "subprocess.Popen[str]") -> bool:
    """Return whether a run, as which it shows without a service, holds a card."""
    shown = box.gpus()[uuid]
    return (shown["state"], shown["pid"]) == ("held", child.pid)


@together
def test_run_after_a_killed_one_waits_for_its_card_and_goes_on(tmp_path: Path) -> None:
    with killed_run(tmp_path, '[devices]\nrelease_timeout = "1h"\n') as (box, uuid, command):
        child = box.start(*command)
        wait_until(lambda: held_by_run(box, uuid, child), "it holds the card")
        assert len(box.starts()) == 1
        restore(box)
        done = finish(child)
        assert done.status == 0, done
        assert len(box.results()) == 2
        assert "held by" not in done.stderr


@together
def test_run_after_a_killed_one_says_that_it_waits_for_a_card_that_stays_as_it_is(tmp_path: Path) -> None:
    with killed_run(tmp_path, SOON) as (box, _, command):
        child = box.start(*command)
        assert child.stderr is not None
        said = next(line for line in child.stderr if "held by" in line)
        assert "GPU 0 is held by the quarantine (62.9 GB more of its memory are in use than before)" in said
        assert len(box.starts()) == 1
        restore(box)
        done = finish(child)
        assert done.status == 0, done
        assert len(box.results()) == 2


@together
def test_run_after_a_killed_one_takes_another_card_where_its_own_stays_as_it_is(tmp_path: Path) -> None:
    with killed_run(tmp_path, RARELY, count=2) as (box, uuid, command):
        done = box.freight(*command)
        assert done.status == 0, done
        [_, [_, [second]]] = box.starts()
        assert second != uuid
        assert len(box.results()) == 2


@together
def test_card_that_was_not_as_before_when_a_run_was_stopped_is_looked_at_by_the_next_one(tmp_path: Path) -> None:
    with killed_run(tmp_path, RARELY) as (box, _, command):
        child = box.start(*command)
        assert child.stderr is not None
        assert next(line for line in child.stderr if "the quarantine" in line)
        os.killpg(child.pid, signal.SIGINT)
        assert finish(child).status == 130
        again = box.start(*command)
        assert again.stderr is not None
        assert next(line for line in again.stderr if "the quarantine" in line)
        assert len(box.starts()) == 1
        os.killpg(again.pid, signal.SIGINT)
        assert finish(again).status == 130
        restore(box)
        assert box.freight(*command).status == 0
