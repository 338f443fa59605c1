"""What each microsecond of a tiny record goes to: `python -m bench.hotpath [--factor 0.4]`.

W6 is run once by itself, for the CPU time a record, and once with py-spy looking at all of Freight's processes 250
times a second, for the shares of it. A look counts for the innermost function of Freight's on the stack.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from bench.checks import Expected
from bench.engines import simulated
from bench.freightrun import check, freight
from bench.measuring import absolute_folder, run
from bench.peers.install import REPORT
from bench.peers.roster import ENVIRONMENTS, environment
from bench.race import note
from bench.workloads import WORKLOADS, write_workload

RATE: Final = 250
PY_SPY: Final = ENVIRONMENTS / REPORT / "bin" / "py-spy"
_FRAME: Final = re.compile(r"\((?:[^():]*/)?freight/([a-z_]+/[a-z_]+)\.py:\d+\)")
_WORKER: Final = "worker/__main__"
# By module, the longest name first that fits.
_WORK: Final = {
    "control": {
        "control/intake": "reading and checking the input", "control/inputs": "reading and checking the input",
        "core/record": "reading and checking the input", "core/jsonbytes": "reading and checking the input",
        "core/media": "reading and checking the input", "core/prompt": "the order of dispatch",
        "control/prompts": "the order of dispatch", "core/order": "the order of dispatch",
        "api/exchange": "the exchange with the worker", "control/dispatcher": "handing out records",
        "control/stretches": "handing out records", "store/results": "putting results on disk",
        "store/database": "putting results on disk", "core/answer": "putting results on disk",
        "control/output": "writing the output",
    },
    "worker": {
        "engines/": "HTTP with the engine", "core/answer": "reading answers, making lines",
        "core/jsonbytes": "reading answers, making lines", "core/record": "cutting the body out of the line",
        "worker/driver": "tries and the queue", "core/window": "the window", "core/climb": "the window",
        "worker/agent": "the exchange with the control plane", "worker/link": "the exchange with the control plane",
    },
}  # fmt: skip
IMPORTS: Final = "imports, once a run"
OTHER: Final = "the event loop, and everything else"


def work_of(stack: str) -> tuple[str, str]:
    """Return whose work a stack is: the process and what it was at."""
    modules = _FRAME.findall(stack)
    process = "worker" if _WORKER in modules else "control"
    if "importlib._bootstrap" in stack:
        return process, IMPORTS
    for module in reversed(modules):
        for name, work in _WORK[process].items():
            if module.startswith(name):
                return process, work
    return process, OTHER


def shares(lines: Iterable[str]) -> Counter[tuple[str, str]]:
    """Return how often each kind of work was seen, of py-spy's lines of a stack and a count."""
    seen: Counter[tuple[str, str]] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        seen[work_of(stack)] += int(count)
    return seen


def profiled(folder: Path, source: Path, url: str) -> Counter[tuple[str, str]]:
    """Run Freight below py-spy."""
    (folder / "home").mkdir(parents=True)
    stacks = folder / "stacks"
    argv = [
        str(PY_SPY), "record", "--subprocesses", "--format", "raw", "--rate", str(RATE), "--output", str(stacks), "--",
        sys.executable, "-m", "freight", "run", str(source), "-o", str(folder / "out.jsonl"), "--model", url,
    ]  # fmt: skip
    took = run(argv, cwd=folder, env=environment(folder), log=folder / "log")
    assert took.status == 0, (folder / "log").read_text()[-2000:]
    return shares(stacks.read_text().splitlines())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.hotpath", description=__doc__)
    parser.add_argument("--factor", type=float, default=0.4, help="of W6's number of records")
    parser.add_argument("--folder", type=absolute_folder, help="where files are made; on a real disk")
    given = parser.parse_args()
    workload = WORKLOADS["W6"]
    with tempfile.TemporaryDirectory(prefix="freight-hotpath-", dir=given.folder) as name:
        folder = Path(name)
        source = folder / "in.jsonl"
        records = write_workload(source, workload, given.factor)
        with simulated(folder / "engine", workload.engine_options()) as engine:
            took = freight(folder / "plain", source, engine.url)
            check(folder / "plain", Expected(source))
            seen = profiled(folder / "seen", source, engine.url)
    cpu_us = took.cpu_s / records * 1e6
    print(f"{records:,} records, {cpu_us:.0f} µs of CPU each")
    for (process, work), count in sorted(seen.items(), key=lambda item: -item[1]):
        found = {"process": process, "work": work, "us": count / seen.total() * cpu_us}
        note({"kind": "hotpath", "records": records, "cpu_us": cpu_us, **found})
        print(f"{found['us']:6.1f} µs  {process:8} {work}")


if __name__ == "__main__":
    main()
