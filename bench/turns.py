"""A simulated engine whose options depend on which one it is: `python -m bench.turns FOLDER OPTIONS…`.

FOLDER/plan.json has a list of options for each; the first to start takes the first. What an engine has done is in
FOLDER/summary-N.json once it was told to end.
"""

import json
import os
import sys
import time
from pathlib import Path


def take_turn(folder: Path) -> int:
    """Return a number that no other process gets."""
    number = 0
    while True:
        try:
            handle = os.open(folder / f"started-{number}.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            number += 1
            continue
        os.write(handle, str(time.monotonic()).encode())
        os.close(handle)
        return number


def main() -> None:
    """Become the engine of this turn."""
    folder = Path(sys.argv[1])
    number = take_turn(folder)
    plan = json.loads((folder / "plan.json").read_text())
    summary = ["--summary", str(folder / f"summary-{number}.json")]
    argv = [sys.executable, "-m", "bench.simengine", *sys.argv[2:], *plan[number % len(plan)], *summary]
    os.execv(sys.executable, argv)


if __name__ == "__main__":
    main()
