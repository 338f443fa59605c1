"""Write docs/reference.md from the code: `python docs/generate.py` (with --check: only compare)."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import click
import msgspec

from freight.cli.main import freight
from freight.config import PATH_SETTINGS, POOL_SETTINGS, SETTINGS, VARIABLES
from freight.core import answer
from freight.core.job import FINAL, NEXT, State
from freight.core.model import ModelEntry
from freight.core.record import INTAKE_CODES, PATHS
from freight.engines.endpoint import KEY_VARIABLE

REFERENCE = Path(__file__).with_name("reference.md")

CODES = {
    "invalid_json": "the line is not one JSON object: bad syntax, NaN or Infinity, bad UTF-8, over 512 levels deep",
    "missing_custom_id": "no `custom_id`",
    "invalid_custom_id": "`custom_id` is not a string of 1 to 512 characters",
    "duplicate_custom_id": "an earlier line has the same `custom_id`; that one runs",
    "invalid_body": "`body` is missing or no object",
    "invalid_url": "`url` is no endpoint that Freight knows",
    "invalid_method": "`method` is not POST",
    "media_not_allowed": "a media field is neither inline data nor https from a host in `media.hosts`",
    "model_mismatch": "the body names another model than the job's",
    "streaming_unsupported": "`stream` is set",
    "payload_too_large": "the line is longer than `limits.record_bytes`; its `custom_id` is not read",
    answer.INFERENCE_FAILED: "the engine refused the record, or failed at every try; `response` holds what it said",
    answer.REQUEST_TIMEOUT: "no answer within `--record-timeout`",
    answer.WORKER_CRASHED: "the record took a model server down three times",
    answer.INVALID_RESPONSE: "the engine answered 200 with something that is no answer, three times",
    answer.BATCH_CANCELLED: "not reached: the job was cancelled",
    answer.BATCH_EXPIRED: "not reached: the job's time ran out",
    answer.BATCH_FAILED: "not reached: the job failed",
}

STATES = {
    State.VALIDATING: "the file is being checked",
    State.QUEUED: "waits for a device; the reason is shown",
    State.STARTING: "a worker loads the model",
    State.RUNNING: "records are being answered",
    State.FINALIZING: "all records are done; the results file is being written",
    State.COMPLETED: "every record has its line, answered or failed",
    State.FAILED: "the job could not be done; answers so far are kept",
    State.CANCELLING: "cancel was asked for; requests are still ending",
    State.CANCELLED: "cancelled, and its devices are free",
    State.TIMED_OUT: "its time ran out; answers so far are kept",
    State.SUSPENDED: "cannot go on now (disk full, no server answers): goes on by itself, or frees its devices to fail",
}


def commands(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    """Yield (command line, help text) of a command and all below it."""
    context = click.Context(command, info_name=path, max_content_width=100, terminal_width=100)
    yield path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, f"{path} {name}")


def tables() -> Iterator[str]:
    """Yield the keys of the tables whose names the user chooses."""
    hints = get_type_hints(ModelEntry, include_extras=True)
    models = [
        (field.name, default_of(field), hints[field.name].__metadata__[0].description)
        for field in msgspec.structs.fields(ModelEntry)
    ]
    pools, paths = ([(s.key, f"`{s.default!r}`", s.about) for s in known] for known in (POOL_SETTINGS, PATH_SETTINGS))
    for title, rows in (("models.NAME", models), ("pools.NAME", pools), ("paths.USER", paths)):
        yield f"\n### {title}\n\n| key | default | what |\n|---|---|---|"
        yield from (f"| `{title}.{key}` | {default} | {about} |" for key, default, about in rows)


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """Return what a field has where nothing is written; nothing for one that must be."""
    if field.required:
        return ""
    return f"`{field.default!r}`" if field.default is not msgspec.NODEFAULT else f"`{field.default_factory()!r}`"


def reference() -> str:
    """Return the whole page."""
    parts = ["# Reference\n\nWritten from the code by `docs/generate.py`; a test compares the two.\n"]
    parts.append("## Commands\n")
    parts += [f"### `{path}`\n\n```\n{text}\n```\n" for path, text in commands(freight, "freight")]
    parts.append("## Settings\n\n| key | variable | default | what |\n|---|---|---|---|")
    parts += [f"| `{s.key}` | `{s.variable()}` | `{s.default!r}` | {s.about} |" for s in SETTINGS]
    parts.append("\nDurations (here in seconds) may be written `90s`, `15m`, `12h` or `30d`, sizes `10MB` or `64KiB`.")
    parts += list(tables())
    parts.append("\n### Other variables\n\n| variable | what |\n|---|---|")
    parts += [f"| `{name}` | {about} |" for name, about in VARIABLES.items()]
    parts.append(f"| `{KEY_VARIABLE}` | the API key for a server whose URL is given as `--model` |")
    parts.append("\n## Endpoints\n\n" + "\n".join(f"- `{path}`" for path in PATHS.values()))
    parts.append("\n## Error codes\n\n| code | when |\n|---|---|")
    parts += [f"| `{code}` | {about} |" for code, about in CODES.items()]
    parts.append("\nThe first eleven are found at intake and carry the line's number as `line`.")
    parts.append("\n## Job states\n\n| state | what |\n|---|---|")
    parts += [f"| {state} | {about}{' (final)' if state in FINAL else ''} |" for state, about in STATES.items()]
    parts.append("\n```mermaid\nstateDiagram-v2\n    [*] --> VALIDATING")
    parts += [f"    {before} --> {after}: {event}" for (before, event), after in NEXT.items() if before != after]
    parts.append("```\n")
    return "\n".join(parts)


def check_complete() -> None:
    """Raise AssertionError when a code or state has no words here."""
    assert set(INTAKE_CODES) <= set(CODES), "an intake code is undocumented"
    assert set(STATES) == set(State), "a state is undocumented"


if __name__ == "__main__":
    check_complete()
    if "--check" in sys.argv:
        sys.exit(0 if REFERENCE.read_text(encoding="utf-8") == reference() else "docs/reference.md is out of date")
    REFERENCE.write_text(reference(), encoding="utf-8")
