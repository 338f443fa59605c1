"""Cases of size through the service: many lines, and one very long line."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil
import pytest

from freight.core.job import State
from tests.contract.casetable import BIG, input_of
from tests.contract.served import lines_of
from tests.harness import code, engine
from tests.service import ServiceBox, command_of, service_box

MOST_KIB: Final = 500_000
MEASURE: Final = (
    "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode; "
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r)"
)


def measured(box: ServiceBox, *arguments: str) -> int:
    """Run a command that must succeed; return how much memory its largest process took, in KiB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, sys.executable, "-m", "freight", *arguments],
        cwd=box.folder, env=box.environment(), capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def peak(process: psutil.Process) -> int:
    """Return how much memory a process took at its most, in KiB."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[0])


@pytest.mark.parametrize("number", [pytest.param(98, id="case-98")])
def test_many_lines_in_bounded_memory(number: int, tmp_path: Path) -> None:
    lines = 400_000 if BIG else 20_000
    file = input_of("many98", tmp_path, lines)
    # The worker stays until it was looked at.
    with (
        service_box(tmp_path / "own", pool='keep_warm = "1h"') as box,
        engine(tmp_path / "engine", record=False) as fast,
    ):
        assert box.freight("serve", "--background").status == 0
        began = time.monotonic()
        commands = [measured(box, "batch", "submit", str(file), "--model", fast.url, "--name", "many")]
        # Accepted: the whole of it was sent and checked.
        assert time.monotonic() - began < 120
        assert box.job("many").records == lines
        commands.append(measured(box, "batch", "wait", "many"))
        job = box.job("many")
        assert (job.state, job.done, job.failed) == (State.COMPLETED, lines, 0)
        commands.append(measured(box, "batch", "results", "many", "-o", "out.jsonl"))
        others = {" ".join(command_of(process)): peak(process) for process in box.processes()}
        assert any("serve" in command for command in others)
        assert any("freight.worker" in command for command in others)
        assert max(*commands, *others.values()) < MOST_KIB, (commands, others)
        with (box.folder / "out.jsonl").open("rb") as output:
            for number_of_line, line in enumerate(output, start=1):
                assert b'"custom_id":"row-%d","response":{"status_code":200,' % number_of_line in line
        assert number_of_line == lines


@pytest.mark.parametrize("number", [pytest.param(99, id="case-99")])
def test_line_over_the_limit_is_a_line_and_never_cut(number: int, tmp_path: Path) -> None:
    file = str(input_of("wide99", tmp_path))
    with service_box(tmp_path / "own") as box, engine(tmp_path / "engine") as running:
        submit = ("submit", file, "--model", running.url, "--wait", "--name")
        done = box.batch(*submit, "cut")
        assert done.status == 0
        assert done.last_line().startswith("1 of 3 failed: payload_too_large: ")
        results = lines_of(box, "cut")
        assert [code(line) for line in results] == [None, "payload_too_large", None]
        assert (results[1]["custom_id"], results[1]["error"]["line"]) == (None, 2)
        for text in ("12582911", "10000000"):
            assert text in results[1]["error"]["message"]
        # With room for it, it goes whole; the service reads its settings anew for each submission.
        box.configure('limits.record_bytes = "16MB"')
        assert box.batch(*submit, "wide").status == 0
        assert [line["custom_id"] for line in lines_of(box, "wide")] == ["wide-1", "wide-2", "wide-3"]
        assert max(len(body) for _, body in running.received()) > 12_000_000
