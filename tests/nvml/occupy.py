"""Run a command that is on cards of the stand-in library: `python -m tests.nvml.occupy MB -- COMMAND ARGUMENTS`.

It takes MB megabytes of each card that CUDA_VISIBLE_DEVICES names by UUID, until it ends, and is shown as a process
there. What it starts is not.
"""

import os
import sys
from pathlib import Path

from tests.nvml.cards import VARIABLE


def main() -> None:
    """Write down that this process is on its cards, and become the command."""
    megabytes, dashes, *command = sys.argv[1:]
    assert dashes == "--", "usage: python -m tests.nvml.occupy MB -- COMMAND"
    folder = Path(f"{os.environ[VARIABLE]}.pids")
    cards = [uuid for uuid in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
    aside = folder / f".{os.getpid()}"
    aside.write_text("".join(f"{uuid} {int(megabytes)}\n" for uuid in cards))
    aside.replace(folder / str(os.getpid()))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
