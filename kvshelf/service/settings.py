"""The settings of the service: `KVSHELF_...` variables, overridden by command line options, immutable once loaded."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, DotEnvSettingsSource, NoDecode, SettingsConfigDict

from kvshelf.api.creation import Measured
from kvshelf.api.strict import Ttl, described, parse_json
from kvshelf.errors import InvalidRequest, nearest
from kvshelf.service.loops import Hours
from kvshelf.store.checks import parsed_size
from kvshelf.store.ladder.rule import Ladder
from kvshelf.store.private import without_secret
from kvshelf.workers.cluster.served import served_name

PREFIX = "KVSHELF_"

OTHER_VARIABLES = frozenset(
    {
        "KVSHELF_URL",
        "KVSHELF_API_KEY",
        "KVSHELF_ENV_FILE",
        "KVSHELF_CPU_LEVEL",
        "KVSHELF_GATES",
        "KVSHELF_KERNELS",
        "KVSHELF_TRUST_FILE",
    }
)
"""Variables of the clients, the command line, engines and kernels, allowed for a service, too."""

_NEVER_EMPTY: Final = {"store", "encryption_key_file", "erasure_key_file", "api_key_file"}
"""Settings of which an empty variable is refused: the default is a shelf in the user's data folder, or no keys."""

_CHOICES = {
    "device": (r"auto|cpu|cuda(:\d+)?|spread", "auto, cpu, cuda, spread"),
    "dtype": (r"auto|float32|bfloat16|float16", "auto, float32, bfloat16, float16"),
    "weights": (r"plain|int8", "plain, int8"),
    "engine": (r"kvshelf|llama\.cpp", "kvshelf, llama.cpp"),
}

Seconds = Annotated[float, Field(gt=0, le=30 * 86400)]


class Settings(BaseSettings):
    """All settings of `kvshelf serve`. The suffix `_s` means seconds, `_bytes` bytes.

    The environment variable of a setting is `KVSHELF_` and its name in capitals; lists are separated by commas. An
    empty variable is one that is not set.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    store: str = Field(
        default_factory=lambda: f"disk://{quote(str(_data_folder() / 'kvshelf'))}",
        description="URL of the store; default: the user's data folder",
    )
    encryption_key_file: str | None = Field(
        None,
        min_length=1,
        description="its first key encrypts caches; only its owner may read the file; default: no encryption",
    )
    erasure_key_file: str | None = Field(
        None,
        min_length=1,
        description="private key of Ed25519 in PEM that signs the receipts of erasures; default: they are not signed",
    )
    prices_file: str | None = Field(
        None, min_length=1, description="prices of use, as JSON, for `GET /v1/usage?cost=true`; default: none"
    )
    default_ttl_s: Ttl | None = Field(None, description="lifetime of caches without their own; default: forever")
    max_ttl_s: Ttl | None = Field(None, description="longest lifetime of a cache")
    tenant_max_caches: int | None = Field(None, ge=1, lt=2**53, description="caches one tenant may have on the shelf")
    tenant_max_concurrent: int = Field(1024, ge=1, description="requests one tenant may have open at once")
    tenant_requests_per_minute: int | None = Field(None, ge=1, description="rate of one tenant, and its largest burst")
    tenant_tokens_per_minute: int | None = Field(
        None, ge=1, lt=2**53, description="prefilled and generated tokens of one tenant; counted after the work"
    )
    tenant_max_bytes: int | None = Field(None, ge=1, lt=2**53, description="bytes one tenant may have on the shelf")
    tenant_promised_bytes: int | None = Field(
        None, ge=0, lt=2**53, description="bytes that one tenant may pin or have guaranteed to stay"
    )
    promised_bytes: int | None = Field(None, ge=0, lt=2**53, description="the same of all tenants together")
    models: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], NoDecode] = Field(
        ("kvshelf-tiny",), min_length=1, description="bundled names, folders or hub ids; the first is the default"
    )
    adapters: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="LoRA adapters of the first model, NAME=FOLDER; each has replicas and weights of its own"
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="a file with a chat template, or the name of one of the model's; default: its own",
    )
    engine: str = Field("kvshelf", description="of questions: kvshelf, or llama.cpp, which runs GGUF files")
    device: str = Field("auto", description="auto, cpu, cuda or spread")
    dtype: str = Field("auto", description="auto, float32, bfloat16 or float16")
    weights: str = Field("plain", description="plain or int8: rounded to a byte each, on a CPU")
    replicas: int = Field(1, ge=1, le=1024, description="replicas of each model")
    gpus_per_replica: int = Field(
        1, ge=1, le=64, description="GPUs of each replica, each with some of its heads, or layers with device spread"
    )
    gpu_memory: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="a share of its device that each replica may use, such as 0.5, so that two share a GPU, or bytes, "
        "such as 40GiB; default: all of a GPU, and on a CPU no limit",
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads per replica; default: all CPUs, shared equally"
    )
    address: str | None = Field(None, description="address of a running Ray cluster; default: start a local one")
    api_key_file: str | None = Field(
        None, min_length=1, description="API keys, see `kvshelf keys`; default: everybody may use the service"
    )
    host: str = Field("127.0.0.1", description="address to listen on; without API keys only loopback addresses")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="host names, besides loopback, under which a service without API keys may be called"
    )
    port: int = Field(8765, ge=0, le=65535, description="port to listen on; 0 takes a free one")

    max_document_tokens: int | None = Field(
        None, ge=1, description="longest document to compress; default: the limit of the model"
    )
    max_body_bytes: int = Field(64 << 20, ge=1024)
    max_held_bytes: int = Field(
        default_factory=lambda set_before: max(256 << 20, 4 * set_before.get("max_body_bytes", 0)),
        description="bodies held in memory, half of it for one tenant; default: four max_body_bytes, at least 256 MiB",
    )
    max_import_bytes: int = Field(4 << 30, ge=1024, description="largest blob to import")
    max_file_bytes: int = Field(1 << 30, ge=1024, description="largest uploaded batch input")
    max_batch_rows: int = Field(100_000, ge=1, description="most rows in the input of one batch")
    max_running_batches: int = Field(
        4,
        ge=1,
        le=64,
        description="batches that run at once; a tenant's first may run beyond it, up to four times as many",
    )
    tenant_max_batches: int = Field(100, ge=1, description="unfinished batches of one tenant")
    extract_cpu_s: Seconds = Field(60.0, description="processor time to extract the text of one PDF or HTML file")
    extract_memory_bytes: int = Field(1 << 30, ge=256 << 20, description="memory to extract it")
    upload_deadline_s: Seconds = Field(120.0, description="time for the whole body to arrive")
    min_upload_bytes_per_s: int = Field(1024, ge=1, description="slower bodies are refused, after a grace time")
    upload_grace_s: Seconds = Field(10.0, description="grace time before the minimum rate applies")
    max_connections: int = Field(2048, ge=1, description="open connections")
    max_connections_per_address: int = Field(1024, ge=1, description="open connections from one address")
    headers_deadline_s: Seconds = Field(15.0, description="time for the headers of a request to arrive")
    unread_deadline_s: Seconds = Field(60.0, description="how long a client may leave an answer unread")
    request_deadline_s: Seconds = Field(600.0, description="limit of one creation, import or query, including queueing")

    max_ongoing_requests: int = Field(128, ge=1, description="requests per replica, running or queued in it")
    max_queued_requests: int = Field(256, ge=1, description="waiting requests per model and kind of work")
    max_open_generations: int = Field(64, ge=1, description="questions that share each decode step, per replica")
    max_suffix_bytes: int = Field(1 << 30, ge=1 << 20, description="KV of all open questions and answers, per replica")
    resident_bytes: int = Field(2 << 30, ge=0, description="caches that a replica holds in memory between questions")
    resident_idle_s: Seconds = Field(600.0, description="how long an unused cache stays in a replica's memory")
    warm: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="labels, team=law,tier=hot: every replica has the caches with all of them in memory"
    )
    warm_interval_s: Seconds = Field(300.0, description="time between two looks for these caches; the first at once")
    warm_hours: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="07:30-18:00,22:00-02:00: only at these times of day, in UTC; default: all day"
    )
    batch_share: float = Field(
        0.1, gt=0, lt=1, description="least share of a busy model for compression, and for questions of batches"
    )

    operational_intensity: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="FLOP a byte of the models' devices, for prefill token equivalents; `kvshelf doctor` measures it; "
        "default: what a table says of the device",
    )
    quality_probe: Measured = Field(
        "fast",
        description="how the quality of every compression is measured: full, fast, or false for only where min_quality "
        "asks; a creation that says quality has its own",
    )
    tenant_quality: Annotated[dict[str, Measured], NoDecode] = Field(
        default_factory=dict, description='the same for single tenants, as JSON: {"law": "full", "logs": false}'
    )

    guard_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the answers that an idle replica asks again of the full cache, of documents whose source "
        "is kept; default: none",
    )
    guard_time_share: float = Field(0.05, gt=0, le=1, description="share of its time that a replica may take for this")
    guard_floor: float = Field(0.9, gt=0, lt=1, description="least share that a cache answers as the full one")
    guard_below: Literal["flag", "remake"] = Field(
        "flag", description="a cache below the floor gets its new quality; remake: and a finer one is made beside it"
    )
    guard_label: str = Field(
        "",
        max_length=64,
        description="a label of kinds, not of persons: the guard's metrics tell its values apart, the first 20, and "
        "usage those of each tenant, for 400 days",
    )

    ladder: str = Field(
        "",
        max_length=512,
        description="caches that nobody asks are coded smaller by it: none:1d,int8:7d,klt, the age behind the codec "
        "that they leave; default: they stay as they were made",
    )
    sweep_interval_s: Seconds = Field(60.0, description="time between two removals of expired caches")
    startup_deadline_s: Seconds = Field(300.0, description="limit for loading the models")
    shutdown_grace_s: Seconds = Field(10.0, description="time for open requests when the service stops")
    otel_endpoint: str | None = Field(
        None, min_length=1, description="OTLP address for traces, such as http://host:4318/v1/traces; default: none"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("quality_probe", mode="before")
    @classmethod
    def _probe(cls, value: Any) -> Any:
        """A flag as other settings have it, or one of the two ways to measure."""
        text = value.lower() if isinstance(value, str) else value
        return {"true": "fast", "1": "fast", True: "fast", "false": False, "0": False}.get(text, text)

    @field_validator("tenant_quality", mode="before")
    @classmethod
    def _of_json(cls, value: Any) -> Any:
        try:
            return parse_json(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f'{value!r:.200} is no JSON; write {{"TENANT": "full"}}') from error

    @field_validator("gpu_memory", mode="before")
    @classmethod
    def _in_bytes(cls, value: Any) -> Any:
        """A share up to 1 as it is, and a size in bytes."""
        if not (isinstance(value, str) and value[-1:].isalpha()):
            return value
        if not (size := parsed_size(value)):
            raise ValueError(f"{value!r:.80} is no size; write a share such as 0.5, or bytes such as 40GiB")
        return size

    @field_validator("gpu_memory")
    @classmethod
    def _planned(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and (info.data.get("gpus_per_replica", 1) > 1 or info.data.get("device") == "spread"):
            raise ValueError("it is of replicas on one device; take gpus_per_replica 1, and not device spread")
        return value

    @field_validator("encryption_key_file", "api_key_file", "erasure_key_file", "prices_file")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        # Replicas run in other folders, perhaps on other machines.
        return None if path is None else str(Path(path).expanduser().absolute())

    @field_validator("chat_template")
    @classmethod
    def _of_one_model(cls, template: str | None, info: ValidationInfo) -> str | None:
        if template is not None and len(info.data.get("models", ())) > 1:
            raise ValueError("it is of one model, and several are served; start a service for each")
        file = None if template is None else Path(template).expanduser()
        return str(file.absolute()) if file is not None and file.is_file() else template

    @field_validator("models", "adapters", "allowed_hosts", "warm", "warm_hours", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("warm")
    @classmethod
    def _labels(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for label in value:
            if not all(label.partition("=")):
                raise ValueError(f"{label!r:.80} is no label; write KEY=VALUE, and commas between several")
        return value

    @field_validator("warm_hours")
    @classmethod
    def _hours(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if Hours.parse(value).spans and not info.data.get("warm", value):
            raise ValueError("these are the hours of KVSHELF_WARM, which names no label; set both")
        return value

    @field_validator("device", "dtype", "weights", "engine")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        # Checked here, without torch: a replica would refuse it too, but only once Ray is up.
        pattern, names = _CHOICES[info.field_name or ""]
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} is none of {names}")
        return value

    @field_validator("gpus_per_replica")
    @classmethod
    def _one_process_of_bytes(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("weights") == "int8" and value > 1:
            raise ValueError("weights in int8 are of one process; take 1, or plain weights")
        return value

    @field_validator("guard_share", "ladder")
    @classmethod
    def _of_one_process(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("gpus_per_replica", 1) > 1 and info.data.get("device") != "spread":
            what = "the guard" if info.field_name == "guard_share" else "a ladder"
            raise ValueError(f"{what} is of replicas of one process; take gpus_per_replica 1, or device spread")
        return value

    @field_validator("ladder")
    @classmethod
    def _possible(cls, value: str) -> str:
        try:
            if value:
                Ladder.parse(value)
        except InvalidRequest as error:
            raise ValueError(error.message) from error
        return value

    @field_validator("weights", "gpus_per_replica", "gpu_memory", "guard_share")
    @classmethod
    def _of_kvshelf(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        if info.data.get("engine") == "llama.cpp" and value != cls.model_fields[name].default:
            raise ValueError("it is of kvshelf's own engine, and engine is llama.cpp; leave it out")
        return value

    @field_validator("models")
    @classmethod
    def _no_duplicates(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("a model is listed twice")
        return value

    @field_validator("adapters")
    @classmethod
    def _named_once(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        models = info.data.get("models", ())
        names, folders = [*map(served_name, models)], list[str]()
        for adapter in value:
            name, _, folder = (part.strip() for part in adapter.partition("="))
            if not name or not folder:
                raise ValueError(f"{adapter!r:.200} is no adapter; write NAME=FOLDER, the folder as peft saved it")
            if "+" in folder or "+" in "".join(models[:1]):
                raise ValueError(
                    f"{models[0]!r:.100} with {folder!r:.100}: neither may have a +, which is between them"
                )
            if name in names:
                raise ValueError(f"the name {name!r:.100} is that of a model or of another adapter")
            names.append(name)
            folders.append(folder)
        return tuple(map("=".join, zip(names[len(models) :], folders, strict=True)))

    @field_validator("host")
    @classmethod
    def _loopback_without_keys(cls, host: str, info: ValidationInfo) -> str:
        if info.data.get("api_key_file") is None and not is_loopback(host):
            raise ValueError(
                f"{host!r} can be reached from other machines, and without API keys anyone could use the service: set "
                "api_key_file (`kvshelf keys create` makes one), or bind 127.0.0.1, ::1 or localhost"
            )
        return host

    @field_validator("max_ttl_s")
    @classmethod
    def _at_least_the_default(cls, value: float | None, info: ValidationInfo) -> float | None:
        default = info.data.get("default_ttl_s")
        if value is not None and default is not None and default > value:
            raise ValueError(f"{value:g} is less than default_ttl_s, {default:g}")
        return value

    @field_validator("max_held_bytes")
    @classmethod
    def _at_least_two_bodies(cls, value: int, info: ValidationInfo) -> int:
        if value < 2 * info.data.get("max_body_bytes", 0):
            raise ValueError(f"{value} is less than two bodies of max_body_bytes, {info.data['max_body_bytes']}")
        return value

    @property
    def replica_processes(self) -> int:
        """The number of processes that hold models."""
        return self.replicas * len(self.served) * self.gpus_per_replica

    @property
    def served(self) -> list[tuple[str, str]]:
        """Each model and, for one with an adapter, the adapter's name, else ""."""
        adapters = (adapter.split("=", 1) for adapter in self.adapters)
        return [(model, "") for model in self.models] + [(f"{self.models[0]}+{at}", name) for name, at in adapters]

    def redacted(self) -> dict[str, Any]:
        """All effective settings, with users and passwords in URLs replaced by stars."""
        return {name: _redact(value) for name, value in self.model_dump(mode="json").items()}


def load_settings(env_file: Path | None = None, **overrides: Any) -> Settings:
    """Settings from a file of variables, overridden by the environment, then by the `overrides` that are not None.

    Raises `InvalidRequest` that names the setting and its value. An unknown `KVSHELF_` variable is refused as a typing
    error, and an empty one of the store or a key file: the service would start on another shelf, or without keys.
    """
    settings = {PREFIX + name.upper() for name in Settings.model_fields}
    names = {name for name in os.environ if name.upper().startswith(PREFIX)} - OTHER_VARIABLES
    values: dict[str, str | None] = {name.upper(): os.environ[name] for name in names}
    if env_file is not None:
        if not env_file.is_file():  # pydantic would ignore this
            raise InvalidRequest(f"there is no file {env_file}", param="env_file")
        try:
            source = DotEnvSettingsSource(Settings, env_file=env_file, env_ignore_empty=False)
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"the file {env_file} cannot be read ({error}); it has lines NAME=value in UTF-8", param="env_file"
            ) from error
        in_file = {name.upper(): value for name, value in source.env_vars.items()}
        names, values = names | in_file.keys(), in_file | values
    unknown = sorted(name for name in names if name.upper() not in settings)
    if unknown:
        raise InvalidRequest(
            f"unknown setting {unknown[0]}{nearest(unknown[0], settings)}; the settings are "
            f"{', '.join(sorted(settings))}",
            param=unknown[0],
        )
    overrides = {name: value for name, value in overrides.items() if value is not None}
    for name in _NEVER_EMPTY - overrides.keys():
        if values.get(variable := PREFIX + name.upper(), "not set") in ("", None):  # None: a name without = in the file
            raise InvalidRequest(
                f"setting {name}: {variable} is empty; give it a value, or unset it for the default", param=name
            )
    try:
        return Settings(_env_file=env_file, **overrides)
    except ValidationError as exc:
        raise _refusal(exc) from exc


def _refusal(error: ValidationError) -> InvalidRequest:
    """What is wrong with which setting, its value, and the variable of it. Passwords of URLs are not shown."""
    first = error.errors(include_url=False)[0]
    value = str(first["input"])
    shown = without_secret(value)
    if shown != value:
        first["input"] = shown
    param, message = described(first)
    name = without_secret(param or "")
    if first["type"] == "value_error":  # of a validator above: it says the value, where that is at fault
        message = without_secret(first["msg"].removeprefix("Value error, "))
        if shown != value and "://" in message.replace("://***@", ""):  # cut before the @ that ends a password
            message = f"{shown!r:.80} is not taken here"
    variable = PREFIX + str(first["loc"][0]).upper()
    return InvalidRequest(f"setting {name}: {message} ({variable})", param=name)


def _data_folder() -> Path:
    """The user's data folder (XDG base directories), so the default shelf does not depend on the working folder."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _redact(value: Any) -> Any:
    if isinstance(value, list):
        return [_redact(item) for item in value]
    return without_secret(value) if isinstance(value, str) else value
