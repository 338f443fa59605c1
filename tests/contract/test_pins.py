"""Pinned models: up without a job, first choice of their jobs, never in the way of what they were told not to be."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from freight.client.sync import Client
from freight.core.job import State
from tests.contract.scenario import side_by_side
from tests.contract.served import ask
from tests.gpubox import GpuBox, gpu_box
from tests.harness import PATIENCE_S, Finished, Json, chat, engine_command, model_toml, wait_until
from tests.service import HOLDS, chats


def models(box: GpuBox) -> str:
    """Return models of a card each, and one of two."""
    return "".join(box.model(name, gpus=1) for name in ("red", "blue", "green")) + box.model("pair", gpus=2)


def pin(box: GpuBox, name: str, workers: int = 1) -> None:
    """Pin a model."""
    done = box.freight("models", "pin", name, "--workers", f"{workers}")
    assert (done.status, done.stdout) == (0, ""), done
    assert done.stderr.startswith(f"{name} is pinned: {workers} worker"), done


def idle(box: GpuBox, model: str) -> list[Json]:
    """Return a model's workers that serve no job and have their server up."""
    return [worker for worker in box.ps()["workers"] if worker["model"] == model and worker["phase"] == "idle"]


def until_up(box: GpuBox, model: str, count: int = 1) -> list[str]:
    """Wait until so many workers of a model are idle, and all its workers are; return their ids."""
    wait_until(lambda: len(idle(box, model)) == count, f"{count} of {model} are up")
    return [worker["id"] for worker in idle(box, model)]


def models_started(box: GpuBox) -> list[str]:
    """Return which models' servers were started, in order."""
    return [name for name, _ in box.starts()]


def kill_service(box: GpuBox) -> None:
    """Kill the service."""
    with Client(box.server) as client:
        pid = client.version().pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not box.is_served(), "it is gone")


@side_by_side
def test_pinned_model_is_up_without_a_job_and_its_job_starts_at_once_on_it(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(models(box))
        box.serve()
        pin(box, "red")
        [worker] = until_up(box, "red")
        [shown] = box.ps()["workers"]
        assert (shown["id"], shown["pinned"], shown["job"]) == (worker, True, None)
        assert shown["devices"] == box.starts()[0][1]
        assert box.ps()["pins"] == [{"model": "red", "workers": 1, "up": 1, "reason": ""}]
        tables = [line.split() for line in box.freight("ps").stdout.splitlines()]
        assert ["PINNED", "MODEL", "UP", "REASON"] in tables
        assert ["red", "1/1"] in tables
        assert any(words[:1] == ["red"] and "(pinned)" in words for words in tables)
        assert "the model red, warm" in {device["holder"] for device in box.gpus().values()}
        box.put("job", chats("a", "b"), "red")
        done = box.ended("job")
        assert (done.state, done.done, done.failed) == ("COMPLETED", 2, 0)
        # No load is in its timeline, as there was none.
        assert not [event for event in done.events if event.event.startswith("model ")]
        assert until_up(box, "red") == [worker]
        assert models_started(box) == ["red"]
        pin(box, "red", 2)
        assert worker in until_up(box, "red", 2)
        assert sorted(card for _, [card] in box.starts()) == sorted(box.uuids)


@side_by_side
def test_job_of_another_model_ends_a_warm_worker_and_never_a_pinned_one(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(models(box), 'keep_warm = "10m"')
        box.serve()
        pin(box, "red")
        [pinned] = until_up(box, "red")
        box.put("first", chats("a"), "blue")
        box.ended("first")
        until_up(box, "blue")
        box.put("second", chats("a"), "green")
        assert box.ended("second").state == "COMPLETED"
        assert models_started(box) == ["red", "blue", "green"]
        assert not idle(box, "blue")
        box.put("large", chats("a"), "pair")
        waiting = box.until("large", lambda job: job.reason, "it says why it waits")
        assert "the pinned model red" in waiting.reason
        # The next of a single card is not kept from one by what cannot have two.
        box.put("third", chats("a"), "blue")
        assert box.ended("third").state == "COMPLETED"
        assert until_up(box, "red") == [pinned]
        assert box.freight("models", "unpin", "red").status == 0
        assert box.ended("large").state == "COMPLETED"


@side_by_side
def test_pins_outlive_the_service_and_their_workers_are_adopted(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(models(box))
        box.serve()
        pin(box, "red", 2)
        before = sorted(until_up(box, "red", 2))
        kill_service(box)
        box.serve()
        assert sorted(until_up(box, "red", 2)) == before
        assert box.ps()["pins"] == [{"model": "red", "workers": 2, "up": 2, "reason": ""}]
        box.put("job", chats("a"), "red")
        assert box.ended("job").state == "COMPLETED"
        assert models_started(box) == ["red"] * 2
        # An orderly stop ends the workers; the next start brings them up again.
        box.stop()
        assert not box.processes()
        box.serve()
        assert not set(until_up(box, "red", 2)) & set(before)
        assert models_started(box) == ["red"] * 4


@side_by_side
def test_pinned_worker_that_is_killed_is_replaced(folder: Path) -> None:
    with gpu_box(folder / "own", 1) as box:
        box.configure(models(box))
        box.serve()
        pin(box, "red")
        [first] = until_up(box, "red")
        for victim in (box.workers, box.simengines):
            for process in victim():
                process.kill()
            wait_until(lambda first=first: [w["id"] for w in idle(box, "red")] not in ([], [first]), "another is up")
            [first] = until_up(box, "red")
        assert models_started(box) == ["red"] * 3
        assert box.ps()["pins"][0]["up"] == 1


@side_by_side
def test_job_that_comes_while_a_pinned_model_loads_gets_that_worker(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(box.model("slow", "--loading", "2", gpus=1))
        box.serve()
        pin(box, "slow")
        wait_until(lambda: [w["phase"] for w in box.ps()["workers"]] == ["loading"], "it loads")
        box.put("job", chats("a"), "slow")
        assert box.ended("job").state == "COMPLETED"
        until_up(box, "slow")
        assert models_started(box) == ["slow"]


@side_by_side
def test_job_of_more_workers_than_are_pinned_gets_them_and_leaves_the_pinned_ones(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(models(box))
        box.serve()
        pin(box, "red")
        until_up(box, "red")
        box.put("job", [chat(f"{number}", HOLDS) for number in range(4)], "red", workers=2, concurrency=1)
        box.until("job", lambda job: len(job.workers) == 2, "it has two workers")
        box.cancel("job")
        assert box.ended("job").state == "CANCELLED"
        until_up(box, "red")
        wait_until(lambda: len(box.ps()["workers"]) == 1, "the other one has gone")


@side_by_side
def test_cancel_of_a_job_on_a_pinned_worker_leaves_that_up(folder: Path) -> None:
    with gpu_box(folder / "own", 1) as box:
        box.configure(models(box))
        box.serve()
        pin(box, "red")
        [worker] = until_up(box, "red")
        box.put("job", [chat("a", HOLDS)], "red")
        box.until("job", lambda job: job.in_flight, "it runs")
        box.cancel("job")
        assert box.ended("job").state == "CANCELLED"
        assert until_up(box, "red") == [worker]
        assert models_started(box) == ["red"]


@side_by_side
def test_number_of_pinned_workers_that_is_none_is_refused_by_the_api(folder: Path) -> None:
    with gpu_box(folder / "own", 1) as box:
        box.configure(models(box))
        box.serve()
        for workers in ("0", "-1", "x", "99999999999999999999"):
            answer = ask(box, "PUT", f"/api/pins/red?workers={workers}")
            assert 400 <= answer.status_code < 500, (workers, answer.text)
        assert ask(box, "PUT", "/api/pins/nosuch?workers=1").status_code == 400
        assert box.ps()["pins"] == []


@side_by_side
def test_unpinned_model_lets_its_workers_go_but_those_that_are_at_work(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(models(box))
        box.serve()
        pin(box, "red", 2)
        until_up(box, "red", 2)
        box.put("job", [chat("a", HOLDS)], "red")
        box.until_state("job", State.RUNNING)
        done = box.freight("models", "unpin", "red")
        assert (done.status, done.stderr) == (0, "red is pinned no more\n")
        wait_until(lambda: len(box.ps()["workers"]) == 1, "the idle one has gone")
        assert box.job("job").state == "RUNNING"
        box.cancel("job")
        wait_until(lambda: not box.ps()["workers"], "and the other after its job")
        assert box.ps()["pins"] == []
        assert models_started(box) == ["red"] * 2


@side_by_side
def test_fewer_pinned_workers_than_before_lets_one_go(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(models(box))
        box.serve()
        pin(box, "red", 2)
        before = until_up(box, "red", 2)
        pin(box, "red", 1)
        wait_until(lambda: len(box.ps()["workers"]) == 1, "one has gone")
        [left] = until_up(box, "red")
        assert left in before


@side_by_side
def test_pin_that_can_never_be_is_refused_with_the_fix(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        endpoint = model_toml("lab", engine="endpoint", source="http://127.0.0.1:9")
        box.configure(models(box) + box.model("huge", gpus=3) + box.model("small", gpus=0) + endpoint)
        box.serve()
        refusals: dict[tuple[str, ...], tuple[str, ...]] = {
            ("pin", "red", "--workers", "3"): ("3 workers of red", "2 do"),
            ("pin", "pair", "--workers", "2"): ("2 workers of pair with 2 GPUs each do not fit; 1 do",),
            ("pin", "small", "--workers", "2"): ("2 workers of small", "1 do"),
            ("pin", "huge"): ("3 GPUs per worker", "has 2"),
            ("pin", "nosuch"): ("there is no model nosuch in the registry",),
            ("pin", str(box.config)): ("in the registry", "freight models add"),
            ("pin", "lab"): ("lab", "runs already"),
            ("pin", "red", "--workers", "0"): ("0",),
            ("unpin", "red"): ("red is not pinned", "pinned: none"),
        }
        for arguments, words in refusals.items():
            done = box.freight("models", *arguments)
            assert done.status == 2, done
            for word in words:
                assert word in done.stderr, done
        assert (box.ps()["pins"], box.ps()["workers"], box.starts()) == ([], [], [])


@side_by_side
def test_pinned_model_that_cannot_start_says_why_and_harms_no_job(folder: Path) -> None:
    with gpu_box(folder / "own", 1) as box:
        box.configure(models(box) + box.model("bad", "--fail-start", gpus=1))
        box.serve()
        pin(box, "bad")
        wait_until(lambda: "no usable device (simulated)" in box.ps()["pins"][0]["reason"], "it says why")
        assert box.ps()["pins"][0]["up"] == 0
        box.put("job", chats("a"), "red")
        assert box.ended("job").state == "COMPLETED"
        wait_until(lambda: models_started(box).count("bad") == 3, "it was tried three times")
        box.put("again", chats("a"), "red")
        assert box.ended("again").state == "COMPLETED"
        assert models_started(box).count("bad") == 3
        assert "no usable device (simulated)" in box.ps()["pins"][0]["reason"]
        box.put("own", chats("a"), "bad")
        assert box.ended("own").state == "FAILED"


@side_by_side
def test_pin_of_a_model_that_is_gone_at_the_next_start_says_so_and_can_be_taken_back(folder: Path) -> None:
    with gpu_box(folder / "own", 1) as box:
        box.configure(models(box))
        box.serve()
        pin(box, "red")
        until_up(box, "red")
        box.stop()
        box.configure(box.model("blue", gpus=1))
        box.serve()
        [shown] = box.ps()["pins"]
        assert (shown["model"], shown["up"]) == ("red", 0)
        assert "red" in shown["reason"]
        box.put("job", chats("a"), "blue")
        assert box.ended("job").state == "COMPLETED"
        assert box.freight("models", "unpin", "red").status == 0
        assert box.ps()["pins"] == []


@side_by_side
def test_alias_pins_the_model_and_unpins_it(folder: Path) -> None:
    with gpu_box(folder / "own", 1) as box:
        box.configure(box.model("red", gpus=1, aliases=["gpt-4o-mini"]))
        box.serve()
        pin(box, "gpt-4o-mini")
        until_up(box, "red")
        assert [shown["model"] for shown in box.ps()["pins"]] == ["red"]
        assert box.freight("models", "unpin", "gpt-4o-mini").status == 0
        wait_until(lambda: not box.ps()["workers"], "it has gone")


def test_pins_need_a_service(tmp_path: Path) -> None:
    box = GpuBox(tmp_path / "box", 1)
    done = box.freight("models", "unpin", "red")
    assert done.status == 5, done


@side_by_side
def test_one_pinned_worker_of_two_cards_is_adopted_and_a_job_that_comes_at_once_joins_it(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(models(box))
        box.serve()
        pin(box, "red")
        [worker] = until_up(box, "red")
        for name in ("first", "second"):
            kill_service(box)
            box.serve()
            box.put(name, chats("a"), "red")
            assert box.ended(name).state == "COMPLETED"
            assert until_up(box, "red") == [worker]
        assert [shown["id"] for shown in box.ps()["workers"]] == [worker]
        assert models_started(box) == ["red"]


@side_by_side
def test_worker_that_is_adopted_while_it_loads_is_not_up_yet_and_its_load_is_told(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(box.model("slow", "--loading", "20", gpus=1))
        box.serve()
        pin(box, "slow")
        box.put("job", chats("a"), "slow")
        wait_until(box.starts, "its server loads")
        kill_service(box)
        box.serve()
        [shown] = box.ps()["pins"]
        assert (shown["workers"], shown["up"]) == (1, 0)
        done = box.ended("job")
        assert done.state == "COMPLETED"
        until_up(box, "slow")
        assert models_started(box) == ["slow"]
        told = [event.detail for event in done.events if event.event == "model loaded"]
        assert len(told) == 1
        assert told[0].startswith("worker 1 in ")


def added(box: GpuBox, name: str, *options: str) -> None:
    """Register a model under the name "red"; its server's starts are noted by another name."""
    note = f'echo "{name} x" >> {box.folder}/starts; exec "$@"'
    command = ["sh", "-c", note, "sh", *engine_command(box.folder, *options)]
    done = box.freight("models", "add", "red", "--engine", "command", "--gpus", "1", "--force", "--", *command)
    assert done.status == 0, done


@side_by_side
def test_job_runs_on_the_model_as_it_is_registered_now_though_the_one_before_is_pinned(folder: Path) -> None:
    with gpu_box(folder / "own", 1) as box:
        box.configure("")
        added(box, "old")
        box.serve()
        pin(box, "red")
        [before] = until_up(box, "red")
        added(box, "new", "--count-prompts")
        box.put("job", chats("a"), "red")
        assert box.ended("job").state == "COMPLETED"
        assert models_started(box) == ["old", "new"]
        [after] = until_up(box, "red")
        assert after != before
        assert box.ps()["pins"] == [{"model": "red", "workers": 1, "up": 1, "reason": ""}]


# Without the superuser's right to look into all folders.
BOUND: Final = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]


def bound(box: GpuBox, *arguments: str) -> Finished:
    """Run a command that may look only into folders whose modes allow it."""
    words = [*(BOUND if os.geteuid() == 0 else []), sys.executable, "-m", "freight", *arguments]
    done = subprocess.run(
        words, cwd=box.folder, env=box.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return Finished(done.returncode, done.stdout, done.stderr)


@side_by_side
def test_model_in_a_folder_that_may_not_be_looked_into_is_refused_and_does_not_keep_the_service_from_starting(
    folder: Path,
) -> None:
    with gpu_box(folder / "own", 1) as box:
        locked = box.folder / "locked"
        (locked / "weights").mkdir(parents=True)
        box.configure(box.model("red", gpus=1, source=str(locked / "weights")) + box.model("blue", gpus=1))
        box.serve()
        pin(box, "red")
        until_up(box, "red")
        box.stop()
        locked.chmod(0)
        try:
            assert bound(box, "serve", "--background").status == 0
            [shown] = box.ps()["pins"]
            assert (shown["up"], "Permission denied" in shown["reason"]) == (0, True)
            path = str(box.write("in.jsonl", chats("a")))
            for arguments in (("batch", "submit", path, "--model", "red"), ("run", path, "-o", "o", "--model", "red")):
                done = bound(box, *arguments)
                assert done.status == 2, done
                assert "the source of model red: Permission denied" in done.stderr
                assert done.last_line().startswith("hint: ")
            assert "Permission denied" in bound(box, "models", "show", "red").stdout
            # Others run.
            box.put("other", chats("a"), "blue")
            assert box.ended("other").state == "COMPLETED"
        finally:
            locked.chmod(0o700)
        box.put("own", chats("a"), "red")
        assert box.ended("own").state == "COMPLETED"
        until_up(box, "red")
