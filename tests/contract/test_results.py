"""The results file: its lines, whose bytes they are, and what stands there when there is no answer."""

import json
import re
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final

import pytest

from bench.simengine.oddities import EXACT_BODY
from tests.contract.scripted import OK, Reply, scripted
from tests.harness import Box, Engine, Finished, Json, chat, code, engine

HUGE: Final = ("<p>Ünïcödé 🚀</p>\r\n" * 400).encode()
ODD_ID: Final = rb'"\u0061\/b \ud83d\ude00 \"q\""'
PROMPTS: Final = {
    "exact": "STUB:bytes-exact",
    "lines": "STUB:200-two-lines",
    "infinity": "STUB:200-neg-infinity",
    "refused": "STUB:400-unsupported-param",
    "broken": "STUB:502-html-always",
    "html": "STUB:200-html",
    "error": "STUB:200-error-body",
    "choices": "STUB:200-no-choices",
    "surrogate": "STUB:reply-lone-surrogate",
}


def lines() -> list[Json | bytes]:
    """Return the input: good and bad records, with blank lines between."""
    odd = b'{"custom_id": ' + ODD_ID + b', "body": {"messages":[{"role":"user","content":"hi"}]}}'
    return [
        *(chat(name, text) for name, text in PROMPTS.items()),
        b"",
        odd,
        b"  \t",
        {"custom_id": "bad", "method": "GET", "body": {"messages": []}},
        {"body": {"messages": []}},
        {"custom_id": "last", "body": {"prompt": "hello", "n": 2}, "url": "/v1/completions"},
    ]


@dataclass(frozen=True)
class Written:
    """One run, and the file that it wrote."""

    done: Finished
    raw: list[bytes]
    parsed: dict[str | None, Json]
    received: list[tuple[str, bytes]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Generator[Written]:
    """Run a file of every kind of record once."""
    folder = tmp_path_factory.mktemp("results")
    box = Box(folder)
    box.write("in.jsonl", lines())
    with engine(folder / "engine") as sim:
        done = box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url)
        raw = (folder / "out.jsonl").read_bytes().split(b"\n")
        yield Written(done, raw[:-1], {line["custom_id"]: line for line in box.results()}, sim.received())


def body_bytes(written: Written, number: int) -> bytes:
    """Return the bytes of a line's response body."""
    match = re.search(rb'"body":(.*)\},"error":', written.raw[number])
    assert match
    return match.group(1)


def test_every_line_that_is_not_blank_has_one_line_in_order(written: Written) -> None:
    assert written.done.status == 0
    assert list(written.parsed) == [*PROMPTS, json.loads(ODD_ID), "bad", None, "last"]
    assert len(written.raw) == len(written.parsed)
    jobs = {line["id"][:36] for line in written.parsed.values()}
    assert len(jobs) == 1
    assert str(uuid.UUID(jobs.pop()))
    assert [line["id"][36:] for line in written.parsed.values()] == [f"-{i}" for i in range(len(written.parsed))]


def test_lines_have_the_shape_that_readers_of_batches_know(written: Written) -> None:
    for line in written.parsed.values():
        assert list(line) == ["id", "custom_id", "response", "error"]
        if line["response"] is not None:
            assert list(line["response"]) == ["status_code", "request_id", "body"]
            assert line["response"]["request_id"]
        if line["error"] is None:
            assert line["response"]["status_code"] == 200
        else:
            assert list(line["error"])[:2] == ["code", "message"]
            assert line["error"]["message"]


def test_custom_id_is_carried_as_it_was_written(written: Written) -> None:
    assert b'"custom_id":' + ODD_ID + b',"response"' in written.raw[len(PROMPTS)]


def test_answers_are_the_engines_own_bytes(written: Written) -> None:
    assert body_bytes(written, 0) == EXACT_BODY
    assert rb"half \ud835 sign" in written.raw[list(PROMPTS).index("surrogate")]
    assert written.parsed["last"]["response"]["body"]["choices"][1]["index"] == 1


def test_answer_that_is_not_one_line_of_strict_json_is_written_again_as_such(written: Written) -> None:
    spread = written.parsed["lines"]["response"]["body"]
    assert spread["choices"][0]["message"]["content"] == "ok"
    assert written.parsed["lines"]["error"] is None
    choice = written.parsed["infinity"]["response"]["body"]["choices"][0]
    assert choice["logprobs"]["content"][0]["logprob"] is None


def test_refusals_and_failures_keep_what_the_engine_said(written: Written) -> None:
    refused, broken = written.parsed["refused"], written.parsed["broken"]
    assert (code(refused), refused["response"]["status_code"]) == ("InferenceFailed", 400)
    assert refused["response"]["body"]["error"]["param"] == "logit_bias"
    assert "unsupported parameter" in refused["error"]["message"]
    assert (code(broken), broken["response"]["status_code"]) == ("InferenceFailed", 502)
    assert broken["response"]["body"].startswith("<html>")


@pytest.mark.parametrize("name", ["html", "error", "choices"])
def test_answer_that_is_none_is_an_error(written: Written, name: str) -> None:
    assert code(written.parsed[name]) == "invalid_engine_response"
    assert written.parsed[name]["response"] is None


def test_bad_lines_say_their_number_and_null_where_the_id_is_unknown(written: Written) -> None:
    bad = written.parsed["bad"]
    assert (code(bad), bad["error"]["line"], bad["response"]) == ("invalid_method", len(PROMPTS) + 4, None)
    nameless = written.parsed[None]
    assert (code(nameless), nameless["error"]["line"]) == ("missing_custom_id", len(PROMPTS) + 5)
    assert {"line"} <= set(bad["error"])
    assert all("line" not in (written.parsed[name]["error"] or {}) for name in PROMPTS)


def test_bodies_reach_the_engine_unchanged_but_for_the_model(written: Written) -> None:
    sent = {body for _, body in written.received}
    for record in (line for line in lines()[: len(PROMPTS)] if isinstance(line, dict)):
        whole = json.dumps(record["body"], separators=(",", ":")).encode()
        assert b'{"model":"local-model",' + whole[1:] in sent
    assert b'{"model":"local-model","messages":[{"role":"user","content":"hi"}]}' in sent


def test_last_line_counts_the_failures_and_gives_the_commonest_reason(written: Written) -> None:
    total = len(written.parsed)
    assert written.done.last_line().startswith(f"7 of {total} failed: 3 × invalid_engine_response: the engine answered")
    assert f"{total - 7} of {total} records answered" in written.done.stderr
    assert "tokens: " in written.done.stderr


def test_odd_bodies_reach_the_engine_byte_for_byte(box: Box, sim: Engine) -> None:
    message = rb'"messages" : [ {"content":"caf\u00e9 \/ \ud83d caf' + "é".encode() + rb' %d","role":"user"} ]'
    bodies = [
        b'{  "seed":18446744073709551616 ,"temperature":1.0E+2,"x":-0.0, ' + message % 0 + b" }",
        b'{"max_tokens":8,"max_tokens":600,' + message % 1 + b"}",
        b'{"model":"local-model","top_p":0.10,' + message % 2 + b"}",
        b'{"z":[1e-07,{"b":null,"a":{}}],' + message % 3 + b',"model" : "local-model"}',
        b'{"mod\\u0065l":"local-model",' + message % 4 + b"}",
    ]
    box.write("in.jsonl", [b'{"custom_id":"%d","body":%s}' % (n, body) for n, body in enumerate(bodies)])
    assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", sim.url).status == 0
    assert [code(line) for line in box.results()] == [None] * 5
    expected = [b'{"model":"local-model",' + body[1:] if b"mod" not in body else body for body in bodies]
    assert sorted(body for _, body in sim.received()) == sorted(expected)


def test_alias_is_rewritten_and_nothing_else(box: Box, tmp_path: Any) -> None:
    body = b'{"seed":1.50 , "model":"%s","messages":[{"role":"user","content":"\\"model\\":\\"small\\" %s"}]}'
    names = [b"small", b"gpt-4o-mini", b"local-model"]
    box.write("in.jsonl", [b'{"custom_id":"%s","body":%s}' % (name, body % (name, name)) for name in names])
    with engine(tmp_path / "engine") as sim:
        box.configure(f'[models.small]\nengine="endpoint"\nsource="{sim.url}"\naliases=["gpt-4o-mini"]\n')
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", "small").status == 0
        assert [code(line) for line in box.results()] == [None] * 3
        assert {received for _, received in sim.received()} == {body % (b"local-model", name) for name in names}


def test_body_that_is_not_json_is_kept_in_part(box: Box) -> None:
    box.write("in.jsonl", [chat("a", "huge"), chat("b", "id")])

    def answer(text: str, _: int) -> Reply:
        return Reply(404, HUGE) if text == "huge" else Reply(headers={"x-request-id": "req-77"})

    with scripted(answer) as server:
        assert box.freight("run", "in.jsonl", "-o", "out.jsonl", "--model", server.url).status == 0
    first, second = box.results()
    kept = first["response"]["body"]
    assert HUGE.decode().startswith(kept.rstrip("\ufffd"))
    assert 4000 <= len(kept.encode()) <= 4096
    assert second["response"]["request_id"] == "req-77"
    assert second["response"]["body"] == json.loads(OK.body)
