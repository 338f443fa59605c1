"""Results over TCP: whole, in parts, again only when they are others, and on over a connection that breaks."""

import asyncio
import json
from collections.abc import Generator
from pathlib import Path
from typing import Final

import httpx
import pytest

from freight.client import saving
from freight.client.aio import AsyncClient
from freight.client.calls import ConnectionLost
from freight.client.sync import Client
from freight.core.job import FINAL
from freight.errors import NoSuchJob
from tests.contract.cutting import Way, cutting
from tests.contract.town import MODEL, Town, town
from tests.harness import PATIENCE_S, parse_lines, wait_until

LONG: Final = "long " + "x" * 100_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    with town(tmp_path_factory.mktemp("town")) as made:
        yield made


@pytest.fixture(scope="module")
def small(shared: Town) -> str:
    """A job of alice's of which two records failed."""
    return shared.job("alice", "a", "refuse always", "b", "refuse always", "c")


@pytest.fixture(scope="module")
def large(shared: Town) -> str:
    """A job of alice's with 2 MB of results."""
    return shared.job("alice", *[f"{LONG} {number}" for number in range(20)])


def ask(
    place: Town, job: str, method: str = "GET", only: str = "", who: str = "alice", **headers: str
) -> httpx.Response:
    """Ask for a job's results; headers are written with _ for -."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    query = f"?only={only}" if only else ""
    return place.as_(who, method, f"/api/jobs/{job}/results{query}", headers=sent)


@pytest.mark.parametrize("only", ["", "ok", "failed"])
def test_parts_make_the_whole(shared: Town, small: str, only: str) -> None:
    whole = ask(shared, small, only=only)
    size = len(whole.content)
    assert (whole.status_code, whole.headers["content-length"]) == (200, str(size))
    assert whole.headers["accept-ranges"] == "bytes"
    assert [line["custom_id"] for line in parse_lines(whole.content)] == {
        "": ["0", "1", "2", "3", "4"], "ok": ["0", "2", "4"], "failed": ["1", "3"],
    }[only]  # fmt: skip
    step = 97
    for start in range(0, size, step):
        part = ask(shared, small, only=only, Range=f"bytes={start}-{start + step - 1}")
        stop = min(start + step, size)
        assert part.status_code == 206
        assert part.content == whole.content[start:stop]
        assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
        assert part.headers["content-length"] == str(stop - start)
        assert part.headers["etag"] == whole.headers["etag"]
    assert ask(shared, small, only=only, Range=f"bytes={size - 1}-").content == b"\n"
    assert ask(shared, small, only=only, Range="bytes=-10").content == whole.content[-10:]


def test_part_that_is_not_there_is_refused_with_the_size(shared: Town, small: str) -> None:
    size = len(ask(shared, small).content)
    refused = ask(shared, small, Range=f"bytes={size}-")
    assert (refused.status_code, refused.headers["content-range"]) == (416, f"bytes */{size}")
    error = refused.json()["error"]
    assert error["code"] == "range_not_satisfiable"
    assert str(size) in error["message"] and str(size - 1) in error["hint"]


@pytest.mark.parametrize("header", ["bytes=0-1,5-6", "bytes=5-1", "lines=0-1", "bytes=a-"])
def test_what_is_not_one_part_gives_the_whole(shared: Town, small: str, header: str) -> None:
    answer = ask(shared, small, Range=header)
    assert (answer.status_code, answer.content) == (200, ask(shared, small).content)


def test_head_says_all_but_the_results(shared: Town, small: str) -> None:
    whole, head = ask(shared, small), ask(shared, small, "HEAD", Range="bytes=0-1")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("content-length", "content-type", "etag", "accept-ranges", "freight-records-done"):
        assert head.headers[name] == whole.headers[name], name
    assert head.headers["freight-job-state"] == "COMPLETED"
    assert ask(shared, small, "HEAD", who="bob").status_code == 404
    # The connection is still good for other requests.
    assert ask(shared, small).content == whole.content


def test_results_are_not_sent_again_while_they_are_the_same(shared: Town, small: str) -> None:
    etag = ask(shared, small).headers["etag"]
    assert etag.startswith('"')
    for header in (etag, f'"other", W/{etag}', "*"):
        again = ask(shared, small, If_None_Match=header)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert ask(shared, small, If_None_Match='"other"').status_code == 200
    assert len({ask(shared, small, only=only).headers["etag"] for only in ("", "ok", "failed")}) == 3


def test_part_of_what_is_another_by_now_is_the_whole(shared: Town) -> None:
    job = shared.job("alice", "a", "refuse once: mended", "b")
    before = ask(shared, job)
    etag = before.headers["etag"]
    assert ask(shared, job, Range="bytes=5-9", If_Range=etag).content == before.content[5:10]
    assert ask(shared, job, Range="bytes=5-9", If_Range=f"W/{etag}").status_code == 200
    with shared.client("alice") as client:
        client.retry(job)
        client.wait(job, PATIENCE_S)
    after = ask(shared, job, Range="bytes=5-9", If_Range=etag)
    assert (after.status_code, after.headers["etag"] == etag) == (200, False)
    assert [line["error"] for line in parse_lines(after.content)] == [None] * 3
    assert ask(shared, job, If_None_Match=etag).status_code == 200


def test_records_that_were_not_reached_are_counted(shared: Town) -> None:
    request = {"upload": shared.upload("alice", "a", "hold", *"bcdefghij"), "model": MODEL, "concurrency": 1}
    job = shared.as_("alice", "POST", "/api/jobs", json=request).json()["job"]["id"]
    with shared.client("alice") as client:
        wait_until(lambda: client.job(job).in_flight, "it runs")
        client.cancel(job)
        shared.end.let_go.set()
        assert client.wait(job, PATIENCE_S).state == "CANCELLED"
    shared.end.let_go.clear()
    whole = ask(shared, job)
    lines = parse_lines(whole.content)
    assert len(lines) == 11 and lines[-1]["error"]["code"] == "batch_cancelled"
    assert whole.headers["content-length"] == str(len(whole.content))
    assert whole.headers["freight-job-state"] == "CANCELLED"
    for start in range(0, len(whole.content), 211):
        assert ask(shared, job, Range=f"bytes={start}-").content == whole.content[start:]


def test_results_of_a_running_job_say_how_far_they_go_and_have_no_parts(shared: Town) -> None:
    upload = shared.upload("alice", "a", "hold", "b")
    job = shared.as_("alice", "POST", "/api/jobs", json={"upload": upload, "model": MODEL}).json()["job"]["id"]
    with shared.client("alice") as client:
        wait_until(lambda: client.job(job).done == 2, "two are done")
        path = f"/api/jobs/{job}/results?partial=true"
        for method in ("GET", "HEAD"):
            answer = shared.as_("alice", method, path, headers={"Range": "bytes=0-4", "If-None-Match": "*"})
            assert answer.status_code == 200
            heads = ("accept-ranges", "freight-records-done", "freight-records-total", "freight-job-state")
            assert [answer.headers[name] for name in heads] == ["none", "2", "3", "RUNNING"]
            assert not {"etag", "content-length"} & set(answer.headers)
            assert len(answer.content.splitlines()) == (2 if method == "GET" else 0)
        assert ask(shared, job, "HEAD").status_code == 409
        shared.end.let_go.set()
        client.wait(job, PATIENCE_S)
    shared.end.let_go.clear()


def test_job_is_not_told_again_while_it_is_the_same(shared: Town, small: str) -> None:
    path = f"/api/jobs/{small}"
    first = shared.as_("alice", "GET", path)
    etag = first.headers["etag"]
    again = shared.as_("alice", "GET", path, headers={"If-None-Match": etag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert shared.as_("alice", "GET", path, headers={"If-None-Match": '"other"'}).json() == first.json()
    assert shared.as_("bob", "GET", path, headers={"If-None-Match": etag}).status_code == 404


def test_client_sees_each_change_of_a_job_that_it_looks_at_again(shared: Town, small: str) -> None:
    with cutting(shared.url, ()) as way, Client(way.url, shared.tokens["alice"]) as client:
        first = client.job(small)
        assert client.job(small) == first
        assert b"if-none-match: " in way.asked[-1].lower()
        other = shared.job("alice", "refuse once: seen")
        assert client.job(other).failed == 1
        client.retry(other)
        client.wait(other, PATIENCE_S)
        assert (client.job(other).failed, client.job(small)) == (0, first)
        client.delete(other)
        with pytest.raises(NoSuchJob):
            client.job(other)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "FIRST_PAUSE_S", 0.001)


def saved(place: Town, way: Way, job: str, path: Path) -> int:
    with Client(way.url, place.tokens["alice"]) as client:
        return client.save_results(job, path)


@pytest.mark.usefixtures("quick")
def test_transfer_that_breaks_goes_on_from_where_it_was(shared: Town, large: str, tmp_path: Path) -> None:
    whole = ask(shared, large).content
    # Every attempt brings some, so that there may be more of them than are given up.
    cuts = [250_000] * (saving.TRIES + 2)
    with cutting(shared.url, cuts) as way:
        assert saved(shared, way, large, tmp_path / "out.jsonl") == 20
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    starts = [int(asked.removeprefix("bytes=").removesuffix("-")) for asked in way.ranges()]
    assert len(starts) == len(cuts)
    assert starts == sorted(set(starts)) and starts[0] > 0 and starts[-1] < len(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.usefixtures("quick")
def test_transfer_of_the_async_client_goes_on_too(shared: Town, large: str, tmp_path: Path) -> None:
    async def save(way: Way) -> int:
        async with AsyncClient(way.url, shared.tokens["alice"]) as client:
            return await client.save_results(large, tmp_path / "out.jsonl")

    with cutting(shared.url, (700_000, 500_000)) as way:
        assert asyncio.run(save(way)) == 20
    assert (tmp_path / "out.jsonl").read_bytes() == ask(shared, large).content
    assert len(way.ranges()) == 2


@pytest.mark.usefixtures("quick")
def test_transfer_of_what_is_another_by_now_begins_anew(shared: Town, tmp_path: Path) -> None:
    job = shared.job("alice", "refuse once: anew", *[f"{LONG} anew {number}" for number in range(6)])
    before = ask(shared, job).content

    def again() -> None:
        with shared.client("alice") as client:
            client.retry(job)
            client.wait(job, PATIENCE_S)

    with cutting(shared.url, (400_000,)) as way:
        way.cut = again
        assert saved(shared, way, job, tmp_path / "out.jsonl") == 7
    after = ask(shared, job).content
    assert (tmp_path / "out.jsonl").read_bytes() == after != before


@pytest.mark.usefixtures("quick")
def test_transfer_that_brings_nothing_any_more_is_given_up(shared: Town, large: str, tmp_path: Path) -> None:
    with cutting(shared.url, (700_000, *[100] * 50)) as way, pytest.raises(ConnectionLost):
        saved(shared, way, large, tmp_path / "out.jsonl")
    assert len(way.asked) == 1 + saving.TRIES
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_transfer_that_never_began_is_given_up_at_once(shared: Town, large: str, tmp_path: Path) -> None:
    with cutting(shared.url, [100] * 50) as way, pytest.raises(ConnectionLost):
        saved(shared, way, large, tmp_path / "out.jsonl")
    assert len(way.asked) == 1


def test_command_goes_on_over_a_connection_that_breaks(shared: Town, large: str, tmp_path: Path) -> None:
    with cutting(shared.url, (10_000, 700_000)) as way:
        here = {"FREIGHT_SERVER": way.url, "FREIGHT_TOKEN": shared.tokens["alice"]}
        done = shared.box.freight("batch", "results", large, "-o", str(tmp_path / "out.jsonl"), **here)
    assert done.status == 0, done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == ask(shared, large).content
    assert way.ranges()


def test_ended_job_keeps_its_etag_over_a_restart(shared: Town, small: str) -> None:
    assert json.loads(ask(shared, small).content.splitlines()[0])["custom_id"] == "0"
    before = ask(shared, small, "HEAD").headers["etag"]
    shared.box.stop()
    assert shared.box.freight("serve", "--background").status == 0
    shared.url = shared.found()
    assert ask(shared, small, "HEAD").headers["etag"] == before
    with shared.client("alice") as client:
        assert client.job(small).state in FINAL
