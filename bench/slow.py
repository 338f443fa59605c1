"""The service among slow sockets: `python -m bench.slow [--sockets 500]`, with the deadlines that it has by itself.

Opens so many connections to a service on TCP, each slow in one of these ways, in equal numbers: it sends nothing; it
drips a byte of a head, or of a body, every half second: of a request with a good token and with a bad one, of a form,
of an upload whose length is said, and of one in chunks. Meanwhile /healthz and a question with a token are asked,
each on a connection of its own, every 50 ms. Reports their 50th and 99th percentile, and when the first and the last
socket of each kind was closed: heads have 10 s, bodies 30 s.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from bench.serving import serving

SOCKETS: Final = 500
_DRIP_S: Final = 0.5
_ASK_S: Final = 0.05
HEAD_S: Final = 10.0
BODY_S: Final = 30.0
PART: Final = b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
# A machine that has other work looks at its clock late.
SLACK_S: Final = 2.0


def ways(token: str) -> dict[str, tuple[bytes, bytes, float]]:
    """Return the ways to be slow: what is sent first, what drips after it, and by when it must be closed."""

    def head(path: str, of: str, length: str = "Content-Length: 999999") -> bytes:
        return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {of}\r\n{length}\r\n\r\n".encode()

    chunked = "Transfer-Encoding: chunked"
    form = f"Content-Type: multipart/form-data; boundary=x\r\n{chunked}"
    body = "Content-Type: application/json\r\nContent-Length: 9999"
    return {
        "silent": (b"", b"", HEAD_S),
        "head": (b"GET /", b"x", HEAD_S),
        "header": (b"GET /healthz HTTP/1.1\r\nX: ", b"x", HEAD_S),
        "body": (head("/api/jobs", token, body), b" ", BODY_S),
        "form": (head("/v1/files", token, form) + b"%x\r\n%b\r\n" % (len(PART), PART), b"1\r\n{\r\n", BODY_S),
        "upload": (head("/api/uploads", token), b"{", BODY_S),
        "chunks": (head("/api/uploads", token, chunked), b"1\r\n{\r\n", BODY_S),
        "refused": (head("/api/uploads", "frt_bad"), b"{", BODY_S),
    }  # fmt: skip


async def slow(port: int, first: bytes, drop: bytes) -> float:
    """Be slow until the other side closes; return after how long that was."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    closed = asyncio.create_task(_until_closed(reader))
    writer.write(first)
    while not closed.done():
        await asyncio.wait((closed,), timeout=_DRIP_S)
        if drop:
            writer.write(drop)
    took = time.monotonic() - began
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return took


async def _until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(65536):
            pass


async def ask(port: int, path: str, token: str) -> float:
    """Ask on a connection of its own; return how long that took, in milliseconds."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()
    took = time.perf_counter() - began
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    writer.close()
    await writer.wait_closed()
    return took * 1000


async def questions(port: int, path: str, token: str, is_over: Callable[[], bool]) -> list[float]:
    """Ask every 50 ms until it is over."""
    took: list[float] = []
    while not is_over():
        took.append(await ask(port, path, token))
        await asyncio.sleep(_ASK_S)
    return took


def percentiles(took_ms: list[float]) -> dict[str, float]:
    """Return how many there were, and the 50th and 99th percentile and the longest."""
    cuts = statistics.quantiles(took_ms, n=100, method="inclusive")
    return {
        "count": len(took_ms),
        "p50_ms": round(cuts[49], 1),
        "p99_ms": round(cuts[98], 1),
        "most_ms": round(max(took_ms), 1),
    }


async def measure(port: int, token: str, sockets: int, pid: int) -> dict[str, object]:
    """Have the sockets be slow, and ask meanwhile."""
    kinds = ways(token)
    quiet = percentiles([await ask(port, "/healthz", token) for _ in range(50)])
    tasks = {
        name: [asyncio.create_task(slow(port, first, drop)) for _ in range(sockets // len(kinds))]
        for name, (first, drop, _) in kinds.items()
    }
    everything = [task for made in tasks.values() for task in made]

    def is_over() -> bool:
        return all(task.done() for task in everything)

    health, asked = await asyncio.gather(
        questions(port, "/healthz", token, is_over), questions(port, "/api/version", token, is_over)
    )
    closed: dict[str, list[float]] = {}
    for name, made in tasks.items():
        took = [task.result() for task in made]
        closed[name] = [round(min(took), 2), round(max(took), 2)]
        assert max(took) <= kinds[name][2] + SLACK_S, (name, max(took))
    left = [one for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
    return {
        "sockets": len(everything),
        "healthz_before": quiet,
        "healthz": percentiles(health),
        "version": percentiles(asked),
        "closed_s": closed,
        "left": len(left),
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sockets", type=int, default=SOCKETS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="freight-bench-") as name:
        folder = Path(name)
        (folder / "config.toml").write_text('[server]\nlisten = "127.0.0.1:0"\n')
        own = {"FREIGHT_DATA": str(folder / "data"), "FREIGHT_CONFIG": str(folder / "config.toml")}
        with serving(folder, {**os.environ, **own}) as client:
            log = folder / "log"
            [port] = re.findall(r"serving on http://\S+:(\d+)", log.read_text())
            token, pid = client.create_token("somebody").token, client.version().pid
            assert pid is not None
            print(json.dumps(asyncio.run(measure(int(port), token, arguments.sockets, pid))))
            assert list((folder / "data" / "uploads").iterdir()) == []
            assert "Traceback" not in log.read_text(), log.read_text()


if __name__ == "__main__":
    sys.exit(main())
