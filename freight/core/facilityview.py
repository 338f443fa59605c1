"""The shapes of the facility's API. Their fields are those of the facility's own samples."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """A batch to make of a file on the service's machine.

    `output_folder_path` is where the folder with its files goes; without it, that is the user's first output root.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    model: str
    input_file: str
    output_folder_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMade:
    """A batch that was made. It is one task."""

    batch_id: str
    input_file: str
    output_folder_path: str
    task_ids: list[str]
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A batch in the list."""

    batch_id: str
    cluster: str
    created_at: str
    framework: str
    input_file: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCancelled:
    """A batch that ends before its time."""

    batch_id: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What became of a batch: `response_time` is how long it ran, in seconds."""

    response_time: float
    throughput_tokens_per_second: float
    total_tokens: int
    num_responses: int
    lines_processed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Where the files of a batch are, and what became of it."""

    results_file: str
    progress_file: str
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFault:
    """Why a batch did not complete."""

    code: str
    message: str
    info: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedResult(BatchResult):
    """The same of a batch that failed and has results all the same."""

    error: BatchFault


@dataclass(frozen=True, slots=True, kw_only=True)
class NoResult:
    """A batch that ended without any results."""

    error: BatchFault


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """An engine family of a cluster: its models, other names for them, and those that do batches; where to send those.

    `endpoints` are below the cluster's base URL.
    """

    models: list[str] = field(default_factory=list[str])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    batch_models: list[str] = field(default_factory=list[str])
    endpoints: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A pool of machines, and what runs there."""

    base_url: str
    frameworks: dict[str, Framework]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The clusters there are."""

    clusters: dict[str, Cluster]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShown:
    """A model that runs, or that somebody's job waits for."""

    model: str
    framework: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob:
    """A batch of the user's that has not ended."""

    batch_id: str
    model: str
    framework: str
    input_file: str
    created_at: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJobs:
    """What a cluster is doing: models whose servers are up for jobs, models that jobs wait for, and one's own jobs."""

    running: list[ModelShown]
    queued: list[ModelShown]
    jobs: list[OwnJob]
