"""Jobs on cards: whole ones, never shared, waited for with the reason, and refused where they can never be had."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from freight.core.device import Holder
from freight.core.job import State
from freight.launchers.locks import lock_device, lock_folder
from tests.contract.scenario import side_by_side
from tests.gpubox import MUCH_MB, GpuBox, gpu_box
from tests.harness import chat, finish, wait_until
from tests.service import HOLDS, chats

LOADS_S: Final = 0.5


def four_models(box: GpuBox) -> str:
    """Return models that take two cards, one, what there is, and none."""
    return box.model("pair", gpus=2) + box.model("single", gpus=1) + box.model("free") + box.model("small", gpus=0)


@side_by_side
def test_each_worker_sees_its_whole_cards_alone_and_no_two_jobs_share_one(folder: Path) -> None:
    with gpu_box(folder / "own", 4) as box:
        box.configure(four_models(box))
        box.serve()
        for name, model in (("a", "pair"), ("b", "single"), ("c", "free")):
            box.put(name, [chat("1", HOLDS)], model)
        for name in "abc":
            box.until_state(name, State.RUNNING)
        given = dict(box.starts())
        assert {model: len(cards) for model, cards in given.items()} == {"pair": 2, "single": 1, "free": 1}
        assert sorted(card for cards in given.values() for card in cards) == sorted(box.uuids)
        assert {device["job"] for device in box.gpus().values() if device["state"] == "leased"} == {"a", "b", "c"}
        # On a machine with cards, what runs on the CPU sees none of them.
        box.put("d", chats("1"), "small")
        assert box.ended("d").state == "COMPLETED"
        assert box.starts()[-1] == ("small", [])
        box.clear()
        wait_until(lambda: {device["state"] for device in box.gpus().values()} == {"free"}, "all is free again")


@side_by_side
def test_job_for_two_cards_waits_for_both_and_is_told_who_has_them(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(four_models(box))
        box.serve()
        box.put("nightly", [chat("1", HOLDS)], "pair")
        box.until_state("nightly", State.RUNNING)
        box.put("next", chats("1"), "pair")
        box.put("third", chats("1"), "single")
        waiting = box.until("next", lambda job: job.reason, "it says why it waits")
        assert (waiting.state, waiting.reason) == ("QUEUED", "it needs 2 GPUs; both GPUs are held by nightly")
        third = box.until("third", lambda job: job.reason, "it says why it waits")
        assert third.reason == "1 job ahead; both GPUs are held by nightly"
        assert "both GPUs are held by nightly" in box.freight("ps").stdout
        box.cancel("nightly")
        assert [box.ended(name).state for name in ("next", "third")] == ["COMPLETED"] * 2


@side_by_side
def test_workers_of_one_job_have_a_card_each(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(four_models(box))
        box.serve()
        box.put("both", [chat(f"{number}", HOLDS) for number in range(2)], "single", workers=2)
        box.until("both", lambda job: len(job.workers) == 2, "it has two workers")
        wait_until(lambda: len(box.starts()) == 2, "both servers were started")
        assert sorted(cards[0] for _, cards in box.starts()) == sorted(box.uuids)
        box.clear()


@side_by_side
def test_gpus_of_the_command_line_beat_the_models_own(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(four_models(box))
        box.serve()
        box.write("in.jsonl", chats("1"))
        for name, gpus in (("two", "2"), ("none", "0")):
            options = ("--model", "single", "--name", name, "--gpus", gpus, "--wait")
            assert box.batch("submit", "in.jsonl", *options).status == 0
        assert [(model, len(cards)) for model, cards in box.starts()] == [("single", 2), ("single", 0)]


@side_by_side
def test_more_cards_than_there_are_is_refused_by_submit_and_by_run(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(four_models(box) + box.model("huge", gpus=8))
        box.serve()
        box.write("in.jsonl", chats("1"))
        asks = {("--model", "single", "--gpus", "3"): "3 GPUs per worker", ("--model", "huge"): "8 GPUs per worker"}
        for ask, words in asks.items():
            for command in (("batch", "submit", "in.jsonl"), ("run", "in.jsonl", "-o", "out.jsonl")):
                done = box.freight(*command, *ask)
                assert done.status == 2, done
                assert words in done.stderr
                assert "the largest machine here has 2" in done.stderr
                assert "hint: use --gpus 2" in done.stderr
        assert (box.names(), box.starts()) == ([], [])


@side_by_side
def test_run_takes_whole_cards_too_and_waits_for_those_of_the_service(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(four_models(box))
        box.write("in.jsonl", chats("1"))
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", "single", "--gpus", "2").status == 0
        assert sorted(box.starts()[0][1]) == sorted(box.uuids)
        box.serve()
        box.put("holder", [chat("1", HOLDS)], "pair")
        box.until_state("holder", State.RUNNING)
        child = box.start("run", "in.jsonl", "-o", "again.jsonl", "--model", "pair")
        assert child.stderr is not None
        named = next(line for line in child.stderr if "held by process" in line)
        assert "(user " in named
        assert len(box.starts()) == 2
        box.cancel("holder")
        assert finish(child).status == 0
        assert len(box.results("again.jsonl")) == 1


@side_by_side
def test_visible_devices_limit_the_service(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.config.write_text(f'{four_models(box)}\n[pools.local]\ndevices = "auto"\n')
        visible = box.uuids[1]
        box.serve(CUDA_VISIBLE_DEVICES=visible)
        assert [device for device in box.gpus() if device.startswith("GPU-")] == [visible]
        box.put("one", chats("1"), "single")
        assert box.ended("one").state == "COMPLETED"
        assert box.starts() == [("single", [visible])]
        box.write("in.jsonl", chats("1"))
        done = box.batch("submit", "in.jsonl", "--model", "pair")
        assert done.status == 2
        assert "the largest machine here has 1" in done.stderr


@side_by_side
def test_card_on_which_a_stranger_computes_is_left_alone_and_he_is_named(folder: Path) -> None:
    with (
        gpu_box(folder / "own") as box,
        subprocess.Popen([sys.executable, "-c", "input()", "train.py"], stdin=subprocess.PIPE) as child,
    ):
        box.configure(four_models(box))
        box.cards.change(box.uuids[0], processes={child.pid: MUCH_MB})
        box.serve()
        box.put("one", [chat("1", HOLDS)], "single")
        box.until_state("one", State.RUNNING)
        assert box.starts() == [("single", [box.uuids[1]])]
        box.put("two", chats("1"), "single")
        waiting = box.until("two", lambda job: "train.py" in job.reason, "it names him")
        assert waiting.state == "QUEUED"
        assert f"process {child.pid} (user " in waiting.reason
        assert "one" in waiting.reason
        # What needs no card does not wait for one.
        box.put("beside", chats("1"), "small")
        assert box.ended("beside").state == "COMPLETED"
        assert child.poll() is None
        child.kill()
        child.wait()
        assert box.ended("two").state == "COMPLETED"
        box.clear()


@side_by_side
def test_stranger_that_hardly_uses_a_card_keeps_nobody_off_it(folder: Path) -> None:
    with gpu_box(folder / "own", 1) as box:
        box.configure(four_models(box))
        # A desktop's own programs are on its card, too.
        box.cards.change(box.uuids[0], processes={os.getpid(): 300})
        box.serve()
        box.put("one", chats("1"), "single")
        assert box.ended("one").state == "COMPLETED"


@side_by_side
def test_two_data_folders_never_share_a_card(folder: Path) -> None:
    with gpu_box(folder / "one") as one, gpu_box(folder / "two") as two:
        two.cards, two.uuids = one.cards, one.uuids
        for box in (one, two):
            box.configure(four_models(box))
            box.serve()
        one.put("first", [chat("1", HOLDS)], "single")
        one.until_state("first", State.RUNNING)
        two.put("second", [chat("1", HOLDS)], "single")
        two.until_state("second", State.RUNNING)
        [[_, [left]], [_, [right]]] = one.starts() + two.starts()
        assert {left, right} == set(one.uuids)
        two.put("waiter", chats("1"), "single")
        waiting = two.until("waiter", lambda job: "process" in job.reason, "it names the other service")
        assert "(user " in waiting.reason
        assert "serve" in waiting.reason
        two.put("large", chats("1"), "pair")
        assert two.gpus()[left]["state"] == "held"
        one.clear()
        assert two.ended("waiter").state == "COMPLETED"
        assert two.job("large").state == "QUEUED"
        two.cancel("second")
        assert two.ended("large").state == "COMPLETED"


@side_by_side
def test_job_whose_cards_are_fewer_at_the_next_start_waits_and_says_so(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(four_models(box))
        box.serve()
        box.put("holder", [chat("1", HOLDS)], "single")
        box.until_state("holder", State.RUNNING)
        box.put("large", chats("1"), "pair")
        box.until("large", lambda job: job.reason, "it says why it waits")
        box.stop()
        box.config.write_text(f'{four_models(box)}\n[pools.local]\ndevices = ["{box.uuids[0]}", "{box.device}"]\n')
        box.serve()
        waiting = box.until("large", lambda job: "1" in job.reason, "it says what there is")
        assert (waiting.state, "2 GPUs" in waiting.reason) == ("QUEUED", True)
        box.until_state("holder", State.RUNNING)
        box.stop()
        box.configure(four_models(box))
        box.serve()
        box.cancel("holder")
        assert box.ended("large").state == "COMPLETED"


@side_by_side
def test_timeline_tells_of_each_load_with_the_workers_number(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(box.model("slow", "--loading", f"{LOADS_S}", gpus=1))
        box.serve()
        box.put("job", chats(*(["STUB:sleep=1"] * 6)), "slow", workers=2, concurrency=1)
        assert box.ended("job").state == "COMPLETED"
        events = json.loads(box.batch("status", "job", "--json").stdout)["events"]
        loading = [event["detail"] for event in events if event["event"] == "model loading"]
        # Servers that are started together may note that in any order.
        assert [detail.split(" on ")[0] for detail in loading] == ["worker 1", "worker 2"]
        assert {detail.split(" on ")[1] for detail in loading} == {" ".join(cards) for _, cards in box.starts()}
        loaded = [event["detail"] for event in events if event["event"] == "model loaded"]
        assert [detail.split(" in ")[0] for detail in sorted(loaded)] == ["worker 1", "worker 2"]
        assert all(float(detail.split()[3]) >= LOADS_S for detail in loaded)
        states = [event["state"] for event in events]
        assert states[-1] == "COMPLETED"
        assert set(states) <= set(State)


@pytest.mark.parametrize("gpus", ["-1", "x", "1.5"])
def test_number_of_cards_that_is_none_is_refused(folder_box: GpuBox, gpus: str) -> None:
    folder_box.write("in.jsonl", chats("1"))
    done = folder_box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", "single", "--gpus", gpus)
    assert done.status == 2, done


@pytest.fixture
def folder_box(tmp_path: Path) -> GpuBox:
    box = GpuBox(tmp_path / "box", 1)
    box.configure(four_models(box))
    return box


@contextmanager
def training(box: GpuBox, uuid: str) -> Generator["subprocess.Popen[bytes]"]:
    """Run a process of a stranger that computes on a card."""
    with subprocess.Popen([sys.executable, "-c", "input()", "train.py"], stdin=subprocess.PIPE) as child:
        box.cards.change(uuid, processes={child.pid: MUCH_MB})
        try:
            yield child
        finally:
            child.kill()


@side_by_side
def test_stranger_on_a_card_that_was_never_tried_is_named_and_no_warm_model_goes_for_nothing(folder: Path) -> None:
    with gpu_box(folder / "own") as box:
        box.configure(four_models(box), 'keep_warm = "10m"')
        box.serve()
        box.put("first", chats("1"), "single")
        assert box.ended("first").state == "COMPLETED"
        [[_, [warm]]] = box.starts()
        [before] = box.ps()["workers"]
        [other] = set(box.uuids) - {warm}
        with training(box, other) as child:
            box.put("large", chats("1"), "pair")
            waiting = box.until("large", lambda job: "train.py" in job.reason, "it names him")
            assert waiting.state == "QUEUED"
            assert f"process {child.pid} (user " in waiting.reason
            assert "the warm model single" in waiting.reason
            [after] = box.ps()["workers"]
            assert (after["id"], after["phase"]) == (before["id"], "idle")
            # It serves who can use it.
            box.put("second", chats("1"), "single")
            assert box.ended("second").state == "COMPLETED"
            assert len(box.starts()) == 1
        assert box.ended("large").state == "COMPLETED"
        assert [model for model, _ in box.starts()] == ["single", "pair"]


@side_by_side
def test_holder_of_a_card_is_shown_once_with_and_without_a_service(folder: Path) -> None:
    with gpu_box(folder / "own") as box, training(box, box.uuids[0]) as child:
        box.configure(four_models(box))
        held = lock_device(box.uuids[1], lock_folder())
        assert not isinstance(held, Holder)
        try:
            for served in (False, True):
                if served:
                    box.serve()
                lines = box.freight("gpus", COLUMNS="400").stdout.splitlines()
                for uuid, pid in zip(box.uuids, (child.pid, os.getpid()), strict=True):
                    [line] = [line for line in lines if uuid in line]
                    assert line.count(f"process {pid}") == 1, line
                    assert f"held by process {pid} (user " in line
                    assert line.count("(user ") == 1, line
        finally:
            os.close(held)
