"""The cards that the stand-in library shows, as a test wants them.

The file that the library reads has a line a card, its fields apart by tabs:

    driver    VERSION
    fail      FUNCTION  CODE              a call of the library that returns this instead
    card      UUID  NAME  TOTAL_MB  USED_MB  FLAGS  PID:MB,PID:MB
    instance  (the same)                  a MIG instance of the card above

What processes use comes on top of USED_MB; those that have ended do not count.
"""

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "STAND_IN_CARDS"
LIBRARY: Final = "libnvidia-ml.so.1"
DRIVER: Final = "570.124.06"
SOURCE: Final = Path(__file__).with_name("nvml.c")


@dataclass(frozen=True)
class Card:
    """One card. `processes` are on it while they live, by pid, each with its megabytes.

    `flags`: "lost" (it fell off the bus), "denied" (this user may not open it), "nomemory" and "noprocesses" (it does
    not say), "mig" (it is split into its `instances`), "nomig" (it cannot be).
    """

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    total_mb: int = 81_559
    used_mb: int = 4
    flags: tuple[str, ...] = ()
    processes: Mapping[int, int] = field(default_factory=dict[int, int])
    instances: tuple["Card", ...] = ()

    def lines(self, word: str = "card") -> Iterator[str]:
        """Yield its lines of the file."""
        flags = (*self.flags, "mig") if self.instances else self.flags
        processes = ",".join(f"{pid}:{megabytes}" for pid, megabytes in self.processes.items())
        yield "\t".join(
            (word, self.uuid, self.name, str(self.total_mb), str(self.used_mb), ",".join(flags) or "-", processes)
        )
        for part in self.instances:
            yield from part.lines("instance")


def card(ending: str, **fields: Any) -> Card:
    """Return a card whose UUID is "GPU-" and this."""
    return Card(f"GPU-{ending}", **fields)


def instance(ending: str, **fields: Any) -> Card:
    """Return a part of a card, for its `instances`."""
    return Card(f"MIG-{ending}", **{"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "total_mb": 9_856, **fields})


class Cards:
    """The cards of a machine; the library and its file are in `folder`. With `old` the driver lacks newer calls."""

    def __init__(self, folder: Path, *cards: Card, old: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.file = folder / "cards"
        (folder / "cards.pids").mkdir(exist_ok=True)
        (folder / LIBRARY).write_bytes(_library(old))
        self.show(*cards)

    def show(self, *cards: Card, driver: str = DRIVER, failing: Mapping[str, int] | None = None) -> None:
        """Let these be the cards from now on; `failing` are calls of the library that return these codes instead."""
        self.cards: Sequence[Card] = cards
        lines = [f"driver\t{driver}", *(f"fail\t{call}\t{code}" for call, code in (failing or {}).items())]
        lines += [line for shown in cards for line in shown.lines()]
        aside = self.folder / "cards.new"
        aside.write_text("".join(f"{line}\n" for line in lines))
        aside.replace(self.file)

    def change(self, uuid: str, **fields: Any) -> None:
        """Change one card, as by `change("GPU-aaaa", used_mb=70_000)`; the others stay as they are."""
        assert any(one.uuid == uuid for one in self.cards), uuid
        self.show(*(replace(one, **fields) if one.uuid == uuid else one for one in self.cards))

    def environment(self) -> dict[str, str]:
        """Return the variables with which a program finds the stand-in instead of a driver's library."""
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("LD_LIBRARY_PATH"))))
        return {"LD_LIBRARY_PATH": path, VARIABLE: str(self.file)}


@functools.cache
def _library(old: bool) -> bytes:
    """Return the library, compiled."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, LIBRARY)
        options = ("-shared", "-fPIC", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", *(("-DOLD",) if old else ()))
        subprocess.run(["cc", *options, "-o", str(made), str(SOURCE), "-lpthread"], check=True)
        return made.read_bytes()
