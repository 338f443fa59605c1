"""Devices, what is on them, and who holds them."""

from dataclasses import dataclass
from enum import StrEnum


class DeviceKind(StrEnum):
    """The kinds of device, by whose driver knows them."""

    CPU = "cpu"
    NVIDIA = "nvidia"
    AMD = "amd"


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a worker takes whole. `id` is host-wide: a GPU's UUID, or `cpu:N`.

    `name` is the maker's, `memory` in bytes (None: not known), `index` the driver's number for it.
    """

    id: str
    kind: str
    name: str = ""
    memory: int | None = None
    index: int | None = None

    def is_gpu(self) -> bool:
        """Return whether it counts as a GPU, of which a model may ask for several."""
        return self.kind != DeviceKind.CPU

    def label(self) -> str:
        """Return what people call it."""
        return self.id if self.index is None or not self.is_gpu() else f"GPU {self.index}"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a device: a process of this host, and what it is doing there."""

    pid: int
    what: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.what})" if self.pid else self.what


@dataclass(frozen=True, slots=True)
class Usage:
    """What is on a device: bytes of its memory in use (None: it does not say), and the processes that compute there."""

    memory_used: int | None
    holders: tuple[Holder, ...] = ()
