"""The devices of this machine: which there are, which may be used, and what is on them."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freight.core.device import Device, DeviceKind, Holder, Usage
from freight.errors import UserError
from freight.launchers.amd import AmdCards
from freight.launchers.cards import Cards, Trouble, begins_with
from freight.launchers.hold import Holds
from freight.launchers.nvidia import NvidiaCards

# How many threads a worker's model server may compute with: what most of them read.
THREADS: Final = "OMP_NUM_THREADS"
_KEY: Final = "pools.local.devices"
_AUTO: Final = (Device("cpu:0", DeviceKind.CPU),)


class Inventory:
    """The devices that Freight may use on this machine, found once; what is on them is read anew each time."""

    def __init__(self, devices: Sequence[Device], makers: Sequence[Cards]) -> None:
        self._devices = tuple(devices)
        self._makers = makers

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that may be used: the declared ones as declared, else GPUs first and the CPU last."""
        return self._devices

    def all_devices(self) -> tuple[Device, ...]:
        """Return, for showing, every GPU that can be read, whoever may use it, and the CPU devices that may be used."""
        gpus = tuple(device for cards in self._makers for device in cards.devices)
        return (*gpus, *(device for device in self._devices if not device.is_gpu()))

    def usage(self, device: Device) -> Usage | None:
        """Return what is on a device now; None for a CPU, which cannot say.

        A GPU that its driver cannot read any more counts as full and held, by pid 0.
        """
        cards = next((cards for cards in self._makers if cards.kind == device.kind), None)
        return None if cards is None else cards.usage(device)

    def environment(self, devices: Sequence[Device]) -> dict[str, str]:
        """Return the variables with which a worker sees exactly these devices, and of each maker's GPUs no other.

        On a CPU device that is one of several it may use its share of the cores, unless told otherwise. Empty on a
        machine without GPUs and with one CPU device.
        """
        variables: dict[str, str] = {}
        shares = sum(not device.is_gpu() for device in self._devices)
        if shares > 1 and any(not device.is_gpu() for device in devices) and THREADS not in os.environ:
            variables[THREADS] = str(max(1, len(os.sched_getaffinity(0)) // shares))
        # The first maker's have the last word: HIP reads CUDA's variable too.
        for cards in reversed(self._makers):
            variables |= cards.environment([device for device in devices if device.kind == cards.kind])
        return variables

    def troubles(self) -> tuple[Trouble, ...]:
        """Return what keeps GPUs of this machine from being used."""
        return tuple(trouble for cards in self._makers for trouble in cards.troubles)

    def drivers(self) -> str:
        """Return, for people, which drivers there are; without one, that NVIDIA's library is missing."""
        return ", ".join(cards.driver for cards in self._makers if cards.driver)


def find_devices(declared: Sequence[str] | None, environment: Mapping[str, str]) -> Inventory:
    """Return the devices of this machine's pool: the declared ones, else (None) its GPUs and then its CPU.

    `environment` may limit the GPUs: CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES.
    A declared device is `cpu:N`, or a GPU's UUID or its beginning. Raises UserError for one that is not there,
    that fits several, or that the environment hides.
    """
    if declared is not None and not declared:
        raise UserError(f"{_KEY} is empty, so nothing could run", 'use "auto", or name a device as "cpu:0"')
    makers: tuple[Cards, ...] = (NvidiaCards(), AmdCards(environment))
    visible = [device for cards in makers for device in cards.visible(environment)]
    if declared is None:
        return Inventory((*visible, *_AUTO), makers)
    chosen = [_declared(name, makers, visible, environment) for name in declared]
    return Inventory(tuple(dict.fromkeys(chosen)), makers)


def _declared(name: str, makers: Sequence[Cards], visible: Sequence[Device], environment: Mapping[str, str]) -> Device:
    if re.fullmatch(r"cpu:\d+", name, re.ASCII):
        return Device(name, DeviceKind.CPU)
    gpus = {device.id: device for cards in makers for device in cards.devices}
    found = begins_with(name, gpus)
    if len(found) > 1:
        raise UserError(f"{_KEY} names {name}, which fits {', '.join(found)}", "write more of the UUID")
    if not found:
        raise _unknown(name, makers)
    device = gpus[found[0]]
    if device not in visible:
        limits = next(cards.limits for cards in makers if cards.kind == device.kind)
        set_ones = ", ".join(f"{limit}={environment[limit]}" for limit in limits if limit in environment)
        shown = ", ".join(gpu.id for gpu in visible) or "no GPU"
        raise UserError(f"{_KEY} names {name}, which {set_ones} hides; it leaves {shown}", "unset it, or name another")
    return device


def _unknown(name: str, makers: Sequence[Cards]) -> UserError:
    there = ", ".join(device.id for cards in makers for device in cards.devices) or "no GPU"
    troubles = "; ".join(trouble.what for cards in makers for trouble in cards.troubles)
    message = f"{_KEY} names {name}; this machine has {there}{f' ({troubles})' if troubles else ''}"
    return UserError(message, 'name a GPU by its UUID (freight gpus), or the CPU as "cpu:0"')


def held_words(pid: int | None, what: str) -> str:
    """Return in words that a device is held; without a process, `what` keeps it from being used."""
    return f"held by {Holder(pid, what)}" if pid else f"held: {what}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A device as it was found: what is on it, and who holds it (None: it is free)."""

    device: Device
    usage: Usage | None
    holder: Holder | None


def look(inventory: Inventory, device: Device, locks: Path) -> Seen:
    """Return how a device stands, without a service that knows: who would keep a worker off it."""
    usage = inventory.usage(device)
    holds = Holds(inventory, locks)
    taken = holds.take([device])
    holds.let_go([device.id])
    return Seen(device, usage, taken[1] if taken else None)
