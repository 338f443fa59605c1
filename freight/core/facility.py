"""The facility's API: its words for where a batch stands, and how what it writes is called.

Times are the clock of day's, in seconds; what is shown of them is in UTC.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from freight.core.job import State, Totals

# The name of this API in the catalog.
FACILITY: Final = "facility"
# What of a batch its job's entry keeps, beside the request.
CLUSTER: Final = "cluster"
FRAMEWORK: Final = "framework"
INPUT_FILE: Final = "input_file"
OUTPUT_FOLDER: Final = "output_folder"

PENDING: Final = "pending"
RUNNING: Final = "running"
FAILED: Final = "failed"
COMPLETED: Final = "completed"
CANCELLED: Final = "cancelled"
STATUSES: Final[Mapping[State, str]] = {
    State.VALIDATING: PENDING,
    State.QUEUED: PENDING,
    State.STARTING: PENDING,
    State.SUSPENDED: PENDING,
    State.RUNNING: RUNNING,
    State.FINALIZING: RUNNING,
    State.COMPLETED: COMPLETED,
    State.FAILED: FAILED,
    State.TIMED_OUT: FAILED,
    State.CANCELLING: CANCELLED,
    State.CANCELLED: CANCELLED,
}

# A name may have 255 bytes; beside these two there are an id, a time and an ending.
_MODEL_BYTES: Final = 96
_NAME_BYTES: Final = 96
_ODD: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def states_with(status: str) -> tuple[State, ...]:
    """Return the states that are shown as a status; none for what is no status."""
    return tuple(state for state, shown in STATUSES.items() if shown == status)


def shown_time(at: float) -> str:
    """Return a time as the facility's lists have it: 2025-02-20 18:39:58.049584+00:00."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f+00:00")


def folder_name(input_file: str, model: str, batch: str) -> str:
    """Return what the folder of a batch's files is called."""
    return f"{_input_name(input_file)}_{_cut(model.replace('/', '--'), _MODEL_BYTES)}_{batch}"


def file_names(input_file: str, created_at: float) -> tuple[str, str]:
    """Return what a batch's results file and progress file are called, the same however often it is resumed."""
    stamp = datetime.fromtimestamp(created_at, UTC).strftime("%Y%m%dT%H%M%SZ")
    start = f"{_input_name(input_file)}_{stamp}"
    return f"{start}.results.jsonl", f"{start}.progress.json"


def _input_name(input_file: str) -> str:
    """Return the name of an input, without its ending."""
    name = input_file.rstrip("/").rpartition("/")[2]
    stem, dot, _ = name.rpartition(".")
    return _cut(stem if dot and stem else name, _NAME_BYTES)


def _cut(text: str, most: int) -> str:
    """Return a text fit for a part of a file's name, of `most` bytes."""
    plain = _ODD.sub("_", text).encode(errors="replace")
    return plain[:most].decode(errors="ignore")


def progress(batch: str, state: State, records: int | None, totals: Totals) -> dict[str, Any]:
    """Return what a batch's progress file says, but for when. `records` is None while the input is read."""
    return {
        "batch_id": batch,
        "status": STATUSES[state],
        "lines_total": records,
        "lines_processed": totals.done,
        "num_responses": totals.done - totals.failed,
        "num_failed": totals.failed,
        "total_tokens": totals.input_tokens + totals.output_tokens,
    }
