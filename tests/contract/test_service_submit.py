"""`freight batch submit`: names, models, keys, streams, what it refuses and what it prints."""

import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Final

import pytest

from freight.client.sync import Client
from freight.core.job import State
from freight.core.view import FailureKind, JobEvent, JobRequest, JobStatus, JobSummary, Submitted, WorkerStatus
from freight.store.registry import built_in_models
from tests.harness import Finished, Json, chat
from tests.service import HOLDS, Endpoint, ServiceBox, chats


def refused(done: Finished, says: str) -> None:
    """Assert that a command was refused as users see it."""
    assert (done.status, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.last_line().startswith("hint: ")


def keys(kind: type) -> set[str]:
    """Return the names of a dataclass's fields."""
    return {each.name for each in fields(kind)}


def test_json_has_exactly_the_documented_keys(service: ServiceBox, end: Endpoint) -> None:
    service.write("in.jsonl", chats("refuse always", "hold"))
    done = service.batch("submit", "in.jsonl", "--model", end.url, "--name", "shaped", "--json")
    made = json.loads(done.stdout)
    assert set(made) == keys(Submitted)
    assert (set(made["job"]), made["is_new"], made["job"]["name"]) == (keys(JobStatus), True, "shaped")
    service.until("shaped", lambda job: job.failures and job.workers, "it has a worker and a failure")
    status = json.loads(service.batch("status", "shaped", "--json").stdout)
    assert set(status) == keys(JobStatus)
    for name, kind in (("failures", FailureKind), ("workers", WorkerStatus), ("events", JobEvent)):
        assert status[name]
        assert all(set(each) == keys(kind) for each in status[name])
    [listed] = json.loads(service.batch("list", "--json").stdout)
    assert set(listed) == keys(JobSummary)
    shown = json.loads(service.freight("ps", "--json").stdout)
    assert set(shown) == {"jobs", "workers", "pins"}
    assert [set(job) for job in shown["jobs"]] == [keys(JobSummary)]
    assert [set(worker) for worker in shown["workers"]] == [keys(WorkerStatus)]
    assert {listed["id"], shown["jobs"][0]["id"]} == {status["id"]}


def test_quiet_prints_the_name_alone(service: ServiceBox, end: Endpoint) -> None:
    service.write("in.jsonl", [chat("a", max_tokens=5)])
    done = service.batch("submit", "in.jsonl", "--model", end.url, "--name", "hush", "-q")
    assert (done.status, done.stdout, done.stderr) == (0, "hush\n", "")
    refused(service.batch("submit", "in.jsonl", "--model", end.url, "-q", "--json"), "do not go together")


def test_job_without_a_name_gets_a_readable_one(service: ServiceBox, end: Endpoint) -> None:
    service.write("in.jsonl", chats("a"))
    names = [service.batch("submit", "in.jsonl", "--model", end.url, "-q").stdout.strip() for _ in range(2)]
    assert names[0] != names[1]
    assert all(re.fullmatch(r"[a-z]+-[a-z]+-[a-z0-9]+", name) for name in names)
    assert service.batch("wait", names[0]).status == 0


@pytest.mark.parametrize("name", ["", "-a", "a/b", "ä", "a" * 65])
def test_name_that_breaks_the_rule_is_refused(name: str, service: ServiceBox) -> None:
    service.write("in.jsonl", chats("a"))
    refused(service.batch("submit", "in.jsonl", "--model", "sim", f"--name={name}"), "name")
    assert service.names() == []


def test_name_is_taken_until_its_job_is_deleted(service: ServiceBox, end: Endpoint) -> None:
    longest = "A0_." + "z-" * 30
    service.write("in.jsonl", chats("a"))
    arguments = ("submit", "in.jsonl", "--model", end.url, "--name", longest)
    assert service.batch(*arguments).stdout == f"{longest}\n"
    service.ended(longest)
    taken = service.batch(*arguments)
    refused(taken, f"there is a job named {longest} already")
    assert f"freight batch delete {longest}" in taken.last_line()
    assert service.batch("delete", longest, "-y").status == 0
    assert service.batch(*arguments).status == 0


def test_jobs_are_found_by_name_then_id_then_prefix(service: ServiceBox, end: Endpoint) -> None:
    one = service.put("one", chats("a"), end.url)
    # A job may be named as another one's id begins; the name goes first.
    two = service.put(one.id[:8], chats("a"), end.url)
    service.ended("one")
    service.ended(two.id)

    def found(name: str) -> str:
        done = service.batch("status", name, "--json")
        assert done.status == 0, done.stderr
        return json.loads(done.stdout)["id"]

    assert found("one") == found(one.id) == found(one.id[:9]) == one.id
    assert found(one.id[:8]) == two.id


def test_prefix_that_several_ids_have_is_refused_and_none_is_not_found(service: ServiceBox, end: Endpoint) -> None:
    seen: dict[str, str] = {}
    shared = ""
    with Client(service.server) as client:
        # Of seventeen ids two begin with the same digit at the latest.
        while not shared:
            upload = client.upload(b'{"custom_id":"a"}\n')
            job = client.create(JobRequest(upload=upload.id, model=end.url)).job
            shared = job.id[0] if job.id[0] in seen else ""
            seen.setdefault(job.id[0], job.id)
    many = service.batch("status", shared)
    refused(many, f"several jobs have an id that begins with {shared}")
    unknown = next(digit for digit in "ghijk" if digit not in seen)
    for name in (unknown, "no-such-job", "00000000-0000-0000-0000-000000000000", "../up", ""):
        assert service.batch("status", name).status == 3


def test_strict_lists_every_bad_line_and_leaves_no_job(service: ServiceBox, end: Endpoint) -> None:
    bad = [b"{}", chat("0"), b"[1]", chat("s", stream=True)]
    service.write("in.jsonl", [*chats(*("a",) * 20), *bad, chat("last")])
    done = service.batch("submit", "in.jsonl", "--model", end.url, "--strict")
    refused(done, "in.jsonl, line 21: missing_custom_id: ")
    listed = re.findall(r"in\.jsonl, line (\d+): (\w+): ", done.stderr)
    assert listed == [
        ("21", "missing_custom_id"), ("22", "duplicate_custom_id"), ("23", "invalid_json"),
        ("24", "streaming_unsupported"),
    ]  # fmt: skip
    assert service.names() == []
    assert list((service.data / "batch").iterdir()) == list((service.data / "uploads").iterdir()) == []
    # Without it the job is made, and these lines are its results.
    service.batch("submit", "in.jsonl", "--model", end.url, "--name", "lenient")
    assert service.ended("lenient").failed == 4


def test_same_key_and_body_is_the_same_job_and_another_body_is_refused(service: ServiceBox, end: Endpoint) -> None:
    service.write("in.jsonl", chats("a"))
    service.write("other.jsonl", chats("b"))
    keyed = ("--model", end.url, "--idempotency-key", "K-1")
    first = service.batch("submit", "in.jsonl", *keyed, "-q")
    again = service.batch("submit", "in.jsonl", *keyed)
    assert (again.status, again.stdout) == (0, first.stdout)
    assert "made before, with the same idempotency key" in again.stderr
    assert json.loads(service.batch("submit", "in.jsonl", *keyed, "--json").stdout)["is_new"] is False
    for other in (("other.jsonl", *keyed), ("in.jsonl", *keyed, "--priority", "1"), ("in.jsonl", *keyed, "--strict")):
        refused(service.batch("submit", *other), "K-1")
    assert len(service.names()) == 1
    assert list((service.data / "uploads").iterdir()) == []
    service.ended(first.stdout.strip())
    assert end.seen["a"] == 1
    refused(service.batch("submit", "in.jsonl", "--model", end.url, "--idempotency-key", "a b"), "cannot be sent")


def test_same_key_at_the_same_time_makes_one_job(service: ServiceBox, end: Endpoint) -> None:
    path = service.write("in.jsonl", chats(*map(str, range(200))))

    def submit(_: int) -> tuple[str, bool]:
        with Client(service.server) as client:
            made = client.submit(path, model=end.url, idempotency_key="race")
            return made.job.id, made.is_new

    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(submit, range(6)))
    assert len({job for job, _ in made}) == 1
    assert sorted(is_new for _, is_new in made) == [False] * 5 + [True]
    assert list((service.data / "uploads").iterdir()) == []


def test_standard_input_and_pipes_are_read_to_their_end(service: ServiceBox, end: Endpoint) -> None:
    text = "".join(json.dumps(record) + "\n" for record in chats(*map(str, range(25))))
    done = service.batch("submit", "-", "--model", end.url, "--name", "piped", stdin=text)
    assert (done.status, done.stdout) == (0, "piped\n")
    assert "25 records" in done.stderr
    fifo = service.folder / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_text, args=(text,))
    writer.start()
    done = service.batch("submit", "fifo", "--model", end.url, "--name", "fed")
    writer.join()
    assert (done.status, service.job("fed").records) == (0, 25)
    for name in ("piped", "fed"):
        assert (service.ended(name).failed, len(service.lines(name))) == (0, 25)
    refused(service.batch("submit", "-", "--model", end.url, stdin="[1]\n"), "looks like a JSON array")
    refused(service.batch("submit", "-", "--model", end.url, stdin=""), "standard input")


def test_input_is_the_services_own_once_it_is_submitted(service: ServiceBox, end: Endpoint) -> None:
    service.put("held", chats("hold", "b"), end.url, concurrency=1)
    service.until("held", lambda job: job.in_flight, "it runs")
    (service.folder / "held.jsonl").unlink()
    end.let_go.set()
    assert service.ended("held").done == 2


def test_model_mismatch_of_the_whole_sample_is_refused_with_the_fix(service: ServiceBox) -> None:
    service.write("in.jsonl", [chat("a", model="gpt-5"), chat("b", model="gpt-5")])
    done = service.batch("submit", "in.jsonl", "--model", "sim")
    refused(done, "gpt-5")
    assert "--ignore-record-model" in done.last_line()
    assert "alias" in done.last_line()
    assert service.names() == []
    # One that fits is enough; the other is that record's result.
    service.write("in.jsonl", [chat("a", model="gpt-5"), chat("b", model="gpt-4o-mini")])
    assert service.batch("submit", "in.jsonl", "--model", "sim", "--name", "mixed").status == 0
    assert [kind.code for kind in service.ended("mixed").failures] == ["model_mismatch"]
    assert service.batch("submit", "in.jsonl", "--model", "sim", "--ignore-record-model", "--name", "any").status == 0
    assert service.ended("any").failed == 0


def test_record_may_name_the_model_as_it_was_typed(service: ServiceBox) -> None:
    source = str(built_in_models()["smollm2-135m"].source)
    (service.folder / "models").mkdir()
    (service.folder / "models" / "tiny.gguf").symlink_to(source)
    typed = "models/tiny.gguf"
    models = {"a": typed, "b": "tiny", "c": "another"}
    service.write("in.jsonl", [chat(name, "hi", model=model, max_tokens=2) for name, model in models.items()])
    done = service.batch("submit", "in.jsonl", "--model", typed, "--name", "relative")
    assert done.status == 0, done.stderr
    ended = service.ended("relative")
    assert (ended.state, ended.done, ended.failed) == ("COMPLETED", 3, 1)
    assert [kind.code for kind in ended.failures] == ["model_mismatch"]


def test_model_is_chosen_by_the_first_record_and_said_in_one_line(service: ServiceBox) -> None:
    service.write("in.jsonl", [chat("a", model="gpt-4o-mini")])
    done = service.batch("submit", "in.jsonl", "--name", "chosen")
    assert (done.status, done.stdout) == (0, "chosen\n")
    assert done.stderr.count("using gpt-4o-mini, which the first record names") == 1
    assert service.ended("chosen").model == "sim"


REFUSED: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "gpus": (("--gpus", "1"), "CPU devices only"),
    "pool": (("--pool", "sophia"), "there is no pool sophia"),
    "unknown model": (("--model", "nope"), "there is no model nope"),
    "no workers": (("--workers", "0"), "--workers"),
    "too much priority": (("--priority", "1001"), "priority"),
    "bad duration": (("--timeout", "soon"), "--timeout"),
    "no output folder": (("--output", "nowhere"), "does not exist"),
    "a file as output folder": (("--output", "in.jsonl"), "in.jsonl"),
    "fail without wait": (("--fail-on-errors",), "--wait"),
    "two inputs": (("other.jsonl",), "other.jsonl"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_leaves_nothing(name: str, service: ServiceBox) -> None:
    options, says = REFUSED[name]
    service.write("in.jsonl", chats("a"))
    done = service.batch("submit", "in.jsonl", *(() if "--model" in options else ("--model", "sim")), *options)
    refused(done, says)
    assert service.names() == []
    assert list((service.data / "batch").iterdir()) == list((service.data / "uploads").iterdir()) == []


def test_output_folder_gets_the_results_file_when_the_job_ends(service: ServiceBox, end: Endpoint) -> None:
    folder = service.folder / "wanted"
    folder.mkdir()
    service.write("in.jsonl", chats("a", "hold"))
    arguments = ("submit", "in.jsonl", "--model", end.url, "--output", "wanted", "--name", "out")
    assert service.batch(*arguments).status == 0
    service.until("out", lambda job: job.done == 1, "one is done")
    assert list(folder.iterdir()) == []
    end.let_go.set()
    ended = service.ended("out")
    written = folder / "out-results.jsonl"
    assert (ended.state, ended.output) == ("COMPLETED", str(written))
    assert written.read_bytes() == b"".join(line + b"\n" for line in service.lines("out"))
    # A file written out is never deleted, and never replaced.
    assert service.batch("delete", "out", "-y").status == 0
    assert written.exists()
    refused(service.batch(*arguments), str(written))


def test_wait_option_waits_and_exits_as_wait_does(service: ServiceBox, end: Endpoint) -> None:
    service.write("in.jsonl", chats("a", "refuse always"))
    arguments = ("submit", "in.jsonl", "--model", end.url, "--wait")
    done = service.batch(*arguments, "--name", "waited")
    assert (done.status, done.stdout) == (0, "waited\n")
    assert done.last_line().startswith("1 of 2 failed: InferenceFailed (400)")
    assert service.batch(*arguments, "--fail-on-errors").status == 6


def names_of(rows: list[Json]) -> list[str]:
    """Return the names of jobs."""
    return [row["name"] for row in rows]


def test_list_knows_its_states_and_refuses_others(service: ServiceBox, end: Endpoint) -> None:
    service.put("over", chats("a"), end.url)
    service.ended("over")
    service.put("held", [chat("a", HOLDS)], "sim")
    service.until_state("held", State.RUNNING)
    for state, names in (("active", ["held"]), ("COMPLETED", ["over"]), ("running", ["held"]), ("FAILED", [])):
        done = service.batch("list", "--status", state, "--json")
        assert (done.status, names_of(json.loads(done.stdout))) == (0, names)
    empty = service.batch("list", "--status", "FAILED")
    assert (empty.status, empty.stdout, empty.stderr) == (0, "", "no jobs in state FAILED\n")
    refused(service.batch("list", "--status", "sleeping"), "SUSPENDED")


def test_server_is_named_by_option_or_variable(service: ServiceBox, tmp_path: Path, end: Endpoint) -> None:
    service.put("here", chats("a"), end.url)
    service.ended("here")
    elsewhere = {"FREIGHT_DATA": str(tmp_path / "elsewhere")}
    assert service.batch("list", "-q", FREIGHT_SERVER=service.server, **elsewhere).stdout == "here\n"
    assert service.batch("list", "-q", "--server", service.server, **elsewhere).stdout == "here\n"
    gone = service.batch("list", FREIGHT_SERVER="unix:///nowhere/api.sock", **elsewhere)
    assert (gone.status, "/nowhere/api.sock" in gone.stderr) == (5, True)
    # The user named one: no other is started in its place.
    assert not (tmp_path / "elsewhere").exists()
    for server in ("nonsense", "unix://relative", "ftp://host"):
        refused(service.batch("list", FREIGHT_SERVER=server), server)
