"""Several people on one service: each has what is theirs, and nothing of others'."""

import json
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from freight.core.job import State
from freight.errors import Conflict, NoSuchJob, NotAllowed, TooMany, UserError
from tests.contract.town import MODEL, Town, town
from tests.harness import wait_until
from tests.service import chats


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    with town(tmp_path_factory.mktemp("town")) as made:
        yield made


def body(*texts: str) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in chats(*texts))


def test_two_users_may_have_jobs_of_the_same_name_and_key(shared: Town) -> None:
    ids: list[str] = []
    for who in ("alice", "bob"):
        with shared.client(who) as client:
            for is_new in (True, False):
                made = client.submit(body(who), model=MODEL, name="nightly", idempotency_key="key")
                assert made.is_new is is_new
            ids.append(made.job.id)
            assert client.wait("nightly", 60).user == who
            with client.results("nightly") as lines:
                assert [json.loads(line)["custom_id"] for line in lines] == ["0"]
            with pytest.raises(Conflict):
                client.submit(body("again"), model=MODEL, name="nightly")
            assert [job.id for job in client.jobs() if job.name == "nightly"] == [made.job.id]
    assert ids[0] != ids[1]
    for who, own, other in (("alice", ids[0], ids[1]), ("bob", ids[1], ids[0])):
        with shared.client(who) as client:
            assert client.job("nightly").id == client.job(f"{who}/nightly").id == client.job(own).id == own
            for name in (other, other[:13], f"{'bob' if who == 'alice' else 'alice'}/nightly"):
                for attempt in (client.job, client.cancel, client.resume, client.retry, client.delete, client.results):
                    with pytest.raises(NoSuchJob):
                        attempt(name)
                with pytest.raises(NoSuchJob):
                    client.logs(name)


def test_admin_names_anybodys_job(shared: Town) -> None:
    for who in ("alice", "bob"):
        shared.job(who, name="twice")
    shared.job("bob", name="once")
    with shared.client("carol") as client:
        assert client.job("alice/twice").user == "alice"
        assert client.job("once").user == "bob"
        with pytest.raises(UserError, match="several users"):
            client.job("twice")
        assert {(job.user, job.name) for job in client.jobs()} >= {
            ("alice", "twice"),
            ("bob", "twice"),
            ("bob", "once"),
        }
        client.delete("bob/twice")
        with pytest.raises(NoSuchJob):
            client.job("bob/twice")
        assert client.job("twice").user == "alice"


def test_command_line_shows_whose_jobs_there_are(shared: Town) -> None:
    for who in ("alice", "bob"):
        shared.job(who, name="listed")
    everybodys = shared.box.freight("batch", "list", "-q")
    assert {"alice/listed", "bob/listed"} <= set(everybodys.stdout.splitlines())
    here = {"FREIGHT_SERVER": shared.url, "FREIGHT_TOKEN": shared.tokens["alice"]}
    own = shared.box.freight("batch", "list", "-q", **here)
    assert "listed" in own.stdout.splitlines() and "bob" not in own.stdout
    status = shared.box.freight("batch", "status", "bob/listed")
    assert status.status == 0, status.stderr
    assert shared.box.freight("batch", "status", "bob/listed", **here).status == 3
    results = shared.box.freight("batch", "results", "bob/listed", "--stdout")
    assert results.status == 0 and json.loads(results.stdout)["custom_id"] == "0"
    named = shared.as_("carol", "GET", "/api/names").json()
    assert {"alice/listed", "bob/listed"} <= set(named["names"])
    assert "alice/listed" not in shared.as_("bob", "GET", "/api/names").json()["names"]


def test_what_reaches_beyond_ones_own_things_is_for_admins(shared: Town, tmp_path: Path) -> None:
    with shared.client("alice") as client:
        for options in ({"priority": 1}, {"output": str(tmp_path)}, {"model": shared.end.url}, {"model": "/etc/hosts"}):
            with pytest.raises(NotAllowed):
                client.submit(body("a"), **{"model": MODEL, **options})  # type: ignore[arg-type]
    assert list((shared.box.data / "uploads").iterdir()) == []
    here = {"FREIGHT_SERVER": shared.url, "FREIGHT_TOKEN": shared.tokens["alice"]}
    shared.box.write("in.jsonl", chats("a"))
    refused = shared.box.freight("batch", "submit", "in.jsonl", "--model", MODEL, "--priority", "1", **here)
    assert refused.status == 4 and "priority 1 is for admins" in refused.stderr
    with shared.client("carol") as client:
        made = client.submit(body("a"), model=MODEL, priority=1, output=str(tmp_path), name="far")
        assert client.wait(made.job.id, 60).state == State.COMPLETED
    assert (tmp_path / "far-results.jsonl").exists()


def test_priority_of_others_jobs_does_not_tell_their_names(shared: Town) -> None:
    with shared.client("alice") as client:
        client.submit(body("hold it"), model=MODEL, name="secret-plan", workers=1)
        wait_until(lambda: client.job("secret-plan").state == State.RUNNING, "it runs")
        try:
            with shared.client("bob") as other:
                other.submit(body("b"), model=MODEL, name="bobs")
                wait_until(lambda: other.job("bobs").reason, "it waits")
                assert "another user's job" in other.job("bobs").reason
                shown = json.dumps(
                    [shared.as_("bob", "GET", f"/api/{what}").json() for what in ("workers", "jobs", "devices")]
                )
                assert "secret-plan" not in shown and "alice" not in shown
                assert "another user's job" in shown
        finally:
            shared.end.let_go.set()
        assert client.wait("secret-plan", 60).state == State.COMPLETED
        with shared.client("bob") as other:
            assert other.wait("bobs", 60).state == State.COMPLETED


def test_limits_are_each_users_own_and_say_what_they_are(tmp_path: Path) -> None:
    limits = "[limits]\nactive_jobs = 1\nrecords = 3\nstored_bytes = 300000\nrequests = 20\n"
    with town(tmp_path, limits) as place:
        with place.client("alice") as client:
            with pytest.raises(UserError, match=r"more than 3 records, the limit \(limits.records\)"):
                client.submit(body(*"abcd"), model=MODEL)
            with pytest.raises(TooMany, match=r"limits\.stored_bytes\) is 300000"):
                client.submit(body("x" * 300_000), model=MODEL)
            client.submit(body("hold"), model=MODEL, name="held")
            with pytest.raises(TooMany, match=r"the limit \(limits.active_jobs\) is 1"):
                client.submit(body("a"), model=MODEL)
        refused = place.as_("alice", "POST", "/api/jobs", json={"upload": place.upload("alice"), "model": MODEL})
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
        assert "retry-after" not in refused.headers
        with place.client("bob") as client:
            client.submit(body("hold"), model=MODEL)
        headers = {"Authorization": f"Bearer {place.tokens['alice']}"}
        with httpx.Client(base_url=place.url, headers=headers, trust_env=False) as http:
            answers = [http.get("/api/version") for _ in range(400)]
            late = [answer for answer in answers if answer.status_code == 429]
            assert late and all(answer.headers["retry-after"] == "1" for answer in late)
            assert "limits.requests" in late[0].text
            assert place.as_("bob", "GET", "/api/version").status_code == 200
        place.end.let_go.set()
        # The owner, on the Unix socket, has none of these.
        place.box.put("large", chats(*"abcdef", "x" * 300_000), MODEL)
        place.box.put("second", chats("a"), MODEL)
        assert place.box.ended("large").state == place.box.ended("second").state == State.COMPLETED
