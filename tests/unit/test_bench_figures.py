"""What benchmarks measure, note and write."""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from bench.engines import simulated
from bench.measuring import run
from bench.report import page
from bench.results import figure, ratios
from tests.harness import ROOT

BURN = "import time\nwhile time.process_time() < 0.2: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"


def line(peer: str, setting: str, round_: int, seconds: float, **changes: Any) -> dict[str, Any]:
    """Return one run of a race as it is noted."""
    made = {
        "kind": "race", "at": "2026-01-01T00:00:00Z", "workload": "W1", "peer": peer, "setting": setting,
        "round": round_, "records": 100, "factor": 1.0, "speed": 1.0, "right": 100, "in_order": True, "problem": None,
        "status": 0, "starts": 1, "sent": 100, "wall_s": seconds, "seconds": seconds, "start_s": 0.1, "span_s": 1.0,
        "finish_s": 0.1, "cpu_us": 100.0, "client_load": 0.1, "peak_mb": 50.0, "total_peak_mb": 60.0,
        "cached_share": 0.0, "in_flight_max": 8,
    }  # fmt: skip
    return made | changes


def test_the_cpu_time_of_a_grandchild_counts(tmp_path: Path) -> None:
    took = run([sys.executable, "-c", PARENT], cwd=tmp_path, env=os.environ, log=tmp_path / "log")
    assert took.status == 0
    assert took.cpu_s >= 0.2
    assert took.peak_mb > 1


def test_who_is_late_is_killed_with_all_below_it(tmp_path: Path) -> None:
    sleep = f"import time; time.sleep(600)  # {tmp_path}"
    sleeper = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    took = run([sys.executable, "-c", sleeper], cwd=tmp_path, env=os.environ, log=tmp_path / "log", limit_s=1.0)
    assert took.status == -9
    left = [process for process in psutil.process_iter(["cmdline"]) if sleep in (process.info["cmdline"] or [])]
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def test_what_a_program_prints_is_kept(tmp_path: Path) -> None:
    run([sys.executable, "-c", "print('said')"], cwd=tmp_path, env=os.environ, log=tmp_path / "log")
    assert (tmp_path / "log").read_text() == "said\n"


def test_an_engine_says_at_its_end_what_it_did_and_when(tmp_path: Path) -> None:
    before = time.monotonic()
    with simulated(tmp_path, ["--profile", "b200-30b", "--speed", "1000"]) as engine:
        body = json.dumps({"messages": [{"role": "user", "content": "hello " * 100}], "max_tokens": 8}).encode()
        for _ in range(2):
            urllib.request.urlopen(f"{engine.url}/v1/chat/completions", body, timeout=10).close()
        summary = engine.stop()
    assert (summary["requests"], summary["answered"], summary["finished"]) == (2, 2, 2)
    # The loop's clock is coarser than ours.
    assert before - 0.1 <= summary["first_request_at"] <= summary["last_answer_at"] <= time.monotonic() + 0.1
    assert 0 < summary["cache_hits"] < summary["cache_queries"]


def test_a_figure_is_a_median_with_its_range() -> None:
    found = figure([3.0, 1.0, 2.0])
    assert found is not None and found.text("{:.1f}") == "2.0 (1.0–3.0)"
    assert figure([]) is None


def test_a_ratio_is_taken_within_a_round() -> None:
    freight = [line("freight", "default", 0, 10), line("freight", "default", 1, 20)]
    peer = [line("bare", "best", 0, 20), line("bare", "best", 1, 40), line("bare", "best", 2, 1)]
    found = ratios(freight, peer)
    assert found is not None and (found.median, found.count) == (2.0, 2)


def test_the_page_has_every_program_and_names_ties() -> None:
    lines = [
        line("freight", "default", 0, 10),
        line("bare", "best", 0, 10.1),
        line("saturate", "best", 0, 30),
        line("flexllm", "default", 0, 50, right=40, status=-9),
        {"kind": "peak", "at": "", "slots": 64, "metrics": True, "share": 0.99, "goal": 0.97, "in_flight_max": 80},
    ]
    text = "\n".join(page(lines))
    assert "- W1: as fast as bare (best): 1.01 ×" in text
    assert "saturate (best)" not in text
    assert "| saturate | best | 30.0 | 3.3 | 3.00 × |" in text
    assert "40 of 100, stopped for its time" in text
    assert "| 64 | open | 0.990 | 0.97 | 80 |" in text
    assert str(ROOT) not in text
