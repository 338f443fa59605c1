"""The processes of a worker, found by the marker that they carry in their environment."""

import os
import signal
from pathlib import Path
from typing import Final

import psutil

# Set in the environment of a worker and, by inheritance, of all that it starts.
MARKER: Final = "FREIGHT_WORKER"
# Servers that rename their processes by setproctitle, as vLLM and SGLang do, would have it write over what others see
# of their environment, marker and all.
KEEPS_MARKER: Final = {"SPT_NOENV": "1"}


def marked(worker: str) -> list[psutil.Process]:
    """Return the processes whose environment carries the worker's marker. Zombies have none."""
    needle = f"{MARKER}={worker}".encode()
    found: list[psutil.Process] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        environ = Path(entry.path, "environ")
        try:
            if needle in environ.read_bytes().split(b"\0"):
                process = psutil.Process(int(entry.name))
                # Looked at again: the number may have become another's before its process was opened.
                if needle in environ.read_bytes().split(b"\0"):
                    found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def kill(process: psutil.Process) -> None:
    """End a process, unless its number is another's by now."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.Error:
        return
