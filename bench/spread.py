"""Several workers: `python -m bench.spread [--factor 0.1] [--rounds 3]`, in the seconds of the simulated engines.

`four` and `sorted`: W1 and W2 on four workers, against an ideal shared queue and against static shards, both worked
out in virtual time on the same file. `half`: four times W4, one of four workers at half speed, against the sum of the
speeds. `late`: W1 on engines that are ready after 60, 90, 120 and 240 seconds, against waiting for all of them.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.checks import Expected
from bench.freightrun import Span, check, freight, own_engines, span_of, summaries_of
from bench.measuring import absolute_folder
from bench.race import note
from bench.simengine.options import parse_options
from bench.simengine.physics import Physics, Request
from bench.simengine.virtual import Machine, read_requests, run, shared_queue, static_shards
from bench.workloads import WORKLOADS, Workload, write_workload

SPEED: Final = 2.0
WORKERS: Final = 4


@dataclass(frozen=True, slots=True)
class Case:
    """Four workers: when each is ready, how fast each is, and what the result is held against."""

    name: str
    workload: str
    goal: float
    speeds: tuple[float, ...] = (1.0,) * WORKERS
    ready_s: tuple[float, ...] = (0.0,) * WORKERS
    # Of the workload's number of records.
    size: float = 1.0


CASES: Final = {
    case.name: case
    for case in (
        Case("four", "W1", 1 / 1.02),
        Case("sorted", "W2", 1.4),
        # A long answer at half speed would be all of the end: answers of like lengths, and many of them.
        Case("half", "W4", 0.95, speeds=(1.0, 1.0, 1.0, 0.5), size=4.0),
        Case("late", "W1", 1.4, ready_s=(60.0, 90.0, 120.0, 240.0)),
    )
}


def options_of(workload: Workload, case: Case) -> list[list[str]]:
    """Return each engine's command line."""
    return [
        [*workload.engine, "--speed", f"{SPEED * speed:g}", "--startup", f"{ready * speed:g}"]
        for speed, ready in zip(case.speeds, case.ready_s, strict=True)
    ]


def reference_s(case: Case, physics: Physics, requests: Sequence[Request]) -> float:
    """Return the seconds that the case is held against, in virtual time."""
    machines = [Machine(physics)] * WORKERS
    if case.name == "sorted":
        return run(machines, static_shards(requests, WORKERS)).makespan_s
    if case.name == "half":
        alone = run(machines[:1], shared_queue(requests)).makespan_s
        return alone / sum(case.speeds)
    ideal = run(machines, shared_queue(requests)).makespan_s
    return ideal + max(case.ready_s)


def ideal_s(case: Case, physics: Physics, requests: Sequence[Request]) -> float:
    """Return what an ideal shared queue takes on the very same workers."""
    machines = [
        replace(Machine(physics), speed=speed, ready_s=ready)
        for speed, ready in zip(case.speeds, case.ready_s, strict=True)
    ]
    return run(machines, shared_queue(requests)).makespan_s


def measure(case: Case, given: argparse.Namespace) -> None:
    """Run one case some times."""
    workload = WORKLOADS[case.workload]
    physics = parse_options(workload.engine_options()).physics
    assert physics is not None
    with tempfile.TemporaryDirectory(prefix="freight-spread-", dir=given.folder) as name:
        source = Path(name) / "in.jsonl"
        write_workload(source, workload, given.factor * case.size)
        expected, requests = Expected(source), list(read_requests(source))
        reference, ideal = reference_s(case, physics, requests), ideal_s(case, physics, requests)
        for number in range(given.rounds):
            folder = Path(name) / f"run-{number}"
            config = own_engines(folder, options_of(workload, case))
            freight(folder, source, "many", "--workers", str(WORKERS), config=config)
            check(folder, expected)
            summaries = summaries_of(folder)
            seconds = makespan(case, summaries, span_of(summaries))
            found: dict[str, Any] = {
                "case": case.name, "round": number, "records": len(expected), "seconds": seconds,
                "reference_s": reference, "ideal_s": ideal, "ratio": reference / seconds, "goal": case.goal,
                "by_engine": span_of(summaries).by_engine,
            }  # fmt: skip
            note({"kind": "spread", "factor": given.factor, **found})
            print(
                f"{case.name:7} {seconds:7.1f} s; reference {reference:7.1f} s: {found['ratio']:.3f} x"
                f" (goal {case.goal:.3f}); ideal shared queue {ideal:7.1f} s; {found['by_engine']}",
                flush=True,
            )


def makespan(case: Case, summaries: Sequence[dict[str, Any]], span: Span) -> float:
    """Return the seconds of the engines' time; where they become ready late, from the start of the first."""
    if not any(case.ready_s):
        return span.seconds * SPEED
    return (span.last_answer_at - min(summary["started_at"] for summary in summaries)) * SPEED


def main() -> None:
    """Run all cases, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m bench.spread", description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--folder", type=absolute_folder)
    given = parser.parse_args()
    for name in given.cases:
        measure(CASES[name], given)


if __name__ == "__main__":
    main()
