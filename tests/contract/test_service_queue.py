"""Whose turn it is and why the others wait, workers that go from job to job, and whose lines a log holds."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Final

import pytest

from freight.client.sync import Client
from freight.core.job import State
from tests.contract.scenario import side_by_side
from tests.harness import chat, engine_command, model_toml, wait_until
from tests.service import HOLDS, ServiceBox, chats, endpoint, service_box

STARTED: Final = "a server began here"


def loud(folder: Path, name: str) -> list[str]:
    """Return a server's command line that writes a line when it starts, into its log and into a file of ours."""
    script = f'echo "{STARTED}: {name}"; echo {name} >> {folder}/starts; exec "$@"'
    return ["sh", "-c", script, "sh", *engine_command(folder)]


def models(folder: Path) -> str:
    """Return two models, whose starts are noted."""
    folder.mkdir(parents=True, exist_ok=True)
    return "".join(model_toml(name, engine="command", command=loud(folder, name)) for name in ("red", "blue"))


def starts(folder: Path) -> list[str]:
    """Return which models' servers were started, in order."""
    path = folder / "starts"
    return path.read_text().split() if path.exists() else []


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("queue")


@pytest.fixture(scope="module")
def running(engines: Path) -> Generator[ServiceBox]:
    with service_box(engines / "box", models(engines)) as box:
        assert box.freight("serve", "--background").status == 0
        yield box


@pytest.fixture
def service(running: ServiceBox, engines: Path) -> Generator[ServiceBox]:
    (engines / "starts").unlink(missing_ok=True)
    yield running
    running.clear()


def test_higher_priority_goes_first_and_the_rest_in_order_of_arrival(service: ServiceBox) -> None:
    service.put("front", [chat("a", HOLDS)], "red")
    service.until_state("front", State.RUNNING)
    for name, priority in (("low", -1), ("first", 0), ("second", 0)):
        service.put(name, chats("a"), "red", priority=priority)
    service.write("in.jsonl", chats("a"))
    high = ("--name", "high", "--priority", "7", "-q")
    assert service.batch("submit", "in.jsonl", "--model", "red", *high).status == 0
    service.until("low", lambda job: job.reason.startswith("3 jobs ahead"), "it says why it waits")
    reasons = {job["name"]: job["reason"] for job in json.loads(service.freight("ps", "--json").stdout)["jobs"]}
    held = f"{service.device} is held by front"
    assert reasons == {
        "front": "", "high": held, "first": f"1 job ahead; {held}", "second": f"2 jobs ahead; {held}",
        "low": f"3 jobs ahead; {held}",
    }  # fmt: skip
    assert f"3 jobs ahead; {held}" in service.freight("ps").stdout
    assert f"QUEUED: 2 jobs ahead; {held}" in service.batch("status", "second").stdout
    # Nothing that runs is stopped for a higher one.
    assert service.job("front").state == "RUNNING"
    service.cancel("front")
    ended = [service.ended(name) for name in ("high", "first", "second", "low")]
    assert [job.state for job in ended] == ["COMPLETED"] * 4
    began = [job.started_at or "" for job in ended]
    assert began == sorted(began)
    assert len(set(began)) == 4


def test_queued_job_of_the_same_model_is_handed_the_worker(service: ServiceBox, engines: Path) -> None:
    service.put("one", chats("STUB:sleep=0.5"), "red")
    service.until_state("one", State.RUNNING)
    service.put("two", chats("b"), "red")
    service.put("three", chats("c"), "blue")
    assert [service.ended(name).state for name in ("one", "two", "three")] == ["COMPLETED"] * 3
    assert starts(engines) == ["red", "blue"]
    # Nobody wants it any more: it does not stay.
    wait_until(lambda: not service.workers(), "its worker has ended")


def test_logs_of_each_job_hold_only_its_own_lines(service: ServiceBox) -> None:
    service.put("one", chats("STUB:sleep=0.5"), "red")
    service.until_state("one", State.RUNNING)
    service.put("two", chats("b"), "red")
    service.put("three", chats("c"), "blue")
    service.ended("three")
    logs = {name: service.freight("logs", name).stdout for name in ("one", "two", "three")}
    assert [STARTED in logs[name] for name in ("one", "two", "three")] == [True, False, True]
    assert f"{STARTED}: red" in logs["one"]
    assert f"{STARTED}: blue" in logs["three"]
    assert "red" not in logs["three"]


def test_logs_can_be_cut_followed_and_asked_of_one_worker(service: ServiceBox) -> None:
    service.put("talks", [chat("a", HOLDS)], "red")
    service.until_state("talks", State.RUNNING)
    following = service.start("logs", "talks", "-f")
    assert following.stdout is not None
    assert following.stdout.readline() == "==> worker 1 <==\n"
    service.cancel("talks")
    assert following.wait(60) == 0
    following.communicate()
    whole = service.freight("logs", "talks", "--worker", "1").stdout
    assert whole.splitlines()[0] == f"{STARTED}: red"
    assert len(whole.splitlines()) >= 2
    last = service.freight("logs", "talks", "--worker", "1", "--tail", "1").stdout
    assert last == whole.splitlines(keepends=True)[-1]
    missing = service.freight("logs", "talks", "--worker", "2")
    assert (missing.status, "no worker 2" in missing.stderr) == (2, True)


def test_jobs_on_endpoints_need_no_device(service: ServiceBox) -> None:
    service.put("front", [chat("a", HOLDS)], "red")
    service.until_state("front", State.RUNNING)
    with endpoint() as end:
        service.put("beside", chats("a"), end.url)
        assert service.ended("beside").state == "COMPLETED"
    assert service.job("front").state == "RUNNING"


@side_by_side
def test_each_job_waits_for_the_devices_of_this_machine_whatever_its_data_folder(folder: Path) -> None:
    with service_box(folder / "one", models(folder)) as one, service_box(folder / "two", models(folder)) as two:
        two.device = one.device
        two.configure(models(folder))
        for box in (one, two):
            assert box.freight("serve", "--background").status == 0
        one.put("holder", [chat("a", HOLDS)], "red")
        one.until_state("holder", State.RUNNING)
        two.put("waiter", chats("a"), "red")
        waiting = two.until("waiter", lambda job: job.reason, "it says why it waits")
        with Client(one.server) as client:
            pid = client.version().pid
        assert waiting.state == "QUEUED"
        assert waiting.reason.startswith(f"{one.device} is held by process {pid} (user ")
        one.clear()
        assert two.ended("waiter").state == "COMPLETED"


@side_by_side
def test_time_in_the_queue_does_not_count_against_the_timeout(folder: Path) -> None:
    limit_s = 3.0
    with service_box(folder / "own") as box, endpoint() as end:
        assert box.freight("serve", "--background").status == 0
        box.put("front", chats("hold"), end.url)
        box.until("front", lambda job: job.in_flight, "it runs")
        box.put("late", chats("a"), end.url, timeout_s=limit_s)
        # Its own limit has passed, as another job shows that began after it.
        box.until("front", lambda job: job.ran_s > limit_s + 1, "longer than the limit has passed")
        waiting = box.job("late")
        assert (waiting.state, waiting.ran_s) == ("QUEUED", 0.0)
        end.let_go.set()
        assert box.ended("late").state == "COMPLETED"


@side_by_side
def test_warm_worker_serves_the_next_job_of_its_model_and_gives_way_to_another(folder: Path) -> None:
    with service_box(folder / "own", models(folder), 'keep_warm = "60s"') as box:
        assert box.freight("serve", "--background").status == 0
        box.put("one", chats("a"), "red")
        box.ended("one")
        wait_until(lambda: [w["phase"] for w in _workers(box)] == ["idle"], "its worker is warm")
        [warm] = _workers(box)
        assert (warm["model"], warm["place"], warm["job"], warm["number"]) == ("red", box.device, None, None)
        shown = box.freight("ps")
        assert (shown.status, "no jobs that have not ended" in shown.stderr) == (0, True)
        assert [line.split()[:3] for line in shown.stdout.splitlines() if line] == [
            ["WARM", "MODEL", "PLACE"], ["red", box.device, "idle"],
        ]  # fmt: skip
        box.put("two", chats("b"), "red")
        box.ended("two")
        assert starts(folder) == ["red"]
        assert STARTED not in box.freight("logs", "two").stdout
        # Another model's job has the device; the warm worker makes room at once.
        box.put("three", chats("c"), "blue")
        assert box.ended("three").state == "COMPLETED"
        assert starts(folder) == ["red", "blue"]
        wait_until(lambda: [w["model"] for w in _workers(box)] == ["blue"], "only the other one is warm")


def _workers(box: ServiceBox) -> list[dict[str, object]]:
    return json.loads(box.freight("ps", "--json").stdout)["workers"]


@side_by_side
def test_warm_worker_ends_when_its_time_is_over(folder: Path) -> None:
    with service_box(folder / "own", models(folder), 'keep_warm = "1s"') as box:
        assert box.freight("serve", "--background").status == 0
        box.put("one", chats("a"), "red")
        box.ended("one")
        assert box.workers()
        wait_until(lambda: not box.workers() and not box.simengines(), "it has ended")
        # What its server wrote while it was idle is of no job, and goes with it.
        wait_until(lambda: not list((box.data / "workers").iterdir()), "its log is gone")


@side_by_side
def test_finished_jobs_are_deleted_when_their_retention_is_over(folder: Path) -> None:
    with service_box(folder / "own", 'retention = "1s"\n') as box, endpoint() as end:
        assert box.freight("serve", "--background").status == 0
        over = box.put("over", chats("a"), end.url)
        going = box.put("going", chats("hold"), end.url)
        box.ended("over")
        wait_until(lambda: not (box.data / "batch" / over.id).exists(), "it is gone")
        assert box.batch("status", "over").status == 3
        # Only what has ended is.
        assert (box.job("going").state, (box.data / "batch" / going.id).exists()) == ("RUNNING", True)
