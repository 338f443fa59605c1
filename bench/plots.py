"""The plots of docs/benchmarks.md, drawn in an environment of its own: `python -m bench.plots RESULTS FOLDER`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

from bench.results import Line, figure, grouped, ratios, read

mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "freight", "font.size": 9, "figure.figsize": (7, 3.2)}
PEERS = ("freight", "saturate", "flexllm", "curator", "bare")
COLOURS = {peer: f"C{place}" for place, peer in enumerate(PEERS)}


def best(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Return each peer's runs at its best setting; Freight's default is its best."""
    kept = [line for line in lines if line["setting"] == ("default" if line["peer"] == "freight" else "best")]
    return grouped(kept, lambda line: line["peer"])


def save(axes: Any, path: Path) -> None:
    """Write a small SVG, the same for the same figures."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.tight_layout()
    axes.figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(axes.figure)


def by_workload_of(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Return runs by workload, those of the size in which the most peers took part."""
    found: dict[str, list[Line]] = {}
    for name, runs in grouped(lines, lambda line: line["workload"]).items():
        sizes = grouped(runs, lambda line: line["factor"]).values()
        found[name] = max(sizes, key=lambda these: len({line["peer"] for line in these}))
    return found


def draw_rates(lines: Sequence[Line], path: Path) -> None:
    """Draw how many times as fast Freight was, for each workload and peer."""
    by_workload = {name: runs for name, runs in by_workload_of(lines).items() if len(best(runs)) > 1}
    peers = [peer for peer in PEERS[1:] if any(peer in best(runs) for runs in by_workload.values())]
    axes: Any = pyplot.subplots()[1]
    for place, peer in enumerate(peers):
        for column, runs in enumerate(by_workload.values()):
            entries = best(runs)
            found = ratios(entries.get("freight", []), entries.get(peer, []))
            if found is None:
                continue
            x = column + (place - len(peers) / 2 + 0.5) * 0.8 / len(peers)
            error = [[found.median - found.least], [found.most - found.median]]
            label = peer if column == 0 else None
            axes.bar(x, found.median, 0.8 / len(peers), yerr=error, color=COLOURS[peer], label=label, ecolor="0.3")
    axes.axhline(1, color="0.3", linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set_xticks(range(len(by_workload)), list(by_workload))
    axes.set_ylabel("times as fast")
    axes.legend(frameon=False, ncols=4)
    save(axes, path)


def draw_peak(lines: Sequence[Line], path: Path) -> None:
    """Draw the share of the peak by slots, with metrics open and shut."""
    axes: Any = pyplot.subplots()[1]
    for has_metrics, these in grouped(lines, lambda line: line["metrics"]).items():
        by_slots = grouped(these, lambda line: line["slots"])
        slots = sorted(by_slots)
        shares = [figure(line["share"] for line in by_slots[size]) for size in slots]
        axes.plot(
            [str(size) for size in slots], [share.median for share in shares if share], "o-",
            label=f"metrics {'open' if has_metrics else 'shut'}",
        )  # fmt: skip
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("slots")
    axes.set_ylabel("share of the peak")
    axes.legend(frameon=False)
    save(axes, path)


def draw_cpu(lines: Sequence[Line], path: Path) -> None:
    """Draw the CPU time a record on tiny records."""
    entries = best(by_workload_of(lines)["W6"])
    axes: Any = pyplot.subplots()[1]
    names = [peer for peer in PEERS if peer in entries]
    for place, peer in enumerate(names):
        found = figure(line["cpu_us"] for line in entries[peer])
        assert found is not None
        axes.barh(place, found.median, color=COLOURS[peer])
        axes.text(found.median, place, f" {found.median:.0f}", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("µs of CPU a record")
    save(axes, path)


def main() -> None:
    """Draw what there are figures for."""
    lines, folder = read(Path(sys.argv[1])), Path(sys.argv[2])
    kinds = grouped(lines, lambda line: line["kind"])
    races = kinds.get("race", [])
    if races:
        draw_rates(races, folder / "benchmarks-rates.svg")
    if any(line["workload"] == "W6" for line in races):
        draw_cpu(races, folder / "benchmarks-cpu.svg")
    if "peak" in kinds:
        draw_peak(kinds["peak"], folder / "benchmarks-peak.svg")


if __name__ == "__main__":
    main()
