"""A box with a service on a machine with cards: the driver's library is a stand-in, all above it is real."""

import itertools
import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.harness import Json, engine_command, model_toml
from tests.nvml import Card, Cards, card
from tests.service import ServiceBox

_number = itertools.count()
# What keeps a stand-in card busy, in megabytes.
MUCH_MB: Final = 60_000


def own_card(**fields: Any) -> Card:
    """Return a card of this test's own: locks are for the whole host."""
    return card(f"{os.getpid():x}-{time.monotonic_ns():x}-{next(_number)}", **fields)


class GpuBox(ServiceBox):
    """A box with cards, all of which its pool has, and one CPU device. Its models note each start, and on what."""

    def __init__(self, folder: Path, count: int) -> None:
        self.cards = Cards(folder / "cards", *(own_card() for _ in range(count)))
        self.uuids = [one.uuid for one in self.cards.cards]
        super().__init__(folder)

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment of a command, in which the stand-in library is found."""
        return super().environment(**{**self.cards.environment(), **extra})

    def configure(self, toml: str, pool: str = "") -> None:
        """Write the configuration file; the pool has all cards and the test's own CPU device."""
        devices = json.dumps([*self.uuids, self.device])
        self.config.write_text(f"{toml}\n[pools.local]\ndevices = {devices}\n{pool}\n")

    def model(self, name: str, *options: str, **entry: Any) -> str:
        """Return a model, whose server writes down its start and the GPUs that it was given."""
        note = f'echo "{name} ${{CUDA_VISIBLE_DEVICES-unset}}" >> {self.folder}/starts; exec "$@"'
        command = ["sh", "-c", note, "sh", *engine_command(self.folder, *options)]
        return model_toml(name, engine="command", command=command, **entry)

    def starts(self) -> list[tuple[str, list[str]]]:
        """Return which models' servers were started, in order, each with the GPUs that it was to see."""
        path = self.folder / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(name, gpus.split(",") if gpus else []) for name, _, gpus in (line.partition(" ") for line in lines)]

    def gpus(self) -> dict[str, Json]:
        """Return what `freight gpus --json` says of each device."""
        done = self.freight("gpus", "--json")
        assert done.status == 0, done
        return {device["id"]: device for device in json.loads(done.stdout)["devices"]}

    def ps(self) -> Json:
        """Return what `freight ps --json` says."""
        done = self.freight("ps", "--json")
        assert done.status == 0, done
        return json.loads(done.stdout)

    def serve(self, **extra: str) -> None:
        """Start the service."""
        done = self.freight("serve", "--background", **extra)
        assert done.status == 0, done


@contextmanager
def gpu_box(folder: Path, count: int = 2) -> Generator[GpuBox]:
    """Give a box with so many cards, whose service is stopped after the block; nothing of it may be left then."""
    box = GpuBox(folder, count)
    try:
        yield box
        if box.is_served():
            box.stop()
        assert not box.processes()
    except Exception as error:
        log = box.data / "serve.log"
        error.add_note(f"the service said: {log.read_text()[-3000:] if log.exists() else ''}")
        raise
    finally:
        box.kill_all()
