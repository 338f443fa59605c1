"""What the simulated engine reads from the wire, sends over it and writes down."""

import json
import os
import socket
from pathlib import Path

import pytest

from bench.simengine.record import read_record
from tests.unit.simengines import CHAT, Engine, chat_body, running


def test_large_bodies_are_answered_and_recorded_whole(tmp_path: Path) -> None:
    record = tmp_path / "record"
    body = json.dumps(chat_body("word " * (64 * 1024 * 1024 // 5))).encode()
    with running("--record", str(record)) as engine:
        answer = engine.ask("POST", CHAT, body, Expect="100-continue")
        assert answer.json()["usage"]["prompt_tokens"] == 64 * 1024 * 1024 // 5
    ((path, kept),) = read_record(record)
    assert path == CHAT
    assert kept == body


def test_pipelined_requests_and_chunked_bodies_are_understood(engine: Engine) -> None:
    body = json.dumps(chat_body("x")).encode()
    head = b"POST %b HTTP/1.1\r\n" % CHAT.encode()
    plain = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    chunk = b"%x\r\n%b\r\n" % (5, body[:5]) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) - 5, body[5:])
    last = head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk
    with socket.create_connection((engine.host, engine.port)) as link:
        link.sendall(plain * 3 + last)
        received = b"".join(iter(lambda: link.recv(65536), b""))
    assert received.count(b"HTTP/1.1 200 OK\r\n") == received.count(b'"content":"ok"') == 4


def test_what_is_not_http_gets_a_400(engine: Engine) -> None:
    with socket.create_connection((engine.host, engine.port)) as link:
        link.sendall(b"hello there\r\n\r\n")
        received = b"".join(iter(lambda: link.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_torn_tail_is_left_out_and_overwritten(tmp_path: Path, cut: int) -> None:
    record = tmp_path / "record"
    with running("--record", str(record)) as engine:
        engine.ask("POST", "/v1/nothing?query=1", b"\x00\xff not json")
        engine.ask("POST", CHAT, b"torn")
    os.truncate(record, record.stat().st_size - cut)
    assert read_record(record) == [("/v1/nothing", b"\x00\xff not json")]
    with running("--record", str(record)) as engine:
        engine.ask("POST", CHAT, b"next")
    assert read_record(record) == [("/v1/nothing", b"\x00\xff not json"), (CHAT, b"next")]


def test_two_engines_share_a_record_file(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with running("--record", str(record)) as one, running("--record", str(record)) as two:
        for text in (b"1", b"2"):
            one.ask("POST", CHAT, text)
            two.ask("POST", CHAT, text)
    assert read_record(record) == [(CHAT, b"1"), (CHAT, b"1"), (CHAT, b"2"), (CHAT, b"2")]
