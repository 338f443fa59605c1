"""What the GPUs of all makers have in common: what a library of theirs tells, limits in variables, who is on a GPU."""

import pwd
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from freight.core.device import Device, Holder, Usage

MOST_COMMAND: Final = 120
# No box has GPUs whose number is longer.
_MOST_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something about GPUs that does not work, and how to mend it."""

    what: str
    fix: str


class Cards(Protocol):
    """The GPUs of one maker on this machine."""

    # The kind of device, a `DeviceKind`.
    kind: str
    # Those that can be read, in the driver's order.
    devices: tuple[Device, ...]
    # What keeps GPUs from being used.
    troubles: tuple[Trouble, ...]
    # The driver, for people; without one, what is missing.
    driver: str
    # The variables that limit which of them a program sees.
    limits: tuple[str, ...]

    def visible(self, environment: Mapping[str, str]) -> tuple[Device, ...]:
        """Return those that the variables of `environment` leave, in the variables' order."""
        ...

    def usage(self, device: Device) -> Usage:
        """Return what is on one of them now."""
        ...

    def environment(self, chosen: Sequence[Device]) -> dict[str, str]:
        """Return the variables with which a program sees exactly these; none where the maker has no GPU here."""
        ...


def read_limit(
    text: str | None, numbered: Sequence[Sequence[Device]], named: Mapping[str, Sequence[Device]]
) -> tuple[Device, ...]:
    """Return the devices that a variable such as CUDA_VISIBLE_DEVICES leaves, in its order; None leaves all.

    Its entries are numbers, or the beginnings of names that fit one alone. The first that is neither ends the list,
    so that "-1" and "" leave none. What is named twice counts once. A number may stand for several devices, or for
    none where the GPU cannot be used.
    """
    if text is None:
        return tuple(device for devices in numbered for device in devices)
    found: dict[Device, None] = {}
    for entry in text.split(","):
        devices = _entry(entry.strip(), numbered, named)
        if devices is None:
            break
        found |= dict.fromkeys(devices)
    return tuple(found)


def _entry(
    entry: str, numbered: Sequence[Sequence[Device]], named: Mapping[str, Sequence[Device]]
) -> Sequence[Device] | None:
    if entry.isascii() and entry.isdigit():
        number = int(entry[:_MOST_DIGITS])
        return numbered[number] if len(entry) <= _MOST_DIGITS and number < len(numbered) else None
    names = begins_with(entry, named)
    return named[names[0]] if len(names) == 1 else None


def begins_with(beginning: str, names: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Return the names that begin so, whatever the case; a name that is this very text alone, and none for no text."""
    small = beginning.casefold()
    found = [name for name in names if small and name.casefold().startswith(small)]
    return next(([name] for name in found if name.casefold() == small), found)


def holder(pid: int) -> Holder:
    """Return who a process on a GPU is, as far as this user may see it; a command is cut short."""
    with suppress(OSError, KeyError):
        process = Path(f"/proc/{pid}")
        user = pwd.getpwuid(process.stat().st_uid).pw_name
        command = command_of(process)
        if command:
            return Holder(pid, f"user {user}: {command}")
    return Holder(pid, "a process that cannot be seen from here")


def command_of(process: Path) -> str:
    """Return a process's command for showing, its program without folders, the rest cut short; "" for one that ended.

    Raises OSError for a process that is gone. `process` is its folder under /proc.
    """
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return " ".join((Path(words[0]).name, *words[1:])).strip()[:MOST_COMMAND]


def unreachable(device: Device, error: object) -> Usage:
    """Return the usage of a GPU that cannot be read any more: full, and held by no process, so that it is not free."""
    return Usage(device.memory, (Holder(0, f"its driver cannot read it: {error}"),))
