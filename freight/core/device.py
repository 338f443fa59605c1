"""Devices, and who holds them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a worker takes whole. `id` is host-wide: a GPU's UUID, or `cpu:N`."""

    id: str
    kind: str


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a device: a process of this host, and what it is doing there."""

    pid: int
    what: str
