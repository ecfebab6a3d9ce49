"""The types of files and batches, in OpenAI's shapes and with its names, so that its clients work; shared by the
service and ours.

Times are whole Unix seconds here, as there. What OpenAI has not: `paused`, `reused` rows, `progress`, and the fields of
a batch that say how its rows are compressed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvshelf.api.creation import CacheOptions
from kvshelf.api.strict import MAX_TTL_S, QueryString, RequestBody, ResponseBody

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "paused",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
FilePurpose = Literal["batch", "batch_output"]

MAX_METADATA = 16

_Id = Annotated[str, Field(min_length=1, max_length=128)]
_MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
_MetadataValue = Annotated[str, Field(max_length=512)]


class ExpiresAfter(RequestBody):
    """How long a file is kept, counted from when it was created."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=1, le=int(MAX_TTL_S))]


class CreateFile(RequestBody):
    """POST /v1/files: the fields of the form beside the file."""

    purpose: Literal["batch"] = Field(description="what the file is for: the input of a batch")
    expires_after: ExpiresAfter | None = Field(None, description="30 days if absent")


class CreateBatch(CacheOptions):
    """POST /v1/batches: compress every row of an uploaded file. The options of a creation hold for all rows that do
    not bring their own."""

    input_file_id: _Id = Field(description="of a file with the purpose batch: a row on each line, as JSON")
    endpoint: Literal["/v1/caches"] = Field(description="what is done with each row")
    completion_window: Annotated[str, Field(pattern=r"^[1-9]\d{0,2}[hd]$")] = Field(
        "24h", description="hours or days, after which it ends with what is done: 24h, 7d"
    )
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = Field(None, description="of the files of results; 30 days if absent")
    window: Annotated[str, Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d$")] | None = Field(
        None, description="the time of day in which it may work, on the service's clock: 22:00-06:00"
    )
    max_gpu_hours: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        None, description="of the replicas' work, after which it is cancelled with what is done"
    )
    max_attempts: Annotated[int, Field(ge=1, le=100)] = Field(3, description="at each row, before it is an error row")
    document_timeout_s: Annotated[float, Field(gt=0, le=86400)] = Field(3600.0, description="for one attempt")

    def options(self) -> dict[str, Any]:
        """What rows take over: the options of a creation that were given."""
        return self.model_dump(mode="json", include=set(CacheOptions.model_fields), exclude_unset=True)


class ListFiles(QueryString):
    """GET /v1/files: the filters."""

    purpose: str | None = Field(None, description="files with this purpose")
    limit: Annotated[int, Field(ge=1, le=1000, description="files in this page")] = 20
    after: str | None = Field(None, description="the last id of the page before")
    order: Literal["desc"] = Field("desc", description="newest first")


class ListBatches(QueryString):
    """GET /v1/batches: where to begin."""

    limit: Annotated[int, Field(ge=1, le=100, description="batches in this page")] = 20
    after: str | None = Field(None, description="the last id of the page before")


class FileObject(ResponseBody):
    """One uploaded file, or one that a batch left. Its id serves as `input_file_id`; `digest` is BLAKE3 in hex."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    digest: str | None = None


class FileList(ResponseBody):
    object: Literal["list"] = "list"
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
    """Rows. `completed` ones have a cache; of these, `reused` ones had it before, and cost nothing."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    reused: int = 0


class BatchError(ResponseBody):
    """What is wrong with the input as a whole. What is wrong with a row stands in the error file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(ResponseBody):
    object: Literal["list"] = "list"
    data: list[BatchError]


class WorkerShare(ResponseBody):
    """What one replica has done for a batch. `seconds` is its work."""

    done: int = 0
    tokens: int = 0
    seconds: float = 0.0


class BatchProgress(ResponseBody):
    """How a batch goes on. `reason` says why it waits, by its own or by a caller's will.

    tokens: of the documents that are done; `tokens_per_s` of those that were compressed. gpu_hours: of replicas' work.
    """

    reason: str = ""
    tokens: int = 0
    bytes_full: int = 0
    bytes_stored: int = 0
    tokens_per_s: float = 0.0
    elapsed_s: float = 0.0
    eta_s: float | None = None
    gpu_hours: float = 0.0
    workers: dict[str, WorkerShare] = Field(default_factory=dict)


class BatchObject(ResponseBody):
    """One batch. `status` is `failed` where no row has a cache in the end; the files of results are there in every end.

    paused: by a caller, outside its window, or while there is no room or no worker; `progress.reason` says which.
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
    expires_at: int | None = None
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
    progress: BatchProgress = BatchProgress()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it, unless its failed rows are tried again."""
        return self.status in ("completed", "failed", "expired", "cancelled")


class BatchList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
