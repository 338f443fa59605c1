"""NVIDIA's GPUs, through the library of their driver (NVML) and nvidia-ml-py."""

import ctypes
import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from freight.core.device import Device, DeviceKind, Usage
from freight.launchers.cards import Trouble, holder, read_limit, unreachable

LIBRARY: Final = "libnvidia-ml.so.1"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
NO_LIBRARY: Final = "no NVIDIA driver library"
# The kernel's driver shows itself here.
DRIVER: Final = Path("/proc/driver/nvidia/version")
# More processes may come on a card while they are read.
_READINGS: Final = 3
_UNKNOWN: Final = (1 << 64) - 1
_INSTALL: Final = (
    "install the user-space part of the same driver version; a container needs to be started with its GPUs and the "
    "driver's utility capability"
)
_FIXES: Final = {
    "NVMLError_GpuIsLost": "see the kernel's log for what happened to it; restart the machine",
    "NVMLError_ResetRequired": "reset it (nvidia-smi --gpu-reset), or restart the machine",
    "NVMLError_NoPermission": "give this user access to the /dev/nvidia* files",
}
_START_TROUBLES: Final = {
    "NVMLError_DriverNotLoaded": Trouble(
        "the NVIDIA library is installed, but the driver is not loaded", "load it: modprobe nvidia"
    ),
    "NVMLError_LibRmVersionMismatch": Trouble(
        "the NVIDIA library and the driver that is loaded are of different versions", "restart the machine"
    ),
    "NVMLError_FunctionNotFound": Trouble("the NVIDIA driver is too old", "update the NVIDIA driver"),
    "NVMLError_NoPermission": Trouble(
        "this user may not use the NVIDIA driver", "give this user access to the /dev/nvidia* files"
    ),
}


class NvidiaCards:
    """The NVIDIA GPUs of this machine, found once. A card in MIG mode is left out for its instances."""

    kind: str = DeviceKind.NVIDIA
    limits: tuple[str, ...] = (VISIBLE,)

    def __init__(self) -> None:
        self.devices: tuple[Device, ...] = ()
        self.troubles: tuple[Trouble, ...] = ()
        self.driver = NO_LIBRARY
        self._count = 0
        self._handles: dict[str, Any] = {}
        # By CUDA's numbers, which are in PCI order; and by UUID, a card in MIG mode standing for its instances.
        self._numbered: list[tuple[Device, ...]] = []
        self._named: dict[str, tuple[Device, ...]] = {}
        found: Any = _library()
        self._nvml: Any = found
        if found is None or isinstance(found, Trouble):
            self.troubles = () if found is None else (found,)
            return
        try:
            self.driver = f"NVIDIA driver {found.nvmlSystemGetDriverVersion()}"
            self._count = found.nvmlDeviceGetCount()
        except found.NVMLError as error:
            self.troubles = (_start_trouble(error),)
        for index in range(self._count):
            self._find_card(index)
        self.devices = tuple(device for devices in self._numbered for device in devices)

    def visible(self, environment: Mapping[str, str]) -> tuple[Device, ...]:
        """Return those that CUDA_VISIBLE_DEVICES leaves, in its order."""
        return read_limit(environment.get(VISIBLE), self._numbered, self._named)

    def usage(self, device: Device) -> Usage:
        """Return what is on one of them now; one that cannot be read any more is held."""
        handle = self._handles[device.id]
        try:
            _, used = self._memory(handle)
            return Usage(used, tuple(holder(pid) for pid in self._processes(handle)))
        except self._nvml.NVMLError as error:
            return unreachable(device, error)

    def environment(self, chosen: Sequence[Device]) -> dict[str, str]:
        """Return the variables with which a program sees exactly these; none on a machine without a card."""
        if not self._count:
            return {}
        return {VISIBLE: ",".join(device.id for device in chosen), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def _find_card(self, index: int) -> None:
        name, uuid = f"GPU {index}", ""
        try:
            card = self._nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = self._nvml.nvmlDeviceGetUUID(card)
            name = f"GPU {index} ({uuid})"
            devices = self._instances(card) if self._is_split(card) else (self._device(card, uuid, index),)
        except self._nvml.NVMLError as error:
            fix = _FIXES.get(type(error).__name__, "nvidia-smi may say more")
            self.troubles += (Trouble(f"{name} cannot be read: {error}", fix),)
            # CUDA does not number what it may not open, as in a container or a batch job that got other cards.
            if type(error).__name__ != "NVMLError_NoPermission":
                self._numbered.append(())
            return
        if not devices:
            what = f"{name} is in MIG mode and has no instances"
            self.troubles += (Trouble(what, "make some (nvidia-smi mig -cgi), or leave the mode (nvidia-smi -mig 0)"),)
        self._numbered.append(devices)
        self._named[uuid] = devices
        self._named |= {device.id: (device,) for device in devices}

    def _device(self, handle: Any, uuid: str, index: int | None) -> Device:
        total, _ = self._memory(handle)
        self._handles[uuid] = handle
        return Device(uuid, DeviceKind.NVIDIA, self._nvml.nvmlDeviceGetName(handle), total, index)

    def _is_split(self, card: Any) -> bool:
        """Return whether the card is in MIG mode; most cards do not know of it."""
        try:
            return self._nvml.nvmlDeviceGetMigMode(card)[0] == 1
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            return False

    def _instances(self, card: Any) -> tuple[Device, ...]:
        found: list[Device] = []
        for number in range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(card)):
            try:
                handle = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number)
            except self._nvml.NVMLError_NotFound:
                continue
            # Their numbers count within the card, so they are shown by UUID.
            found.append(self._device(handle, self._nvml.nvmlDeviceGetUUID(handle), None))
        return tuple(found)

    def _memory(self, handle: Any) -> tuple[int | None, int | None]:
        """Return the bytes there are and those in use, None where the card does not say.

        The second version of the call does not count what the driver keeps for itself; old drivers have the first.
        """
        nvml = self._nvml
        for version in (nvml.nvmlMemory_v2, None):
            try:
                memory = nvml.nvmlDeviceGetMemoryInfo(handle, version)
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
                return None, None
            except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_ArgumentVersionMismatch):
                continue
            return _known(memory.total), _known(memory.used)
        return None, None

    def _processes(self, handle: Any) -> list[int]:
        """Return the processes that compute on the card; none where it does not say."""
        nvml = self._nvml
        calls = [nvml.nvmlDeviceGetComputeRunningProcesses_v3] * _READINGS
        for call in (*calls, nvml.nvmlDeviceGetComputeRunningProcesses_v2):
            try:
                return list(dict.fromkeys(int(process.pid) for process in call(handle)))
            except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_InsufficientSize):
                continue
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission):
                return []
        return []


@functools.cache
def _library() -> Any | Trouble | None:
    """Return nvidia-ml-py, started, for as long as this process lives; None without the driver's library."""
    try:
        ctypes.CDLL(LIBRARY)  # So that a machine without it need not import what speaks to it.
    except OSError as error:
        if "No such file" not in str(error):
            return Trouble(f"the NVIDIA library cannot be loaded: {error}", _INSTALL)
        return _driver_alone()
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _start_trouble(error)
    return nvml


def _driver_alone() -> Trouble | None:
    if not DRIVER.exists():
        return None
    return Trouble(f"the NVIDIA driver is loaded, and its library {LIBRARY} is not found", _INSTALL)


def _start_trouble(error: object) -> Trouble:
    words = Trouble(f"the NVIDIA library does not work: {error}", "nvidia-smi may say more")
    return _START_TROUBLES.get(type(error).__name__, words)


def _known(size: int) -> int | None:
    return None if size == _UNKNOWN else int(size)
