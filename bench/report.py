"""Write docs/benchmarks.md of what benchmarks noted: `python -m bench.report`.

Every figure is the median over the rounds, its range in brackets; ratios are taken within a round.
"""

import argparse
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bench.engines import ROOT
from bench.goals import goals
from bench.order import KINDS
from bench.peers.install import REPORT
from bench.peers.roster import BEST, DEFAULT, ENVIRONMENTS, PEERS
from bench.race import RESULTS
from bench.results import Line, figure, grouped, is_whole, rate, ratios, read
from bench.simengine.calibrate import IN_FLIGHT, SHARES, curve
from bench.simengine.profiles import PROFILES
from bench.workloads import WORKLOADS

PAGE: Final = ROOT / "docs" / "benchmarks.md"
PLOTS: Final = {
    "benchmarks-rates.svg": "How many times as fast Freight was as each peer at its best setting",
    "benchmarks-peak.svg": "Share of the engine's own peak that one worker reaches",
    "benchmarks-cpu.svg": "CPU time a record, all processes of a client",
}
# Below this a ratio is a tie or worse, and is named.
TIE: Final = 1.05

_INTRODUCTION: Final = """# Benchmarks

Freight against what people use for the same work, on the same engine and the same file, run in turns: round by round
each program once, on a fresh engine. Every answer is checked before a time counts. A figure is the median of the
rounds, its range in brackets; a ratio is taken within each round. All ran on one machine, with the engine on it as
well: compare the figures of a table, and quote none.

The engine is a simulation of continuous batching (`bench/simengine`) unless said otherwise: slots, a token budget a
step, a block prefix cache, preemption; its step times are fitted to a published curve of a 30B model on a B200. Where
it runs sped up, so that a run takes a minute, the span from the first request to the last answer is multiplied by that
speed; what a client does before and after is not. Seconds are the engine's. Programs that adapt by the clock, as
Freight and saturate do, have less of it on a sped-up engine.
"""

_TIES: Final = """## Where Freight only ties

On one engine, with nothing shared among the records (W1, W4), a bare loop with as many requests in flight as the engine
runs already reaches the engine's peak. Nobody can be faster there, and Freight is not: it finds that number by itself,
keeps every answer through a kill, and starts two processes to do so, which a file of 24 records feels. The bare loop
keeps nothing: it takes part to show what the engine gives. Freight wins by order (W3, W3b), by several workers and
skewed files, and by how little durability costs it (W6). With many 503s (W7) it is no faster than others: it slows down
at them, as a server that says so asks, and a record that meets three of them ends as an error.
"""

# Workloads that a client's own start decides.
SHORT: Final = ("W2", "W5-24", "W5-300")

_ENDS: Final = """Where Freight is behind by a hundredth or a few on W2 and W5, it is by its own start: two processes of
Python, one of which opens its databases, checks the file and makes the order. From the first request to the last answer
all take as long, but for a tenth of a second on W5-300, while Freight finds out how many requests the engine runs at
once. Where it starts the engine itself it knows, and its own start is over when the engine is up. Seconds, the middle
column the engine's:"""

_COMMANDS: Final = """## Commands

```console
$ make bench-peers       # an environment for each peer, in build/peers
$ make bench             # all of this page, some hours; FACTOR=0.05 ROUNDS=1 for a quick look
$ .venv/bin/python -m bench.race W3 --peers freight bare --rounds 1
```

Each of the peers runs with its telemetry off, in a home folder of its own.
"""


def page(lines: Sequence[Line], remark: str = "") -> Iterator[str]:
    """Yield the sections of the page; `remark` is what its reader must know of how it was made."""
    by_kind = grouped(lines, lambda line: line["kind"])
    yield _INTRODUCTION
    yield f"This page: {machine()}, {lines[-1]['at'][:10]}. {remark}"
    yield "## Goals"
    yield table(["", "goal", "found", "met"], [goal.row() for goal in goals(lines)])
    yield plot_line("benchmarks-rates.svg")
    yield from races(by_kind.get("race", ()), by_kind.get("file", ()))
    yield _TIES
    yield from named_ties(by_kind.get("race", ()))
    yield from ends(by_kind.get("race", ()))
    yield from peaks(by_kind.get("peak", ()))
    yield from spreads(by_kind.get("spread", ()))
    yield from costs(by_kind.get("cost", ()))
    yield from orders(by_kind.get("order", ()))
    yield from hot_path(by_kind.get("hotpath", ()))
    yield from reals(by_kind.get("real", ()))
    yield from simulation(by_kind.get("engine", ()))
    yield who()
    yield _COMMANDS


def machine() -> str:
    """Return what it ran on."""
    return f"{os.cpu_count()} CPU cores, {platform.system()}, Python {platform.python_version()}"


def plot_line(name: str) -> str:
    """Return the reference to a plot, if it was drawn."""
    return f"![{PLOTS[name]}]({name})" if (PAGE.parent / name).exists() else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def races(lines: Sequence[Line], files: Sequence[Line]) -> Iterator[str]:
    """Yield a table for each workload, and what the file asks of the engine."""
    yield "## Against what people use"
    asked = {(file["workload"], file["factor"]): file for file in files}
    for (name, factor), runs in grouped(lines, lambda line: (line["workload"], line["factor"])).items():
        yield f"### {name}: {WORKLOADS[name].about}{_size(runs[-1])}"
        if file := asked.get((name, factor)):
            yield asked_of(file)
        entries = grouped(runs, lambda line: (line["peer"], line["setting"]))
        freight = entries.get(("freight", DEFAULT), [])
        yield table(
            ["", "setting", "seconds", "records/s", "Freight is", "cached", "CPU µs", "MB", "answered"],
            [race_row(peer, setting, these, freight) for (peer, setting), these in entries.items()],
        )


def asked_of(file: Line) -> str:
    """Return what a file asks of the engine, whoever the client is."""
    as_it_is, by_prompt = (
        f"{file[f'{name}_s']:.1f} s ({file[f'{name}_cached']:.3f} of the prompts' tokens cached)"
        for name in ("as_it_is", "by_prompt")
    )
    return (
        f"In virtual time, every slot filled at once, the engine takes {as_it_is} for the file as it is, and "
        f"{by_prompt} sorted by prompt. No order finds more than {file['best_cached']:.3f} cached."
    )


def _size(line: Line) -> str:
    if line["factor"] == 1:
        return ""
    return f" (here {line['records']:,} of them)"


def race_row(peer: str, setting: str, these: Sequence[Line], freight: Sequence[Line]) -> list[str]:
    """Return one program's row."""
    faster = ratios(freight, these)
    shown = {"seconds": "{:.1f}", "cached_share": "{:.2f}", "cpu_us": "{:.0f}", "peak_mb": "{:.0f}"}
    cells = {name: _cell(these, name, shape) for name, shape in shown.items()}
    rates = figure(rate(line) for line in these)
    return [
        peer, setting, cells["seconds"], rates.text("{:,.1f}") if rates else "",
        "" if (peer == "freight" and setting == DEFAULT) or faster is None else f"{faster.text()} ×",
        cells["cached_share"], cells["cpu_us"], cells["peak_mb"], answered(these),
    ]  # fmt: skip


def _cell(these: Sequence[Line], name: str, shape: str) -> str:
    found = figure(line[name] for line in these if line[name] is not None)
    return found.text(shape) if found else ""


def answered(these: Sequence[Line]) -> str:
    """Return whether all was answered, and what was not."""
    worst = min(these, key=lambda line: (line["problem"] is None, line["right"]))
    if is_whole(worst):
        return "all, in order" if all(line["in_order"] for line in these) else "all"
    if worst["problem"]:
        return worst["problem"]
    note = ", stopped for its time" if worst["status"] == -9 else ""
    return f"{worst['right']:,} of {worst['records']:,}{note}"


def named_ties(lines: Sequence[Line]) -> Iterator[str]:
    """Yield each pair in which Freight was not clearly faster."""
    found: list[str] = []
    for (name, peer, setting), these in grouped(
        lines, lambda line: ((line["workload"], line["factor"]), line["peer"], line["setting"])
    ).items():
        freight = [
            line
            for line in lines
            if ((line["workload"], line["factor"]), line["peer"], line["setting"]) == (name, "freight", DEFAULT)
        ]
        faster = ratios(freight, these)
        if (peer, setting) == ("freight", DEFAULT) or faster is None or faster.median >= TIE:
            continue
        word = "slower than" if faster.median < 0.98 else "as fast as"
        unsafe = "" if all(is_whole(line) for line in these) else ", which did not answer all"
        found.append(f"- {name[0]}{_size(these[-1])}: {word} {peer} ({setting}){unsafe}: {faster.text()} ×")
    if found:
        yield f"Of all pairs above, those in which Freight is not {TIE} times as fast:\n\n" + "\n".join(found)


def ends(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what goes by before the first request and after the last answer, where that decides."""
    rows: list[list[str]] = []
    for name in SHORT:
        runs = [line for line in lines if line["workload"] == name and is_whole(line)]
        whole = [line for line in runs if line["factor"] == max(run["factor"] for run in runs)]
        for (peer, setting), these in grouped(whole, lambda line: (line["peer"], line["setting"])).items():
            if setting == BEST or peer == "freight":
                cells = [_cell(these, part, "{:.2f}") for part in ("start_s", "span_s", "finish_s")]
                rows.append([name, f"{peer} ({setting})", *cells])
    if rows:
        yield _ENDS
        yield table(["", "", "before the first request", "from there to the last answer", "after it"], rows)


def peaks(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what one worker uses of an engine."""
    if not lines:
        return
    yield (
        "## One worker\n\nShare of the engine's own peak, from the first request to the last answer, on an endpoint "
        "whose settings Freight does not know; the peak is the same file in virtual time, every slot filled at once."
    )
    yield plot_line("benchmarks-peak.svg")
    rows: list[list[str]] = []
    for (slots, metrics), these in grouped(lines, lambda line: (line["slots"], line["metrics"])).items():
        share = figure(line["share"] for line in these)
        goal = these[-1]["goal"]
        most = max(line["in_flight_max"] for line in these)
        rows.append(
            [f"{slots:,}", "open" if metrics else "shut", share.text("{:.3f}") if share else "", f"{goal}", f"{most}"]
        )
    yield table(["slots", "metrics", "share", "goal", "in flight at most"], rows)


_CASES: Final = {
    "four": "W1 on four workers, against an ideal shared queue (virtual time)",
    "sorted": "W2 on four workers, against static shards (virtual time)",
    "half": "Four times W4, one of four workers at half speed, against the sum of the speeds",
    "late": "W1, ready after 60, 90, 120 and 240 s, against waiting for all",
}


def spreads(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what several workers come to."""
    if not lines:
        return
    yield "## Several workers"
    rows: list[list[str]] = []
    for name, these in grouped(lines, lambda line: line["case"]).items():
        ratio, seconds = figure(line["ratio"] for line in these), figure(line["seconds"] for line in these)
        last = these[-1]
        cells = [_CASES[name], *(found.text("{:.2f}") if found else "" for found in (seconds, ratio))]
        rows.append([*cells, f"{last['goal']:.2f}", f"{last['reference_s']:.1f}", f"{last['ideal_s']:.1f}"])
    yield table(["", "seconds", "times as fast", "goal", "it is held against", "ideal shared queue"], rows)


_COSTS: Final = {
    "durability": ("W6 on a disk, as a share of the rate in memory", "share"),
    "resume": ("seconds to the first request after a kill half-way through W6", "to_first_request_s"),
    "dedupe": ("times as fast with `--dedupe`", "ratio"),
    "large": ("MB of the largest process on records of 5 MB", "peak_mb"),
}


def costs(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what the promises cost."""
    yield "## What it costs"
    yield plot_line("benchmarks-cpu.svg")
    rows: list[list[str]] = []
    for (what, each), these in grouped(lines, lambda line: (line["what"], line.get("copies"))).items():
        label, name = _COSTS[what]
        found = figure(line[name] for line in these)
        more = f", {each} copies of each" if each else ""
        rows.append([label + more, found.text("{:.2f}") if found else "", f"{these[-1]['goal']:g}"])
    if rows:
        yield table(["", "", "goal"], rows)


def orders(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what the order of dispatch costs, by the kind of file."""
    if not lines:
        return
    yield "Seconds of CPU that the order of dispatch adds to the check of a file (`python -m bench.order`):"
    rows: list[list[str]] = []
    for (name, records), these in grouped(lines, lambda line: (line["file"], line["records"])).items():
        found = figure(line["added_s"] for line in these)
        about = " ".join((KINDS[name].__doc__ or name).split()).partition(";")[0].rstrip(".")
        rows.append([about, f"{records:,}", found.text("{:.2f}") if found else ""])
    yield table(["file", "records", "seconds"], rows)


def hot_path(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what a tiny record's CPU time goes to, as it was seen last."""
    latest = [line for line in lines if line["cpu_us"] == lines[-1]["cpu_us"]]
    if not latest:
        return
    yield (
        f"## Where a tiny record's time goes\n\nW6, {latest[0]['records']:,} records, {latest[0]['cpu_us']:.0f} µs of "
        "CPU each over both processes, shared out by py-spy. It includes what a run costs once, its start and its end."
    )
    rows = [[line["process"], line["work"], f"{line['us']:.1f}"] for line in latest if line["us"] >= 0.05]
    yield table(["process", "work", "µs"], rows)


def reals(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what real engines on the CPU came to."""
    if not lines:
        return
    yield "## Real engines"
    rows: list[list[str]] = []
    names = ("from_ready_s", "wall_s", "cached_share", "share")
    for (what, way), these in grouped(lines, lambda line: (line["what"], line["way"])).items():
        cells = [figure(line[name] for line in these if name in line) for name in names]
        rows.append([what, way, *(found.text("{:.2f}") if found else "" for found in cells)])
    yield table(["", "", "seconds from ready", "wall", "cached", "of a closed loop's rate"], rows)


def simulation(lines: Sequence[Line]) -> Iterator[str]:
    """Yield how near the simulated engine is to the published curve, and what it costs itself."""
    yield (
        "## The simulated engine\n\nShare of the peak throughput of a 30B model on a B200, in percent, with so many "
        "requests in flight (`python -m bench.simengine.calibrate`)."
    )
    shares = zip(IN_FLIGHT, SHARES, curve(PROFILES["b200-30b"]), strict=True)
    rows = [[f"{count}", f"{share:g}", f"{found:.1f}"] for count, share, found in shares]
    yield table(["in flight", "published", "simulated"], rows)
    for options, these in grouped(lines, lambda line: line["options"]).items():
        cost = figure(line["cpu_us_per_request"] for line in these)
        yield f"`{options}`: {cost.text('{:.0f}')} µs of the engine's own CPU a request." if cost else ""


def who() -> str:
    """Return who took part, and how each was set."""
    rows: list[list[str]] = []
    for peer in PEERS.values():
        for setting, about in peer.about.items():
            rows.append([peer.requirement or peer.name, setting, about])
    missing = [peer.requirement for peer in PEERS.values() if not peer.is_installed()]
    note = f"\n\nNot installed here, and so not in the tables: {', '.join(missing)}." if missing else ""
    return "## Who took part\n\n" + table(["", "setting", "how"], rows) + note


def draw() -> None:
    """Draw the plots, where what draws them is installed."""
    python = ENVIRONMENTS / REPORT / "bin" / "python"
    if python.exists():
        subprocess.run([str(python), "-m", "bench.plots", str(RESULTS), str(PAGE.parent)], cwd=ROOT, check=True)


def main() -> None:
    """Draw, then write."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--remark", default="", help="what a reader must know of how these figures came about")
    given = parser.parse_args()
    draw()
    sections = [section.strip() for section in page(read(RESULTS), given.remark)]
    given.output.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
