"""Large files and large records: complete, in order, and in little memory. What each took is printed."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

from tests.faults.runs import OUT, Running, answer
from tests.harness import Box, Json, chat, code, content, engine

MEGABYTE = 1_000_000
TICKS_S = os.sysconf("SC_CLK_TCK")


class Usage:
    """What each process of a run took, at most, by its role."""

    def __init__(self) -> None:
        self.peak_bytes: dict[str, int] = {}
        self.cpu_s: dict[str, float] = {}
        self.wall_s = 0.0

    def note(self, process: psutil.Process) -> None:
        """Take note of a process that runs."""
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
            status = Path(f"/proc/{process.pid}/status").read_text()
            times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, psutil.Error):
            return
        if not words[0]:
            return  # It is ending: it has given its memory back, and what it was is no longer told.
        role = next((word for word in words if word in ("freight", "freight.worker")), "other")
        peak = next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)
        self.peak_bytes[role] = max(peak, self.peak_bytes.get(role, 0))
        self.cpu_s[role] = max((int(times[11]) + int(times[12])) / TICKS_S, self.cpu_s.get(role, 0.0))

    def show(self, what: str, count: int) -> None:
        """Print it all."""
        peaks = ", ".join(f"{role} {peak / MEGABYTE:.0f} MB" for role, peak in self.peak_bytes.items())
        cpu = ", ".join(f"{role} {1e6 * spent / count:.0f} µs" for role, spent in self.cpu_s.items())
        rate = count / self.wall_s
        print(f"{what}: {self.wall_s:.1f} s, {rate:.0f} records/s; peak {peaks}; CPU a record {cpu}")


def measured(box: Box, *arguments: str, timeout: float = 150) -> Usage:
    """Run to a good end and return what it took."""
    usage, began = Usage(), time.monotonic()
    running = Running(box, *arguments)
    watched: list[psutil.Process] = []
    while running.child.poll() is None:
        assert time.monotonic() - began < timeout, running.said()
        # Looking through all of /proc costs more than to look at those that are known.
        if len(watched) < 2 or not all(process.is_running() for process in watched):
            watched = box.processes()
        for process in watched:
            usage.note(process)
        time.sleep(0.05)
    usage.wall_s = time.monotonic() - began
    finished = running.end()
    assert finished.status == 0, finished
    return usage


def check_peak(usage: Usage, most_bytes: int) -> None:
    """Assert that control plane and worker were both seen, and stayed below `most_bytes`."""
    assert set(usage.peak_bytes) == {"freight", "freight.worker"}
    assert max(usage.peak_bytes.values()) <= most_bytes, usage.peak_bytes


def write_lines(box: Box, lines: Iterable[bytes]) -> Path:
    path = box.folder / "in.jsonl"
    with path.open("wb", buffering=1 << 20) as file:
        file.writelines(lines)
    return path


def test_hundred_and_fifty_thousand_records(box: Box, tmp_path: Path) -> None:
    count = 150_000
    line = b'{"custom_id":"r%d","body":{"messages":[{"role":"user","content":"text %d"}]}}\n'
    write_lines(box, (line % (index, index) for index in range(count)))
    with engine(tmp_path / "engine", "--digest") as instant:
        usage = measured(box, "in.jsonl", "-o", OUT, "--model", instant.url)
        assert instant.counts()["requests"] == count
    usage.show("150,000 records", count)
    index = -1
    with (box.folder / OUT).open("rb") as output:
        for index, line in enumerate(output):
            result: Json = msgspec.json.decode(line)
            assert result["custom_id"] == f"r{index}"
            assert content(result) == answer(index)
    assert index == count - 1
    check_peak(usage, 200 * MEGABYTE)


def test_five_hundred_records_of_five_megabytes(box: Box, tmp_path: Path) -> None:
    count, text = 500, b"word " * (MEGABYTE - 20)
    head = b'{"custom_id":"r%d","body":{"messages":[{"role":"user","content":"%d '
    path = write_lines(box, (head % (index, index) + text + b'"}]}}\n' for index in range(count)))
    # Not recorded, and answered at once: it is Freight that is measured.
    with engine(tmp_path / "engine", record=False) as instant:
        usage = measured(box, "in.jsonl", "-o", OUT, "--model", instant.url)
        assert instant.counts()["requests"] == count
    path.unlink()
    usage.show("500 records of 5 MB", count)
    assert [result["custom_id"] for result in box.results(OUT)] == [f"r{index}" for index in range(count)]
    assert {code(result) for result in box.results(OUT)} == {None}
    check_peak(usage, 300 * MEGABYTE)


def test_lines_over_the_limit_become_error_lines_in_bounded_memory(box: Box, tmp_path: Path) -> None:
    limit = 10 * MEGABYTE
    ordinary = [json.dumps(chat(f"r{index}", f"text {index}")).encode() for index in range(4)]
    head, tail = b'{"custom_id":"long","body":{"messages":[{"role":"user","content":"', b'"}]}}'
    at_limit = head + b"x" * (limit - len(head) - len(tail)) + tail
    path = write_lines(
        box, (line + b"\n" for line in (ordinary[0], at_limit, ordinary[1], b" " + at_limit, ordinary[2]))
    )
    with path.open("r+b") as file:
        # A hole of a gigabyte: a line that takes no room on disk.
        os.truncate(path, path.stat().st_size + 1000 * MEGABYTE)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + ordinary[3] + b"\n")
    with engine(tmp_path / "engine", "--digest", record=False) as instant:
        usage = measured(box, "in.jsonl", "-o", OUT, "--model", instant.url)
        assert instant.counts()["requests"] == 5
    usage.show("lines of 10 MB and 1 GB", 7)
    results = box.results(OUT)
    assert [result["custom_id"] for result in results] == ["r0", "long", "r1", None, "r2", None, "r3"]
    refused = [None, None, None, "payload_too_large", None, "payload_too_large", None]
    assert [code(result) for result in results] == refused
    assert [result["error"]["line"] for result in results if result["error"]] == [4, 6]
    assert "10000001 bytes" in results[3]["error"]["message"]
    check_peak(usage, 200 * MEGABYTE)
