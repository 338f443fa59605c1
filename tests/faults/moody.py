"""A model server that takes another mood at each start, and what became of the jobs that had to do with it."""

import json
import os
from pathlib import Path
from typing import Final

from freight.core.device import Holder
from freight.core.view import JobStatus
from freight.launchers.locks import lock_device, lock_folder
from tests.faults.services import Served, ask
from tests.harness import engine_command, model_toml, wait_until

# Counts a start, and adds the options that are meant for it, or those for all.
_SCRIPT: Final = """
echo >> "$0/starts"; n=$(($(wc -l < "$0/starts")))
if [ -e "$0/mood.$n" ]; then mood="$0/mood.$n"; else mood="$0/mood"; fi
echo "this is start $n"
exec "$@" $(cat "$mood")
"""


class Moody:
    """A service with a model "mine", a well-behaved one called "good", and `count` devices."""

    def __init__(self, service: Served, mood: str, settings: str = "", count: int = 1, pool: str = "") -> None:
        self.service = service
        self.folder = service.folder
        self.devices = [f"{service.device}{number}" for number in range(count)]
        self.set(mood)
        own = engine_command(self.folder, "--digest")
        moody = ["sh", "-c", _SCRIPT, str(self.folder), *own]
        models = model_toml("mine", engine="command", command=moody)
        models += model_toml("good", engine="command", command=own)
        where = f"[pools.local]\ndevices = {json.dumps(self.devices)}\n{pool}\n"
        service.config.write_text(f"{settings}\n{models}\n{where}")

    def set(self, mood: str, start: int = 0) -> None:
        """Choose the options of one start, counted from 1, or of all for which none were chosen."""
        name = f"mood.{start}" if start else "mood"
        (self.folder / name).write_text(mood)

    def starts(self) -> int:
        """Return how often the moody server was started."""
        path = self.folder / "starts"
        return len(path.read_text()) if path.exists() else 0

    def check_all_free(self) -> None:
        """Assert that nobody holds any of the devices."""
        held = [holder for device in self.devices if isinstance(holder := _try(device), Holder)]
        assert not held, held

    def until_all_free(self) -> None:
        """Wait until nobody holds any of the devices."""
        wait_until(lambda: not any(isinstance(_try(device), Holder) for device in self.devices), "all are free", 10)


def _try(device: str) -> Holder | None:
    held = lock_device(device, lock_folder())
    if isinstance(held, Holder):
        return held
    os.close(held)
    return None


def states(job: JobStatus) -> list[str]:
    """Return the states that a job has been in, in order."""
    found: list[str] = []
    for event in job.events:
        if not found or found[-1] != event.state:
            found.append(event.state)
    return found


def details(job: JobStatus, event: str) -> list[str]:
    """Return what the timeline says with each event of a kind."""
    return [entry.detail for entry in job.events if entry.event == event]


def places_of_starts(database: Path) -> list[str]:
    """Return the devices of all workers that a control plane has started, in order."""
    return [str(devices) for (devices,) in ask(database, "SELECT devices FROM worker ORDER BY started_at, rowid")]
