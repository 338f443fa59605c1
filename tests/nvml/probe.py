"""Asks Freight about this machine's devices in a process of its own, where the stand-in library can be found.

Each line of standard input is a question in JSON, `{"declared": …, "environment": {…}}`; each is answered by a line.
"""

import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.harness import ROOT, Json

# A file that is taken for AMD's driver.
AMD_DRIVER: Final = "STAND_IN_AMD_DRIVER"


class Probe:
    """The process, which keeps the driver's library open as a service does."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child

    def ask(self, declared: Sequence[str] | None = None, **environment: str) -> Json:
        """Find the devices anew and return all about them; of a UserError its "error" and "hint"."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        question = {"declared": declared, "environment": environment}
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())

    def ids(self, declared: Sequence[str] | None = None, **environment: str) -> list[str]:
        """Return the ids of the devices that may be used."""
        found = self.ask(declared, **environment)
        return [device["id"] for device in found["devices"]]

    def again(self) -> Json:
        """Look once more at the devices that the last question found, without looking for others."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("again\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())


@contextmanager
def probe(environment: Mapping[str, str]) -> Generator[Probe]:
    """Run a process with these variables."""
    command = [sys.executable, "-W", "error", "-m", "tests.nvml.probe"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=dict(environment), stdin=pipe, stdout=pipe, text=True) as child:
        yield Probe(child)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(10) == 0


def main() -> None:
    """Answer questions until there is none. A module that stands in for amdsmi needs no driver."""
    from freight.errors import UserError
    from freight.launchers import amd
    from freight.launchers.devices import find_devices

    amd.DRIVER = Path(os.environ.get(AMD_DRIVER, amd.DRIVER))  # type: ignore[misc]
    inventory = None
    for line in sys.stdin:
        if line != "again\n":
            try:
                inventory = find_devices(**json.loads(line))
            except UserError as error:
                print(json.dumps({"error": error.message, "hint": error.hint}), flush=True)
                continue
        assert inventory is not None
        answer: dict[str, Any] = {
            "devices": [asdict(device) for device in inventory.devices()],
            "all": [device.id for device in inventory.all_devices()],
            "troubles": [[trouble.what, trouble.fix] for trouble in inventory.troubles()],
            "drivers": inventory.drivers(),
            "usage": {
                device.id: asdict(usage) if (usage := inventory.usage(device)) else None
                for device in inventory.devices()
            },
            "environments": {device.id: inventory.environment([device]) for device in inventory.devices()},
            "environment": inventory.environment(inventory.devices()),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
