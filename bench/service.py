"""How the service answers under many jobs: `python -m bench.service [--jobs 300 --clients 16]`.

Submits jobs of ten records from many threads to a service of its own, on the simulated engine, which answers at once.
Meanwhile `status` and `list` are asked every 50 ms. Reports how long submitting and all took, the 50th and 99th
percentile of both questions, the service's memory after a third of the jobs and after all, and the wall time of
`freight --help` and of one shell completion. Results are checked before they count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from bench.serving import serving
from bench.simengine.answers import digest_text
from freight import Client

ROOT: Final = Path(__file__).resolve().parents[1]
RECORDS: Final = 10
_ASK_S: Final = 0.05
_RUNS: Final = 5
_POLL_S: Final = 0.1


def input_of(job: int) -> bytes:
    """Return the input of one job, no record of which is in another's."""
    lines: list[str] = []
    for place in range(RECORDS):
        body = {"messages": [{"role": "user", "content": f"job {job} record {place}"}], "max_tokens": 16}
        lines.append(json.dumps({"custom_id": f"row-{place}", "url": "/v1/chat/completions", "body": body}))
    return "\n".join(lines).encode() + b"\n"


def check_results(client: Client, name: str, job: int) -> None:
    """Raise AssertionError unless every record of a job has its answer, in order."""
    with client.results(name) as stream:
        lines = [json.loads(line) for line in stream]
    assert len(lines) == RECORDS, f"{len(lines)} lines for {RECORDS} records"
    for place, line in enumerate(lines):
        assert line["custom_id"] == f"row-{place}" and line["error"] is None, line
        answer = line["response"]["body"]["choices"][0]["message"]["content"]
        assert answer == digest_text(f"job {job} record {place}"), line


def memory_mb(pid: int) -> float:
    """Return the megabytes that a process has resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024 / 1e6


class Questions(threading.Thread):
    """Asks the service something every 50 ms; `took_ms` says how long each answer took."""

    def __init__(self, url: str, ask: Callable[[Client], object]) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._ask = ask
        self._stop_asked = threading.Event()
        self.took_ms: list[float] = []

    def run(self) -> None:
        """Ask until told to stop."""
        with Client(self._url) as client:
            while not self._stop_asked.wait(_ASK_S):
                began = time.perf_counter()
                self._ask(client)
                self.took_ms.append((time.perf_counter() - began) * 1000)

    def finish(self) -> dict[str, float]:
        """Stop and return the 50th and 99th percentile, in milliseconds."""
        self._stop_asked.set()
        self.join()
        cuts = statistics.quantiles(self.took_ms, n=100, method="inclusive")
        return {"p50_ms": round(cuts[49], 1), "p99_ms": round(cuts[98], 1)}


def wait_all(client: Client, count: int) -> None:
    """Wait until `count` jobs are complete."""
    while sum(job.state == "COMPLETED" for job in client.jobs()) < count:
        time.sleep(_POLL_S)


def measure(client: Client, url: str, jobs: int, clients: int, model: str) -> dict[str, object]:
    """Run the jobs on a service and return what it took."""

    def submit(job: int) -> str:
        with Client(url) as own:
            return own.submit([input_of(job)], model=model, name=f"job-{job}").job.name

    pid = client.version().pid
    third = max(1, jobs // 3)
    with ThreadPoolExecutor(clients) as together:
        began = time.monotonic()
        names = [submit(0)]
        asking = [Questions(url, lambda own: own.job("job-0")), Questions(url, lambda own: next(own.jobs()))]
        for questions in asking:
            questions.start()
        names += together.map(submit, range(1, third))
        wait_all(client, third)
        early = memory_mb(pid)
        submitting = time.monotonic()
        names += together.map(submit, range(third, jobs))
        submit_s = time.monotonic() - submitting
        wait_all(client, jobs)
        total_s = time.monotonic() - began
    status, listed = (questions.finish() for questions in asking)
    late = memory_mb(pid)
    for job, name in enumerate(names):
        check_results(client, name, job)
    return {
        "jobs": jobs,
        "clients": clients,
        "submit_s": round(submit_s, 2),
        "submits_per_s": round((jobs - third) / max(submit_s, 1e-9)),
        "total_s": round(total_s, 2),
        "status": status,
        "list": listed,
        "memory_mb_after_a_third": round(early, 1),
        "memory_mb_after_all": round(late, 1),
    }


def median_ms(arguments: Sequence[str], environment: dict[str, str]) -> float:
    """Return the median wall time of a command over some runs, in milliseconds."""
    took: list[float] = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "freight", *arguments],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        took.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(took), 1)


def commands(environment: dict[str, str]) -> dict[str, float]:
    """Return how long the help and one completion of a job's name take."""
    completing = {"_FREIGHT_COMPLETE": "bash_complete", "COMP_WORDS": "freight batch status ", "COMP_CWORD": "3"}
    return {
        "help_ms": median_ms(["--help"], environment),
        "completion_ms": median_ms([], environment | completing),
    }


def run(folder: Path, jobs: int, clients: int, model: str) -> dict[str, object]:
    """Measure a service of its own in `folder`."""
    environment = {**os.environ, "FREIGHT_DATA": str(folder / "data")}
    url = f"unix://{folder / 'data' / 'run' / 'api.sock'}"
    with serving(folder, environment) as client:
        return {**measure(client, url, jobs, clients, model), **commands(environment)}


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--clients", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="freight-bench-") as name:
        folder = Path(name)
        url_file = folder / "url"
        engine = subprocess.Popen(
            [sys.executable, "-m", "bench.simengine", "--digest", "--port-file", str(url_file)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        try:
            while not url_file.exists():
                time.sleep(_POLL_S)
            print(json.dumps(run(folder, arguments.jobs, arguments.clients, url_file.read_text().strip())))
        finally:
            engine.terminate()
            engine.wait()


if __name__ == "__main__":
    main()
