"""The input file: what is accepted, what refuses it as a whole, and what each bad line becomes."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.contract.casetable import check_refused
from tests.contract.scenario import side_by_side
from tests.harness import Box, Engine, Json, chat, code, engine, engine_command, model_toml

USER: Final = [{"role": "user", "content": "hi"}]
NOWHERE: Final = "http://127.0.0.1:9"


def line(custom_id: Any, body: Any = None, **fields: Any) -> Json:
    """Return a record as an object, whatever is in it."""
    return {"custom_id": custom_id, "body": {"messages": USER} if body is None else body, **fields}


def image(url: str) -> Json:
    """Return a body that shows an image."""
    content = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}]}


def nested(levels: int) -> bytes:
    """Return a record that nests this deep."""
    # The record and its body are two levels.
    inner = levels - 2
    return b'{"custom_id":"deep%d","body":{"prompt":"x","d":%s%s}}' % (levels, b"[" * inner, b"]" * inner)


# Bad lines and their codes, after twenty good ones, where a bad line refuses nothing.
BAD: Final[list[tuple[Json | bytes, str]]] = [
    (b'{"custom_id":"a",}', "invalid_json"),
    (b'{"custom_id":"a","body":{"prompt":"x","t":NaN}}', "invalid_json"),
    (b'{"custom_id":"a","body":{"prompt":"x","t":-Infinity}}', "invalid_json"),
    (b'{"custom_id":"a\xff","body":{"prompt":"x"}}', "invalid_json"),
    (b'[{"custom_id":"a"}]', "invalid_json"),
    (b'"text"', "invalid_json"),
    (nested(513), "invalid_json"),
    (b'{"custom_id":"a","body":{"prompt":"x"}}{"custom_id":"b","body":{"prompt":"x"}}', "invalid_json"),
    ({"body": {"prompt": "x"}}, "missing_custom_id"),
    (line(None), "missing_custom_id"),
    (line(7), "invalid_custom_id"),
    (line(["a"]), "invalid_custom_id"),
    (line(""), "invalid_custom_id"),
    (line("x" * 513), "invalid_custom_id"),
    (line("good-3"), "duplicate_custom_id"),
    (b'{"custom_id":"g\\u006fod-4","body":{"prompt":"x"}}', "duplicate_custom_id"),
    (line("b1", "text"), "invalid_body"),
    (line("b2", ["text"]), "invalid_body"),
    ({"custom_id": "b3"}, "invalid_body"),
    (line("u1", url="/v1/images"), "invalid_url"),
    (line("u2", url="http://example.com/v1/chat/completions"), "invalid_url"),
    (line("u3", {"text": "x"}), "invalid_url"),
    (line("m1", method="GET"), "invalid_method"),
    (line("m2", method=3), "invalid_method"),
    (line("i1", image("http://allowed.example/a.png")), "media_not_allowed"),
    (line("i2", image("https://elsewhere.example/a.png")), "media_not_allowed"),
    (line("i3", image("file:///etc/passwd")), "media_not_allowed"),
    (line("i4", {"messages": USER, "x": [{"deep": {"input_audio": {"url": "https://a.b/c"}}}]}), "media_not_allowed"),
    (line("i5", {"messages": USER, "file": {"file_url": "/etc/passwd"}}), "media_not_allowed"),
    (line("o1", {"model": "another", "messages": USER}), "model_mismatch"),
    (line("s1", {"messages": USER, "stream": True}), "streaming_unsupported"),
    (b'{"custom_id":"long","body":{"prompt":"' + b"x" * 20_000 + b'"}}', "payload_too_large"),
]
# Good lines of every kind.
GOOD: Final[list[Json | bytes]] = [
    *(chat(f"good-{n}", f"text {n}") for n in range(1, 14)),
    line("c" * 512),
    line("post", method="post"),
    line("data", image("data:image/png;base64,AAAA")),
    line("host", image("https://Allowed.example/a.png")),
    line("unstreamed", {"messages": USER, "stream": False}),
    nested(512),
    b'{"custom_id":"lone \\ud83d","body":{"prompt":"half \\ud83d"}}',
]
KNOWS_NO_ID: Final = ("invalid_json", "missing_custom_id", "invalid_custom_id", "payload_too_large")


@side_by_side
def test_every_kind_of_bad_line_has_its_code_and_the_rest_runs(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [*GOOD, *(bad for bad, _ in BAD)])
    settings = {"FREIGHT_LIMITS_RECORD_BYTES": "16KiB", "FREIGHT_MEDIA_HOSTS": "allowed.example"}
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url, **settings)
    assert done.status == 0
    results = box.results()
    assert [code(found) for found in results] == [None] * len(GOOD) + [name for _, name in BAD]
    for number, (found, (bad, name)) in enumerate(zip(results[len(GOOD) :], BAD, strict=True), start=len(GOOD) + 1):
        assert found["error"]["line"] == number
        assert found["response"] is None
        record = {"custom_id": None} if name in KNOWS_NO_ID else json.loads(bad) if isinstance(bad, bytes) else bad
        assert found["custom_id"] == record["custom_id"]
    assert done.last_line().startswith(f"{len(BAD)} of {len(GOOD) + len(BAD)} failed: 8 × invalid_json: ")
    # The first of two uses is the one that runs.
    assert "also used on line 3" in results[len(GOOD) + 14]["error"]["message"]

    strict = box.freight("run", "in.jsonl", "-o", "strict.jsonl", "--model", sim.url, "--strict", **settings)
    check_refused(box, strict, "strict.jsonl")
    for number, (_, name) in enumerate(BAD, start=len(GOOD) + 1):
        assert f"in.jsonl, line {number}: {name}: " in strict.stderr

    # The validator knows no model, and finds all else.
    found = box.freight("batch", "validate", "in.jsonl", "--json", **settings)
    assert found.status == 2
    report = json.loads(found.stdout)
    assert report["records"] == len(GOOD) + len(BAD)
    expected = [(n, name) for n, (_, name) in enumerate(BAD, len(GOOD) + 1) if name != "model_mismatch"]
    assert [(flaw["line"], flaw["code"]) for flaw in report["problems"]] == expected


@side_by_side
def test_validate_lists_every_problem_by_line_and_runs_nothing(box: Box) -> None:
    box.write("bad.jsonl", [chat("a"), b"", b"{", chat("a"), chat("c", stream=True)])
    found = box.freight("batch", "validate", "bad.jsonl")
    assert found.status == 2
    places = [text.split(": ")[:2] for text in found.stdout.splitlines()]
    assert ["bad.jsonl:3", "invalid_json"] in places
    assert ["bad.jsonl:4", "duplicate_custom_id"] in places
    assert ["bad.jsonl:5", "streaming_unsupported"] in places
    assert "problem" in found.stderr
    text = json.dumps(chat("a"))
    good = box.freight("batch", "validate", "-", stdin=text)
    assert (good.status, good.stdout) == (0, "")
    assert "1 records, all good" in good.stderr
    good = box.freight("batch", "validate", "-", "--json", stdin=text)
    assert json.loads(good.stdout) == {"file": "standard input", "records": 1, "problems": []}
    missing = box.freight("batch", "validate", "nope.jsonl")
    assert (missing.status, missing.last_line().startswith("hint: ")) == (2, True)
    assert sorted(path.name for path in box.folder.iterdir()) == ["bad.jsonl", "config.toml"]


# What refuses a file as a whole: its bytes, and what the refusal says.
REFUSED: Final[dict[str, tuple[bytes, str]]] = {
    "array": (b'\xef\xbb\xbf \n[{"custom_id":"a"}]', "looks like a JSON array. Freight reads JSONL."),
    "empty": (b"", "is empty"),
    "blank": (b" \n\r\n\t\n", "every line is blank"),
    "gzip": (b"\x1f\x8b\x08\x00", "gzip"),
    "zip": (b"PK\x03\x04abc", "zip"),
    "parquet": (b"PAR1\x15\x04", "Parquet"),
    "utf16-be": ("\ufeff{}".encode("utf-16-be"), "UTF-16"),
    "utf16-without-mark": ('{"custom_id":1}'.encode("utf-16-le"), "UTF-16"),
    "no-ids": (b'{"body":{"prompt":"x"}}\n' * 25, "none of the first 20 records has a custom_id"),
    "bad-json": (json.dumps(chat("a")).encode() + b'\n\n{"custom_id": x}', "line 3, column 15: "),
}


@pytest.mark.parametrize("name", REFUSED)
@side_by_side
def test_file_that_is_not_worth_starting_on_is_refused(name: str, box: Box) -> None:
    content, says = REFUSED[name]
    (box.folder / "in.jsonl").write_bytes(content)
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", NOWHERE)
    check_refused(box, done, "out.jsonl")
    assert says in done.stderr
    assert done.stderr.startswith("error: in.jsonl")


@side_by_side
def test_sample_of_another_model_is_refused_with_the_fix(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat(f"r{n}", model="gpt-4o") for n in range(30)])
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url)
    check_refused(box, done, "out.jsonl")
    assert "gpt-4o" in done.stderr
    assert "--ignore-record-model" in done.last_line()
    assert "alias" in done.last_line()
    assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url, "--ignore-record-model").status == 0
    assert [code(found) for found in box.results()] == [None] * 30


@side_by_side
def test_endpoint_follows_from_the_url_or_the_body(box: Box, folder: Path) -> None:
    rerank = {"query": "q", "documents": ["a", "b"]}
    score = {"text_1": "a", "text_2": "b"}
    expected = {
        "/v1/chat/completions": [line("1"), line("2", url="/v1/chat/completions")],
        "/v1/completions": [line("3", {"prompt": "x"}), line("4", {"prompt": "x"}, url=None)],
        "/v1/embeddings": [line("5", {"input": "x"})],
        "/v1/responses": [line("6", {"input": "x"}, url="/v1/responses")],
        "/v1/rerank": [line("7", rerank, url="/v1/rerank")],
        "/v1/score": [line("8", score, url="/v1/score")],
    }
    box.write("in.jsonl", [record for records in expected.values() for record in records])
    with engine(folder / "engine") as own:
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", own.url).status == 0
        assert [code(found) for found in box.results()] == [None] * 8
        paths = [path for path, _ in own.received()]
    assert {path: paths.count(path) for path in expected} == {path: len(sent) for path, sent in expected.items()}


@side_by_side
def test_small_budgets_are_noted_and_accepted(box: Box, sim: Engine) -> None:
    budgets = [{"max_tokens": 511}, {"max_completion_tokens": 16}, {"max_tokens": 512}, {}]
    box.write("in.jsonl", [chat(f"{n}", **budget) for n, budget in enumerate(budgets)])
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url)
    assert done.status == 0
    assert "note: 2 of the first 4 records allow fewer than 512 tokens" in done.stderr
    assert [code(found) for found in box.results()] == [None] * 4


@side_by_side
def test_limits_of_the_file_refuse_it_whole_and_say_which(box: Box, sim: Engine) -> None:
    box.write("in.jsonl", [chat(f"{n}") for n in range(5)])
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url, FREIGHT_LIMITS_FILE_BYTES="100B")
    check_refused(box, done, "out.jsonl")
    assert "limits.file_bytes" in done.stderr
    # The limit of records is for jobs that come over HTTP.
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url, FREIGHT_LIMITS_RECORDS="2")
    assert done.status == 0


@side_by_side
def test_names_that_fit_a_registered_model(box: Box, folder: Path) -> None:
    command = engine_command(folder)
    box.configure(model_toml("mine", engine="command", command=command, source="/tmp", aliases=["other", "org/name"]))
    records = [
        chat("entry", model="mine"), chat("alias", model="other"), chat("slash", model="org/name"),
        chat("stem", model="tmp"), chat("absent"), chat("foreign", model="foreign"),
    ]  # fmt: skip
    box.write("in.jsonl", records)
    done = box.freight("run", "in.jsonl", "-o", "out.jsonl")
    assert done.status == 0
    assert "no --model given; using mine" in done.stderr.splitlines()[0]
    assert [code(found) for found in box.results()] == [None] * 5 + ["model_mismatch"]
    sent = [json.loads(body)["model"] for _, body in Engine("", folder, None).received()]  # type: ignore[arg-type]
    # Whatever the server calls it, all are sent to the same model.
    assert len(sent) == 5
    assert len(set(sent)) == 1
