"""Print a results file for a reader: `python examples/show.py RESULTS`. Needs nothing but Python."""

import json
import sys
from pathlib import Path
from textwrap import shorten
from typing import Any

WIDTH = 88


def text(line: dict[str, Any]) -> str:
    """Return the answer's text, or what stands for it."""
    if line["error"]:
        return f"error {line['error']['code']}: {line['error']['message']}"
    body = line["response"]["body"]
    if "choices" in body:
        choice = body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    return f"a vector of {len(body['data'][0]['embedding'])} numbers"


if __name__ == "__main__":
    with Path(sys.argv[1]).open(encoding="utf-8") as file:
        for raw in file:
            answer = json.loads(raw)
            print(f"{answer['custom_id']:>10}  {shorten(text(answer), WIDTH, placeholder=' …')}")
