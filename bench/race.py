"""Freight and what people use today, side by side: `python -m bench.race W1 W4 [--rounds 5] [--factor 0.1]`.

Each round runs every peer once, in turn, on a fresh engine of the simulator; what is compared was run in one round. A
peer's default setting takes part in the first rounds only (`--default-rounds`), and is stopped after `--limit` seconds.
Every answer is checked before a time counts. One JSON line a run is appended to build/bench/results.jsonl.

Time counts from the engine being ready: for a client of an engine that is up already, from the client's own start. What
the engine takes is in its own seconds: where it runs sped up, the span from the first request to the last answer is
multiplied by that speed, and what a client does before and after is not.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench.checks import Expected
from bench.engines import ROOT, Simulated, simulated
from bench.freightrun import freight, own_engines, summaries_of
from bench.measuring import Took, absolute_folder, run
from bench.peers.roster import BEST, DEFAULT, INPUT_ORDER, OWN_ENGINE, PEERS, Peer, Task, batch_file, environment
from bench.simengine.options import parse_options
from bench.simengine.virtual import ORDERS, Machine, best_cached_share, read_requests, shared_queue
from bench.simengine.virtual import run as run_virtual
from bench.workloads import WORKLOADS, Workload, write_workload

RESULTS: Final = ROOT / "build" / "bench" / "results.jsonl"
# Where the order is what makes the difference, or must not.
_WITH_INPUT_ORDER: Final = frozenset(("W3", "W3b", "W4", "W5-24", "W5-300"))
# Where a client's own start is felt. Freight's is over when an engine that it starts itself is ready.
_WITH_OWN_ENGINE: Final = frozenset(("W2", "W5-24", "W5-300"))
STARTUP_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A peer with a setting."""

    peer: Peer
    setting: str


@dataclass(frozen=True, slots=True)
class Result:
    """What one run came to. Seconds are the engine's, but for `wall_s`."""

    workload: str
    peer: str
    setting: str
    round: int
    records: int
    factor: float
    speed: float
    right: int
    in_order: bool
    problem: str | None
    status: int
    starts: int
    sent: int
    wall_s: float
    seconds: float
    start_s: float
    span_s: float
    finish_s: float
    cpu_us: float | None
    client_load: float
    peak_mb: float
    total_peak_mb: float
    cached_share: float
    in_flight_max: int

    @property
    def is_whole(self) -> bool:
        """Return whether every record has its answer, and nothing else is there."""
        return self.problem is None and self.right == self.records


def note(line: dict[str, Any]) -> None:
    """Append a result."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps({"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line}) + "\n")


def cached_share(summary: dict[str, Any]) -> float:
    """Return the share of prompts' tokens that an engine found in its cache."""
    return summary.get("cache_hits", 0) / max(1, summary.get("cache_queries", 0))


def entries(workload: Workload, peers: Sequence[str], with_defaults: bool) -> Iterator[Entry]:
    """Yield who runs in a round."""
    for name in peers:
        peer = PEERS[name]
        if not peer.is_installed():
            continue
        for setting in peer.about:
            if setting == INPUT_ORDER and workload.name not in _WITH_INPUT_ORDER:
                continue
            if setting == OWN_ENGINE and workload.name not in _WITH_OWN_ENGINE:
                continue
            # Freight needs no setting: its default is its best.
            if setting != DEFAULT or with_defaults or BEST not in peer.about:
                yield Entry(peer, setting)


def killer(workload: Workload, records: int, engine: Simulated) -> Callable[[], bool]:
    """Return whether the client is to be killed now; it says so once."""
    was_killed = False

    def should_kill() -> bool:
        nonlocal was_killed
        if not was_killed and engine.answered() >= workload.kill_at * records:
            was_killed = True
            return True
        return False

    return should_kill


def measure(
    entry: Entry,
    workload: Workload,
    folder: Path,
    source: Path,
    expected: Expected,
    number: int,
    given: argparse.Namespace,
) -> Result:
    """Run one peer on an engine of its own."""
    place = folder / "run"
    shutil.rmtree(place, ignore_errors=True)
    (place / "home").mkdir(parents=True)
    if entry.setting == OWN_ENGINE:
        return _measure_own_engine(entry, workload, place, source, expected, number, given.factor)
    with simulated(place / "engine", workload.engine_options()) as engine:
        task = Task(source, engine.url, place, entry.setting, workload.window)
        task.output.mkdir()
        argv, env, log = entry.peer.command(task), environment(place), place / "log"
        is_best = entry.setting == BEST or BEST not in entry.peer.about
        limit_s = 0.0 if is_best else given.limit
        should_kill = killer(workload, len(expected), engine) if workload.kill_at else None
        parts = [run(argv, cwd=place, env=env, log=log, limit_s=limit_s, should_kill=should_kill)]
        if should_kill is not None and parts[0].status == -9:
            parts.append(run(argv, cwd=place, env=env, log=log, limit_s=limit_s))
        summary = engine.stop()
    return _result(entry, workload, task, expected, parts, summary, number, given.factor)


def _measure_own_engine(
    entry: Entry, workload: Workload, place: Path, source: Path, expected: Expected, number: int, factor: float
) -> Result:
    """Run Freight with an engine that it starts; what counts is from that one's being ready to Freight's end."""
    task = Task(source, "", place, entry.setting, workload.window)
    task.output.mkdir()
    config = own_engines(place, [[*workload.engine_options(), "--startup", f"{STARTUP_S * workload.speed:g}"]])
    took = freight(place, source, "many", config=config)
    (place / "out.jsonl").rename(batch_file(task))
    summary = summaries_of(place)[0]
    counted = replace(took, began_at=summary["ready_at"])
    # The engine's CPU time is in that of the processes below Freight.
    return replace(_result(entry, workload, task, expected, [counted], summary, number, factor), cpu_us=None)


def _result(
    entry: Entry,
    workload: Workload,
    task: Task,
    expected: Expected,
    parts: list[Took],
    summary: dict[str, Any],
    number: int,
    factor: float,
) -> Result:
    began, ended = parts[0].began_at, parts[-1].ended_at
    first = summary["first_request_at"] or ended
    last = summary["last_answer_at"] or first
    wall_s = sum(part.seconds for part in parts)
    cpu_s = sum(part.cpu_s for part in parts)
    # What lies between a kill and the next start is nobody's.
    gap_s = sum(after.began_at - before.ended_at for before, after in pairwise(parts))
    start_s, span_s, finish_s = first - began, (last - first - gap_s) * workload.speed, ended - last
    try:
        verdict = expected.check(entry.peer.answers(task))
        right, in_order, problem = verdict.right, verdict.in_order, verdict.problem()
    except FileNotFoundError:
        right, in_order, problem = 0, False, None
    return Result(
        workload=workload.name,
        peer=entry.peer.name,
        setting=entry.setting,
        round=number,
        records=len(expected),
        factor=factor,
        speed=workload.speed,
        right=right,
        in_order=in_order,
        problem=problem,
        status=parts[-1].status,
        starts=len(parts),
        sent=summary["requests"],
        wall_s=wall_s,
        seconds=start_s + span_s + finish_s,
        start_s=start_s,
        span_s=span_s,
        finish_s=finish_s,
        cpu_us=cpu_s / max(1, summary["answered"]) * 1e6,
        client_load=cpu_s / wall_s,
        peak_mb=max(part.peak_mb for part in parts),
        total_peak_mb=max(part.total_peak_mb for part in parts),
        cached_share=cached_share(summary),
        in_flight_max=summary["in_flight_max"],
    )


def note_file(workload: Workload, source: Path, records: int, factor: float) -> None:
    """Note what the file asks of the engine: the least time in which it can be done, in virtual time."""
    physics = parse_options(workload.engine_options()).physics
    if physics is None:
        return
    requests = list(read_requests(source, context=physics.max_model_len))
    as_it_is = run_virtual([Machine(physics)], shared_queue(requests))
    by_prompt = run_virtual([Machine(physics)], shared_queue(sorted(requests, key=ORDERS["prefix"])))
    found = {
        "workload": workload.name, "factor": factor, "records": records, "megabytes": source.stat().st_size / 1e6,
        "as_it_is_s": as_it_is.makespan_s, "by_prompt_s": by_prompt.makespan_s,
        "as_it_is_cached": as_it_is.cached_share, "by_prompt_cached": by_prompt.cached_share,
        "best_cached": best_cached_share(requests),
    }  # fmt: skip
    note({"kind": "file", **found})
    print("  in virtual time: " + ", ".join(f"{name} {found[name]:.3f}" for name in list(found)[4:]), flush=True)


def race(workload: Workload, given: argparse.Namespace) -> None:
    """Run all rounds of one workload; each peer's input stays the same."""
    with tempfile.TemporaryDirectory(prefix="freight-race-", dir=given.folder) as name:
        folder = Path(name)
        source = folder / "in.jsonl"
        write_workload(source, workload, given.factor)
        expected = Expected(source)
        sources = {name: _source_of(PEERS[name], source) for name in given.peers}
        print(f"{workload.name}: {workload.about}; {len(expected):,} records", flush=True)
        note_file(workload, source, len(expected), given.factor)
        for number in range(given.rounds):
            field = list(entries(workload, given.peers, number < given.default_rounds))
            turn = number % max(1, len(field))
            for entry in field[turn:] + field[:turn]:
                result = measure(entry, workload, folder, sources[entry.peer.name], expected, number, given)
                note({"kind": "race", **asdict(result)})
                print(line_of(result), flush=True)
                if (not result.is_whole or result.status) and given.show_log:
                    print((folder / "run" / "log").read_text(errors="replace")[-2000:], flush=True)


def _source_of(peer: Peer, source: Path) -> Path:
    if peer.prepare is None:
        return source
    own = source.with_name(f"in-{peer.name}.jsonl")
    peer.prepare(source, own)
    return own


def line_of(result: Result) -> str:
    """Return one run as a line for people."""
    again = f", started {result.starts} times, {result.sent} sent" if result.starts > 1 else ""
    whole = "" if result.is_whole else f"  {result.right}/{result.records} answered, {result.problem or 'stopped'}"
    return (
        f"  {result.round} {result.peer:9} {result.setting:11} {result.seconds:8.1f} s"
        f" (start {result.start_s:.1f}, end {result.finish_s:.1f}), {result.right / result.seconds:8,.1f}/s,"
        f" {result.cpu_us or 0:6.0f} µs, {result.client_load:4.2f} cores, {result.peak_mb:5.0f} MB,"
        f" cached {result.cached_share:.3f}, {result.in_flight_max} in flight{again}{whole}"
    )


def main() -> None:
    """Run the races that are named."""
    parser = argparse.ArgumentParser(prog="python -m bench.race", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="W")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--default-rounds", type=int, default=1, help="rounds in which defaults take part")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="a default setting's time")
    parser.add_argument("--factor", type=float, default=1.0, help="of the number of records")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--folder", type=absolute_folder, help="where files are made; on a real disk")
    parser.add_argument("--show-log", action="store_true", help="print what an unsuccessful peer said")
    given = parser.parse_args()
    for name in given.workloads:
        race(WORKLOADS[name], given)


if __name__ == "__main__":
    main()
