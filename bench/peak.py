"""How much of an engine one worker uses: `python -m bench.peak [--slots 8 64] [--factor 0.1]`.

One endpoint whose settings Freight does not know, with its metrics open and shut, against the engine's own peak: the
same file in virtual time, every slot filled the moment it is free. Measured from the first request to the last answer.
"""

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.checks import Expected
from bench.engines import simulated
from bench.freightrun import check, freight, span_of
from bench.measuring import absolute_folder
from bench.race import note
from bench.simengine.options import parse_options
from bench.simengine.virtual import Machine, read_requests, run, shared_queue
from bench.workloads import SEED, mixed, scaled, write_input

# Slots, records, and how fast the engine's time passes: as fast as leaves the client well below a core.
SIZES: Final = {8: (2_000, 16.0), 64: (5_000, 8.0), 256: (12_000, 4.0), 1024: (20_000, 2.5)}
GOALS: Final = {True: 0.97, False: 0.90}


def measure(slots: int, has_metrics: bool, number: int, given: argparse.Namespace) -> None:
    """Run one size once."""
    count, speed = SIZES[slots]
    options = ["--profile", "b200-30b", "--max-num-seqs", str(slots), "--speed", f"{speed:g}"]
    physics = parse_options(options).physics
    assert physics is not None
    with tempfile.TemporaryDirectory(prefix="freight-peak-", dir=given.folder) as name:
        folder = Path(name)
        source = folder / "in.jsonl"
        write_input(source, mixed(random.Random(SEED), scaled(count, given.factor)))
        ideal = run([Machine(physics)], shared_queue(read_requests(source))).makespan_s
        shut = [] if has_metrics else ["--no-metrics"]
        with simulated(folder / "engine", [*options, *shut]) as engine:
            freight(folder, source, engine.url)
            summary = engine.stop()
        expected = Expected(source)
        check(folder, expected)
    seconds = span_of([summary]).seconds * speed
    found: dict[str, Any] = {
        "slots": slots, "metrics": has_metrics, "round": number, "records": len(expected), "seconds": seconds,
        "peak_s": ideal, "share": ideal / seconds, "goal": GOALS[has_metrics],
        "in_flight_max": summary["in_flight_max"],
    }  # fmt: skip
    note({"kind": "peak", "factor": given.factor, **found})
    print(
        f"{slots:5} slots, metrics {'open' if has_metrics else 'shut'}: {found['share']:.3f} of the peak"
        f" (goal {found['goal']}); {seconds:.1f} s against {ideal:.1f} s, {found['in_flight_max']} in flight at most",
        flush=True,
    )


def main() -> None:
    """Run all sizes, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m bench.peak", description=__doc__)
    parser.add_argument("--slots", type=int, nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--folder", type=absolute_folder)
    given = parser.parse_args()
    for number in range(given.rounds):
        for slots in given.slots:
            for has_metrics in (True, False):
                measure(slots, has_metrics, number, given)


if __name__ == "__main__":
    main()
