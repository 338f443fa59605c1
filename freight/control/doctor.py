"""Findings about a machine: what a run needs, whether it is there, and what to do when it is not."""

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import apsw

from freight.config import load_config
from freight.control.settingscheck import check_settings, missing_folders
from freight.core.device import Device, Usage
from freight.errors import FreightError
from freight.launchers.devices import Inventory, find_devices, held_words, look
from freight.launchers.locks import lock_folder
from freight.store.filesystem import filesystem_type, is_network
from freight.store.registry import built_in_models, read_registry

# Earlier versions may corrupt a database in WAL mode.
_LEAST_SQLITE = (3, 51, 3)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `good` or not, and how to mend it. What is not `grave` is only worth a warning."""

    what: str
    found: str
    good: bool = True
    fix: str = ""
    grave: bool = True


def examine(config: Path | None, data: Path) -> Iterator[Finding]:
    """Yield the findings, the most basic first."""
    python = platform.python_version()
    yield Finding("Python", python, sys.version_info >= (3, 11), "Freight needs Python 3.11 or newer")
    yield _sqlite()
    yield from _configuration(config, data)
    yield _engine()
    yield from _devices(data)
    yield _folder(data)
    yield _sockets()


def _sqlite() -> Finding:
    version = apsw.sqlite_lib_version()
    good = tuple(int(part) for part in version.split(".")) >= _LEAST_SQLITE
    return Finding("SQLite", version, good, "update apsw: this version may corrupt a database")


def _configuration(config: Path | None, data: Path) -> Iterator[Finding]:
    try:
        found = load_config(read_registry(data), built_in_models())
        check_settings(found)
    except FreightError as error:
        yield Finding("configuration", error.message, False, error.hint or "")
        return
    models = ", ".join(found.models) or "no models"
    yield Finding("configuration", f"{config or 'none (defaults)'}; models: {models}")
    for words in missing_folders(found):
        yield Finding("granted folder", words, False, "make it, or take it out of [paths]", grave=False)


def _engine() -> Finding:
    if find_spec("xllamacpp") is None:
        return Finding(
            "llama.cpp", "not installed", False, "pip install xllamacpp; or use only URLs and commands as models"
        )
    return Finding("llama.cpp", f"xllamacpp {importlib.metadata.version('xllamacpp')}")


def _devices(data: Path) -> Iterator[Finding]:
    try:
        declared = load_config(read_registry(data), built_in_models()).local_devices()
        inventory = find_devices(declared, os.environ)
        for device in inventory.devices():
            yield Finding(
                "device", f"{device.id} ({_about(device, inventory.usage(device))}), {_stand(inventory, device)}"
            )
    except FreightError as error:
        yield Finding("device", error.message, False, error.hint or "")
        return
    yield from _gpus(inventory, declared)


def _gpus(inventory: Inventory, declared: Sequence[str] | None) -> Iterator[Finding]:
    """Yield what there is to say about GPUs that are not used."""
    # Whoever declares CPU devices alone does not miss a GPU.
    wanted = declared is None or any(device.is_gpu() for device in inventory.devices())
    for trouble in inventory.troubles():
        yield Finding("GPUs", trouble.what, not wanted, trouble.fix)
    every = [device for device in inventory.all_devices() if device.is_gpu()]
    left_out = [device for device in every if device not in inventory.devices()]
    if left_out:
        why = "pools.local.devices does not name them" if declared else "the environment hides them"
        yield Finding("GPUs", f"not used, because {why}: {', '.join(device.id for device in left_out)}")
    if not every and not inventory.troubles():
        yield Finding("GPUs", f"none found ({inventory.drivers()}); the CPU is used")


def _about(device: Device, usage: Usage | None) -> str:
    if not device.is_gpu():
        return f"{len(os.sched_getaffinity(0))} cores"
    label = "" if device.index is None else f"{device.label()}, "
    if device.memory is None or usage is None or usage.memory_used is None:
        return f"{label}{device.name}, memory not known"
    return f"{label}{device.name}, {usage.memory_used / 1e9:.1f} of {device.memory / 1e9:.1f} GB in use"


def _stand(inventory: Inventory, device: Device) -> str:
    holder = look(inventory, device, lock_folder()).holder
    return held_words(holder.pid, holder.what) if holder else "free"


def _folder(data: Path) -> Finding:
    existing = next(parent for parent in (data, *data.parents) if os.path.exists(parent))  # noqa: PTH110
    free_gb = shutil.disk_usage(existing).free / 1e9
    kind = f"{filesystem_type(existing)}{', a network file system' if is_network(existing) else ''}"
    good = os.access(existing, os.W_OK)
    return Finding(
        "data folder", f"{data} ({kind}, {free_gb:.0f} GB free)", good, "it cannot be written to; set FREIGHT_DATA"
    )


def _sockets() -> Finding:
    with tempfile.TemporaryDirectory(prefix="freight-") as folder, socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(f"{folder}/probe.sock")
        except OSError as error:
            return Finding(
                "Unix sockets", f"{folder}: {error.strerror}", False, "set TMPDIR to a local folder with a short path"
            )
    return Finding("Unix sockets", f"work in {tempfile.gettempdir()}")
