"""Cases of size: many lines, and one very long line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.casetable import BIG, input_of
from tests.harness import Box, code, engine


@pytest.mark.parametrize("number", [pytest.param(98, id="case-98")])
def test_many_lines_in_bounded_memory(number: int, box: Box, tmp_path: Path) -> None:
    lines = 400_000 if BIG else 40_000
    file = input_of("many98", tmp_path, lines)
    measure = "import resource, subprocess, sys; r = subprocess.run(sys.argv[1:]).returncode; " + (
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(r)"
    )
    with engine(tmp_path / "engine") as fast:
        done = subprocess.run(
            [sys.executable, "-c", measure, sys.executable, "-m", "freight",
             "run", str(file), "-o", "out.jsonl", "--model", fast.url],
            cwd=box.folder, env=box.environment(), capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # In KiB, and of the largest of its processes.
    assert int(done.stdout) < 500_000
    with (box.folder / "out.jsonl").open("rb") as output:
        for number_of_line, line in enumerate(output, start=1):
            assert b'"custom_id":"row-%d","response":{"status_code":200,' % number_of_line in line
    assert number_of_line == lines


@pytest.mark.parametrize("number", [pytest.param(99, id="case-99")])
def test_line_over_the_limit_is_a_line_and_never_cut(number: int, box: Box, tmp_path: Path) -> None:
    file = input_of("wide99", tmp_path)
    with engine(tmp_path / "engine") as running:
        arguments = ("run", str(file), "--model", running.url, "-o")
        assert box.freight(*arguments, "out.jsonl").status == 0
        results = box.results()
        assert [code(line) for line in results] == [None, "payload_too_large", None]
        assert (results[1]["custom_id"], results[1]["error"]["line"]) == (None, 2)
        for text in ("12582911", "10000000"):
            assert text in results[1]["error"]["message"]
        # With room for it, it goes whole.
        wide = box.freight(*arguments, "wide.jsonl", FREIGHT_LIMITS_RECORD_BYTES="16MB")
        assert wide.status == 0
        assert [line["custom_id"] for line in box.results("wide.jsonl")] == ["wide-1", "wide-2", "wide-3"]
        assert max(len(body) for _, body in running.received()) > 12_000_000
