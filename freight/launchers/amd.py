"""AMD's GPUs, through the Python package `amdsmi` of the ROCm driver where that is installed."""

import functools
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from freight.core.device import Device, DeviceKind, Usage
from freight.launchers.cards import Trouble, holder, read_limit, unreachable

PACKAGE: Final = "amdsmi"
# What the kernel's driver lets programs compute through. Also without it the package may be installed.
DRIVER: Final = Path("/dev/kfd")
# The runtime below HIP reads the first; what that leaves, HIP numbers anew and reads the second, or CUDA's.
ROCR: Final = "ROCR_VISIBLE_DEVICES"
HIP: Final = "HIP_VISIBLE_DEVICES"
CUDA: Final = "CUDA_VISIBLE_DEVICES"
# What makes HIP see none: it takes an empty text for no limit at all.
_NONE: Final = "-1"
_MIB: Final = 1 << 20
_FIX: Final = "see amd-smi; the user needs access to /dev/kfd and /dev/dri (groups video and render)"


class AmdCards:
    """The AMD GPUs of this machine, found once."""

    kind: str = DeviceKind.AMD
    limits: tuple[str, ...] = (ROCR, HIP, CUDA)

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.devices: tuple[Device, ...] = ()
        self.troubles: tuple[Trouble, ...] = ()
        self.driver = f"an AMD driver without the package {PACKAGE}" if DRIVER.exists() else ""
        self._handles: dict[str, Any] = {}
        # What the runtime below HIP leaves, by HIP's numbers; a card that cannot be read keeps its own.
        self._reached: list[tuple[Device, ...]] = []
        smi: Any = _library()
        self._smi: Any = smi
        if smi is None or isinstance(smi, Trouble):
            self.troubles = () if smi is None else (smi,)
            return
        self.driver = "AMD driver"
        found: list[Device] = []
        try:
            for number, handle in enumerate(smi.amdsmi_get_processor_handles()):
                found += self._find_card(number, handle)
        except smi.AmdSmiException as error:
            self.troubles += (Trouble(f"AMD GPUs cannot be listed: {error}", _FIX),)
        # HIP's order, which its numbers mean.
        self.devices = tuple(sorted(found, key=lambda device: -1 if device.index is None else device.index))
        self._reached = self._within(environment.get(ROCR))

    def visible(self, environment: Mapping[str, str]) -> tuple[Device, ...]:
        """Return those that ROCR_VISIBLE_DEVICES and then HIP_VISIBLE_DEVICES leave."""
        limit = environment.get(HIP) or environment.get(CUDA) or None  # HIP takes "" for no limit.
        left = self._within(environment.get(ROCR))
        return read_limit(limit, left, _named(device for devices in left for device in devices))

    def usage(self, device: Device) -> Usage:
        """Return what is on one of them now; one that cannot be read any more is held."""
        handle = self._handles[device.id]
        try:
            used = self._smi.amdsmi_get_gpu_vram_usage(handle).get("vram_used")
            processes = self._smi.amdsmi_get_gpu_process_list(handle)
            return Usage(_bytes(used), tuple(holder(int(one["pid"])) for one in processes if _is_there(one)))
        except self._smi.AmdSmiException as error:
            return unreachable(device, error)

    def environment(self, chosen: Sequence[Device]) -> dict[str, str]:
        """Return the variables with which a program sees exactly these; none on a machine without a card.

        Numbers count within what ROCR_VISIBLE_DEVICES leaves, which a worker inherits.
        """
        if not self.devices:
            return {}
        numbers = [str(self._reached.index((device,))) for device in chosen]
        text = ",".join(numbers) or _NONE
        return {HIP: text, CUDA: text}

    def _within(self, limit: str | None) -> list[tuple[Device, ...]]:
        """Return the devices by HIP's numbers where ROCR_VISIBLE_DEVICES is `limit`."""
        last = max((device.index or 0 for device in self.devices), default=-1)
        every = [tuple(device for device in self.devices if device.index == number) for number in range(last + 1)]
        return every if limit is None else [(device,) for device in read_limit(limit, every, _named(self.devices))]

    def _find_card(self, number: int, handle: Any) -> list[Device]:
        smi = self._smi
        try:
            ident, index = self._identity(number, handle)
            memory = _bytes(smi.amdsmi_get_gpu_vram_usage(handle).get("vram_total"))
            name = str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])
        except smi.AmdSmiException as error:
            self.troubles += (Trouble(f"AMD GPU {number} cannot be read: {error}", _FIX),)
            return []
        self._handles[ident] = handle
        return [Device(ident, DeviceKind.AMD, name, memory, index)]

    def _identity(self, number: int, handle: Any) -> tuple[str, int]:
        """Return a card's UUID and number as HIP has them; as the driver has them where that does not know."""
        uuid = str(self._smi.amdsmi_get_gpu_device_uuid(handle))
        ask = getattr(self._smi, "amdsmi_get_gpu_enumeration_info", None)
        if ask is None:
            return uuid, number
        try:
            known: dict[str, Any] = ask(handle)
        except self._smi.AmdSmiException:
            return uuid, number
        hip, index = str(known.get("hip_uuid")), known.get("hip_id")
        hip_uuid = hip if re.fullmatch(r"GPU-[0-9a-fA-F]+", hip) else uuid
        return hip_uuid, index if isinstance(index, int) else number


def _bytes(mebibytes: object) -> int | None:
    """Return a size in bytes; None for what the package writes where a card does not say."""
    return mebibytes * _MIB if isinstance(mebibytes, int) else None


def _is_there(process: Any) -> bool:
    """Return whether a process is on the card: the driver lists it on each that it opened, used or not."""
    return process.get("memory_usage", {}).get("vram_mem") != 0


def _named(devices: Iterable[Device]) -> dict[str, tuple[Device, ...]]:
    return {device.id: (device,) for device in devices}


@functools.cache
def _library() -> Any | Trouble | None:
    """Return amdsmi, started, for as long as this process lives; None without it, or without a driver for it."""
    if not DRIVER.exists() or find_spec(PACKAGE) is None:
        return None
    try:
        smi: Any = importlib.import_module(PACKAGE)
    except Exception as error:  # Where the driver's library is missing, each of its versions raises something else.
        return Trouble(f"the package {PACKAGE} cannot be imported: {error}", "install the ROCm driver's own version")
    try:
        smi.amdsmi_init()
    except smi.AmdSmiException as error:
        return Trouble(f"the AMD library does not work: {error}", _FIX)
    return smi
