"""Garbage, half requests and strangers on the service's two sockets: it stays healthy, and nothing of it leaks in."""

import random
import socket
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx
import msgspec
import pytest

from freight.core.messages import PROTOCOL, Order, Orders, Phase, Report
from tests.faults.runs import records
from tests.faults.services import Served, served
from tests.harness import wait_until

SEED: Final = 1125
COUNT: Final = 60
JOB: Final = b'{"upload":"none"}'

RAW: Final[dict[str, bytes]] = {
    "nothing": b"",
    "noise": random.Random(SEED).randbytes(5000),
    "no HTTP": b"hello\r\n\r\n",
    "TLS": bytes.fromhex("160301020001000100fc0303"),
    "half a line": b"GET /api/ver",
    "half a head": b"POST /exchange HTTP/1.1\r\nHost: freight\r\nContent-Le",
    "half a body": b"POST /exchange HTTP/1.1\r\nHost: freight\r\nContent-Length: 1000\r\n\r\nabc",
    "half an upload": b"POST /api/uploads HTTP/1.1\r\nHost: freight\r\nContent-Length: 1000\r\n\r\nabc",
    "wrong length": b"POST /api/uploads HTTP/1.1\r\nHost: freight\r\nContent-Length: -3\r\n\r\n",
    "huge length": b"POST /api/uploads HTTP/1.1\r\nHost: freight\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "wrong chunk": b"POST /api/uploads HTTP/1.1\r\nHost: freight\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "endless head": b"GET /api/version HTTP/1.1\r\nX: " + b"a" * 200_000,
}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    """A service with a job under way, which all tests of this module share."""
    with served(tmp_path_factory.mktemp("garbage")) as service:
        service.own_engine("--latency", "0.5", "--slots", "2")
        service.write("in.jsonl", records(COUNT))
        service.serve()
        service.submit("in.jsonl", "job", concurrency=2)
        wait_until(service.received, "the engine is at work")
        yield service


def sockets(service: Served) -> tuple[Path, Path]:
    """Return the sockets of the API and of the workers."""
    return service.socket, service.socket.with_name("control.sock")


def healthy(service: Served) -> None:
    """Assert that the service goes on with its job, with the one worker that it had."""
    assert service.server.poll() is None, service.said()
    done = service.client.job("job").done
    wait_until(lambda: service.server.poll() is not None or service.client.job("job").done > done, "the job goes on")
    assert service.server.poll() is None, service.said()
    assert service.client.job("job").state == "RUNNING"
    assert service.starts() == 1
    assert service.uploads() == []


def connected(path: Path) -> socket.socket:
    """Return a connection to a socket."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(20)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def test_what_is_no_request_and_who_hangs_up_change_nothing(busy: Served) -> None:
    print(f"seed {SEED}")
    for path in sockets(busy):
        for raw in RAW.values():
            with connected(path) as connection:
                try:
                    connection.sendall(raw)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1 << 16)
                except OSError:
                    continue  # It hung up first, which it may.
    healthy(busy)


def test_half_requests_that_stay_open_keep_nobody_waiting(busy: Served) -> None:
    with ExitStack() as stack:
        for path in sockets(busy):
            for raw in RAW.values():
                connection = stack.enter_context(connected(path))
                try:
                    connection.sendall(raw)
                except OSError:
                    continue
        assert busy.client.version().pid == busy.server.pid
        assert busy.client.job("job").state == "RUNNING"
    wait_until(lambda: busy.uploads() == [], "nothing is left of half uploads", 10)
    healthy(busy)


API: Final[dict[str, tuple[str, str, bytes, int]]] = {
    "no JSON": ("POST", "/api/jobs", b"\xff\x00{", 400),
    "other JSON": ("POST", "/api/jobs", b"[1,2]", 400),
    "deep JSON": ("POST", "/api/jobs", b"[" * 100_000, 400),
    "unknown field": ("POST", "/api/jobs", b'{"upload":"a","surprise":1}', 400),
    "wrong type": ("POST", "/api/jobs", b'{"upload":"a","workers":"many"}', 400),
    "endless number": ("POST", "/api/jobs", b'{"upload":"a","timeout_s":1e999}', 400),
    "no number": ("POST", "/api/jobs", b'{"upload":"a","timeout_s":NaN}', 400),
    "no upload": ("POST", "/api/jobs", JOB, 404),
    "upload with a path": ("POST", "/api/jobs", b'{"upload":"../../catalog"}', 404),
    "upload with a pattern": ("POST", "/api/jobs", b'{"upload":"*"}', 404),
    "half a character": ("POST", "/api/jobs", b'{"upload":"\\ud800"}', 400),
    "drop with a path": ("DELETE", "/api/uploads/..%2F..%2Fcatalog", b"", 404),
    "job with a path": ("GET", "/api/jobs/..%2F..%2Fcatalog", b"", 404),
    "job of no bytes": ("GET", "/api/jobs/%00", b"", 404),
    "job of no characters": ("GET", "/api/jobs/%ff%fe", b"", 404),
    "no such page": ("GET", "/api/jobs?after=zz", b"", 400),
    "page of no time": ("GET", "/api/jobs?after=nan~x", b"", 400),
    "negative page": ("GET", "/api/jobs?limit=-1", b"", 400),
    "no such state": ("GET", "/api/jobs?state=HAPPY", b"", 400),
    "no such kind": ("GET", "/api/jobs/job/results?only=good", b"", 400),
    "no such route": ("GET", "/api/everything", b"", 404),
    "wrong method": ("PUT", "/api/jobs", b"", 405),
    "root": ("GET", "/", b"", 404),
    "huge worker": ("GET", f"/api/jobs/job/logs?worker={1 << 70}", b"", 400),
}


@pytest.mark.parametrize("name", API)
def test_request_that_makes_no_sense_is_answered_in_words(busy: Served, name: str) -> None:
    method, path, body, status = API[name]
    transport = httpx.HTTPTransport(uds=str(busy.socket))
    with httpx.Client(transport=transport, base_url="http://freight") as client:
        answer = client.request(method, path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    if status >= 400:
        error = answer.json()["error"]
        assert error["code"] and error["message"]
    assert busy.client.version().pid == busy.server.pid


def test_every_request_above_leaves_the_service_healthy(busy: Served) -> None:
    healthy(busy)


def report(**fields: object) -> bytes:
    """Return an encoded report, one of a worker that does not exist unless told otherwise."""
    whole = Report(PROTOCOL, "0123456789ab", 1, Phase.READY)
    return msgspec.msgpack.encode(msgspec.to_builtins(whole) | fields)


def exchange(service: Served, content: bytes) -> httpx.Response:
    """Send what a worker would."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(sockets(service)[1]))) as client:
        return client.post("http://control/exchange", content=content)


@pytest.mark.parametrize("fields", [{}, {"protocol": PROTOCOL + 1}, {"worker": ""}], ids=["unknown", "newer", "empty"])
def test_worker_that_the_service_does_not_know_is_told_to_end(busy: Served, fields: dict[str, object]) -> None:
    answer = exchange(busy, report(**fields))
    assert msgspec.msgpack.decode(answer.content, type=Orders).order is Order.STOP
    healthy(busy)


REPORTS: Final[dict[str, bytes]] = {
    "empty": b"",
    "noise": random.Random(SEED + 1).randbytes(300),
    "cut": report()[:-3],
    "no report": msgspec.msgpack.encode([1, 2, 3]),
    # What a worker of another version may say, whose shape is not known here.
    "newer shape": report(protocol=PROTOCOL + 1, phase="dreaming", want="a lot"),
    "deep": b"\x91" * 100_000,
}


@pytest.mark.parametrize("name", REPORTS)
def test_report_that_cannot_be_read_leaves_the_service_healthy(busy: Served, name: str) -> None:
    exchange(busy, REPORTS[name])
    healthy(busy)


def test_stop_is_not_kept_waiting_by_half_requests(busy: Served) -> None:
    with ExitStack() as stack:
        for path in sockets(busy):
            for name in ("nothing", "half a head", "half a body", "half an upload"):
                stack.enter_context(connected(path)).sendall(RAW[name])
        stopped = busy.freight("stop", timeout=20)
    assert stopped.status == 0, stopped
    busy.nothing_left()
    assert busy.uploads() == []
    assert busy.ask("SELECT state FROM job") == [("QUEUED",)]
