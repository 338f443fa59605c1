"""Files of the OpenAI API, by the unmodified SDK: kept whole, shown to their user alone, and gone when they go."""

import io
import json
import re
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import openai
import pytest
from openai import OpenAI
from openai.types import Batch, FileObject

from tests.contract.town import MODEL, Town, town
from tests.harness import PATIENCE_S, Json, parse_lines, wait_until
from tests.service import chats

LIMIT: Final = 40_000_000
MEMORY_BYTES: Final = 12_000_000
BOUNDARY: Final = "limit"
FORM: Final = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    limits = f"[limits]\nfile_bytes = {LIMIT}\nstored_bytes = 90000000\n"
    with town(tmp_path_factory.mktemp("town"), limits) as made:
        yield made


@pytest.fixture
def alice(shared: Town) -> Generator[OpenAI]:
    with sdk(shared, "alice") as client:
        yield client


@pytest.fixture
def bob(shared: Town) -> Generator[OpenAI]:
    with sdk(shared, "bob") as client:
        yield client


def sdk(place: Town, who: str) -> OpenAI:
    return OpenAI(base_url=f"{place.url}/v1", api_key=place.tokens[who], max_retries=0, timeout=PATIENCE_S)


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in chats(*texts, model=MODEL))


def contents(place: Town) -> set[str]:
    """Return what lies in the data folder of files, and of what is on its way there."""
    return {entry.name for folder in ("files", "uploads") for entry in (place.box.data / folder).iterdir()}


def part(name: str, text: bytes, filename: str | None = None) -> bytes:
    """Return a part of a form."""
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + text + b"\r\n"


END: Final = f"--{BOUNDARY}--\r\n".encode()


def batch(client: OpenAI, *texts: str, **options: Any) -> Batch:
    """Make a batch of records and wait for its end."""
    file = client.files.create(file=lines(*texts), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **options
    )
    return ended(client, made.id)


def ended(client: OpenAI, name: str) -> Batch:
    seen: list[Batch] = []

    def is_over() -> bool:
        seen[:] = [client.batches.retrieve(name)]
        return seen[0].status in ("completed", "failed", "expired", "cancelled")

    wait_until(is_over, f"{name} has ended")
    return seen[0]


def test_file_is_sent_shown_fetched_and_deleted(shared: Town, alice: OpenAI) -> None:
    sent = lines("a", "b")
    begun = int(time.time())
    file = alice.files.create(file=("my input.jsonl", sent), purpose="batch")
    assert re.fullmatch(r"file-[0-9a-f]{32}", file.id)
    expected = {
        "id": file.id, "object": "file", "bytes": len(sent), "filename": "my input.jsonl", "purpose": "batch",
        "status": "processed", "created_at": file.created_at, "expires_at": None,
    }  # fmt: skip
    assert shared.as_("alice", "GET", f"/v1/files/{file.id}").json() == expected
    assert begun <= file.created_at <= time.time() + 1
    assert alice.files.retrieve(file.id) == alice.files.wait_for_processing(file.id) == file
    assert alice.files.content(file.id).read() == sent
    with alice.files.with_streaming_response.content(file.id) as answer:
        assert b"".join(answer.iter_bytes(7)) == sent
        assert answer.headers["content-length"] == str(len(sent))
    lying = shared.box.data / "files" / file.id
    assert lying.read_bytes() == sent
    assert lying.stat().st_mode & 0o077 == lying.parent.stat().st_mode & 0o077 == 0
    gone = alice.files.delete(file.id)
    assert (gone.id, gone.deleted, gone.object) == (file.id, True, "file")
    assert not lying.exists()
    for attempt in (alice.files.retrieve, alice.files.content, alice.files.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(file.id)


def test_part_of_a_file_can_be_fetched_and_its_head_alone(shared: Town, alice: OpenAI) -> None:
    file = alice.files.create(file=b"0123456789", purpose="batch")
    path = f"/v1/files/{file.id}/content"
    whole = shared.as_("alice", "GET", path)
    some = shared.as_("alice", "GET", path, headers={"Range": "bytes=2-4"})
    assert (some.status_code, some.content, some.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    for asked, content in (({"Range": "bytes=-3"}, b"789"), ({"Range": "bytes=8-"}, b"89")):
        assert shared.as_("alice", "GET", path, headers=asked).content == content
    beyond = shared.as_("alice", "GET", path, headers={"Range": "bytes=10-"})
    assert beyond.status_code == 416 and beyond.json()["error"]["type"] == "invalid_request_error"
    head = shared.as_("alice", "HEAD", path)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "10")
    assert head.headers["etag"] == whole.headers["etag"]
    assert shared.as_("alice", "GET", path, headers={"If-None-Match": head.headers["etag"]}).status_code == 304


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\inputs\\day one.jsonl", "day one.jsonl"),
        ("a\x1b[31mb\u202ec.jsonl", "a[31mbc.jsonl"),
        ("Übung 数据.jsonl", "Übung 数据.jsonl"),
        ("x" * 300 + ".jsonl", "x" * 255),
        ("..", ".."),
    ],
)
def test_name_of_a_file_is_for_showing_only(shared: Town, alice: OpenAI, given: str, shown: str) -> None:
    file = alice.files.create(file=(given, b"{}\n"), purpose="batch")
    assert alice.files.retrieve(file.id).filename == shown
    assert (shared.box.data / "files" / file.id).read_bytes() == b"{}\n"


@pytest.mark.parametrize("seconds", [3600, 2_592_000])
def test_file_that_is_to_expire_says_when(alice: OpenAI, seconds: int) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": seconds}
    file = alice.files.create(file=b"{}\n", purpose="batch", expires_after=expiry)
    assert file.expires_at == file.created_at + seconds
    assert alice.files.retrieve(file.id).expires_at == file.expires_at


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"purpose": "user_data"}, "purpose"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({"expires_after": {"anchor": "created_at", "seconds": 3599}}, "expires_after"),
        ({"expires_after": {"anchor": "created_at", "seconds": 2_592_001}}, "expires_after"),
        ({"expires_after": {"anchor": "created_at", "seconds": "²"}}, "expires_after"),
        ({"expires_after": {"anchor": "last_active_at", "seconds": 3600}}, "expires_after"),
        ({"expires_after": {"seconds": 3600}}, "expires_after"),
        ({"expires_after": {"anchor": "created_at"}}, "expires_after"),
    ],
)
def test_file_that_is_asked_for_wrongly_is_refused_by_its_field(
    shared: Town, alice: OpenAI, options: Json, param: str
) -> None:
    before = contents(shared)
    asked: Any = {"purpose": "batch", **options}
    with pytest.raises(openai.BadRequestError) as refused:
        alice.files.create(file=b"{}\n", **asked)
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
    assert contents(shared) == before


@pytest.mark.parametrize(
    "body",
    [
        part("file", b"x", "a.jsonl") + part("purpose", b"batch") + END,
        part("purpose", b"batch") + part("file", b"x", "a.jsonl") + END,
        part("other", b"1") + part("file", b"x", "a.jsonl") + part("purpose", b"batch") + part("more", b"2") + END,
        part("purpose", b"batch") + part("file", b"x") + END,
    ],
    ids=["file first", "file last", "file between", "file without a name"],
)
def test_fields_of_a_form_come_in_any_order(shared: Town, alice: OpenAI, body: bytes) -> None:
    answer = shared.as_("alice", "POST", "/v1/files", content=body, headers=FORM)
    assert answer.status_code == 200, answer.text
    assert alice.files.content(answer.json()["id"]).read() == b"x"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"nonsense", None),
        (END, "file"),
        (part("purpose", b"batch") + END, "file"),
        (part("file", b"x", "a") + END, "purpose"),
        (part("purpose", b"batch") + part("file", b"x", "a") + part("file", b"y", "b") + END, "file"),
        (part("purpose", b"batch") + part("purpose", b"batch") + part("file", b"y", "b") + END, "purpose"),
        (part("purpose", b"\xff") + part("file", b"y", "b") + END, "purpose"),
        (part("purpose", b"batch") + part("file", b"x" * 3_000_000, "a"), None),
        (part("purpose", b"batch") + part("file", b"x" * 3_000_000, "a")[:-1], None),
        (part("purpose", b"batch") + part("file", b"x", "a") + part("more", b"x" * 70_000) + END, None),
        (part("purpose", b"batch") + part("file", b"x" * 3_000_000, "a") + b"broken", None),
    ],
    ids=[
        "empty", "no form", "no parts", "no file", "no purpose", "two files", "two purposes", "not UTF-8", "no end",
        "cut off", "long field", "broken end",
    ],
)  # fmt: skip
def test_broken_form_is_refused_and_leaves_nothing(shared: Town, body: bytes, param: str | None) -> None:
    before = contents(shared)
    answer = shared.as_("alice", "POST", "/v1/files", content=body, headers=FORM)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert contents(shared) == before
    for headers in ({"Content-Type": "application/json"}, {"Content-Type": "multipart/form-data"}, {}):
        assert shared.as_("alice", "POST", "/v1/files", content=body, headers=headers).status_code == 400


def test_upload_that_is_aborted_leaves_nothing(shared: Town, alice: OpenAI) -> None:
    before = contents(shared)
    address = urlsplit(shared.url)
    body = part("purpose", b"batch") + part("file", b"x" * 4_000_000, "a")
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {shared.tokens['alice']}\r\n"
        f"Content-Type: {FORM['Content-Type']}\r\nContent-Length: {len(body) + 1_000_000}\r\n\r\n"
    )
    with closing(socket.create_connection((address.hostname or "", address.port or 0))) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: contents(shared) != before, "it has begun")
    wait_until(lambda: contents(shared) == before, "nothing of it is left")


def test_file_over_the_limit_is_a_413_and_leaves_nothing(shared: Town, alice: OpenAI) -> None:
    before = contents(shared)

    def chunks(count: int) -> Iterator[bytes]:
        yield part("purpose", b"batch") + part("file", b"", "a")[:-2]
        for _ in range(count):
            yield b"x" * 1_000_000
        yield b"x\r\n" + END

    whole = b"".join(chunks(LIMIT // 1_000_000))
    for content in (whole, chunks(LIMIT // 1_000_000), whole + b"x" * 1_000_000):
        answer = shared.as_("alice", "POST", "/v1/files", content=content, headers=FORM)
        assert answer.status_code == 413, answer.text
        assert answer.json()["error"]["code"] == "too_large" and "limits.file_bytes" in answer.text
        # The limit that was set, not what a form may have.
        assert str(LIMIT) in answer.json()["error"]["message"]
    assert contents(shared) == before


def test_memory_does_not_grow_with_what_is_sent_and_fetched(shared: Town, alice: OpenAI) -> None:
    (service,) = [found for found in shared.box.processes() if "serve" in found.cmdline()]
    alice.files.delete(alice.files.create(file=b"x" * 1_000_000, purpose="batch").id)
    before = service.memory_info().rss
    peaks: list[int] = []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            peaks.append(service.memory_info().rss)
            return super().read(size)

    sent = b"0123456789abcde\n" * (30_000_000 // 16)
    file = alice.files.create(file=Watched(sent), purpose="batch")
    try:
        with alice.files.with_streaming_response.content(file.id) as answer:
            fetched = 0
            for piece in answer.iter_bytes(1 << 20):
                fetched += len(piece)
                peaks.append(service.memory_info().rss)
        assert fetched == file.bytes == len(sent)
    finally:
        alice.files.delete(file.id)
    assert max(peaks) - before < MEMORY_BYTES, (before, max(peaks))


def test_list_is_read_page_by_page_and_has_ones_own_files_alone(shared: Town, alice: OpenAI, bob: OpenAI) -> None:
    for client in (alice, bob):
        for file in client.files.list():
            client.files.delete(file.id)
    mine: list[str] = []
    for number in range(7):
        mine.append(alice.files.create(file=(f"{number}", b"{}\n"), purpose="batch").id)
        bob.files.create(file=b"{}\n", purpose="batch")
    assert [file.id for file in alice.files.list(limit=3, order="asc")] == mine
    assert [file.id for file in alice.files.list(limit=3)] == mine[::-1]
    assert [file.id for file in alice.files.list()] == mine[::-1]
    first = alice.files.list(limit=3, order="asc")
    assert ([file.id for file in first.data], first.has_more) == (mine[:3], True)
    assert alice.files.list(limit=7).has_more is False
    shown = shared.as_("alice", "GET", "/v1/files", params={"limit": 2, "after": mine[2]}).json()
    assert [file["id"] for file in shown["data"]] == [mine[1], mine[0]]
    assert (shown["object"], shown["first_id"], shown["last_id"]) == ("list", mine[1], mine[0])
    assert [file.id for file in alice.files.list(purpose="batch", limit=2)] == mine[::-1]
    assert alice.files.list(purpose="vision").data == []
    for file in alice.files.list(limit=2):
        alice.files.delete(file.id)  # The next page begins after one that is gone.
    assert alice.files.list().data == []
    assert len(bob.files.list().data) == 7
    for params in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"limit": "x"}):
        refused = shared.as_("alice", "GET", "/v1/files", params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(params)))
    assert shared.as_("alice", "GET", "/v1/files", params={"after": "file-x"}).status_code == 404


def test_anothers_file_reads_as_one_that_is_not_there(shared: Town, alice: OpenAI) -> None:
    file = alice.files.create(file=b"{}\n", purpose="batch")
    unknown = "file-" + "0" * 32
    for who in ("bob", "carol"):
        for method, route in (("GET", ""), ("GET", "/content"), ("HEAD", "/content"), ("DELETE", "")):
            answer = shared.as_(who, method, f"/v1/files/{file.id}{route}")
            none = shared.as_(who, method, f"/v1/files/{unknown}{route}")
            assert answer.status_code == none.status_code == 404
            assert answer.text == none.text.replace(unknown, file.id)
            if method != "HEAD":
                error = answer.json()["error"]
                assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "id", "no_such_file")
        assert file.id not in shared.as_(who, "GET", "/v1/files").text
    assert alice.files.retrieve(file.id) == file
    for odd in ("..", "%2e%2e", "x", "file-", "%00", "a%2Fb"):
        assert shared.as_("alice", "GET", f"/v1/files/{odd}").status_code in (404, 200)
        assert shared.as_("alice", "DELETE", f"/v1/files/{odd}").status_code in (404, 405)


def test_user_keeps_no_more_than_their_room(shared: Town, bob: OpenAI) -> None:
    before = contents(shared)
    kept = [bob.files.create(file=b"x" * 30_000_000, purpose="batch") for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="stored_bytes") as refused:
        bob.files.create(file=b"x" * 35_000_000, purpose="batch")
    assert refused.value.response.headers["x-should-retry"] == "false"
    for file in kept:
        bob.files.delete(file.id)
    assert contents(shared) == before


def test_batch_gives_its_answers_and_its_errors_in_two_files(shared: Town, alice: OpenAI) -> None:
    done = batch(alice, "a", "refuse always", "b")
    assert done.status == "completed" and done.output_file_id and done.error_file_id
    answered = parse_lines(alice.files.content(done.output_file_id).read())
    assert [(line["custom_id"], line["error"]) for line in answered] == [("0", None), ("2", None)]
    assert answered[0]["response"]["body"]["choices"][0]["message"]["content"].startswith("a, ")
    refused = parse_lines(alice.files.content(done.error_file_id).read())
    assert [(line["custom_id"], line["error"]) for line in refused] == [("1", None)]
    assert refused[0]["response"]["status_code"] == 400
    assert refused[0]["response"]["body"]["error"]["type"] == "refused"
    for file in (done.output_file_id, done.error_file_id):
        content = alice.files.content(file).read()
        about = alice.files.retrieve(file)
        assert (about.purpose, about.bytes, about.expires_at) == ("batch_output", len(content), None)
        assert about.created_at == done.completed_at
        some = shared.as_("alice", "GET", f"/v1/files/{file}/content", headers={"Range": "bytes=5-20"})
        assert (some.status_code, some.content) == (206, content[5:21])
        assert shared.as_("bob", "GET", f"/v1/files/{file}/content").status_code == 404
    listed = [file.id for file in alice.files.list(purpose="batch_output", limit=1)]
    assert {done.output_file_id, done.error_file_id} <= set(listed)
    alice.files.delete(done.output_file_id)
    with pytest.raises(openai.NotFoundError):
        alice.files.content(done.output_file_id)
    later = alice.batches.retrieve(done.id)
    assert (later.output_file_id, later.error_file_id) == (None, done.error_file_id)


def test_batch_has_no_file_of_which_there_would_be_no_line(alice: OpenAI) -> None:
    good = batch(alice, "a")
    assert good.output_file_id and good.error_file_id is None
    bad = batch(alice, "refuse always")
    assert bad.output_file_id is None and bad.error_file_id


def test_input_may_be_deleted_while_its_batches_run(shared: Town, alice: OpenAI) -> None:
    file = alice.files.create(file=lines("hold a", "hold b"), purpose="batch")
    shared.end.let_go.clear()
    made = [
        alice.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        for _ in range(2)
    ]  # fmt: skip
    alice.files.delete(file.id)
    assert not (shared.box.data / "files" / file.id).exists()
    assert {batch.input_file_id for batch in made} == {file.id}
    shared.end.let_go.set()
    for one in made:
        done = ended(alice, one.id)
        assert done.output_file_id is not None
        output = parse_lines(alice.files.content(done.output_file_id).read())
        assert [line["custom_id"] for line in output] == ["0", "1"]


def test_output_of_a_batch_expires_when_it_was_asked_to(alice: OpenAI) -> None:
    done = batch(alice, "a", output_expires_after={"anchor": "created_at", "seconds": 3600})
    assert done.output_file_id is not None
    about: FileObject = alice.files.retrieve(done.output_file_id)
    assert about.expires_at is not None and about.expires_at - about.created_at == 3600


def test_cancelled_batch_says_of_each_record_that_it_was_not_reached(shared: Town, alice: OpenAI) -> None:
    file = alice.files.create(file=lines("hold a", "hold b"), purpose="batch")
    shared.end.let_go.clear()
    try:
        made = alice.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )  # fmt: skip
        alice.batches.cancel(made.id)
        done = ended(alice, made.id)
    finally:
        shared.end.let_go.set()
    assert done.status == "cancelled" and done.output_file_id is None and done.error_file_id is not None
    content = alice.files.content(done.error_file_id).read()
    told = parse_lines(content)
    assert [(line["custom_id"], line["response"], line["error"]["code"]) for line in told] == [
        ("0", None, "batch_cancelled"),
        ("1", None, "batch_cancelled"),
    ]
    assert alice.files.retrieve(done.error_file_id).bytes == len(content)


def test_files_are_there_after_the_service_was_killed_and_nothing_else(tmp_path: Path) -> None:
    with town(tmp_path) as place:
        with sdk(place, "alice") as client:
            file = client.files.create(file=b"{}\n", purpose="batch")
        for process in [found for found in place.box.processes() if "serve" in found.cmdline()]:
            process.kill()
            process.wait(PATIENCE_S)
        (place.box.data / "files" / ("file-" + "0" * 32)).write_bytes(b"nobody's")
        assert place.box.freight("serve", "--background").status == 0
        place.url = place.found()
        assert contents(place) == {file.id}
        with sdk(place, "alice") as client:
            assert client.files.content(file.id).read() == b"{}\n"
