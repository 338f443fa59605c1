"""Workers and devices: `python -m bench.workers [--loading 10 --cancels 50 --stubborn 3]`, on the simulated engine.

Prints one JSON line a measurement. `two_workers`: 24 records that take a second each, one at a time on a worker, by one
worker and by two, with the time that each model takes to load. `cancel`: from the cancel of a running job until another
process can take its device and the service shows nothing on it; once more with an engine that ignores SIGTERM, which
has 30 s. `warm`: from the submit of a second job of a model that is up to its first answer, as the engine sees it.
Results are checked before they count.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.serving import serving
from bench.simengine.answers import digest_text
from freight import Client
from freight.core.device import Holder
from freight.core.job import FINAL
from freight.core.view import JobStatus
from freight.launchers.locks import lock_device, lock_folder

ROOT: Final = Path(__file__).resolve().parents[1]
RECORDS: Final = 24
PATIENCE_S: Final = 180.0
_POLL_S: Final = 0.005


class Bench:
    """A service with models that Freight starts, each the simulated engine with other options, and some devices."""

    def __init__(self, folder: Path, client: Client, devices: Sequence[str]) -> None:
        self.client = client
        self.devices = devices
        self.record = folder / "record"

    def submit(self, name: str, model: str, **options: Any) -> None:
        """Make a job of RECORDS records."""
        self.client.submit([input_of(name)], model=model, name=name, **options)

    def state(self, name: str) -> str:
        """Return a job's state."""
        return self.client.job(name).state

    def check(self, name: str) -> None:
        """Wait for a job's end; raise AssertionError unless every record has its answer, in order."""
        until(lambda: self.state(name) in FINAL, f"{name} ends")
        with self.client.results(name) as stream:
            lines = [json.loads(line) for line in stream]
        assert [line["custom_id"] for line in lines] == [f"row-{place}" for place in range(RECORDS)], name
        for place, line in enumerate(lines):
            assert line["error"] is None, line
            answer = line["response"]["body"]["choices"][0]["message"]["content"]
            assert answer == digest_text(text_of(name, place)), line

    def is_free(self) -> bool:
        """Return whether this process, another one, can take every device, and the service shows nothing on any."""
        for device in self.devices:
            held = lock_device(device, lock_folder())
            if isinstance(held, Holder):
                return False
            os.close(held)
        return not self.client.workers() and all(device.state == "free" for device in self.client.devices())


def text_of(name: str, place: int) -> str:
    """Return the prompt of a job's record."""
    return f"job {name} record {place}"


def input_of(name: str) -> bytes:
    """Return the input of a job, no record of which is in another's."""
    lines: list[str] = []
    for place in range(RECORDS):
        body = {"messages": [{"role": "user", "content": text_of(name, place)}], "max_tokens": 16}
        lines.append(json.dumps({"custom_id": f"row-{place}", "url": "/v1/chat/completions", "body": body}))
    return "\n".join(lines).encode() + b"\n"


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {PATIENCE_S:g} s: {what}"
        time.sleep(_POLL_S)


def measure_two_workers(bench: Bench) -> dict[str, object]:
    """Return the wall time of one worker and of two, from the submit on, and their ratio."""
    took: list[float] = []
    for workers in (1, 2):
        name = f"with-{workers}"
        began = time.monotonic()
        bench.submit(name, "slow", workers=workers, concurrency=1)
        bench.check(name)
        took.append(time.monotonic() - began)
        loads = [event for event in bench.client.job(name).events if event.event == "model loaded"]
        assert len(loads) == workers, loads
        until(bench.is_free, "the devices are free")
    return {"one_worker_s": round(took[0], 2), "two_workers_s": round(took[1], 2), "ratio": round(took[0] / took[1], 2)}


def is_under_way(job: JobStatus) -> bool:
    """Return whether a server has some of a job's records; the job must not have ended."""
    assert job.state not in FINAL, job.reason
    return job.in_flight > 0


def measure_cancel(bench: Bench, model: str, times: int) -> dict[str, object]:
    """Return how long it took from a cancel to free devices."""
    took: list[float] = []
    for number in range(times):
        name = f"{model}-{number}"
        bench.submit(name, model)
        until(lambda name=name: is_under_way(bench.client.job(name)), "its records are under way")
        began = time.monotonic()
        bench.client.cancel(name)
        until(bench.is_free, "the device is free")
        took.append(time.monotonic() - began)
        until(lambda name=name: bench.state(name) == "CANCELLED", "the job is cancelled")
    return {"cancels": times, **spread(took)}


def measure_warm(bench: Bench) -> dict[str, object]:
    """Return how long the second of two jobs waited for its first answer, from the submit and from its start."""
    bench.submit("first", "quick")
    bench.check("first")
    until(lambda: any(worker.phase == "idle" for worker in bench.client.workers()), "the model is warm")
    before = bench.record.stat().st_size
    began = time.monotonic()
    bench.submit("second", "quick")
    until(lambda: bench.record.stat().st_size > before, "the second job's first request is there")
    request_s = time.monotonic() - began
    until(lambda: bench.client.job("second").done, "its first answer is on disk")
    answer_s = time.monotonic() - began
    bench.check("second")
    events = [event.event for event in bench.client.job("second").events]
    assert "model loading" not in events, events
    return {"first_request_s": round(request_s, 3), "first_answer_s": round(answer_s, 3)}


def spread(took: Sequence[float]) -> dict[str, float]:
    """Return the median, the 95th percentile and the longest of some times, in seconds."""
    ordered = sorted(took)
    late = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return {"p50_s": round(statistics.median(took), 3), "p95_s": round(late, 3), "max_s": round(ordered[-1], 3)}


def models_toml(folder: Path, loading_s: float) -> str:
    """Return the models of the measurements."""
    options = {
        "slow": ("--loading", f"{loading_s:g}", "--latency", "1"),
        "held": ("--latency", "600"),
        "stubborn": ("--latency", "600", "--ignore-sigterm"),
        "quick": ("--loading", f"{loading_s:g}"),
    }
    engine = [sys.executable, "-m", "bench.simengine", "--socket", "{socket}", "--digest"]
    commands = {name: [*engine, "--record", str(folder / "record"), *more] for name, more in options.items()}
    return "".join(
        f'[models.{name}]\nengine = "command"\ncommand = {json.dumps(command)}\n' for name, command in commands.items()
    )


@contextmanager
def bench_on(loading_s: float, devices: int, keep_warm: str = "0s") -> Generator[Bench]:
    """Run a service of its own, for as long as the block takes."""
    with tempfile.TemporaryDirectory(prefix="freight-bench-") as name:
        folder = Path(name)
        ours = [f"cpu:{os.getpid()}{number}" for number in range(devices)]
        pool = f'[pools.local]\ndevices = {json.dumps(ours)}\nkeep_warm = "{keep_warm}"\n'
        (folder / "config.toml").write_text(models_toml(folder, loading_s) + pool)
        environment = {
            **os.environ, "FREIGHT_DATA": str(folder / "data"), "FREIGHT_CONFIG": str(folder / "config.toml"),
        }  # fmt: skip
        with serving(folder, environment) as client:
            yield Bench(folder, client, ours)


def main() -> None:
    """Measure and print a JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loading", type=float, default=10.0, help="seconds that a model takes to load")
    parser.add_argument("--cancels", type=int, default=50)
    parser.add_argument("--stubborn", type=int, default=3, help="cancels of an engine that ignores SIGTERM")
    arguments = parser.parse_args()
    with bench_on(arguments.loading, devices=2) as bench:
        _print("two_workers", measure_two_workers(bench))
    with bench_on(arguments.loading, devices=1) as bench:
        _print("cancel", measure_cancel(bench, "held", arguments.cancels))
        if arguments.stubborn:
            _print("cancel_ignoring_sigterm", measure_cancel(bench, "stubborn", arguments.stubborn))
    with bench_on(arguments.loading, devices=1, keep_warm="1h") as bench:
        _print("warm", measure_warm(bench))


def _print(what: str, found: dict[str, object]) -> None:
    print(json.dumps({"measured": what, **found}), flush=True)


if __name__ == "__main__":
    main()
