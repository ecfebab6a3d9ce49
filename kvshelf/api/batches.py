"""The types of files and batches, in OpenAI's shapes with fields of kvshelf added; times are whole Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from kvshelf.api.creation import CacheOptions
from kvshelf.api.strict import MAX_TTL_S, ListBody, QueryString, RequestBody, ResponseBody, misuse

BatchStatus = Literal[
    "validating", "failed", "in_progress", "paused", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Endpoint = Literal["/v1/caches", "/v1/chat/completions"]
"""What a batch does with each of its rows: compress a document, or answer a question."""

UNDONE: Final[Mapping[str, str]] = {"expired": "batch_expired", "cancelled": "batch_cancelled"}
"""By the status in which a batch ends: the code of the rows that it left undone, in its error file."""

MAX_METADATA = 16

_Id = Annotated[str, Field(min_length=1, max_length=128)]
_MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]


class ExpiresAfter(RequestBody):
    """Lifetime of a file, counted from its creation."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=1, le=int(MAX_TTL_S))]


class CreateFile(RequestBody):
    """POST /v1/files: the form fields besides the file."""

    purpose: Literal["batch"] = Field(description="batch: the file is the input of a batch")
    expires_after: ExpiresAfter | None = Field(None, description="default: 30 days")


class CreateBatch(CacheOptions):
    """POST /v1/batches: compress every row of an uploaded file, or answer the question in each. The creation options
    are defaults for rows without their own; questions take none."""

    input_file_id: _Id = Field(description="a file with the purpose batch and one JSON row per line")
    endpoint: Endpoint = Field(description="the operation to run on each row")
    completion_window: Annotated[str, Field(pattern=r"^[1-9]\d{0,2}[hd]$")] = Field(
        "24h", description="hours or days after which the batch ends with the rows done so far: 24h, 7d"
    )
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = Field(
        None, description="lifetime of the result files; default: 30 days"
    )
    window: Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d$")] | None = Field(
        None, description="hours of the day in which the batch may run, on the service's clock: 22:00-06:00"
    )
    max_gpu_hours: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="replica hours after which the batch is cancelled; finished rows stay"
    )
    max_attempts: Annotated[int, Field(ge=1, le=100)] = Field(
        3, description="attempts before a row becomes an error row"
    )
    document_timeout_s: Annotated[float, Field(gt=0, le=86400)] = Field(3600.0, description="limit of one attempt")
    priority: Annotated[int, Field(ge=-10, le=10)] = Field(
        0, description="of your batches, those of the highest run first, and equal ones take turns"
    )

    @model_validator(mode="after")
    def _options_of_documents(self) -> Self:
        option = next((name for name, value in self.options().items() if value is not None), None)
        if self.endpoint != "/v1/caches" and option is not None:
            raise misuse(option, f"{option} is for documents; a question has all of its fields in its own body")
        return self

    def options(self) -> dict[str, Any]:
        """The creation options of the request, as defaults for the rows."""
        return self.model_dump(mode="json", include=set(CacheOptions.model_fields), exclude_unset=True)


class ListFiles(QueryString):
    """GET /v1/files: the filters."""

    purpose: str | None = Field(None, description="files with this purpose")
    limit: Annotated[int, Field(ge=1, le=1000, description="files in this page")] = 20
    after: str | None = Field(None, description="the last id of the page before")
    order: Literal["desc"] = Field("desc", description="newest first")


class ListBatches(QueryString):
    """GET /v1/batches: which page."""

    limit: Annotated[int, Field(ge=1, le=100, description="batches in this page")] = 20
    after: str | None = Field(None, description="the last id of the page before")


class FileObject(ResponseBody):
    """An uploaded file, or a result file of a batch. Use `id` as `input_file_id`; `digest` is BLAKE3 in hex."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    digest: str | None = None


class FileList(ListBody):
    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None


class FileDeleted(ResponseBody):
    """The answer to DELETE."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class RequestCounts(ResponseBody):
    """Numbers of rows. `completed` rows have a cache or an answer. `reused` ones of them had their cache already, at no
    cost."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    reused: int = 0


class BatchError(ResponseBody):
    """An error of the input as a whole. Errors of single rows are in the error file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(ListBody):
    data: list[BatchError]


class WorkerShare(ResponseBody):
    """The work of one replica for a batch. `seconds` is the time it was busy."""

    done: int = 0
    tokens: int = 0
    seconds: float = 0.0


class BatchProgress(ResponseBody):
    """Progress of a batch. `reason` says why it waits or who paused it.

    tokens: of finished documents; of questions and their answers. tokens_per_s: of those done now. gpu_hours: time of
    busy replicas, times the GPUs of each; answers that are generated at once share it.
    """

    reason: str = ""
    tokens: int = 0
    bytes_full: int = 0
    bytes_full_16bit: int = 0
    bytes_stored: int = 0
    tokens_per_s: float = 0.0
    elapsed_s: float = 0.0
    eta_s: float | None = None
    gpu_hours: float = 0.0
    workers: dict[str, WorkerShare] = Field(default_factory=dict)


class BatchObject(ResponseBody):
    """One batch. It ends as `failed` if no row succeeded; every end leaves result files.

    A batch is `paused` by a caller, outside its window, or without room or worker; `progress.reason` says which.
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    paused_at: int | None = None
    expires_at: int | None = Field(
        None, description="the deadline: the batch then ends as `expired`, with the rows done by then"
    )
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    model: str | None = None
    window: str | None = None
    max_gpu_hours: float | None = None
    priority: int = 0
    progress: BatchProgress = BatchProgress()

    @property
    def ended(self) -> bool:
        """Whether the batch has ended. Only a retry reopens it."""
        return self.status in ("completed", "failed", "expired", "cancelled")


class BatchList(ListBody):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
