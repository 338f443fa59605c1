"""Cases of submitting: names of jobs, the same request twice, settings and their effect."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest

from freight.client.sync import Client
from freight.core.view import JobRequest
from freight.errors import Conflict, UserError
from tests.contract.served import ask, lines_of
from tests.contract.test_case_service_paths import good, refused
from tests.harness import CASES, chat, code, engine, model_toml
from tests.service import Endpoint, ServiceBox, endpoint

GOOD: Final = CASES / "inputs" / "00_good3.jsonl"
BAD_NAMES: Final = ("a/b", "my job", "../x", "-n", "x" * 300, "état", "", ".", "a\n", "a\0b")


def body(client: Client, end: Endpoint, **options: Any) -> dict[str, Any]:
    """Return the body of a request for a job, with an upload of the good file of its own."""
    request = JobRequest(upload=client.upload(GOOD.read_bytes()).id, model=end.url, **options)
    return asdict(request)


@pytest.mark.parametrize("number", [pytest.param(77, id="case-77")])
def test_name_that_breaks_the_rule_makes_no_job_and_no_file(
    number: int, service: ServiceBox, end: Endpoint, tmp_path: Path
) -> None:
    around = sorted(service.folder.parent.iterdir()), sorted(service.folder.iterdir())
    for name in BAD_NAMES[:6]:
        for given in (("--name", name), (f"--name={name}",))[: 2 if name == "-n" else 1]:
            done = service.batch("submit", str(GOOD), "--model", end.url, *given, cwd=tmp_path)
            refused(done, "cannot name a job", "64 at most")
    with Client(service.server) as client:
        for name in BAD_NAMES:
            answer = ask(service, "POST", "/api/jobs", json=body(client, end, name=name))
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, UserError.code)
            assert "64" in answer.json()["error"]["hint"]
    assert service.names() == []
    assert not list((service.data / "batch").iterdir())
    assert (sorted(service.folder.parent.iterdir()), sorted(service.folder.iterdir())) == around
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [pytest.param(77, id="case-77")])
@pytest.mark.parametrize("name", ["x" * 64, "00000000-0000-0000-0000-00000000.b_c"])
def test_name_that_keeps_the_rule_works_everywhere(
    number: int, name: str, service: ServiceBox, end: Endpoint, tmp_path: Path
) -> None:
    assert service.batch("submit", str(GOOD), "--model", end.url, "--name", name).stdout == f"{name}\n"
    assert service.batch("wait", name).status == 0
    assert json.loads(service.batch("status", name, "--json").stdout)["name"] == name
    assert service.batch("list", "-q").stdout == f"{name}\n"
    assert service.batch("results", name, cwd=tmp_path).status == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}-results.jsonl"]
    assert service.batch("delete", name, "-y").status == 0
    assert service.names() == []


@pytest.mark.parametrize("number", [pytest.param(77, id="case-77")])
def test_later_commands_look_nowhere_else_for_a_bad_name(number: int, service: ServiceBox, tmp_path: Path) -> None:
    for name in ("../x", "état"):
        assert service.batch("results", name, cwd=tmp_path).status == 3
    assert not list(tmp_path.iterdir())
    for path in ("..%2Fx", "a%2Fb", "%2E%2E%2Fversion", "%C3%A9tat", "-n", "x" * 300, "a%00b"):
        for verb, method in (("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/results", "GET")):
            answer = ask(service, method, f"/api/jobs/{path}{verb}")
            assert answer.status_code in (404, 405), (method, path, verb)


@pytest.mark.parametrize("number", [pytest.param(78, id="case-78")])
def test_name_is_not_taken_from_a_job(number: int, service: ServiceBox, end: Endpoint) -> None:
    service.write("in.jsonl", [chat("a", "a"), chat("b", "hold")])
    submit = ("--model", end.url, "--name", "nightly")
    assert service.batch("submit", "in.jsonl", *submit).status == 0
    service.until("nightly", lambda job: job.in_flight, "it runs")
    first = service.job("nightly").id
    refused(service.batch("submit", str(GOOD), *submit), "nightly", "freight batch delete nightly")
    end.let_go.set()
    before = service.ended("nightly"), service.lines("nightly")
    refused(service.batch("submit", str(GOOD), *submit), "nightly", "freight batch delete nightly")
    with Client(service.server) as client, pytest.raises(Conflict):
        client.submit(GOOD, model=end.url, name="nightly")
    assert (service.job("nightly"), service.lines("nightly")) == before
    assert service.job("nightly").id == first
    assert {path.name for path in (service.data / "batch").iterdir()} == {first}


@pytest.mark.parametrize("number", [pytest.param(79, id="case-79")])
def test_request_that_is_sent_again_makes_one_job(number: int, service: ServiceBox, end: Endpoint) -> None:
    with Client(service.server) as client:

        def create(key: str | None, **options: Any) -> tuple[int, Any]:
            headers = {"Idempotency-Key": key} if key else {}
            answer = ask(service, "POST", "/api/jobs", json=body(client, end, **options), headers=headers)
            return answer.status_code, answer.json()

        made, again = create("key-1"), create("key-1")
        assert (made[0], again[0]) == (201, 200)
        assert made[1]["job"]["id"] == again[1]["job"]["id"]
        assert (made[1]["is_new"], again[1]["is_new"]) == (True, False)
        other = create("key-1", concurrency=1)
        assert (other[0], other[1]["error"]["code"]) == (409, Conflict.code)
        assert service.names() == [made[1]["job"]["name"]]
        # The key is kept with the job, also when it has ended.
        service.ended(made[1]["job"]["id"])
        assert create("key-1")[1]["job"]["id"] == made[1]["job"]["id"]
        # Without a key: two jobs, with results of their own.
        two = [create(None) for _ in range(2)]
        assert [status for status, _ in two] == [201, 201]
        ids = {answer["job"]["id"] for _, answer in two}
        assert len(ids | {made[1]["job"]["id"]}) == 3
        for job in ids:
            assert good(service, job)
            assert {line["id"].rpartition("-")[0] for line in lines_of(service, job)} == {job}


@pytest.mark.parametrize("number", [pytest.param(79, id="case-79")])
def test_command_that_is_repeated_with_its_key_makes_one_job(number: int, service: ServiceBox, end: Endpoint) -> None:
    submit = ("submit", str(GOOD), "--model", end.url, "--idempotency-key", "k")
    uploads = set((service.data / "uploads").iterdir())
    names = {service.batch(*submit).stdout for _ in range(2)}
    assert len(names) == 1
    refused(service.batch(*submit, "--concurrency", "1"), "idempotency key 'k'")
    assert len(service.names()) == 1
    # What was sent in vain is not kept.
    assert set((service.data / "uploads").iterdir()) == uploads


@pytest.mark.parametrize("number", [pytest.param(81, id="case-81")])
def test_settings_are_shown_and_unknown_ones_refused(number: int, service: ServiceBox, end: Endpoint) -> None:
    flags = {
        "--workers": "2", "--gpus": "0", "--pool": "local", "--timeout": "2h", "--record-timeout": "90s",
        "--concurrency": "7", "--priority": "-3", "--order": "input",
    }  # fmt: skip
    given = [word for pair in flags.items() for word in pair]
    submit = ("submit", str(GOOD), "--model", end.url, "--name", "tuned")
    assert service.batch(*submit, *given, "--strict", "--ignore-record-model", "--dedupe").status == 0
    shown = json.loads(service.batch("status", "tuned", "--json").stdout)
    assert shown["options"] == {
        "workers": 2, "gpus": 0, "pool": "local", "timeout_s": 7200.0, "record_timeout_s": 90.0, "concurrency": 7,
        "strict": True, "ignore_record_model": True, "order": "input", "dedupe": True,
    }  # fmt: skip
    assert shown["priority"] == -3
    for flag in (("--no-such-flag",), ("--temperature", "1"), ("--concurrency", "many"), ("--workers", "0")):
        done = service.batch(*submit, *flag)
        refused(done, flag[0])
        assert done.last_line() == "hint: freight batch submit --help"
    assert service.names() == ["tuned"]


@pytest.mark.parametrize("number", [pytest.param(81, id="case-81")])
def test_workers_and_concurrency_have_their_effect(number: int, service: ServiceBox) -> None:
    configured = service.config.read_text()
    with endpoint() as one, endpoint() as two:
        service.configure(model_toml("lab", engine="endpoint", source=[one.url, two.url]))
        service.put("two", [chat(f"r{n}", f"hold {n}") for n in range(12)], "lab", workers=2, concurrency=2)
        job = service.until("two", lambda job: job.in_flight >= 4, "both workers are at work")
        assert [worker.in_flight for worker in job.workers] == [2, 2]
        assert [end.seen.total() for end in (one, two)] == [2, 2]
        for end in (one, two):
            end.let_go.set()
        service.ended("two")
        assert [code(line) for line in lines_of(service, "two")] == [None] * 12
    service.config.write_text(configured)


@pytest.mark.parametrize("number", [pytest.param(81, id="case-81")])
def test_other_settings_have_their_effect(number: int, service: ServiceBox, tmp_path: Path) -> None:
    odd = {"model": "another-model"}
    records = [chat("a", "STUB:sleep=600"), chat("b", "b", temperature=2), chat("c", "c", **odd)]
    with engine(tmp_path / "engine") as sim:
        # What a record's body says is what counts, but for what a setting overrules.
        for name, ignore, last in (("typed", False, "model_mismatch"), ("any", True, None)):
            service.put(name, records, sim.url, record_timeout_s=1.0, ignore_record_model=ignore)
            service.ended(name)
            assert [code(line) for line in lines_of(service, name)] == ["request_timeout", None, last]
        sent = [body for _, body in sim.received()]
        assert sum(body.endswith(b'"temperature":2}') for body in sent) == 2
        assert not any(b"another-model" in body for body in sent)
