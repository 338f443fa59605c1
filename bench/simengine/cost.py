"""What the simulated engine itself costs: `python -m bench.simengine.cost [ITS OPTIONS]`.

Keeps requests in flight over bare sockets for a while and reports the engine's CPU time, for each request and as a
share of one core. By default the engine is instant; with `-- --profile b200-30b --max-num-seqs 1024 --speed 20`
it shows what the step loop takes.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, cast

import psutil
import uvloop

from bench.race import note

ROOT: Final = Path(__file__).resolve().parents[2]


class Asker(asyncio.Protocol):
    """One connection that asks again as soon as it is answered."""

    answered = 0
    asked = 0

    def __init__(self, prompt_bytes: int, max_tokens: int) -> None:
        """Ask prompts of so many bytes, none like another, and answers of so many tokens."""
        self._max_tokens = max_tokens
        self._filler = "x" * prompt_bytes
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        """Count a whole answer, and ask the next."""
        if not self._left:
            head, _, body = data.partition(b"\r\n\r\n")
            self._left = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
            data = body
        self._left -= len(data)
        if not self._left:
            Asker.answered += 1
            self._ask()

    def _ask(self) -> None:
        Asker.asked += 1
        text = f"Item {Asker.asked} {self._filler}"
        body = json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": self._max_tokens}
        ).encode()
        self._transport.write(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


async def _ask_for(seconds: float, port: int, in_flight: int, prompt_bytes: int, max_tokens: int) -> None:
    loop = asyncio.get_running_loop()
    links = [
        await loop.create_connection(lambda: Asker(prompt_bytes, max_tokens), "127.0.0.1", port)
        for _ in range(in_flight)
    ]
    await asyncio.sleep(seconds)
    for transport, _ in links:
        transport.abort()


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--prompt-bytes", type=int, default=160)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("options", nargs="*", default=["--profile", "instant"])
    given = parser.parse_args()
    command = [sys.executable, "-m", "bench.simengine", *given.options]
    engine = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        port = int(engine.stdout.readline().rpartition(":")[2])
        process = psutil.Process(engine.pid)
        before, began = process.cpu_times(), time.monotonic()
        uvloop.run(_ask_for(given.seconds, port, given.in_flight, given.prompt_bytes, given.max_tokens))
        after, took_s = process.cpu_times(), time.monotonic() - began
        cpu_s = after.user + after.system - before.user - before.system
        result = {
            "answered": Asker.answered,
            "per_s": round(Asker.answered / took_s),
            "cpu_us_per_request": round(cpu_s / max(1, Asker.answered) * 1e6, 1),
            "share_of_a_core": round(cpu_s / took_s, 3),
        }
        note({"kind": "engine", "options": " ".join(given.options), **result})
        print(json.dumps(result))
    finally:
        engine.terminate()
        engine.wait()


if __name__ == "__main__":
    main()
