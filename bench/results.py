"""What benchmarks noted, read back and grouped."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A median and the range that it was taken from."""

    median: float
    least: float
    most: float
    count: int

    def text(self, shape: str = "{:.2f}") -> str:
        """Return it for a table, the range in brackets where there is one."""
        middle = shape.format(self.median)
        return middle if self.count < 2 else f"{middle} ({shape.format(self.least)}–{shape.format(self.most)})"


def figure(values: Iterable[float]) -> Figure | None:
    """Return the median and range of some values; None where there is none."""
    kept = list(values)
    return Figure(statistics.median(kept), min(kept), max(kept), len(kept)) if kept else None


def read(path: Path) -> list[Line]:
    """Return every line that was noted."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def grouped(lines: Iterable[Line], key: Callable[[Line], Any]) -> dict[Any, list[Line]]:
    """Return lines by a key, in the order in which the keys came."""
    found: dict[Any, list[Line]] = {}
    for line in lines:
        found.setdefault(key(line), []).append(line)
    return found


def is_whole(line: Line) -> bool:
    """Return whether a run answered every record, rightly and once."""
    return line["problem"] is None and line["right"] == line["records"]


def rate(line: Line) -> float:
    """Return the records a second of a run, those answered rightly alone."""
    return line["right"] / line["seconds"]


def ratios(freight: Sequence[Line], peer: Sequence[Line]) -> Figure | None:
    """Return how many times as fast Freight was, round by round; None where no round has both."""
    ours = {line["round"]: rate(line) for line in freight}
    return figure(ours[line["round"]] / rate(line) for line in peer if line["round"] in ours and line["right"])
