"""What every adapter that is a program of its own is told. Imports nothing but the standard library."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def parse(about: str) -> argparse.Namespace:
    """Return the input, the engine's URL, the model, the output folder, the setting and the window."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--setting", choices=("default", "best"), required=True)
    parser.add_argument("--window", type=int, required=True)
    return parser.parse_args()


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a batch file."""
    with path.open("rb") as file:
        for raw in file:
            yield json.loads(raw)
