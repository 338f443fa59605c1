"""Who uses devices without us: looked at in time for jobs that come."""

import asyncio
from types import SimpleNamespace
from typing import Any

from freight.control.roster import Roster
from freight.control.starts import Starts
from freight.core.device import Device, DeviceKind, Holder
from freight.core.job import State

CARD = Device("GPU-1", DeviceKind.NVIDIA)


class Machine:
    """A launcher with one card, and whoever the test puts on it."""

    def __init__(self) -> None:
        self.holder: Holder | None = None
        self.looks = 0

    def devices(self) -> tuple[Device, ...]:
        return (CARD,)

    def stranger(self, _: Device) -> Holder | None:
        self.looks += 1
        return self.holder


def starts_of(machine: Machine, roster: Roster) -> Starts:
    unused: Any = None
    there: Any = machine
    return Starts(unused, there, unused, unused, asyncio.Event(), roster, unused, True, unused)


def queue(roster: Roster, job: str) -> None:
    waiting: Any = SimpleNamespace(row=SimpleNamespace(id=job, state=State.QUEUED))
    roster.waiting[job] = waiting


def test_card_is_looked_at_anew_for_a_job_that_came_since_the_last_look() -> None:
    async def scenario() -> None:
        machine, roster = Machine(), Roster()
        starts = starts_of(machine, roster)
        queue(roster, "first")
        await starts.look_around(100.0)
        assert (machine.looks, starts.stranger(CARD.id, 100.0)) == (1, "")

        machine.holder = Holder(7, "train.py")
        await starts.look_around(100.5)
        assert machine.looks == 1, "for the same job again and again"

        queue(roster, "second")
        await starts.look_around(100.5)
        assert "train.py" in starts.stranger(CARD.id, 100.5)
        await starts.look_around(100.9)
        assert machine.looks == 2
        await starts.look_around(102.6)
        assert machine.looks == 3

    asyncio.run(scenario())
