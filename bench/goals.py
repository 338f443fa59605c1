"""What the benchmarks aim for, and what came of it: one line for each goal, told also where it was missed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.roster import BEST, DEFAULT, INPUT_ORDER, OWN_ENGINE
from bench.results import Figure, Line, figure, grouped, is_whole, rate, ratios


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that should be at least, or at most, so much; None where it was not measured."""

    about: str
    found: Figure | None
    least: float | None = None
    most: float | None = None
    shape: str = "{:.3f}"

    def row(self) -> list[str]:
        """Return it for a table."""
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        if self.found is None:
            return [self.about, bound, "not measured", ""]
        return [self.about, bound, self.found.text(self.shape), "yes" if self.is_met() else "**no**"]

    def is_met(self) -> bool:
        """Return whether the median is within the bound."""
        if self.found is None:
            return False
        if self.least is not None:
            return self.found.median >= self.least
        return self.most is not None and self.found.median <= self.most


class Runs:
    """What was noted, to be asked by kind and properties."""

    def __init__(self, lines: Sequence[Line]) -> None:
        """Look into `lines`."""
        self._lines = lines

    def some(self, kind: str, **properties: Any) -> list[Line]:
        """Return the lines of a kind with these values."""
        return [
            line
            for line in self._lines
            if line["kind"] == kind and all(line.get(name) == value for name, value in properties.items())
        ]

    def figure(self, kind: str, name: str, **properties: Any) -> Figure | None:
        """Return the median of one value."""
        return figure(line[name] for line in self.some(kind, **properties) if line.get(name) is not None)

    def race(self, workload: str, peer: str, setting: str, factor: float | None = None) -> list[Line]:
        """Return one program's runs, of the given size or of any."""
        more = {} if factor is None else {"factor": factor}
        return self.some("race", workload=workload, peer=peer, setting=setting, **more)

    def rivals(self, workload: str) -> set[str]:
        """Return the peers that took part at their best setting."""
        return {line["peer"] for line in self.some("race", workload=workload, setting=BEST)}

    def against(self, workload: str, setting: str = DEFAULT) -> Iterator[tuple[str, Figure]]:
        """Yield how many times as fast Freight was as each peer at its best."""
        for peer in sorted(self.rivals(workload)):
            runs = self.race(workload, peer, BEST)
            # Of several sizes that in which this peer took part last.
            factor = runs[-1]["factor"]
            found = ratios(
                self.race(workload, "freight", setting, factor), [run for run in runs if run["factor"] == factor]
            )
            if found is not None:
                yield peer, found


def goals(lines: Sequence[Line]) -> Iterator[Goal]:
    """Yield every goal."""
    runs = Runs(lines)
    instant = runs.figure("engine", "cpu_us_per_request", options="--profile instant")
    yield Goal("The simulated engine itself: µs of CPU a request", instant, most=60, shape="{:.0f}")
    yield from _one_worker(runs)
    yield from _several(runs)
    yield from _order(runs)
    yield from _costs(runs)
    yield from _peers(runs)
    yield from _real(runs)


def _one_worker(runs: Runs) -> Iterator[Goal]:
    for has_metrics, least in ((True, 0.97), (False, 0.90)):
        for slots in (8, 64, 256, 1024):
            found = runs.figure("peak", "share", slots=slots, metrics=has_metrics)
            shown = "" if has_metrics else ", metrics shut"
            yield Goal(f"Share of the engine's peak, {slots:,} slots{shown}", found, least=least, shape="{:.3f}")


def _several(runs: Runs) -> Iterator[Goal]:
    makespan = figure(line["seconds"] / line["ideal_s"] for line in runs.some("spread", case="four"))
    yield Goal("Four workers: makespan against an ideal shared queue", makespan, most=1.02, shape="{:.3f}")
    for case, about, least in (
        ("sorted", "Four workers, W2: times as fast as static shards", 1.4),
        ("half", "Four workers, one at half speed: share of the sum of speeds", 0.95),
        ("late", "Four workers, ready one after the other: times as fast as waiting for all", 1.4),
    ):
        yield Goal(about, runs.figure("spread", "ratio", case=case), least=least)


def _order(runs: Runs) -> Iterator[Goal]:
    best = {(line["workload"], line["factor"]): line["best_cached"] for line in runs.some("file")}
    shares = [
        line["cached_share"] / best[line["workload"], line["factor"]]
        for line in runs.race("W3", "freight", DEFAULT)
        if best.get((line["workload"], line["factor"]))
    ]
    yield Goal("W3: share of what the best order finds cached", figure(shares), least=0.95)
    for workload, least in (("W3", 2.0), ("W3b", 1.7), ("W4", 0.99), ("W5-24", 1.0), ("W5-300", 1.0)):
        by_input = runs.race(workload, "freight", INPUT_ORDER)
        size = by_input[-1]["factor"] if by_input else 0.0
        found = ratios(*(runs.race(workload, "freight", setting, size) for setting in (DEFAULT, INPUT_ORDER)))
        yield Goal(f"{workload}: times as fast as `--order input`", found, least=least)
    added = figure(line["added_s"] for line in _slowest(runs.some("order", records=150_000)))
    yield Goal("Seconds of CPU for the order of 150,000 records of 0.2 to 2 kB, the slowest kind", added, most=2.0)


def _slowest(lines: Iterable[Line]) -> list[Line]:
    by_kind = grouped(lines, lambda line: line["file"])
    medians = {name: found.median for name, runs in by_kind.items() if (found := figure(r["added_s"] for r in runs))}
    return by_kind[max(medians, key=lambda name: medians[name])] if medians else []


def _costs(runs: Runs) -> Iterator[Goal]:
    whole = runs.race("W6", "freight", DEFAULT, 1.0)
    yield Goal("W6: records a second", figure(map(rate, whole)), least=4000, shape="{:,.0f}")
    yield Goal("W6: µs of CPU a record", figure(line["cpu_us"] for line in whole), most=180, shape="{:.0f}")
    for workload, most in (("W6", 200), ("W6-1M", 300)):
        peak = figure(line["peak_mb"] for line in runs.race(workload, "freight", DEFAULT, 1.0))
        yield Goal(f"{workload}: MB of the largest process", peak, most=most, shape="{:.0f}")
    large = runs.figure("cost", "peak_mb", what="large")
    yield Goal("2,000 records of 5 MB: MB of the largest process", large, most=300, shape="{:.0f}")
    resume = runs.figure("cost", "to_first_request_s", what="resume")
    yield Goal("Resume half-way through W6: seconds to the first request", resume, most=2.0)
    kept = runs.figure("cost", "share", what="durability")
    yield Goal("W6 on a disk: share of the rate in memory", kept, least=0.9)
    for copies in (2, 4):
        found = runs.figure("cost", "ratio", what="dedupe", copies=copies)
        yield Goal(f"`--dedupe`, {copies} copies of each: times as fast", found, least=0.9 * copies, shape="{:.2f}")


def _peers(runs: Runs) -> Iterator[Goal]:
    for workload, least in (("W1", 0.98), ("W4", 0.98), ("W2", 1.0), ("W3", 2.0), ("W5-24", 1.0), ("W5-300", 1.0)):
        for setting in (DEFAULT, OWN_ENGINE):
            found = list(runs.against(workload, setting))
            if not found and setting == OWN_ENGINE:
                continue
            worst = min(found, key=lambda each: each[1].median, default=(None, None))
            how = ", starting the engine itself" if setting == OWN_ENGINE else ""
            about = f"{workload}{how}: times as fast as the fastest at its best ({worst[0]})"
            yield Goal(about, worst[1], least=least)
    survivors = {peer for peer in runs.rivals("W7") if all(map(is_whole, runs.race("W7", peer, BEST)))}
    found = [each for each in runs.against("W6") if each[0] in survivors]
    worst = min(found, key=lambda each: each[1].median, default=("none", None))
    about = f"W6: times as fast as the fastest that answers all of W7 ({worst[0]})"
    yield Goal(about, worst[1], least=3.5)


def _real(runs: Runs) -> Iterator[Goal]:
    def seconds(way: str, name: str) -> dict[int, float]:
        return {line["round"]: line[name] for line in runs.some("real", what="prefix", way=way) if name in line}

    def faster(ours: dict[int, float], theirs: dict[int, float]) -> Figure | None:
        return figure(theirs[number] / ours[number] for number in ours if number in theirs)

    ready = seconds("freight", "from_ready_s")
    by_input = faster(ready, seconds("freight, order input", "from_ready_s"))
    yield Goal("vLLM, 40 groups of 8: times as fast as `--order input`", by_input, least=1.7)
    batch = faster(ready, seconds("vllm run-batch", "from_ready_s"))
    yield Goal("vLLM, the same: times as fast as `vllm run-batch`, from ready", batch, least=1.0)
    wall = faster(seconds("freight starts vLLM", "wall_s"), seconds("vllm run-batch", "wall_s"))
    yield Goal("vLLM, the same: by wall time", wall, least=1.0)
    for engine, shown in (("llamacpp", "llama.cpp"), ("vllm", "vLLM")):
        share = runs.figure("real", "share", what=f"closed-{engine}")
        yield Goal(f"{shown}, 200 records: share of a closed loop's throughput", share, least=0.97)
