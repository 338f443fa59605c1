"""Findings about a machine: what a run needs, whether it is there, and what to do when it is not."""

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import apsw

from freight.config import load_config
from freight.core.device import Holder
from freight.errors import FreightError
from freight.launchers.local import local_devices
from freight.launchers.locks import lock_device, lock_folder
from freight.store.filesystem import filesystem_type, is_network
from freight.store.registry import built_in_models, read_registry

# Earlier versions may corrupt a database in WAL mode.
_LEAST_SQLITE = (3, 51, 3)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `good` or not, and how to mend it."""

    what: str
    found: str
    good: bool = True
    fix: str = ""


def examine(config: Path | None, data: Path) -> Iterator[Finding]:
    """Yield the findings, the most basic first."""
    python = platform.python_version()
    yield Finding("Python", python, sys.version_info >= (3, 11), "Freight needs Python 3.11 or newer")
    yield _sqlite()
    yield _configuration(config, data)
    yield _engine()
    yield from _devices(data)
    yield _folder(data)
    yield _sockets()


def _sqlite() -> Finding:
    version = apsw.sqlite_lib_version()
    good = tuple(int(part) for part in version.split(".")) >= _LEAST_SQLITE
    return Finding("SQLite", version, good, "update apsw: this version may corrupt a database")


def _configuration(config: Path | None, data: Path) -> Finding:
    try:
        found = load_config(read_registry(data), built_in_models())
    except FreightError as error:
        return Finding("configuration", error.message, False, error.hint or "")
    models = ", ".join(found.models) or "no models"
    return Finding("configuration", f"{config or 'none (defaults)'}; models: {models}")


def _engine() -> Finding:
    if find_spec("xllamacpp") is None:
        return Finding(
            "llama.cpp", "not installed", False, "pip install xllamacpp; or use only URLs and commands as models"
        )
    return Finding("llama.cpp", f"xllamacpp {importlib.metadata.version('xllamacpp')}")


def _devices(data: Path) -> Iterator[Finding]:
    try:
        declared = load_config(read_registry(data), built_in_models()).local_devices()
        for device in local_devices(declared):
            taken = lock_device(device.id, lock_folder())
            if isinstance(taken, Holder):
                yield Finding("device", f"{device.id}, held by process {taken.pid} ({taken.what})")
            else:
                os.close(taken)
                yield Finding("device", f"{device.id} ({len(os.sched_getaffinity(0))} cores), free")
    except FreightError as error:
        yield Finding("device", error.message, False, error.hint or "")


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
