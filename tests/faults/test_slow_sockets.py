"""The service on TCP among peers that are slow, many, or send what is no HTTP: others are served meanwhile."""

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Final, cast

import httpx
import pytest

from freight.api.app import make_app
from freight.api.door import open_door
from freight.api.front import front
from freight.config import load_config
from tests.certificates import made_certificate
from tests.faults.services import Served, served
from tests.faults.tcp import (
    FILE_BYTES,
    HEALTH,
    HELLO,
    HOST,
    SHORT,
    Echo,
    Peer,
    drip,
    exchanged,
    peer,
    resident,
    run,
    serving,
    until,
)
from tests.harness import PATIENCE_S, wait_until
from tests.unit.services import Office, open_office

SLOW: Final = 500


def test_500_slow_sockets_are_closed_and_others_are_served_meanwhile(tmp_path: Path) -> None:
    upload = b"POST /api/uploads HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST
    body = b"POST /form HTTP/1.1\r\nContent-Length: 999\r\n" + HOST
    ways: list[Callable[[Peer], Awaitable[object]]] = [
        lambda made: made.rest(),
        lambda made: drip(made, b"X"),
        lambda made: drip(made, b"y"),
        lambda made: drip(made, b"1\r\nz\r\n"),
    ]
    first = [b"", b"GET /", body, upload]

    async def slow(port: int, way: int) -> None:
        async with peer(port, first[way]) as made:
            await ways[way](made)

    async def scenario() -> None:
        app = Echo()
        # Those who are well have to keep the short times, too, on a machine that has other work.
        settings = SHORT.replace('"1s"', '"3s"').replace('keep_alive_timeout = "3s"', "")
        async with serving(tmp_path, app, settings) as (server, port), peer(port, HEALTH) as good:
            assert (await good.answer()).endswith(b"\r\n\r\nok")
            slow_ones = [asyncio.create_task(slow(port, number % len(ways))) for number in range(SLOW)]
            await until(lambda: len(server.server_state.connections) > SLOW)
            times = 0
            while not all(task.done() for task in slow_ones):
                async with peer(port, HELLO) as other:
                    assert b"/hello 0" in await other.answer()
                await good.send(HEALTH)
                assert (await good.answer()).endswith(b"\r\n\r\nok")
                times += 1
            await asyncio.gather(*slow_ones)
            assert times
            await until(lambda: len(app.left) == SLOW // 2)
            await until(lambda: len(server.server_state.connections) <= 1)

    run(scenario)


def test_late_head_is_told_so_and_a_connection_without_a_request_is_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, Echo(), SHORT) as (_, port):
            silent, head, second, kept = await asyncio.gather(
                exchanged(port), exchanged(port, b"GET /"), exchanged(port, HELLO + b"GET"), exchanged(port, HELLO)
            )
        assert silent == b""
        assert head.startswith(b"HTTP/1.1 408 ")
        assert second.startswith(b"HTTP/1.1 200 ") and second.count(b"HTTP/1.1 408 ") == 1
        assert kept.startswith(b"HTTP/1.1 200 ") and kept.count(b"HTTP/1.1") == 1

    run(scenario)


def test_body_that_stops_is_told_so_and_its_reader_learns_that_it_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = Echo()
        async with serving(tmp_path, app, SHORT) as (_, port):
            answer = await exchanged(port, b"POST /form HTTP/1.1\r\nContent-Length: 9\r\n" + HOST, b"abc")
            assert answer.startswith(b"HTTP/1.1 408 ") and answer.count(b"HTTP/1.1") == 1
            await until(lambda: app.left == ["/form"])

    run(scenario)


def test_answer_that_nobody_takes_is_cut(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = f'{SHORT}\nsend_timeout = "1s"'
        async with serving(tmp_path, Echo(), settings) as (server, port), peer(port) as made:
            # The kernel's own room must not take it all.
            made.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            cast(asyncio.Transport, made.writer.transport).pause_reading()
            await made.send(b"GET /long?pieces=1000 HTTP/1.1\r\n" + HOST)
            await until(lambda: server.server_state.tasks)
            await until(lambda: not server.server_state.connections and not server.server_state.tasks)

    run(scenario)


def test_answer_that_is_taken_slowly_is_sent_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = f'{SHORT}\nsend_timeout = "1s"'
        async with serving(tmp_path, Echo(), settings) as (_, port):
            async with peer(port, b"GET /long?pieces=40 HTTP/1.0\r\n" + HOST, limit=65536) as made:
                size = 0
                while piece := await made.reader.read(65536):
                    size += len(piece)
                    await asyncio.sleep(0.05)
            assert size > 40 * 65536

    run(scenario)


def test_connections_over_the_cap_are_told_so_and_let_in_again_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, Echo(), "max_connections = 3\nmax_peer_connections = 9") as (_, port):
            async with AsyncExitStack() as stack:
                kept = [await stack.enter_async_context(peer(port, HELLO)) for _ in range(3)]
                for made in kept:
                    assert b"/hello" in await made.answer()
                answer = await exchanged(port, HELLO)
                assert answer.startswith(b"HTTP/1.1 503 ") and b"connection: close" in answer
                await kept[0].send(HEALTH)
                assert (await kept[0].answer()).endswith(b"ok")
            await let_in(port)

    run(scenario)


def test_one_peer_leaves_connections_to_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, Echo(), "max_peer_connections = 2") as (_, port):
            async with peer(port), peer(port):
                assert (await exchanged(port, HELLO)).startswith(b"HTTP/1.1 503 ")
                async with peer(port, HELLO, local_addr=("127.0.0.2", 0)) as other:
                    assert b"/hello" in await other.answer()
            await let_in(port)

    run(scenario)


async def let_in(port: int) -> None:
    """Wait until a connection is taken again."""
    while True:
        async with peer(port, HELLO) as made:
            if b" 200 " in await made.answer():
                return


def test_nobody_is_let_in_without_authentication(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "plain.toml"
        file.write_text('[server]\nlisten = "127.0.0.1:0"')
        door = open_door(load_config({}, {}, {"FREIGHT_CONFIG": str(file)}), None)
        assert door is not None
        server = door.serve(front(Echo(), {"localhost"}, 100, lambda: 100))
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            assert (await client.get("/healthz")).text == "ok"
            for path in ("/", "/api/version", "/v1/batches", "/resource_server/list-endpoints", "/docs", "/healthz/"):
                answer = await client.get(path)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "unauthenticated"
            assert (await client.post("/api/uploads", content=b"x" * 1000)).status_code == 401
        server.should_exit = True
        await task
        door.close()

    run(scenario)


def test_answers_under_way_are_finished_at_the_end_and_idle_connections_are_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = Echo()
        async with serving(tmp_path, app) as (server, port), AsyncExitStack() as stack:
            idle = await stack.enter_async_context(peer(port, HELLO))
            assert b"/hello" in await idle.answer()
            half = await stack.enter_async_context(peer(port, b"GET /"))
            busy = await stack.enter_async_context(peer(port, HELLO.replace(b"hello", b"wait")))
            await until(lambda: len(server.server_state.tasks) == 1 and len(server.server_state.connections) == 3)
            server.should_exit = True
            assert await idle.rest() == b""
            assert await half.rest() == b""
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await asyncio.open_connection("127.0.0.1", port)
            app.go_on.set()
            assert b"/wait 0" in await busy.rest()

    run(scenario)


def test_answer_that_does_not_finish_is_broken_off_at_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        app = Echo()
        wait = HELLO.replace(b"hello", b"wait")
        async with serving(tmp_path, app) as (server, port), peer(port, wait) as busy, peer(port) as stuck:
            cast(asyncio.Transport, stuck.writer.transport).pause_reading()
            await stuck.send(b"GET /long?pieces=1000 HTTP/1.1\r\n" + HOST)
            await until(lambda: len(server.server_state.tasks) == 2)
            server.config.timeout_graceful_shutdown = 1
            server.should_exit = True
            assert b"200" not in await busy.rest()
            await until(lambda: not server.server_state.connections and not server.server_state.tasks)

    run(scenario)


def test_connections_wait_while_there_are_no_descriptors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario() -> None:
        async with serving(tmp_path, Echo()) as (_, port):
            with ExitStack() as stack:
                waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
                stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
                free = os.dup(0)
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
                await until(lambda: "cannot take connections for now" in caplog.text)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for one in waiting:
                    one.setblocking(False)
                    loop = asyncio.get_running_loop()
                    await loop.sock_sendall(one, HELLO)
                    assert b" 200 " in await loop.sock_recv(one, 1000)
        assert caplog.text.count("cannot take connections for now") <= 3

    run(scenario)


def test_connections_are_encrypted_by_the_certificate(tmp_path: Path) -> None:
    cert, key = made_certificate(tmp_path, "own")
    trusted = ssl.create_default_context(cafile=cert)
    settings = f'{SHORT}\ntls_cert = "{cert}"\ntls_key = "{key}"'

    async def scenario() -> None:
        app = Echo()
        async with serving(tmp_path, app, settings) as (server, port):
            assert server.url.startswith("https://")
            async with httpx.AsyncClient(
                base_url=f"https://localhost:{port}", verify=trusted, trust_env=False
            ) as client:
                assert (await client.get("/healthz")).text == "ok"
                assert (await client.post("/form", content=b"x" * 300_000)).text == "/form 300000"
                assert len((await client.get("/long?pieces=100")).content) > 100 * 65536
                assert (await client.post("/form", content=b"x" * 1_000_001)).status_code == 413
            # No handshake, one that stops, and what is none.
            closed = await asyncio.gather(exchanged(port), exchanged(port, b"\x16\x03\x01"), exchanged(port, HELLO))
            assert not any(b"HTTP" in answer for answer in closed)
            async with peer(port, b"GET /", ssl=trusted, server_hostname="localhost") as late:
                assert (await late.rest()).startswith(b"HTTP/1.1 408 ")
            async with peer(port, HELLO, ssl=trusted, server_hostname="localhost") as good:
                assert b"/hello 0" in await good.answer()
            await until(lambda: not server.server_state.connections)

    run(scenario)


def test_handshakes_count_as_connections(tmp_path: Path) -> None:
    cert, key = made_certificate(tmp_path, "own")
    trusted = ssl.create_default_context(cafile=cert)
    settings = f'max_peer_connections = 2\ntls_cert = "{cert}"\ntls_key = "{key}"'

    async def scenario() -> None:
        async with serving(tmp_path, Echo(), settings) as (_, port):
            async with peer(port), peer(port):
                assert await exchanged(port) == b""
            while True:
                with suppress(OSError):
                    async with peer(port, HELLO, ssl=trusted, server_hostname="localhost") as good:
                        assert b"/hello 0" in await good.answer()
                    break

    run(scenario)


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Office:
    """Give a folder on which services run in this process."""
    return open_office(tmp_path, monkeypatch)


def test_upload_over_the_cap_is_refused_and_nothing_of_it_is_kept(office: Office, tmp_path: Path) -> None:
    uploads = office.data / "uploads"

    async def send_for_ever(made: Peer) -> None:
        """Send; no more than the cap lies on the disk at any time."""
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        while not made.reader.at_eof():
            await made.send(piece)
            assert sum(file.stat().st_blocks * 512 for file in uploads.glob("*")) < FILE_BYTES + (2 << 20)

    async def refused(port: int) -> None:
        head = b"POST /api/uploads HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HOST
        async with peer(port, head) as made:
            sending = asyncio.create_task(send_for_ever(made))
            answer = await made.answer()
            assert not sending.done()
            assert answer.startswith(b"HTTP/1.1 413 ") and b"\r\nconnection: close\r\n" in answer, answer
            assert b"limits.file_bytes" in answer
            # Nothing more comes, and soon all that is sent falls on deaf ears.
            assert await made.rest() == b""
            await sending

    async def scenario() -> None:
        app = make_app(office.service, office.service.stop)
        async with serving(tmp_path, app) as (server, port):
            async with httpx.AsyncClient(base_url=f"http://localhost:{port}", trust_env=False, timeout=30) as client:
                fine = await client.post("/api/uploads", content=b"x" * (FILE_BYTES - 1))
                assert fine.status_code == 201
                assert (await client.delete(f"/api/uploads/{fine.json()['id']}")).status_code == 204
                before = resident()
                for _ in range(5):
                    await refused(port)
                    await until(lambda: not list(uploads.iterdir()))
                assert resident() - before < 32 << 20
                told = await client.post("/api/uploads", content=b"x" * (FILE_BYTES + 1))
                assert told.status_code == 413
            await until(lambda: not server.server_state.connections)

    office.run(scenario)
    assert not list(uploads.iterdir())


def test_service_listens_where_the_command_line_says(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        child = service.start("serve", "--listen", "127.0.0.1:0")
        assert child.stderr is not None
        lines = [child.stderr.readline(), child.stderr.readline()]
        assert lines[0].startswith(f"serving on {service.socket}")
        url = lines[1].removeprefix("serving on ").strip()
        with httpx.Client(base_url=url, trust_env=False) as client:
            answer = client.get("/healthz")
            assert (answer.text, answer.headers["server"]) == ("ok", "freight")
            assert client.get("/api/version").status_code == 401
            assert client.post("/api/stop").status_code == 401
        assert service.client.version().pid == child.pid
        check_refusals(service, url.removeprefix("http://"), tmp_path)
        assert service.freight("stop").status == 0
        child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 0


def check_refusals(service: Served, taken: str, folder: Path) -> None:
    """Assert that a second service is refused an address in words, and leaves nothing."""
    other = {"FREIGHT_DATA": str(folder / "other")}
    done = service.freight("serve", "--listen", taken, **other)
    assert done.status == 1
    assert f"error: --listen is {taken}: cannot listen there: Address already in use" in done.stderr
    done = service.freight("serve", **other, FREIGHT_SERVER_LISTEN=taken)
    assert (done.status, "server.listen" in done.stderr) == (1, True)
    for options, words in (
        (("--listen", "8400"), "--listen is '8400'"),
        (("--listen", "192.0.2.7:1"), "--listen is 192"),
    ):
        done = service.freight("serve", *options, **other)
        assert (done.status, words in done.stderr) == (2, True), done.stderr
    done = service.freight("serve", "--listen", "127.0.0.1:0", **other, FREIGHT_SERVER_TLS_CERT="/missing.pem")
    assert (done.status, "server.tls_cert is /missing.pem" in done.stderr) == (2, True), done.stderr
    assert not list((folder / "other").glob("run/*"))


def test_service_in_the_background_listens_there_too(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        assert service.freight("serve", "--background", "--listen", "127.0.0.1:0").status == 0
        wait_until(lambda: "serving on http://127.0.0.1:" in service.said(), "it says where it listens")
        assert service.freight("stop").status == 0
        service.nothing_left()
