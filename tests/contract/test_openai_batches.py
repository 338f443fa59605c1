"""Batches and models of the OpenAI API, asked for by OpenAI's own client."""

import json
from collections.abc import Callable, Generator
from typing import Any, Final

import openai
import pytest
from openai import OpenAI
from openai.types import Batch
from pydantic import BaseModel

from tests.contract.town import MODEL, Town, town
from tests.harness import Json, chat, code, content, parse_lines, wait_until
from tests.service import chats as plain_chats

ENDPOINT: Final = "/v1/chat/completions"
ENDS: Final = ("completed", "failed", "cancelled", "expired")
# Models that are listed and never run.
OTHERS: Final = """
[limits]
active_jobs = 100
requests = 10000
records = 8
[models.other]
engine = "command"
command = ["serve", "{socket}"]
aliases = ["lab/alias:1"]
[models.secret]
engine = "command"
command = ["serve", "{socket}"]
groups = ["few"]
"""
_CLIENTS: Final[dict[tuple[str, str], OpenAI]] = {}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    with town(tmp_path_factory.mktemp("town"), OTHERS) as made:
        yield made
    for client in _CLIENTS.values():
        client.close()


def sdk(place: Town, who: str = "alice") -> OpenAI:
    """Return somebody's client; each is made once."""
    known = (place.url, who)
    if known not in _CLIENTS:
        http = openai.DefaultHttpxClient(trust_env=False)
        _CLIENTS[known] = OpenAI(base_url=f"{place.url}/v1", api_key=place.tokens[who], max_retries=0, http_client=http)
    return _CLIENTS[known]


def chats(*texts: str) -> list[Json]:
    """Return a chat record for each text, each of which names the model."""
    return plain_chats(*texts, model=MODEL)


def jsonl(*records: Json | bytes) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in records)


def sent(client: OpenAI, content: bytes) -> str:
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def made(client: OpenAI, *records: Json | bytes, endpoint: str = ENDPOINT, **options: Any) -> Batch:
    return client.batches.create(
        input_file_id=sent(client, jsonl(*records)),
        endpoint=endpoint,  # type: ignore[arg-type] - OpenAI has other endpoints.
        **{"completion_window": "24h", **options},
    )


def ended(client: OpenAI, batch: Batch) -> Batch:
    """Wait until a batch has ended, and return it."""
    return reached(client, batch, *ENDS)


def reached(client: OpenAI, batch: Batch, *statuses: str) -> Batch:
    seen = [batch]

    def look() -> bool:
        seen[:] = [client.batches.retrieve(batch.id)]
        return seen[0].status in statuses

    wait_until(look, f"{batch.id} is {statuses}")
    return seen[0]


def faults(batch: Batch) -> list[tuple[str | None, int | None, str | None]]:
    assert batch.errors is not None and batch.errors.data is not None and batch.errors.object == "list"
    assert all(each.message for each in batch.errors.data)
    return [(each.code, each.line, each.param) for each in batch.errors.data]


def test_a_file_becomes_a_batch_and_its_answers_and_errors_two_files(place: Town) -> None:
    client = sdk(place)
    file = sent(client, jsonl(*chats("a", "refuse always", "c")))
    batch = client.batches.create(
        input_file_id=file, endpoint=ENDPOINT, completion_window="24h", metadata={"run": "one"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )  # fmt: skip
    assert batch.status == "validating" or batch.in_progress_at
    assert batch.id.startswith("batch_") and (batch.input_file_id, batch.metadata) == (file, {"run": "one"})
    assert batch.expires_at == batch.created_at + 86_400
    batch = ended(client, batch)

    assert (batch.status, batch.model, batch.endpoint, batch.errors) == ("completed", MODEL, ENDPOINT, None)
    assert batch.request_counts is not None and batch.usage is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (6, 4, 10)
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert (batch.failed_at, batch.cancelled_at, batch.cancelling_at, batch.expired_at) == (None, None, None, None)
    assert batch.output_file_id and batch.error_file_id
    answers = parse_lines(client.files.content(batch.output_file_id).content)
    assert [(line["custom_id"], content(line), line["error"]) for line in answers] == [
        ("0", "a, 1", None),
        ("2", "c, 1", None),
    ]
    errors = parse_lines(client.files.content(batch.error_file_id).content)
    assert [(line["custom_id"], line["response"]["status_code"], line["error"]) for line in errors] == [
        ("1", 400, None)
    ]
    expires_at = client.files.retrieve(batch.output_file_id).expires_at
    assert expires_at and abs(expires_at - batch.completed_at - 3600) <= 1


def test_a_batch_has_the_fields_of_the_sdk_and_no_others(place: Town) -> None:
    client = sdk(place)
    shown = ended(client, made(client, *chats("a", "refuse always")))
    failed = ended(client, made(client, b"{"))
    for batch in (shown, failed):
        raw = place.as_("alice", "GET", f"/v1/batches/{batch.id}").text
        # Strictly: no text for a number.
        assert is_exact(Batch.model_validate_json(raw, strict=True)), raw


def is_exact(shown: BaseModel) -> bool:
    """Return whether all of a model's fields were there and nothing else was, also further down."""
    if shown.model_extra or shown.model_fields_set != set(type(shown).model_fields):
        return False
    values = [getattr(shown, name) for name in shown.model_fields_set]
    below = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return all(is_exact(each) for each in below if isinstance(each, BaseModel))


def test_any_bad_line_fails_the_batch_and_each_is_told_by_its_line(place: Town) -> None:
    client = sdk(place)
    batch = made(
        client,
        chat("a", "a", model=MODEL),
        b"",
        b'{"custom_id": "b", ',
        {**chat("c"), "url": "/v1/embeddings"},
        {**chat("d"), "url": "/v1/elsewhere"},
        chat("a", "again"),
        {**chat("e", model="another")},
    )
    batch = ended(client, batch)
    assert batch.status == "failed" and batch.failed_at and not batch.in_progress_at
    assert faults(batch) == [
        ("invalid_json", 3, None),
        ("invalid_url", 4, "url"),
        ("invalid_url", 5, "url"),
        ("duplicate_custom_id", 6, "custom_id"),
        ("model_mismatch", 7, "body.model"),
    ]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert batch.request_counts is not None and batch.request_counts.total == 0
    # Nothing of it ran, and Freight's own API says why there is nothing to have.
    assert place.end.seen["again"] == 0
    job = batch.id.removeprefix("batch_")[:8]
    assert (
        "5 of 6 lines are not valid; line 3: invalid_json"
        in place.as_("alice", "GET", f"/api/jobs/{job}").json()["reason"]
    )
    refused = place.as_("alice", "GET", f"/api/jobs/{job}/results")
    assert refused.status_code == 409 and "line 3: invalid_json" in refused.text


@pytest.mark.parametrize(
    ("content", "reason", "words"),
    [
        (b"", "empty_file", "no request"),
        (b"\n \n", "empty_file", "no request"),
        (jsonl(chat("a")), "model_not_found", "no record names a model"),
        (jsonl(chat("a", model="nobody")), "model_not_found", "there is no model nobody"),
        (jsonl(chat("a", model="nobody")), "model_not_found", "lab/alias:1"),
        (jsonl(chat("a", model="secret")), "model_not_found", "groups that you are not in"),
        (jsonl(chat("a", model="/etc/hosts")), "model_not_found", "there is no model"),
        (jsonl(*chats(*"abcdefghi")), "file_too_large", "more than 8 records"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_run_fails_its_batch(place: Town, content: bytes, reason: str, words: str) -> None:
    client = sdk(place)
    file = sent(client, content)
    batch = client.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h")
    batch = ended(client, batch)
    assert batch.status == "failed" and faults(batch) == [(reason, None, None)]
    assert batch.errors is not None and batch.errors.data and words in (batch.errors.data[0].message or "")


def test_a_model_that_is_not_registered_is_none_for_admins_either(place: Town) -> None:
    client = sdk(place, "carol")
    batch = ended(client, made(client, chat("a", model=place.end.url)))
    assert faults(batch) == [("model_not_found", None, None)]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0s"}, "completion_window"),
        ({"completion_window": "9" * 40 + "d"}, "completion_window"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {"\ud800": ""}}, "metadata"),
        ({"metadata": {"notify": "https://example.org/hook"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "later", "seconds": 3600}}, "output_expires_after"),
        ({"metadata": {"k": "\ud800"}}, "metadata"),
        ({"input_file_id": 1}, "input_file_id"),
        ({"input_file_id": "file-\udfff"}, "input_file_id"),
        ({"endpoint": "\ud800"}, "endpoint"),
        ({"priority": 1}, "priority"),
    ],
)
def test_a_request_that_cannot_be_kept_is_refused_by_its_field(place: Town, options: Json, param: str) -> None:
    file = place.kept("refused", lambda: sent(sdk(place), jsonl(*chats("a"))))
    asked = {"input_file_id": file, "endpoint": ENDPOINT, "completion_window": "24h", **options}
    answer = place.as_(
        "alice", "POST", "/v1/batches", content=json.dumps(asked), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "invalid_request")


def test_a_field_whose_name_is_no_text_is_refused(place: Town) -> None:
    asked = {"input_file_id": "file-none", "endpoint": ENDPOINT, "completion_window": "24h", "\ud800": 1}
    answer = place.as_(
        "alice", "POST", "/v1/batches", content=json.dumps(asked), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text


def test_a_file_that_is_not_there_or_anothers_makes_no_batch(place: Town) -> None:
    others = sent(sdk(place, "bob"), jsonl(*chats("a")))
    for file in ("file-none", others, "../../catalog.db"):
        with pytest.raises(openai.NotFoundError) as refused:
            sdk(place).batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h")
        assert (refused.value.param, refused.value.code) == ("input_file_id", "no_such_file")
    batch = ended(sdk(place), made(sdk(place), *chats("a")))
    assert batch.output_file_id
    with pytest.raises(openai.BadRequestError):
        sdk(place).batches.create(input_file_id=batch.output_file_id, endpoint=ENDPOINT, completion_window="24h")
    assert list((place.box.data / "uploads").iterdir()) == []


def test_as_much_metadata_as_may_be_is_given_back(place: Town) -> None:
    pairs = {f"{number}{'k' * 62}": "é" * 512 for number in range(10, 26)}
    assert len(pairs) == 16
    batch = made(sdk(place), *chats("a"), metadata=pairs)
    assert sdk(place).batches.retrieve(batch.id).metadata == pairs


def test_a_batch_that_runs_can_be_cancelled_and_keeps_what_is_done(place: Town) -> None:
    client = sdk(place)
    place.end.let_go.clear()
    batch = made(client, *chats("done first", "hold on"))
    try:
        wait_until(lambda: _completed(client, batch) == 1, "one is done")
        running = client.batches.retrieve(batch.id)
        assert (running.status, running.output_file_id, running.error_file_id) == ("in_progress", None, None)
        asked = client.batches.cancel(batch.id)
        assert asked.status in ("cancelling", "cancelled") and asked.cancelling_at
        batch = reached(client, batch, "cancelled")
    finally:
        place.end.let_go.set()
    assert batch.cancelled_at and batch.output_file_id and batch.error_file_id
    assert [line["custom_id"] for line in parse_lines(client.files.content(batch.output_file_id).content)][:1] == ["0"]
    assert {code(line) for line in parse_lines(client.files.content(batch.error_file_id).content)} == {
        "batch_cancelled"
    }
    assert client.batches.cancel(batch.id).status == "cancelled"
    done = ended(client, made(client, *chats("a")))
    with pytest.raises(openai.ConflictError) as refused:
        client.batches.cancel(done.id)
    assert refused.value.code == "wrong_state" and refused.value.response.headers["x-should-retry"] == "false"


def _completed(client: OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return counts.completed if counts else 0


def test_a_key_makes_one_batch_however_often_it_is_sent(place: Town) -> None:
    client = sdk(place)
    files = [sent(client, jsonl(*chats("a"))) for _ in range(2)]

    def create(file: str, **options: Any) -> Batch:
        return client.batches.create(
            input_file_id=file, endpoint=ENDPOINT, completion_window="24h",
            extra_headers={"Idempotency-Key": "once"}, **options,
        )  # fmt: skip

    first = create(files[0])
    assert create(files[0]).id == first.id
    ended(client, first)
    assert create(files[0]).id == first.id
    others: list[Callable[[], Batch]] = [lambda: create(files[1]), lambda: create(files[0], metadata={"a": "b"})]
    for other in others:
        with pytest.raises(openai.ConflictError) as refused:
            other()
        assert refused.value.response.headers["x-should-retry"] == "false"
    assert list((place.box.data / "uploads").iterdir()) == []
    # Bob's keys are his own.
    theirs = sdk(place, "bob").batches.create(
        input_file_id=sent(sdk(place, "bob"), jsonl(*chats("a"))), endpoint=ENDPOINT, completion_window="24h",
        extra_headers={"Idempotency-Key": "once"},
    )  # fmt: skip
    assert theirs.id != first.id


def test_a_list_has_all_of_ones_own_batches_and_no_others(place: Town) -> None:
    client = OpenAI(
        base_url=f"{place.url}/v1", api_key=place.token("dora"), max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )  # fmt: skip
    with client:
        empty = client.batches.list()
        assert (empty.data, empty.has_more) == ([], False)
        file = sent(client, jsonl(*chats("a"), b"{"))
        ids = [
            client.batches.create(input_file_id=file, endpoint=ENDPOINT, completion_window="24h").id for _ in range(25)
        ]
        made(sdk(place, "bob"), *chats("a"))
        # Jobs of other APIs are none.
        with place.client(token=client.api_key) as own:
            own.submit(jsonl(*chats("a")), model=MODEL)
        newest = list(reversed(ids))
        assert [each.id for each in client.batches.list(limit=10)] == newest
        assert [each.id for each in client.batches.list()] == newest
        page = client.batches.list()
        assert ([each.id for each in page.data], page.has_more, page.last_id) == (newest[:20], True, newest[19])
        page = client.batches.list(limit=5, after=newest[19])
        assert ([each.id for each in page.data], page.has_more) == (newest[20:], False)
        wait_until(lambda: all(each.status == "failed" for each in client.batches.list(limit=100)), "all have failed")
        assert all(faults(each) == [("invalid_json", 2, None)] for each in client.batches.list())
        for limit in (0, 101):
            with pytest.raises(openai.BadRequestError):
                client.batches.list(limit=limit)
        bobs = sdk(place, "bob").batches.list(limit=1).data[0].id
        for after in ("batch_none", bobs):
            with pytest.raises(openai.NotFoundError) as refused:
                client.batches.list(after=after)
            assert refused.value.param == "after"


def test_anothers_batch_is_not_there(place: Town) -> None:
    batch = ended(sdk(place), made(sdk(place), *chats("a")))
    job = place.job("alice")
    # An admin's requests here are about their own as well.
    for who in ("bob", "carol"):
        for name in (batch.id, "batch_", f"batch_{job.replace('-', '')}", job, batch.id.removeprefix("batch_")):
            for attempt in (sdk(place, who).batches.retrieve, sdk(place, who).batches.cancel):
                with pytest.raises(openai.NotFoundError) as refused:
                    attempt(name)
                assert refused.value.code == "no_such_job"
    with pytest.raises(openai.NotFoundError):
        sdk(place).batches.retrieve(f"batch_{job.replace('-', '')}")
    # The machine's owner and admins have it as a job.
    assert place.as_("carol", "GET", f"/api/jobs/{batch.id.removeprefix('batch_')[:8]}").status_code == 200


def test_an_embedding_batch_takes_no_chats(place: Town) -> None:
    client = sdk(place)
    batch = ended(client, made(client, *chats("a"), endpoint="/v1/embeddings"))
    assert faults(batch) == [("invalid_url", 1, "url")]


def test_models_are_listed_by_all_of_their_names_for_those_who_may_run_them(place: Town) -> None:
    listed = {model.id: model for model in sdk(place).models.list()}
    assert {MODEL, "other", "lab/alias:1"} <= set(listed) and "secret" not in listed
    assert {(model.object, model.owned_by) for model in listed.values()} == {("model", "freight")}
    assert "secret" in {model.id for model in sdk(place, "carol").models.list()}
    for name in ("other", "lab/alias:1"):
        one = sdk(place).models.retrieve(name)
        assert one == listed[name] and one.created > 1_700_000_000
    for name in ("secret", "nobody", "lab"):
        with pytest.raises(openai.NotFoundError) as refused:
            sdk(place).models.retrieve(name)
        assert refused.value.code == "model_not_found"


@pytest.fixture
def enforced(place: Town) -> Generator[Town]:
    """Give the place with windows that are enforced for batches that are made meanwhile."""
    before = place.box.config.read_text()
    place.box.config.write_text(before + "\n[openai]\nenforce_window = true\n")
    place.end.let_go.clear()
    yield place
    place.box.config.write_text(before)
    place.end.let_go.set()


def test_a_window_that_is_enforced_ends_a_batch_that_waits_or_runs(enforced: Town) -> None:
    client = sdk(enforced)
    slow = made(client, *chats("first", "hold on"), completion_window="2s")
    late = made(client, *chats("never"), completion_window="1ms")
    late = ended(client, late)
    slow = ended(client, slow)
    assert (late.status, slow.status) == ("expired", "expired")
    assert late.expired_at and late.error_file_id and late.output_file_id is None
    (line,) = parse_lines(client.files.content(late.error_file_id).content)
    assert (code(line), enforced.end.seen["never"]) == ("batch_expired", 0)
    job = enforced.as_("alice", "GET", f"/api/jobs/{late.id.removeprefix('batch_')[:8]}").json()
    assert job["reason"] == "the batch's completion window (1ms) is over"
    # To go on with it is to want it all the same.
    resumed = enforced.as_("alice", "POST", f"/api/jobs/{job['id']}/resume")
    assert resumed.status_code == 200, resumed.text
    again = reached(client, late, "completed")
    assert again.expired_at is None and again.completed_at and again.output_file_id
