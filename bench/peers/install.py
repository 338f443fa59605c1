"""Make the peers' environments: `python -m bench.peers.install [NAME…]`; what is there already is left.

One that cannot be made is named, with what pip said, and left out of the races.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.engines import ROOT
from bench.peers.roster import ENVIRONMENTS, PEERS

# What draws the plots and looks at the hot path is no peer, but lives there as well.
REPORT: Final = "report"


def pinned(name: str) -> str:
    """Return a requirement as constraints.txt has it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def install(name: str, requirement: str) -> bool:
    """Make one environment, as far as it is missing; return whether it is there."""
    folder: Path = ENVIRONMENTS / name
    stamp = folder / ".installed"
    if stamp.is_file() and stamp.read_text() == requirement:
        return True
    print(f"installing {requirement} into {folder.relative_to(ROOT)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    done = subprocess.run(
        [
            str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            # A peer may want other versions than ours of what both use.
            *(("--constraint", str(ROOT / "constraints.txt")) if name == REPORT else ()), *requirement.split(),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(f"{requirement} cannot be installed:\n{done.stderr}", file=sys.stderr)
        shutil.rmtree(folder)
        return False
    stamp.write_text(requirement)
    return True


def main() -> None:
    """Make all of them, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.install", description=__doc__)
    wanted = {peer.name: peer.requirement for peer in PEERS.values() if peer.requirement}
    wanted[REPORT] = f"{pinned('matplotlib')} {pinned('py-spy')}"
    parser.add_argument("names", nargs="*", default=list(wanted))
    for name in parser.parse_args().names:
        install(name, wanted[name])


if __name__ == "__main__":
    main()
