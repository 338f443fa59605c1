"""The service's memory while a gigabyte goes in and out: `python -m bench.transfer [--size 1GB] [--over 10GB]`.

A service of its own on TCP takes an upload of `--size` bytes in chunks, runs a job whose results are as large, and
gives them out, whole and by a client that goes on from the middle. Prints how much its resident memory grew while each
was under way, how long it took, and whether what came is what was there. With `--over N` it instead sends N bytes,
in chunks and with their length, to a service that takes 200 MB, and prints the answers, and what is left of it.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx

from bench.pouring import pour
from freight import Client

ROOT: Final = Path(__file__).resolve().parents[1]
ANSWER_BYTES: Final = 100_000
CAP: Final = "200MB"
_UNITS: Final = {"MB": 10**6, "GB": 10**9}
_LOOK_S: Final = 0.01
_URL: Final = re.compile(r"^serving on (http\S+)$", re.MULTILINE)
_ANSWER: Final = json.dumps({
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "x" * ANSWER_BYTES}, "finish_reason": "stop"}
    ],
}).encode()  # fmt: skip
_MODELS: Final = b'{"object":"list","data":[{"id":"talker","object":"model"}]}'


def bytes_of(text: str) -> int:
    """Return how many bytes a text such as 1GB means."""
    return int(float(text[:-2]) * _UNITS[text[-2:].upper()])


class Patient(ThreadingHTTPServer):
    """A server to which many may connect at once."""

    request_queue_size = 1024
    daemon_threads = True


class Talker(BaseHTTPRequestHandler):
    """A model server whose every answer is long."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Say which models there are."""
        self._send(_MODELS)

    def do_POST(self) -> None:
        """Answer."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(_ANSWER)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self._headers_buffer += [b"\r\n", body]
        self.flush_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def memory(pid: int) -> int:
    """Return the bytes that a process has resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def disk(folder: Path) -> int:
    """Return the bytes that the files of a folder have on disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def watched(pid: int, call: Callable[[], object]) -> dict[str, object]:
    """Call, and return by how much a process's memory was above what it was before, and how long it took."""
    before = highest = memory(pid)
    is_over = threading.Event()

    def look() -> None:
        nonlocal highest
        while not is_over.wait(_LOOK_S):
            highest = max(highest, memory(pid))

    looking = threading.Thread(target=look)
    looking.start()
    began = time.monotonic()
    try:
        said = call()
    finally:
        took_s = time.monotonic() - began
        is_over.set()
        looking.join()
    grew = (highest - before) / 1e6
    return {"grew_mb": round(grew, 1), "from_mb": round(before / 1e6, 1), "s": round(took_s, 1), "said": said}


class Served:
    """A service on TCP, and a token for it."""

    def __init__(self, folder: Path, log: Path, process: "subprocess.Popen[bytes]") -> None:
        self.data = folder / "data"
        with Client(f"unix://{self.data / 'run' / 'api.sock'}") as client:
            self.token = client.create_token("loader").token
        self.url = _URL.findall(log.read_text())[-1]
        self.pid = process.pid

    def download(self, job: str, headers: dict[str, str]) -> tuple[int, int, str]:
        """Fetch results; return the status, how many bytes came, and their SHA-256."""
        digest, count = hashlib.sha256(), 0
        with httpx.stream(
            "GET", f"{self.url}/api/jobs/{job}/results", timeout=600, trust_env=False,
            headers={"Authorization": f"Bearer {self.token}", **headers},
        ) as answer:  # fmt: skip
            for piece in answer.iter_bytes():
                digest.update(piece)
                count += len(piece)
        return answer.status_code, count, digest.hexdigest()


@contextmanager
def serving(folder: Path, toml: str) -> Generator[Served]:
    """Run a service for as long as the block takes."""
    config, log = folder / "config.toml", folder / "log"
    config.write_text(f'[server]\nlisten = "127.0.0.1:0"\n{toml}')
    environment = {**os.environ, "FREIGHT_DATA": str(folder / "data"), "FREIGHT_CONFIG": str(config)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "freight", "serve"], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
    try:
        while not _URL.search(log.read_text()):
            assert process.poll() is None, log.read_text()
            time.sleep(_LOOK_S)
        yield Served(folder, log, process)
    finally:
        process.terminate()
        process.wait()


def job_of(served: Served, records: int, name: str) -> str:
    """Run a job of so many long answers; return its id."""
    lines = (
        b'{"custom_id":"%d","url":"/v1/chat/completions","body":{"messages":[{"role":"user","content":"a"}]}}\n' % place
        for place in range(records)
    )
    with Client(served.url, served.token) as client:
        job = client.submit([b"".join(lines)], model="talker", name=name, concurrency=64).job
        ended = client.wait(job.id)
        assert (ended.state, ended.failed) == ("COMPLETED", 0), ended.failures
    return job.id


def through(folder: Path, size: int) -> dict[str, object]:
    """Send and fetch so many bytes; return what it took."""
    with Patient(("127.0.0.1", 0), Talker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = f"http://127.0.0.1:{server.server_port}"
        model = f'[models.talker]\nengine = "endpoint"\nsource = "{source}"\n'
        toml = f'[limits]\nfile_bytes = "{2 * size // 10**6}MB"\n{model}'
        with serving(folder, toml) as served:
            small, large = job_of(served, 200, "first"), job_of(served, size // ANSWER_BYTES, "large")
        server.shutdown()
    # Another one, whose memory has no room left of the job.
    with serving(folder, toml) as served:
        return _through(served, size, small, large)


def _through(served: Served, size: int, small: str, job: str) -> dict[str, object]:
    def send(count: int) -> int:
        return pour(served.url, "/api/uploads", served.token, count, chunked=True).status

    # What is imported or kept at the first time is no growth.
    send(10**7)
    served.download(small, {})
    upload = watched(served.pid, lambda: send(size))
    whole: list[tuple[int, int, str]] = []
    download = watched(served.pid, lambda: whole.append(served.download(job, {})))
    status, count, digest = whole[0]
    later = watched(served.pid, lambda: served.download(job, {"Range": f"bytes={count - 10**6}-"})[:2])
    path = served.data.parent / "saved.jsonl"
    with Client(served.url, served.token) as client:
        saved = watched(served.pid, lambda: client.save_results(job, path))
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == digest, "what was saved is not what came"
    return {
        "upload": upload,
        "download": {**download, "said": status, "bytes": count},
        "last_megabyte": later,
        "save_results": saved,
    }


def over(folder: Path, size: int) -> dict[str, object]:
    """Send so many bytes to a service that takes fewer; return what it answered, and what is left of it."""
    report: dict[str, object] = {}
    with serving(folder, f'[limits]\nfile_bytes = "{CAP}"\n') as served:
        for path in ("/api/uploads", "/v1/files"):
            for chunked in (True, False):
                answers = [pour(served.url, path, served.token, 1 << 20, chunked=chunked, form=path[1] == "v")]
                before = disk(served.data)

                def send(path: str = path, chunked: bool = chunked) -> dict[str, object]:
                    answer = pour(served.url, path, served.token, size, chunked=chunked, form=path[1] == "v")
                    return {"status": answer.status, "mb_taken": round(answer.taken / 1e6)}

                row = watched(served.pid, send)
                row["disk_left_mb"] = round((disk(served.data) - before) / 1e6, 1)
                row["fits"] = answers[0].status
                report[f"{path} {'in chunks' if chunked else 'with its length'}"] = row
    return report


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=bytes_of, default=10**9, metavar="1GB")
    parser.add_argument("--over", type=bytes_of, metavar="10GB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="freight-bench-") as name:
        folder = Path(name)
        report = through(folder, arguments.size) if arguments.over is None else over(folder, arguments.over)
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
