"""Batches and models as the OpenAI API shows them: the shapes, the states, and which field a bad line is wrong in.

Times are in whole seconds of the clock of day.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from freight.core.job import State, Totals
from freight.core.record import PATHS

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
STATUS: Final[dict[State, Status]] = {
    State.VALIDATING: "validating",
    State.QUEUED: "in_progress",
    State.STARTING: "in_progress",
    State.SUSPENDED: "in_progress",
    State.RUNNING: "in_progress",
    State.FINALIZING: "finalizing",
    State.COMPLETED: "completed",
    State.FAILED: "failed",
    State.CANCELLING: "cancelling",
    State.CANCELLED: "cancelled",
    State.TIMED_OUT: "expired",
}
ENDPOINTS: Final = {path: endpoint for endpoint, path in PATHS.items()}
# The field of a line that an intake code is about; None where the line as a whole is wrong.
PARAMS: Final[dict[str, str | None]] = {
    "invalid_json": None,
    "missing_custom_id": "custom_id",
    "invalid_custom_id": "custom_id",
    "duplicate_custom_id": "custom_id",
    "invalid_body": "body",
    "invalid_url": "url",
    "invalid_method": "method",
    "media_not_allowed": "body",
    "model_mismatch": "body.model",
    "streaming_unsupported": "body.stream",
    "payload_too_large": None,
}
# What a whole file can be refused for; "model_not_found" is also what asking for such a model is answered with.
EMPTY_FILE: Final = "empty_file"
FILE_TOO_LARGE: Final = "file_too_large"
MODEL_NOT_FOUND: Final = "model_not_found"
MODEL_NOT_AVAILABLE: Final = "model_not_available"
# Of a job that failed later on.
BATCH_FAILED: Final = "batch_failed"

MOST_ERRORS: Final = 100
MOST_PAIRS: Final = 16
MOST_KEY: Final = 64
MOST_VALUE: Final = 512
MOST_PAGE: Final = 100
DEFAULT_PAGE: Final = 20
OWNER: Final = "freight"
_ID: Final = re.compile(r"batch_([0-9a-f]{8})([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputExpiry:
    """When a batch's output and error files expire: `seconds` after they were made."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    anchor: Literal["created_at"]
    seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A batch to make of a file. `completion_window` is "24h" or another duration.

    Up to 16 pairs of texts in `metadata` are kept and given back; the pair `notify` names a URL that is told of the
    batch's end.
    """

    # For the server's reading of requests: what it does not know it refuses.
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = field(default=None, repr=False)
    output_expires_after: OutputExpiry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchError:
    """Why a batch failed: a line of its input (`line` counts from 1), or with None the whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchErrors:
    """Why a batch failed: the first bad lines, in order."""

    data: list[BatchError]
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """How many requests a batch has, how many were answered without an error, and how many ended in one."""

    total: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTokens:
    """How many tokens of the prompts came from a cache."""

    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTokens:
    """How many tokens of the answers were thoughts: not told apart."""

    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUsage:
    """The tokens of a batch's answers."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPage:
    """Batches, the newest first. The next page's are those after `last_id`."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model that batches may name. `created` is when the service started: a registered model has no age."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = OWNER


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCards:
    """The models that there are for the one who asks, those of the registry before their aliases."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def batch_id(job: str) -> str:
    """Return what the API calls a job."""
    return f"batch_{job.replace('-', '')}"


def job_of(batch: str) -> str | None:
    """Return the id of the job that the API calls so; None for what is no batch's id."""
    found = _ID.fullmatch(batch)
    return "-".join(found.groups()) if found else None


def request_counts(records: int | None, totals: Totals) -> RequestCounts:
    """Return how a batch of so many records (None: not read yet) stands."""
    return RequestCounts(total=records or 0, completed=totals.done - totals.failed, failed=totals.failed)


def usage(totals: Totals) -> BatchUsage:
    """Return the tokens of a batch's answers."""
    return BatchUsage(
        input_tokens=totals.input_tokens,
        input_tokens_details=InputTokens(cached_tokens=totals.cached_tokens),
        output_tokens=totals.output_tokens,
        output_tokens_details=OutputTokens(),
        total_tokens=totals.input_tokens + totals.output_tokens,
    )


def moments(reached: Mapping[State, float]) -> dict[Status, int]:
    """Return when a batch came to each status that it has had, from when its job first came to each state."""
    found: dict[Status, int] = {}
    for state, at in reached.items():
        found[STATUS[state]] = min(int(at), found.get(STATUS[state], int(at)))
    return found


def page_of(batches: Sequence[Batch], has_more: bool) -> BatchPage:
    """Return batches as a page."""
    return BatchPage(
        data=list(batches),
        first_id=batches[0].id if batches else None,
        last_id=batches[-1].id if batches else None,
        has_more=has_more,
    )
