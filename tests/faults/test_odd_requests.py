"""The service on TCP among peers that send what is no HTTP, or oddly cut: they are answered once, or hung up on."""

import asyncio
from pathlib import Path
from typing import Final

from freight.api.connection import MOST_HEAD_BYTES, MOST_HEADERS, MOST_PIPELINED
from tests.faults.tcp import (
    HELLO,
    HOST,
    SHORT,
    Echo,
    exchanged,
    peer,
    resident,
    run,
    serving,
    until,
)

BOMBS: Final[dict[str, tuple[int, bytes]]] = {
    "many headers": (431, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * (MOST_HEADERS + 1) + HOST),
    "one long header": (431, b"GET / HTTP/1.1\r\nX: " + b"y" * 5_000_000),
    "one long name": (431, b"GET / HTTP/1.1\r\n" + b"y" * 5_000_000),
    "long target": (431, b"GET /" + b"y" * 5_000_000),
    "long together": (
        431, b"GET / HTTP/1.1\r\n" + (b"X: " + b"y" * 1000 + b"\r\n") * (MOST_HEAD_BYTES // 1000 + 1) + HOST,
    ),
    "long chunk extension": (
        400, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + b"1;" + b"y" * 5_000_000,
    ),
    "long trailer": (
        400, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + b"0\r\nX: " + b"y" * 5_000_000,
    ),
    "noise": (400, bytes(range(256)) * 40),
    "TLS": (400, bytes.fromhex("160301020001000100fc0303")),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "tunnel": (400, b"CONNECT elsewhere:443 HTTP/1.1\r\n" + HOST),
    "no path": (400, b"GET * HTTP/1.1\r\n" + HOST),
    "no ASCII": (400, b"GET /\xff\xfe HTTP/1.1\r\n" + HOST),
    "two lengths": (400, b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n" + HOST + b"ab"),
    "length and chunks": (
        400, b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n" + HOST + b"0\r\n\r\n",
    ),
    "wrong chunk": (400, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + b"zz\r\n"),
    "no number": (400, b"POST / HTTP/1.1\r\nContent-Length: -3\r\n" + HOST),
    "huge number": (400, b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n" + HOST),
    "large form": (413, b"POST /form HTTP/1.1\r\nContent-Length: 1000001\r\n" + HOST + b"{}"),
    "large chunked form": (
        413,
        b"POST /form HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST + (b"ffff\r\n" + b"y" * 65535 + b"\r\n") * 40,
    ),
    "no host": (403, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"),
    "two hosts": (403, b"GET / HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\n" + HOST),
    "host of elsewhere": (403, b"GET / HTTP/1.1\r\nConnection: close\r\nHost: evil.example\r\n\r\n"),
    "page of elsewhere": (403, b"GET / HTTP/1.1\r\nConnection: close\r\nOrigin: http://evil.example\r\n" + HOST),
    "page of another port": (403, b"DELETE / HTTP/1.1\r\nConnection: close\r\nOrigin: http://localhost:1\r\n" + HOST),
    "page of nowhere": (403, b"OPTIONS / HTTP/1.1\r\nConnection: close\r\nOrigin: null\r\n" + HOST),
    "own page": (200, b"POST / HTTP/1.1\r\nConnection: close\r\nOrigin: http://localhost\r\n" + HOST),
    "own address": (200, b"GET / HTTP/1.1\r\nConnection: close\r\nHost: 127.0.0.1:8400\r\n\r\n"),
    "upgrade": (200, b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n" + HOST + b"\x81\x85junk"),
    "healthy": (200, b"GET /healthz HTTP/1.0\r\nOrigin: http://evil.example\r\n\r\n"),
    "healthy by force": (405, b"DELETE /healthz HTTP/1.0\r\n\r\n"),
}  # fmt: skip


def test_bombs_and_garbage_are_answered_once_and_hung_up_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, Echo()) as (server, port):
            before = resident()
            answers = dict(
                zip(BOMBS, await asyncio.gather(*(exchanged(port, raw) for _, raw in BOMBS.values())), strict=True)
            )
            for name, (status, _) in BOMBS.items():
                assert answers[name].startswith(b"HTTP/1.1 %d " % status), (name, answers[name])
                assert answers[name].count(b"HTTP/1.1 ") == 1, (name, answers[name])
                assert b"uvicorn" not in answers[name].lower()
            await until(lambda: not server.server_state.connections)
            assert resident() - before < 64 << 20
            assert b"/hello 0" in await exchanged(port, HELLO.replace(b"Host", b"Connection: close\r\nHost"))

    run(scenario)


def test_pipelined_requests_are_answered_in_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        last = b"GET /last HTTP/1.1\r\nConnection: close\r\n" + HOST
        form = b"POST /form HTTP/1.1\r\nContent-Length: 3\r\n" + HOST + b"abc"
        async with serving(tmp_path, Echo()) as (_, port):
            answer = await exchanged(port, HELLO + form + HELLO + last)
            assert [word for word in answer.split() if word.startswith(b"/")] == [
                b"/hello",
                b"/form",
                b"/hello",
                b"/last",
            ]
            # What cannot be understood does not cost those before it their answers.
            answer = await exchanged(port, HELLO * 3 + b"\0junk\r\n" * 100)
            assert (answer.count(b" 200 "), answer.count(b"/hello 0")) == (3, 3)
            # Nor can one connection have any number of requests wait.
            answer = await exchanged(port, HELLO * 10_000)
            assert MOST_PIPELINED <= answer.count(b"/hello 0") <= MOST_PIPELINED + 1

    run(scenario)


def test_half_closed_connection_gets_its_answer_and_half_a_request_gets_none(tmp_path: Path) -> None:
    async def half_closed(port: int, raw: bytes) -> bytes:
        async with peer(port, raw) as made:
            made.writer.write_eof()
            return await made.rest()

    async def scenario() -> None:
        app = Echo()
        async with serving(tmp_path, app) as (server, port):
            assert b"/hello 0" in await half_closed(port, HELLO)
            assert (await half_closed(port, HELLO * 3)).count(b"/hello 0") == 3
            async with peer(port, HELLO.replace(b"hello", b"wait")) as made:
                made.writer.write_eof()
                await app.begun.wait()
                app.go_on.set()
                assert b"/wait 0" in await made.rest()
            assert await half_closed(port, b"") == b""
            assert await half_closed(port, b"GET /") == b""
            assert await half_closed(port, b"POST /form HTTP/1.1\r\nContent-Length: 9\r\n" + HOST + b"abc") == b""
            await until(lambda: app.left == ["/form"] and not server.server_state.connections)

    run(scenario)


def test_half_closed_connection_whose_answer_does_not_come_is_cut(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = Echo()
        async with serving(tmp_path, app, SHORT) as (_, port):
            async with peer(port, HELLO.replace(b"hello", b"wait")) as made:
                made.writer.write_eof()
                assert await made.rest() == b""
            app.go_on.set()

    run(scenario)
