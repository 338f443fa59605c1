"""How Freight scales with the file: `python -m bench.scale --records N`.

Runs `freight run` on N small records against the simulated engine, which answers at once, and reports the rate,
the CPU time over all of Freight's processes and the peak memory of each. Results are checked before they count.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path(__file__).resolve().parents[1]
_SAMPLE_S: Final = 0.2


def write_input(path: Path, records: int) -> None:
    """Write `records` chat requests of about 300 bytes each."""
    filler = "x" * 160
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            body = {"messages": [{"role": "user", "content": f"Item {number} {filler}"}], "max_tokens": 16}
            file.write(json.dumps({"custom_id": f"row-{number}", "url": "/v1/chat/completions", "body": body}) + "\n")


def check_output(path: Path, records: int) -> None:
    """Raise AssertionError unless every record is answered, in order."""
    with path.open(encoding="utf-8") as file:
        for number, raw in enumerate(file):
            line = json.loads(raw)
            assert line["custom_id"] == f"row-{number}" and line["error"] is None, raw[:200]
            content = line["response"]["body"]["choices"][0]["message"]["content"]
            assert len(content) == 16, content
        assert number + 1 == records, f"{number + 1} lines for {records} records"


class PeakMemory(threading.Thread):
    """Watches a process and all below it; `peaks` holds each one's highest resident size, in bytes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._top = psutil.Process(pid)
        self._stop_asked = threading.Event()
        self.peaks: dict[int, int] = {}

    def run(self) -> None:
        """Sample until asked to stop."""
        while not self._stop_asked.wait(_SAMPLE_S):
            with suppress(psutil.Error):
                for process in (self._top, *self._top.children(recursive=True)):
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
                    self.peaks[process.pid] = max(peak, self.peaks.get(process.pid, 0))

    def finish(self) -> list[int]:
        """Stop and return the peaks, the highest first."""
        self._stop_asked.set()
        self.join()
        return sorted(self.peaks.values(), reverse=True)


def measure(folder: Path, records: int, url: str) -> dict[str, float]:
    """Run one file of `records` and return what it took."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    write_input(source, records)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "freight", "run", str(source), "-o", str(output), "--model", url],
        cwd=ROOT,
        env={**os.environ, "FREIGHT_DATA": str(folder / "data")},
    )
    memory = PeakMemory(child.pid)
    memory.start()
    status = child.wait()
    took_s = time.monotonic() - began
    peaks = memory.finish()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert status == 0, f"freight run ended with {status}"
    check_output(output, records)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "records": records,
        "seconds": round(took_s, 1),
        "records_per_s": round(records / took_s),
        "cpu_us_per_record": round(cpu_s / records * 1e6, 1),
        "peak_mb": round(peaks[0] / 1e6),
        "peak_bytes_per_record": round(peaks[0] / records),
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=150_000)
    records = parser.parse_args().records
    with tempfile.TemporaryDirectory(prefix="freight-bench-") as name:
        folder = Path(name)
        url_file = folder / "url"
        engine = subprocess.Popen(
            [sys.executable, "-m", "bench.simengine", "--digest", "--port-file", str(url_file)], cwd=ROOT
        )
        try:
            while not url_file.exists():
                time.sleep(0.02)
            print(json.dumps(measure(folder, records, url_file.read_text().strip())))
        finally:
            engine.terminate()
            engine.wait()


if __name__ == "__main__":
    main()
