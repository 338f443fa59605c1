"""A model server that first notes what of its box still runs, and then becomes another program.

    python -m tests.faults.lookout --config FILE --data FOLDER --token TOKEN --notes FILE -- PROGRAM …

TOKEN is a word that stands in the command lines or the names of the box's servers, whatever their environment says.
"""

import argparse
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# The kernel keeps so many letters of a process's name.
_NAME: Final = 15


@dataclass(frozen=True)
class Seen:
    """A process: its number, its parent's, its name, its words, and the control groups that it is in."""

    pid: int
    parent: int
    name: str
    words: tuple[str, ...]
    variables: tuple[bytes, ...]
    groups: str

    def is_freight(self) -> bool:
        """Return whether it is a command, a service or a worker: no part of a model server."""
        return self.words[1:2] == ("-m",) and self.words[2].partition(".")[0] == "freight"


@dataclass(frozen=True)
class Lookout:
    """What the model servers of a box are known by."""

    config: Path
    data: Path
    token: str

    def servers(self) -> list[Seen]:
        """Return all processes of model servers of the box, by marker, name, command line, group or parent."""
        seen = {one.pid: one for one in processes()}
        groups = tuple(f"/freight-{worker}" for worker in self._workers())
        mine = {pid for pid, one in seen.items() if self._is_mine(one, groups)}
        mine |= {pid for pid in seen if mine & set(ancestors(pid, seen))}
        return [seen[pid] for pid in sorted(mine) if not seen[pid].is_freight()]

    def _is_mine(self, one: Seen, groups: tuple[str, ...]) -> bool:
        return (
            f"FREIGHT_CONFIG={self.config}".encode() in one.variables
            or any(self.token in word for word in one.words)
            or one.name.startswith(self.token[:_NAME])
            or any(group in one.groups for group in groups)
        )

    def _workers(self) -> list[str]:
        database = self.data / "catalog.db"
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=10)) as connection:
            return [worker for (worker,) in connection.execute("SELECT id FROM worker")]


def processes() -> Iterator[Seen]:
    """Yield the processes of this machine, without those of which nothing but their end is left to be read."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
            groups = (entry / "cgroup").read_text()
            threads = len(list((entry / "task").iterdir()))
        except OSError:
            continue
        begin, end = stat.index("("), stat.rindex(")")
        state, parent = stat[end + 2 :].split()[:2]
        # The memory of one that has ended goes with its last thread.
        if state not in "ZX" or threads > 1:
            name = stat[begin + 1 : end]
            yield Seen(int(entry.name), int(parent), name, tuple(words), tuple(variables), groups)


def ancestors(pid: int, seen: dict[int, Seen]) -> Iterator[int]:
    """Yield the numbers of a process's parents, the nearest first."""
    while pid in seen and seen[pid].parent != pid:
        pid = seen[pid].parent
        yield pid


def noted(notes: Path) -> list[str]:
    """Return what each start of a server found of others: "" is as it should be."""
    return notes.read_text().splitlines() if notes.exists() else []


def main() -> None:
    """Look, note, and become the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("program", nargs="+")
    args = parser.parse_args()
    servers = Lookout(args.config, args.data, args.token).servers()
    left = [f"{one.pid} {one.name}" for one in servers if one.pid != os.getpid()]
    with args.notes.open("a") as file:
        file.write("; ".join(left) + "\n")
    os.execv(args.program[0], args.program)


if __name__ == "__main__":
    main()
