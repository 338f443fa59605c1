"""Models that stay up between jobs, several that load at once, and what a job's timeline says of both."""

import json
from collections import Counter
from datetime import datetime
from pathlib import Path

from bench.simengine.record import read_record
from freight.core.view import JobStatus
from tests.contract.scenario import side_by_side
from tests.harness import Box, chat, engine_command, model_toml
from tests.service import HOLDS, ServiceBox, chats, service_box

LOADING, LOADED = "model loading", "model loaded"


def noted(folder: Path, name: str, *options: str) -> str:
    """Return the entry of a model whose starts are noted by name, and whose servers record apart from each other."""
    folder.mkdir(parents=True, exist_ok=True)
    script = f'echo {name} >> "$0/starts"; exec "$@" --record "$0/record.$$"'
    engine = engine_command(folder, *options)
    at = engine.index("--record")
    command = ["sh", "-c", script, str(folder), *engine[:at], *engine[at + 2 :]]
    # Something on a file system, as a model has: loads from one are limited.
    return model_toml(name, engine="command", command=command, source=str(folder))


def starts(folder: Path) -> list[str]:
    """Return which models' servers were started, in order."""
    return (folder / "starts").read_text().split()


def shared_out(folder: Path) -> list[int]:
    """Return how many records each server was sent that was sent any."""
    counts = [len(read_record(file)) for file in folder.glob("record.*")]
    return sorted(count for count in counts if count)


def timeline(job: JobStatus) -> list[tuple[str, str]]:
    """Return what a job's timeline says of its models' loads: the event, and which worker it was."""
    return [
        (entry.event, " ".join(entry.detail.split()[:2])) for entry in job.events if entry.event in (LOADING, LOADED)
    ]


def two_devices(box: ServiceBox, toml: str, pool: str = "") -> None:
    """Configure a box with two devices."""
    devices = json.dumps([f"{box.device}0", f"{box.device}1"])
    box.config.write_text(f"{toml}\n[pools.local]\ndevices = {devices}\n{pool}\n")


def serve(box: ServiceBox) -> None:
    """Start the box's service."""
    assert box.freight("serve", "--background").status == 0


@side_by_side
def test_both_loads_of_two_workers_are_in_the_timeline_and_both_answer(folder: Path) -> None:
    with service_box(folder / "own") as box:
        two_devices(box, noted(folder, "red", "--loading", "1", "--latency", "0.5"))
        serve(box)
        box.put("one", chats(*(f"text {n}" for n in range(24))), "red", workers=2, concurrency=2)
        assert box.ended("one").state == "COMPLETED"
        shown = json.loads(box.batch("status", "one", "--json").stdout)
        loads = [entry for entry in shown["events"] if entry["event"] in (LOADING, LOADED)]
        told = Counter((entry["event"], " ".join(entry["detail"].split()[:2])) for entry in loads)
        assert told == Counter([(event, f"worker {n}") for event in (LOADING, LOADED) for n in (1, 2)])
        # Neither waited for the other.
        assert [entry["event"] for entry in loads] == [LOADING, LOADING, LOADED, LOADED]
        counts = shared_out(folder)
        assert len(counts) == 2
        assert sum(counts) == 24
        assert min(counts) > 1
        table = box.batch("status", "one").stdout
        assert "model loaded" in table


@side_by_side
def test_with_max_loads_of_one_models_of_one_file_system_load_one_after_the_other(folder: Path) -> None:
    with service_box(folder / "own") as box:
        two_devices(box, noted(folder, "red", "--loading", "1"), "max_loads = 1")
        serve(box)
        box.put("one", chats("a", HOLDS, HOLDS), "red", workers=2, concurrency=1)
        job = box.until("one", lambda job: len(timeline(job)) == 4, "both have loaded")
        assert timeline(job) == [
            (LOADING, "worker 1"), (LOADED, "worker 1"), (LOADING, "worker 2"), (LOADED, "worker 2"),
        ]  # fmt: skip
        times = [datetime.fromisoformat(entry.at) for entry in job.events if entry.event in (LOADING, LOADED)]
        assert times == sorted(times)
        # The first does not wait with its work for the second to load.
        assert job.done == 1
        box.cancel("one")
        assert box.ended("one").state == "CANCELLED"


@side_by_side
def test_job_that_waits_for_another_load_says_so(folder: Path) -> None:
    with service_box(folder / "own") as box:
        two_devices(box, noted(folder, "red", "--loading", "600") + noted(folder, "blue"), "max_loads = 1")
        serve(box)
        box.put("slow", chats("a"), "red")
        box.until("slow", lambda job: job.state == "STARTING", "it loads")
        box.put("quick", chats("a"), "blue")
        waiting = box.until("quick", lambda job: job.reason, "it says what it waits for")
        assert waiting.reason == "another model is being loaded from the same file system"
        box.cancel("slow")
        assert box.ended("quick").state == "COMPLETED"


@side_by_side
def test_next_job_of_a_warm_model_loads_nothing_and_another_models_job_evicts_it(folder: Path) -> None:
    with service_box(folder / "own", noted(folder, "red") + noted(folder, "blue"), 'keep_warm = "1h"') as box:
        serve(box)
        for name in ("one", "two"):
            box.put(name, chats(name), "red")
            assert box.ended(name).state == "COMPLETED"
        assert starts(folder) == ["red"]
        assert timeline(box.job("one")) == [(LOADING, "worker 1"), (LOADED, "worker 1")]
        assert timeline(box.job("two")) == []
        box.put("three", chats("a"), "blue")
        assert box.ended("three").state == "COMPLETED"
        assert starts(folder) == ["red", "blue"]


@side_by_side
def test_workers_of_a_cancelled_job_stay_warm_and_only_one_goes_for_another_model(folder: Path) -> None:
    with service_box(folder / "own") as box:
        two_devices(box, noted(folder, "red") + noted(folder, "blue"), 'keep_warm = "1h"')
        serve(box)
        box.put("one", chats(*[HOLDS] * 8), "red", workers=2, concurrency=1)
        box.until("one", lambda job: job.in_flight == 2, "both are at work")
        box.cancel("one")
        assert box.ended("one").state == "CANCELLED"
        box.put("two", chats(*[HOLDS] * 8), "red", workers=2, concurrency=1)
        box.until("two", lambda job: job.in_flight == 2, "both are at work again")
        assert starts(folder) == ["red", "red"]
        assert timeline(box.job("two")) == []
        box.cancel("two")
        box.put("three", chats("a"), "blue")
        assert box.ended("three").state == "COMPLETED"
        models = sorted(worker["model"] for worker in json.loads(box.freight("ps", "--json").stdout)["workers"])
        assert models == ["blue", "red"]


def test_keep_warm_above_its_maximum_is_refused_with_the_fix(box: Box) -> None:
    box.write("in.jsonl", [chat("a", "text")])
    box.config.write_text('[pools.local]\nkeep_warm = "25h"\n')
    for command in (("config", "show"), ("serve", "--background"), ("run", "in.jsonl", "-o", "out.jsonl")):
        done = box.freight(*command)
        assert done.status == 2, done
        assert f"{box.config}: pools.local.keep_warm is longer than pools.local.max_warm, 24 h" in done.stderr
        assert "hint: shorten it, raise max_warm, or keep a model up for good: freight models pin NAME" in done.stderr
    box.config.write_text('[pools.local]\nkeep_warm = "25h"\nmax_warm = "2d"\n')
    assert box.freight("config", "show").status == 0
