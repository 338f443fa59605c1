"""What the service tells about itself and its jobs: the shapes of its JSON API, the same for server and client.

Times are in RFC 3339, UTC; durations in seconds; rates in tokens or records a second over the last half minute.
"""

from dataclasses import dataclass, field
from typing import Any, Final

API_VERSION: Final = 1
IDEMPOTENCY_HEADER: Final = "Idempotency-Key"
# On results: how many records have a line in them, of how many.
DONE_HEADER: Final = "Freight-Records-Done"
TOTAL_HEADER: Final = "Freight-Records-Total"
# The state of the job whose they are.
STATE_HEADER: Final = "Freight-Job-State"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The service that answers: its version, and for admins its process and the folder that it owns."""

    version: str
    api_version: int
    pid: int | None = None
    data_folder: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An input that was sent, whole and on disk. `id` is for the job that uses it, once, within a day."""

    id: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job to make of an upload. Times in seconds, 0 for none; `concurrency` 0 is automatic; `gpus` are those of one
    worker, None as the model's entry says.

    `model` None means the first record's, if it is registered, or the default. `typed` is the model in the user's
    own words where `model` was made absolute, `file` the input's name for showing. `output` is a folder on the
    service's machine into which the results file goes at the end, `notify` a URL that is told of the end. `order` is
    "auto" (records that share a prompt prefix run one after the other) or "input"; with `dedupe` equal requests run
    once.
    """

    # For the server's reading of requests: what it does not know it refuses.
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    upload: str
    file: str = ""
    model: str | None = None
    typed: str | None = None
    name: str | None = None
    workers: int = 1
    gpus: int | None = None
    pool: str = "local"
    timeout_s: float = 0.0
    record_timeout_s: float = 0.0
    concurrency: int = 0
    strict: bool = False
    ignore_record_model: bool = False
    priority: int = 0
    output: str | None = None
    order: str = "auto"
    dedupe: bool = False
    notify: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A job in a list, and whose it is. `records` is None until the input was read; `done` counts failed ones, too."""

    id: str
    name: str
    user: str
    model: str
    state: str
    reason: str
    priority: int
    records: int | None
    done: int
    failed: int
    created_at: str
    started_at: str | None
    finished_at: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureKind:
    """How many records failed in one way, and what one of them says. `status` is 0 where no engine answered."""

    code: str
    status: int
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Something that happened to a job, and the state that it led to."""

    at: str
    event: str
    state: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker. `place` is its devices or its URL; `job` is None for one that keeps its model warm, `user` is whose the
    job is; `number` is its place among its job's workers, from 1, as in `freight logs --worker`.

    `running`, `waiting` and `cache_use` (a share) are what its server says of itself, where it does. `pinned`: its
    model is to be up always.
    """

    id: str
    model: str
    place: str
    phase: str
    note: str
    job: str | None
    number: int | None
    in_flight: int
    started_at: str
    devices: list[str] = field(default_factory=list[str])
    pinned: bool = False
    user: str | None = None
    running: int | None = None
    waiting: int | None = None
    cache_use: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus(JobSummary):
    """All about one job. `notify` is the server that is told of its end: the URL's other parts may be secrets."""

    file: str
    bytes: int
    sha256: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    output: str | None = None
    notify: str | None = None
    ran_s: float = 0.0
    cut: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    input_rate: float = 0.0
    output_rate: float = 0.0
    record_rate: float = 0.0
    in_flight: int = 0
    eta_s: float | None = None
    failures: list[FailureKind] = field(default_factory=list[FailureKind])
    workers: list[WorkerStatus] = field(default_factory=list[WorkerStatus])
    events: list[JobEvent] = field(default_factory=list[JobEvent])


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job that was made, or with an idempotency key found, and what is worth saying about it."""

    job: JobStatus
    notes: list[str] = field(default_factory=list[str])
    is_new: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """Jobs, the newest first. `next` is for `after` in the next request; None at the end."""

    jobs: list[JobSummary]
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameList:
    """The names of jobs, in order. `next` is for `after` in the next request; None at the end."""

    names: list[str]
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinStatus:
    """A pinned model: `workers` of it are to be up, `up` are; `reason` says why there are fewer ("" where all are)."""

    model: str
    workers: int
    up: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerList:
    """The workers there are now, those of jobs and warm ones, the oldest first, and the models that are pinned.

    `next` is for `after` in the next request; None at the end.
    """

    workers: list[WorkerStatus]
    pins: list[PinStatus] = field(default_factory=list[PinStatus])
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """A device of the service's machine. `memory` and `memory_used` are in bytes, None where it does not say.

    `state` is free, leased (by a worker of this service: `job` is the one it serves, or None), held (by somebody else)
    or quarantined (something is left on it); `holder` says by whom, `pid` is their process where it is known.
    """

    id: str
    kind: str
    name: str
    index: int | None
    memory: int | None
    memory_used: int | None
    state: str
    holder: str
    pid: int | None
    job: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceList:
    """The devices of the service's machine. `next` is for `after` in the next request; None at the end."""

    devices: list[DeviceStatus]
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that the one who asks may run. `batch` says that the facility API runs it; `gpus` are those of one worker
    and `context` is in tokens, None where the engine chooses. `groups` is for admins: who may run it, if not all.
    """

    name: str
    engine: str
    aliases: list[str]
    batch: bool
    gpus: int | None = None
    context: int | None = None
    groups: list[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelList:
    """Models, by their names. `next` is for `after` in the next request; None at the end."""

    models: list[ModelInfo]
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """A token to make for a user, good for `expires_s` seconds (None: until it is revoked); `label` is for showing.

    Who shows it is in `groups`.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    user: str
    role: str = "user"
    expires_s: float | None = None
    label: str = ""
    groups: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """A token, but for itself. `expires_at` is None where it does not; `used_on` is the last day (UTC) of its use."""

    id: str
    user: str
    role: str
    label: str
    created_at: str
    expires_at: str | None
    used_on: str | None
    groups: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMade:
    """A token that was made: this once it is told itself."""

    token: str = field(repr=False)
    info: TokenInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenList:
    """Tokens, the oldest first. `next` is for `after` in the next request; None at the end."""

    tokens: list[TokenInfo]
    next: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """What went wrong, and the fix. `code` is stable."""

    code: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """The body of every answer that is no success."""

    error: ErrorBody


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIErrorBody:
    """What went wrong, as OpenAI's clients read it. `param` is the field of the request that is wrong, if one is."""

    message: str
    type: str
    param: str | None
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIErrorReply:
    """The body of every answer of the OpenAI API that is no success."""

    error: OpenAIErrorBody
