"""Draw docs/demo.svg, a picture of `make demo`, from its real output: `make demo 2>&1 | python docs/picture.py`."""

import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 104


def draw(lines: list[str]) -> str:
    """Return the picture of a terminal that shows these lines."""
    console = Console(record=True, width=WIDTH, file=StringIO(), color_system="truecolor")
    console.print(Text("$ make demo", style="bold green"))
    for line in lines:
        text = Text(line, overflow="ellipsis", no_wrap=True)
        text.highlight_regex(r"^ *(chat|plain|json|vector)-\d+", "cyan")
        text.highlight_regex(r"^\d+ of \d+ records answered", "bold")
        console.print(text, overflow="ellipsis", no_wrap=True)
    picture = console.export_svg(title="make demo")
    # The picture must not fetch fonts from anywhere.
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


if __name__ == "__main__":
    shown = [
        line for line in sys.stdin.read().splitlines() if not line.startswith((".venv/", "mkdir", "python", "make"))
    ]
    Path(__file__).with_name("demo.svg").write_text(draw(shown), encoding="utf-8")
