"""What Freight's promises cost: `python -m bench.costs [durability resume dedupe large] [--factor 0.1]`.

`durability`: W6 with the state on a disk against the same in memory, where nothing need be waited for, in turns.
`resume`: W6 killed half-way; from the start of the same command to its first request. `dedupe`: short prompts, each
twice and four times, with and without `--dedupe`. `large`: the memory that 2,000 records of 5 MB take.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.checks import Expected
from bench.engines import Simulated, simulated
from bench.freightrun import check, freight, span_of
from bench.measuring import Took, absolute_folder
from bench.race import note
from bench.workloads import SEED, WORKLOADS, Prompt, copies, scaled, write_input, write_workload

# A file system in memory.
IN_MEMORY: Final = Path("/dev/shm")
LARGE_BYTES: Final = 5_000_000


def measure_durability(given: argparse.Namespace) -> None:
    """Print the rate on a disk and in memory, round by round."""
    for number in range(given.rounds):
        rates: dict[str, float] = {}
        for where, place in (("disk", given.folder), ("memory", IN_MEMORY)):
            with tempfile.TemporaryDirectory(prefix="freight-costs-", dir=place) as name:
                folder = Path(name)
                source = folder / "in.jsonl"
                records = write_workload(source, WORKLOADS["W6"], given.factor)
                with simulated(folder / "engine", WORKLOADS["W6"].engine_options()) as engine:
                    took = freight(folder, source, engine.url)
                check(folder, Expected(source))
            rates[where] = records / took.seconds
        _say("durability", given, number, {**rates, "share": rates["disk"] / rates["memory"], "goal": 0.9})


def measure_resume(given: argparse.Namespace) -> None:
    """Print how long the second start took to its first request."""
    workload = WORKLOADS["W6"]
    with tempfile.TemporaryDirectory(prefix="freight-costs-", dir=given.folder) as name:
        folder = Path(name)
        source = folder / "in.jsonl"
        records = write_workload(source, workload, given.factor)
        with simulated(folder / "engine", workload.engine_options()) as engine:
            url = engine.url
            freight(folder, source, url, should_kill=_half(engine, records))
            before = engine.stop()["answered"]
        port = int(url.rpartition(":")[2])
        with simulated(folder / "engine", workload.engine_options(), port) as engine:
            took = freight(folder, source, url)
            span = span_of([engine.stop()])
        check(folder, Expected(source))
    found = {
        "records": records, "before": before, "after": span.requests, "again": before + span.requests - records,
        "to_first_request_s": span.first_request_at - took.began_at, "goal": 2.0,
    }  # fmt: skip
    _say("resume", given, 0, found)


def _half(engine: Simulated, records: int) -> Callable[[], bool]:
    was_killed = False

    def should_kill() -> bool:
        nonlocal was_killed
        was_killed = was_killed or engine.answered() >= records / 2
        return was_killed

    return should_kill


def measure_dedupe(given: argparse.Namespace) -> None:
    """Print how much faster files of copies run."""
    workload = WORKLOADS["W1"]
    for each in (2, 4):
        with tempfile.TemporaryDirectory(prefix="freight-costs-", dir=given.folder) as name:
            folder = Path(name)
            source = folder / "in.jsonl"
            # More than one window of what is left: else the engine's fill and not the number of records decides.
            write_input(source, copies(random.Random(SEED), scaled(32_000, given.factor), each))
            expected = Expected(source)
            seconds: list[float] = []
            for part, options in (("without", ()), ("with", ("--dedupe",))):
                place = folder / part
                with simulated(place / "engine", workload.engine_options()) as engine:
                    freight(place, source, engine.url, *options)
                    seconds.append(span_of([engine.stop()]).seconds * workload.speed)
                check(place, expected)
        ratio = seconds[0] / seconds[1]
        found = {"copies": each, "without_s": seconds[0], "with_s": seconds[1], "ratio": ratio, "goal": 0.9 * each}
        _say("dedupe", given, 0, found)


def measure_large(given: argparse.Namespace) -> None:
    """Print the highest memory of a process on records of 5 MB."""

    def prompts() -> Iterator[Prompt]:
        rng = random.Random(SEED)
        for number in range(scaled(2_000, given.factor)):
            yield Prompt(f"{number} " + f"{rng.randrange(10**9):x} " * (LARGE_BYTES // 9), 16)

    with tempfile.TemporaryDirectory(prefix="freight-costs-", dir=given.folder) as name:
        folder = Path(name)
        source = folder / "in.jsonl"
        records = write_input(source, prompts())
        with simulated(folder / "engine", WORKLOADS["W6"].engine_options()) as engine:
            took: Took = freight(folder, source, engine.url)
        check(folder, Expected(source))
    _say("large", given, 0, {"records": records, "seconds": took.seconds, "peak_mb": took.peak_mb, "goal": 300})


def _say(what: str, given: argparse.Namespace, number: int, found: dict[str, Any]) -> None:
    note({"kind": "cost", "what": what, "round": number, "factor": given.factor, **found})
    shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
    print(f"{what}: {json.dumps(shown)}", flush=True)


COSTS: Final[dict[str, Callable[[argparse.Namespace], None]]] = {
    "durability": measure_durability,
    "resume": measure_resume,
    "dedupe": measure_dedupe,
    "large": measure_large,
}


def main() -> None:
    """Measure all, or what is named."""
    parser = argparse.ArgumentParser(prog="python -m bench.costs", description=__doc__)
    parser.add_argument("costs", nargs="*", default=list(COSTS), metavar="COST")
    parser.add_argument("--rounds", type=int, default=5, help="of durability")
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--folder", type=absolute_folder, help="where files are made; on a real disk")
    given = parser.parse_args()
    for name in given.costs:
        COSTS[name](given)


if __name__ == "__main__":
    main()
