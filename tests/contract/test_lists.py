"""Lists over TCP: in pages that hold each thing once, and of what was asked for alone."""

from collections.abc import Generator
from typing import Any, Final

import pytest

from freight.cli.names import job_names
from freight.client import calls
from tests.contract.town import MODEL, Town, town
from tests.harness import Json

LISTS: Final = ("jobs", "names", "models", "workers", "devices", "tokens")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    with town(tmp_path_factory.mktemp("town")) as made:
        for who, name in (("alice", "red-1"), ("bob", "red-1"), ("alice", "blue"), ("alice", "red-2")):
            made.job(who, "a", name=name)
        yield made


def page(place: Town, who: str, what: str, **asked: Any) -> Json:
    answer = place.as_(who, "GET", f"/api/{what}", params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def pages(place: Town, who: str, what: str, limit: int, **asked: Any) -> list[Any]:
    """Return all things of a list, read in pages."""
    seen: list[Any] = []
    after: dict[str, str] = {}
    while True:
        got = page(place, who, what, limit=limit, **after, **asked)
        assert len(got[what]) <= limit
        seen += got[what]
        if got["next"] is None:
            return seen
        after = {"after": got["next"]}


def names(jobs: list[Json]) -> list[str]:
    return [f"{job['user']}/{job['name']}" for job in jobs]


@pytest.mark.parametrize("who", ["alice", "carol"])
@pytest.mark.parametrize("what", LISTS)
def test_pages_of_any_size_make_the_whole_list(shared: Town, what: str, who: str) -> None:
    if what == "tokens" and who == "alice":
        assert shared.as_(who, "GET", "/api/tokens").status_code == 403
        return
    whole = page(shared, who, what, limit=1000)
    assert whole["next"] is None
    assert whole[what] or what == "workers"
    for limit in (1, 2, 3):
        assert pages(shared, who, what, limit) == whole[what]


@pytest.mark.parametrize("what", LISTS)
@pytest.mark.parametrize(
    ("asked", "says"),
    [({"after": "x"}, "after"), ({"after": ""}, "after"), ({"limit": 0}, "limit"), ({"limit": 1001}, "limit")],
)
def test_cursor_or_limit_that_cannot_be_is_refused_by_name(
    shared: Town, what: str, asked: dict[str, Any], says: str
) -> None:
    answer = shared.as_("carol", "GET", f"/api/{what}", params=asked)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("what", ["jobs", "names"])
def test_list_of_jobs_goes_on_after_one_that_was_deleted(shared: Town, what: str) -> None:
    for number in range(3):
        shared.job("bob", "a", name=f"gone-{number}")
    whole = pages(shared, "bob", what, 100)
    first = page(shared, "bob", what, limit=2)
    last = first[what][-1]
    assert shared.as_("bob", "DELETE", f"/api/jobs/{last if what == 'names' else last['id']}").status_code == 204
    rest = page(shared, "bob", what, after=first["next"])
    assert first[what] + rest[what] == whole
    for name in {f"gone-{number}" for number in range(3)} & set(page(shared, "bob", "names")["names"]):
        assert shared.as_("bob", "DELETE", f"/api/jobs/{name}").status_code == 204


def test_list_of_tokens_goes_on_after_one_that_was_revoked(shared: Town) -> None:
    shared.token("dora")
    shared.token("dora")
    whole = page(shared, "carol", "tokens", limit=1000)["tokens"]
    first = page(shared, "carol", "tokens", limit=len(whole) - 1)
    assert shared.as_("carol", "DELETE", f"/api/tokens/{whole[-2]['id']}").status_code == 200
    assert page(shared, "carol", "tokens", after=first["next"])["tokens"] == whole[-1:]


def test_jobs_are_listed_by_what_is_asked_for(shared: Town) -> None:
    def found(who: str, **asked: Any) -> list[str]:
        return names(pages(shared, who, "jobs", 2, **asked))

    mine = ["alice/red-2", "alice/blue", "alice/red-1"]
    everybody = ["alice/red-2", "alice/blue", "bob/red-1", "alice/red-1"]
    assert (found("alice"), found("carol")) == (mine, everybody)
    assert found("alice", name="red") == ["alice/red-2", "alice/red-1"]
    assert found("carol", name="red-1") == ["bob/red-1", "alice/red-1"]
    assert found("carol", user="alice") == found("alice", user="alice") == mine
    assert found("carol", user="nobody") == []
    assert found("carol", model=MODEL) == everybody
    assert found("carol", model="other") == found("alice", state="failed") == []
    assert found("carol", name="red", user="alice", state="completed", model=MODEL) == ["alice/red-2", "alice/red-1"]
    blue = next(job for job in page(shared, "alice", "jobs")["jobs"] if job["name"] == "blue")
    assert found("alice", created_after=blue["created_at"]) == ["alice/red-2", "alice/blue"]
    assert found("alice", created_before=blue["created_at"]) == ["alice/red-1"]


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"state": "odd"}, 400, "state: there is no state odd"),
        ({"name": "a b"}, 400, "name: 'a b'"),
        ({"created_after": "yesterday"}, 400, "created_after: 'yesterday' is no time"),
        ({"created_before": "2030-01-01"}, 400, "created_before: '2030-01-01' is no time"),
        ({"user": "bob"}, 403, "user: "),
    ],
)
def test_filter_that_cannot_be_is_refused_by_name(shared: Town, asked: dict[str, str], status: int, says: str) -> None:
    answer = shared.as_("alice", "GET", "/api/jobs", params=asked)
    assert (answer.status_code, answer.json()["error"]["message"].startswith(says)) == (status, True), answer.text


def test_clients_read_all_pages(shared: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen() -> tuple[list[Any], ...]:
        with shared.client("carol") as client:
            return (
                list(client.jobs()),
                client.tokens(),
                client.devices(),
                client.models(),
                client.workers(),
                list(client.jobs(name="red")),
            )

    whole = seen()
    assert len(whole[1]) > 3
    monkeypatch.setattr(calls, "MOST_PAGE", 1)
    monkeypatch.setattr(calls, "PAGE_JOBS", 1)
    monkeypatch.setattr(calls._page, "__defaults__", (1,))
    assert seen() == whole


def test_list_command_shows_what_is_asked_for(shared: Town) -> None:
    here = {"FREIGHT_SERVER": shared.url, "FREIGHT_TOKEN": shared.tokens["alice"]}

    def listed(*options: str) -> tuple[list[str], str]:
        done = shared.box.freight("batch", "list", *options, **here)
        assert done.status == 0, done.stderr
        return done.stdout.split(), done.stderr

    assert listed("-q", "--name", "red")[0] == ["red-2", "red-1"]
    assert listed("-q", "--name", "b", "--model", MODEL)[0] == ["blue"]
    assert listed("--model", "other") == ([], "no jobs of the model other\n")


def test_shells_complete_the_names_of_all_pages(shared: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREIGHT_TOKEN", shared.tokens["alice"])
    monkeypatch.setattr("freight.cli.names._PAGE", "1")
    monkeypatch.setattr("freight.cli.names.TIMEOUT_S", 30)
    assert job_names(shared.url) == ["blue", "red-1", "red-2"]
