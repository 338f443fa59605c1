"""saturate: `pump`, by default with its adaptive window, at best with a fixed one and larger parts.

Its output is a folder of parquet files; `python -m bench.peers.saturate_pump --collect` prints what is in it.
"""

import json
import sys
from typing import Any

from bench.peers.arguments import parse, records

FLUSH_EVERY = 500


def parsed(row: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that are kept of an answer."""
    return {"content": answer["choices"][0]["message"]["content"], "tokens": answer["usage"]["completion_tokens"]}


def run() -> None:
    """Run the file."""
    from saturate import Fixed, pump

    given = parse(__doc__ or "")
    best: dict[str, Any] = {}
    if given.setting == "best":
        best = {"window": Fixed(given.window), "flush_every": FLUSH_EVERY}
    pump(
        ((record["custom_id"], record["body"]) for record in records(given.input)),
        to_request=lambda body: {**body, "model": given.model},
        parse=parsed,
        endpoint=f"{given.url}/v1",
        output=str(given.output),
        **best,
    )


def collect(folder: str) -> None:
    """Print the id and the answer of every record of an output, one JSON line each; the good ones of a record win."""
    from saturate import read_output

    for custom_id, row in read_output(folder):
        print(json.dumps([custom_id, row.get("content")]))


if __name__ == "__main__":
    if sys.argv[1] == "--collect":
        collect(sys.argv[2])
    else:
        run()
