"""Finding a server, and the connections to it: on real sockets, in both event loops."""

import asyncio
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

from freight.engines import pool as pool_module
from freight.engines.base import Address
from freight.engines.client import EngineClient, NeverSent, Unreachable
from tests.certificates import made_certificate
from tests.harness import ROOT
from tests.unit.oddserver import (
    LARGE,
    OK,
    PATH,
    PATIENCE_S,
    Line,
    Play,
    Run,
    answers,
    odd_server,
    once,
    silent,
    speaking_first,
)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("prefix", "key", "path", "more"),
    [
        ("", None, PATH, ""),
        ("/a/b c", None, "/a/b%20c" + PATH, ""),
        ("", "k-1", PATH, "Authorization: Bearer k-1\r\n"),
    ],
)
def test_request_is_just_this(run: Run, prefix: str, key: str | None, path: str, more: str) -> None:
    async def main() -> None:
        async with odd_server(answers(OK)) as odd:
            async with EngineClient(Address(odd.url + prefix, api_key=key)) as client:
                assert (await client.post(PATH, b"{}", None)).body == b"ok"
                assert (await client.get("/health")).body == b"ok"
            common = f"Host: {odd.url.removeprefix('http://')}\r\nUser-Agent: freight\r\nAccept: */*\r\n"
            common += f"Accept-Encoding: identity\r\n{more}"
            posted = f"POST {path} HTTP/1.1\r\n{common}Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}"
            got = f"GET {path.removesuffix(PATH)}/health HTTP/1.1\r\n{common}\r\n"
            assert odd.heard == [posted.encode(), got.encode()]
            assert len(odd.lines) == 1

    run(main())


def test_unix_sockets_and_ipv6_are_spoken_to(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        async with (
            odd_server(answers(OK), socket=path) as odd,
            EngineClient(Address(odd.url, str(path))) as client,
        ):
            assert (await client.post(PATH, b"{}", None)).body == b"ok"
            assert b"\r\nHost: localhost\r\n" in odd.heard[0]
        async with odd_server(answers(OK), host="::1") as odd, EngineClient(Address(odd.url)) as client:
            assert (await client.post(PATH, b"{}", None)).body == b"ok"
            assert f"\r\nHost: {odd.url.removeprefix('http://')}\r\n".encode() in odd.heard[0]

    run(main())


def test_unix_socket_whose_queue_is_full_is_asked_again_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "s")
    pause = asyncio.sleep

    async def main() -> None:
        loop, refused = asyncio.get_running_loop(), asyncio.Event()

        async def pausing(seconds: float) -> None:
            refused.set()
            await pause(seconds)

        monkeypatch.setattr(asyncio, "sleep", pausing)
        async with EngineClient(Address("http://localhost", path)) as client:
            asking = asyncio.create_task(client.post(PATH, b"{}", None))
            await asyncio.wait_for(refused.wait(), PATIENCE_S)
            for _ in queued:
                (await loop.sock_accept(listener))[0].close()
            made, _ = await loop.sock_accept(listener)
            with made:
                assert await loop.sock_recv(made, 4096)
                await loop.sock_sendall(made, OK)
                assert (await asking).body == b"ok"

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        listener.setblocking(False)
        queued: list[socket.socket] = []
        while True:
            waiting = socket.socket(socket.AF_UNIX)
            waiting.setblocking(False)
            if waiting.connect_ex(path):
                waiting.close()
                break
            queued.append(waiting)
        try:
            # The loop that workers run on.
            uvloop.run(main())
        finally:
            for each in queued:
                each.close()


def test_tls_is_spoken_to_those_whose_certificate_is_trusted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ssl

    cert, key = made_certificate(tmp_path, "server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)

    async def main() -> None:
        async with odd_server(answers(OK), tls=tls) as odd:
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
            async with EngineClient(Address(odd.url)) as client:
                with pytest.raises(NeverSent, match="its certificate is not accepted"):
                    await client.post(PATH, b"{}", None)
            monkeypatch.setenv("SSL_CERT_FILE", cert)
            async with EngineClient(Address(odd.url)) as client:
                for body in (b"{}", LARGE, b"{}"):
                    assert (await client.post(PATH, body, None)).body == b"ok"
            assert [len(heard) > len(LARGE) for heard in odd.heard] == [False, True, False]
        async with (
            odd_server(speaking_first(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as odd,
            EngineClient(Address(odd.url.replace("http:", "https:"))) as client,
        ):
            with pytest.raises(NeverSent, match="does not speak TLS"):
                await client.post(PATH, b"{}", None)

    run(main())


def test_connection_used_last_is_used_first_and_there_are_as_many_as_requests(run: Run) -> None:
    async def main() -> None:
        everybody = asyncio.Event()
        order: list[Line] = []

        async def play(line: Line) -> None:
            while await line.request():
                order.append(line)
                if len(order) == 200:
                    everybody.set()
                await everybody.wait()
                await line.say(OK)

        async with odd_server(play) as odd, EngineClient(Address(odd.url)) as client:
            replies = await asyncio.gather(*(client.post(PATH, b"{}", None) for _ in range(200)))
            assert [reply.body for reply in replies] == [b"ok"] * 200
            assert len(odd.lines) == len(set(order)) == 200
            for _ in range(5):
                await client.post(PATH, b"{}", None)
            assert len(set(order[200:])) == 1

    run(main())


def answers_two_at_once() -> Play:
    """Return a play that answers nobody before there are two connections, and notes their ends."""
    both = asyncio.Event()

    async def play(line: Line) -> None:
        while await line.request():
            if len(line.server.lines) == 2:
                both.set()
            await both.wait()
            await line.say(OK)
        line.server.note(b"closed")

    return play


def test_connection_idle_for_long_is_not_used_again_and_closed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with odd_server(answers_two_at_once()) as odd, EngineClient(Address(odd.url)) as client:
            monkeypatch.setattr(pool_module, "KEPT_S", 0.0)
            await asyncio.gather(client.post(PATH, b"{}", None), client.post(PATH, b"{}", None))
            await client.post(PATH, b"{}", None)
            assert len(odd.lines) == 3
            await odd.hears(2)

    run(main())


def test_connections_that_are_idle_are_closed_though_nothing_more_is_sent(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(pool_module, "KEPT_S", 0.05)
        async with odd_server(answers_two_at_once()) as odd, EngineClient(Address(odd.url)) as client:
            await asyncio.gather(client.post(PATH, b"{}", None), client.post(PATH, b"{}", None))
            await odd.hears(2)

    run(main())


@pytest.mark.parametrize(("said", "lines"), [("timeout=1, max=9", 3), ("max=9,Timeout = 600", 1), ("timeout=soon", 1)])
def test_connection_is_not_used_when_the_server_may_be_closing_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, said: str, lines: int
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nKeep-Alive: " + said.encode()

    async def main() -> None:
        monkeypatch.setattr(pool_module, "_MARGIN_S", 1.0)
        async with odd_server(answers(head + b"\r\n\r\nok")) as odd, EngineClient(Address(odd.url)) as client:
            for _ in range(3):
                await client.post(PATH, b"{}", None)
            assert len(odd.lines) == lines

    run(main())


def test_server_that_closes_without_saying_so_is_not_trusted_with_a_kept_connection_again(run: Run) -> None:
    async def main() -> None:
        lost = 0
        async with odd_server(once(OK)) as odd, EngineClient(Address(odd.url)) as client:
            for _ in range(50):
                try:
                    await client.post(PATH, b"{}", None)
                except Unreachable:
                    lost += 1
        assert lost <= 1

    run(main())


def test_server_that_is_not_there_never_saw_the_request(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked(address: Address) -> str:
        async with EngineClient(address) as client:
            with pytest.raises(NeverSent) as raised:
                await client.post(PATH, b"{}", None)
            with pytest.raises(Unreachable, match=re.escape(str(raised.value))):
                await client.get("/health")
            assert await client.problem() == str(raised.value)
            return str(raised.value)

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / "left"))
        assert await asked(Address("http://localhost", str(tmp_path / "none"))) == "no such file or directory"
        assert await asked(Address("http://localhost", str(tmp_path / "left"))) == "connection refused"
        assert await asked(Address(f"http://127.0.0.1:{closed_port()}")) == "connection refused"
        assert await asked(Address(f"http://localhost:{closed_port()}")) == "connection refused"
        # A label may have 63 characters: this is looked up nowhere.
        assert await asked(Address(f"http://{'a' * 64}.invalid")) == "its host name cannot be resolved"

    run(main())


def test_name_is_looked_up_once_for_all_and_its_next_address_tried_where_one_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        looked.append(host)
        kind = socket.AF_INET, socket.SOCK_STREAM, 6, ""
        return [(*kind, (address, port)) for address in ("127.0.0.9", "127.0.0.1")]

    async def main() -> None:
        async with odd_server(answers(OK)) as odd:
            monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
            async with EngineClient(Address(odd.url.replace("127.0.0.1", "box.example"))) as client:
                await asyncio.gather(*(client.post(PATH, b"{}", None) for _ in range(20)))
                monkeypatch.undo()
            assert looked.count("box.example") == 1
            assert b"\r\nHost: box.example:" in odd.heard[0]

    asyncio.run(main())


def full_listener() -> tuple[list[socket.socket], int]:
    """Return sockets that keep a port from which no connection is taken any more."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    kept = [listener]
    for _ in range(4):
        waiting = socket.socket()
        waiting.setblocking(False)
        waiting.connect_ex(listener.getsockname())
        kept.append(waiting)
    return kept, listener.getsockname()[1]


def test_connecting_is_given_up_in_time_and_when_the_client_is_closed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(port: int) -> None:
        async with EngineClient(Address(f"http://127.0.0.1:{port}")) as client:
            # However short the request's own time: the server has not seen it.
            with pytest.raises(NeverSent, match="no answer in time"):
                await client.post(PATH, b"{}", 0.05)
            asking = asyncio.create_task(client.post(PATH, b"{}", None))
            await asyncio.sleep(0)
            await client.close()
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(NeverSent, match="the connection was closed here"):
                    await asking
        monkeypatch.setattr(pool_module, "CONNECT_TIMEOUT_S", 0.05)
        async with EngineClient(Address(f"http://127.0.0.1:{port}")) as client:
            with pytest.raises(NeverSent, match="no answer in time"):
                await client.post(PATH, b"{}", None)

    kept, port = full_listener()
    try:
        run(main(port))
    finally:
        for each in kept:
            each.close()


def test_closed_client_breaks_off_what_is_under_way_and_sends_nothing_more(run: Run) -> None:
    async def main() -> None:
        async def play(line: Line) -> None:
            await line.reader.readuntil(b"\r\n\r\n")
            line.server.note(b"")
            await line.closed()
            line.server.note(b"closed")

        async with odd_server(play) as odd:
            client = EngineClient(Address(odd.url))
            asking = [asyncio.create_task(client.post(PATH, body, 600.0)) for body in (b"{}", LARGE)]
            await odd.hears(2)
            await client.close()
            for each in asking:
                with pytest.raises(Unreachable, match="the connection was closed here") as raised:
                    await each
                assert not isinstance(raised.value, NeverSent)
            with pytest.raises(NeverSent, match="the connection was closed here"):
                await client.post(PATH, b"{}", None)
            with pytest.raises(Unreachable, match="the connection was closed here"):
                await client.get("/health")
            await client.close()
            await odd.hears(4)
            assert len(odd.lines) == 2

    run(main())


def test_probe_takes_five_seconds_at_most_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freight.engines.client.PROBE_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with odd_server(silent) as odd, EngineClient(Address(odd.url)) as client:
            assert await client.problem() == "no answer in time"

    run(main())


@pytest.mark.parametrize("program", ["freight.worker.__main__", "freight.control.embedded"])
def test_neither_a_worker_nor_a_run_takes_the_time_to_load_another_http_client(program: str) -> None:
    loaded = f"import sys, {program}; print([name for name in ('aiohttp', 'httpx') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
