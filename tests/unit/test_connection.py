"""The client of model servers on real sockets, against servers that do what a test says, in both event loops."""

import asyncio
import hashlib
import socket
import tracemalloc

import pytest

from freight.engines.base import Address
from freight.engines.client import EngineClient, NeverSent, TookTooLong, TooLarge, Unreachable
from freight.engines.connection import Connection
from freight.engines.pool import Pool
from tests.unit.oddserver import LARGE, OK, PATH, Line, Run, answers, odd_server, once, speaking_first


@pytest.mark.parametrize(
    ("answer", "connections"),
    [
        (OK, 1),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK, 1),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\nX-Request-Id: 1\r\n\r\n", 1),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", 3),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 3),
        (OK + b"!", 3),
        (OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged", 3),
    ],
)
def test_connection_is_used_again_only_after_an_answer_with_an_end_and_nothing_after_it(
    run: Run, answer: bytes, connections: int
) -> None:
    async def main() -> None:
        async with odd_server(answers(answer)) as odd, EngineClient(Address(odd.url)) as client:
            for _ in range(3):
                reply = await client.post(PATH, b"{}", None)
                assert (reply.body, reply.request_id) == (b"" if reply.status == 204 else b"ok", "")
            assert len(odd.lines) == connections

    run(main())


def test_answer_that_ends_with_the_connection_is_whole(run: Run) -> None:
    async def main() -> None:
        async with (
            odd_server(once(b"HTTP/1.1 200 OK\r\nX-Request-Id: a\r\n\r\n", b"o", b"k")) as odd,
            EngineClient(Address(odd.url)) as client,
        ):
            for _ in range(2):
                reply = await client.post(PATH, b"{}", None)
                assert (reply.body, reply.request_id) == (b"ok", "a")
            assert len(odd.lines) == 2

    run(main())


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\n\r\no"])
def test_answer_that_a_reset_ends_is_none(run: Run, head: bytes) -> None:
    async def main() -> None:
        async def play(line: Line) -> None:
            await line.request()
            await line.say(head)
            line.writer.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )
            line.writer.transport.abort()

        async with odd_server(play) as odd, EngineClient(Address(odd.url)) as client:
            with pytest.raises(Unreachable, match=r"the answer broke off|the connection was closed"):
                await client.post(PATH, b"{}", None)

    run(main())


def test_bytes_that_come_later_unasked_end_the_connection_and_are_not_the_next_answer(run: Run) -> None:
    async def main() -> None:
        async def play(line: Line) -> None:
            if len(line.server.lines) > 1:
                await answers(OK)(line)
            await line.request()
            await line.say(OK)
            await go_on.wait()
            await line.say(OK.replace(b"ok", b"no"))
            await line.closed()
            over.set()

        go_on, over = asyncio.Event(), asyncio.Event()
        async with odd_server(play) as odd, EngineClient(Address(odd.url)) as client:
            await client.post(PATH, b"{}", None)
            go_on.set()
            await over.wait()
            assert (await client.post(PATH, b"{}", None)).body == b"ok"
            assert len(odd.lines) == 2

    run(main())


def test_connection_that_is_lost_before_its_first_request_never_saw_it(run: Run) -> None:
    async def main() -> None:
        for play, words in ((hanging_up, "the connection was closed"), (speaking_first(b"220 x\r\n"), "is not HTTP")):
            async with odd_server(play) as odd:
                host, port = odd.url.removeprefix("http://").split(":")
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(1000, lambda _: None), host, int(port)
                )
                await connection.lost
                with pytest.raises(NeverSent, match=words):
                    await connection.exchange(b"GET / HTTP/1.1\r\n\r\n", b"", None)

    async def hanging_up(line: Line) -> None:
        """Close at once."""

    run(main())


def test_server_that_speaks_first_is_not_http(run: Run) -> None:
    async def main() -> None:
        async with odd_server(speaking_first(b"220 mail.example\r\n")) as odd, EngineClient(Address(odd.url)) as client:
            with pytest.raises(Unreachable, match="its answer is not HTTP"):
                await client.post(PATH, b"{}", None)

    run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n" + b"x" * 1001,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"64\r\n" + b"x" * 100 + b"\r\n") * 11,
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001,
    ],
)
def test_server_whose_answer_is_too_large_is_hung_up_on(run: Run, answer: bytes) -> None:
    async def main() -> None:
        async def play(line: Line) -> None:
            await line.request()
            await line.say(answer)
            await line.closed()
            over.set()

        over = asyncio.Event()
        async with odd_server(play) as odd:
            pool = Pool(Address(odd.url), 1000)
            with pytest.raises(TooLarge):
                await pool.post(PATH, b"{}", None)
            await over.wait()
            await pool.aclose()

    run(main())


def test_redirect_is_an_answer_and_not_followed(run: Run) -> None:
    async def main() -> None:
        async with odd_server(answers(OK)) as other:
            away = f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {other.url}\r\nContent-Length: 0\r\n\r\n".encode()
            async with odd_server(answers(away)) as odd, EngineClient(Address(odd.url)) as client:
                assert (await client.post(PATH, b"{}", None)).status == 307
                assert (await client.get("/health")).status == 307
            assert not other.lines

    run(main())


def test_large_body_goes_out_as_the_server_takes_it_and_is_not_held_twice(run: Run) -> None:
    async def main() -> None:
        async def play(line: Line) -> None:
            head = await line.reader.readuntil(b"\r\n\r\n")
            asked.set()
            await go_on.wait()
            line.server.note(hashlib.sha256(await line.reader.readexactly(len(LARGE))).digest())
            assert b"Content-Length: %d\r\n" % len(LARGE) in head
            await line.say(OK)
            line.server.note(await line.request())
            await line.say(OK)

        asked, go_on = asyncio.Event(), asyncio.Event()
        async with odd_server(play) as odd, EngineClient(Address(odd.url)) as client:
            tracemalloc.start()
            try:
                asking = asyncio.create_task(client.post(PATH, LARGE, None))
                await asked.wait()
                for _ in range(100):
                    await asyncio.sleep(0)
                assert tracemalloc.get_traced_memory()[1] < 3_000_000
            finally:
                tracemalloc.stop()
            go_on.set()
            assert (await asking).body == b"ok"
            assert odd.heard[0] == hashlib.sha256(LARGE).digest()
            await client.post(PATH, b"{}", None)
            assert len(odd.lines) == 1

    run(main())


@pytest.mark.parametrize("status", [b"413 Too Large", b"400 Bad Request"])
def test_server_that_answers_before_it_has_the_whole_body_is_heard_and_its_connection_closed(
    run: Run, status: bytes
) -> None:
    async def main() -> None:
        async def play(line: Line) -> None:
            if len(line.server.lines) > 1:
                await answers(OK)(line)
                return
            await line.reader.readuntil(b"\r\n\r\n")
            await line.say(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\nno")
            await heard.wait()
            await line.closed()
            over.set()

        heard, over = asyncio.Event(), asyncio.Event()
        async with odd_server(play) as odd, EngineClient(Address(odd.url)) as client:
            tracemalloc.start()
            try:
                reply = await client.post(PATH, LARGE, None)
                assert tracemalloc.get_traced_memory()[1] < 3_000_000  # What it does not take is not sent.
            finally:
                tracemalloc.stop()
            assert (reply.status, reply.body) == (int(status[:3]), b"no")
            heard.set()
            await over.wait()
            assert (await client.post(PATH, b"{}", None)).body == b"ok"

    run(main())


@pytest.mark.parametrize("body", [b"{}", LARGE])
def test_server_that_takes_too_long_is_hung_up_on(run: Run, body: bytes) -> None:
    async def main() -> None:
        async def play(line: Line) -> None:
            await line.reader.readuntil(b"\r\n\r\n")
            if len(body) < len(LARGE):
                # Some of an answer is none in time either.
                await line.say(b"HTTP/1.1 200 OK\r\n")
            else:
                await given_up.wait()
            await line.closed()
            over.set()

        given_up, over = asyncio.Event(), asyncio.Event()
        async with odd_server(play) as odd, EngineClient(Address(odd.url)) as client:
            with pytest.raises(TookTooLong):
                await client.post(PATH, body, 0.1)
            given_up.set()
            await over.wait()

    run(main())


@pytest.mark.parametrize("body", [b"{}", LARGE])
def test_server_notices_at_once_that_a_request_is_cancelled(run: Run, body: bytes) -> None:
    async def main() -> None:
        async def play(line: Line) -> None:
            await line.reader.readuntil(b"\r\n\r\n")
            asked.set()
            await line.closed()
            over.set()

        asked, over = asyncio.Event(), asyncio.Event()
        async with odd_server(play) as odd, EngineClient(Address(odd.url)) as client:
            asking = asyncio.create_task(client.post(PATH, body, 600.0))
            await asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await over.wait()

    run(main())
