"""Plans a corpus on paper: GPUs, hours, bytes, memory, network, requests; and simulates a fleet with failures."""

from __future__ import annotations

import heapq
import json
import math
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvshelf.api.creation import DEFAULT_CODEC, DEFAULT_POLICY
from kvshelf.artifact.codecs import Codec
from kvshelf.errors import InvalidRequest
from kvshelf.methods.catalog import policy_info
from kvshelf.methods.policies.budgets import Budget
from kvshelf.workers.replica.create.sizes import ASSUMED_FLOPS, Dimensions


@dataclass(frozen=True)
class Decoder:
    """A published configuration with transformers' names: a Llama in bfloat16, without biases and head norms."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int

    def shape(self) -> Dimensions:
        """As `Dimensions.of` the model, which need not be made."""
        head_dim = self.hidden_size // self.num_attention_heads
        attention = 2 * self.hidden_size * (self.hidden_size + self.num_key_value_heads * head_dim)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        weights = self.num_hidden_layers * layer + self.hidden_size + self.vocab_size * self.hidden_size
        dims = (self.num_hidden_layers, self.num_key_value_heads, head_dim)
        return Dimensions(
            *dims, itemsize=2, device="meta", flops=2.0 * weights, summarised=True, width=self.hidden_size
        )


BUILT_IN: Final = {
    "llama-3.1-8b": Decoder(4096, 14336, 32, 32, 8, 128256),
    "mistral-7b": Decoder(4096, 14336, 32, 32, 8, 32768),
    "qwen2.5-7b": Decoder(3584, 18944, 28, 28, 4, 152064),
    "qwen3-8b": Decoder(4096, 12288, 36, 32, 8, 151936),
}

ATTEMPTS: Final = 3
"""Attempts at a document that kills its worker each time."""
_IN_FLIGHT: Final = 2
"""Documents a replica has begun: one in prefill, one being written."""
FOLDERS: Final = "file system, were it a folder on each node"

S3_PUTS_PER_S: Final = 3500
S3_GETS_PER_S: Final = 5500
"""Requests that S3 takes at least for each partitioned prefix, as AWS publishes it: PUT, COPY, POST and DELETE; GET and
HEAD. It makes more partitions of a prefix as the rate grows, over half an hour or more."""


@dataclass(frozen=True)
class SharedRates:
    """The cost of a document to the resources that all replicas share, as `kvshelf bench rates` measures it.

    Units: processor seconds and bytes. Each resource is one thread, so its seconds limit the documents per second.
    redis_document_s, redis_mb_s: of the Redis server, per document and per megabyte of blob. disk_document_s: of a
    writer to a folder, per document. *_document_bytes: kept besides the blob. controller_replica_s, gcs_replica_s: of
    Serve's controller and Ray's GCS, per replica and second. driver_result_s: of the process that runs a batch, to
    record one result; the pipeline's own work excluded. docs/internals/scale.md describes the measurement behind the
    defaults.
    """

    redis_document_s: float = 1.55e-3
    redis_mb_s: float = 0.852e-3
    redis_document_bytes: float = 5376
    disk_document_s: float = 13.7e-3
    disk_document_bytes: float = 4444
    controller_replica_s: float = 2.06e-3
    gcs_replica_s: float = 0.50e-3
    driver_result_s: float = 0.0354e-3
    basis: str = "measured by `kvshelf bench rates` on 2 busy cores of an Intel Xeon with Valkey 9.1."

    @classmethod
    def read(cls, path: Path) -> SharedRates:
        """Read the output of `kvshelf bench rates`. Raises `InvalidRequest` for any other file."""
        with _output_of("kvshelf bench rates", path, "--shared-rates") as report:
            numbers = {name: float(report["rates"][name]) for name in asdict(MEASURED) if name != "basis"}
            return cls(**numbers, basis=f"measured on {report['machine']['processor']}, {path.name}.")


MEASURED: Final = SharedRates()


@contextmanager
def _output_of(command: str, path: Path, option: str) -> Iterator[Any]:
    """The JSON of a file. Raises `InvalidRequest` if it is unreadable or lacks a field that the `with` block reads."""
    try:
        yield json.loads(path.read_text())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", param=option) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is no output of `{command} --output FILE`: {error!r}", param=option) from error


Lengths = tuple[tuple[int, int], ...]
"""Documents by length: (tokens, count), whole numbers from 1."""


def read_lengths(path: Path, documents: int | None) -> Lengths:
    """A file with a length in tokens per line, optionally followed by a count. documents: scale the counts to this
    total; every length keeps at least one. Raises `InvalidRequest`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="--lengths") from error
    lengths = []
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"(\d+)(?:[\s,]+(\d+))?", line.strip())
        tokens, count = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if tokens and count:
            lengths.append((tokens, count))
        elif line.strip():
            wrong = f"{path}, line {number}: {line!r:.80} is neither a length in tokens nor a length and a count"
            raise InvalidRequest(wrong, param="--lengths")
    if not lengths:
        raise InvalidRequest(f"{path} has no lengths", param="--lengths")
    factor = 1 if documents is None else documents / sum(count for _, count in lengths)
    return tuple((tokens, max(1, round(count * factor))) for tokens, count in lengths)


def object_requests(nbytes: int) -> tuple[int, int]:
    """PUT and POST requests, then GET and HEAD requests, for a blob in object storage: written, and read back. The
    sizes are those of `kvshelf.store.objects`, which needs an extra. To read a blob takes as many GETs as to read it
    back."""
    parts = math.ceil(nbytes / (16 << 20))
    puts, gets = (1, 0) if parts == 1 else (parts + 2, 1)  # beginning and end of the upload; is the name taken?
    gets += 1  # the head
    rest, size = nbytes - (256 << 10) - 64, 1 << 20
    gets += rest > 0  # the tail
    while rest > 0:
        rest, size, gets = rest - size, min(2 * size, 8 << 20), gets + 1
    return puts, gets


@dataclass(frozen=True)
class PlannedWork:
    """The work on each document, fields as in `CreateCache`. home: the home of its cache, one of `HOMES`."""

    policy: str = DEFAULT_POLICY
    compression_ratio: float | None = None
    budget_tokens: int | None = None
    codec: str = DEFAULT_CODEC
    home: str = "redis"

    def stored_bytes(self, shape: Dimensions, num_tokens: int) -> int:
        """Bytes of the cache of a document."""
        beside = policy_info(self.policy).stored_beside
        return shape.policy_bytes(num_tokens, self.kept(num_tokens), self.codec, beside)

    def kept(self, num_tokens: int) -> int:
        """Entries that each head keeps of a document. Raises as a creation does."""
        if not policy_info(self.policy).takes_budget:
            return num_tokens
        ratio, tokens = self.compression_ratio, self.budget_tokens
        return Budget.resolve(num_tokens, compression_ratio=ratio, budget_tokens=tokens).tokens


HOMES: Final = ("redis", "disk", "objects")
"""In Redis, in a folder, or in object storage with an index in Redis."""

_ASSUMED: Final = (
    f"ASSUMED: a GPU does {ASSUMED_FLOPS['cuda']:.0e} operations a second, low on purpose, two for each weight and "
    "token, and {policy} adds {share:.0%} to a prefill, as it does on kvshelf-tiny. Measure with `kvshelf bench speed "
    "--parts compression --output FILE` and give --rates FILE, or give --tokens-per-s."
)


@dataclass(frozen=True)
class Speed:
    """Document tokens per second of one GPU, compression included, and where the number comes from. prefill_per_s:
    those of a prefill alone."""

    tokens_per_s: float
    basis: str
    prefill_per_s: float

    @classmethod
    def of(cls, shape: Dimensions, policy: str, tokens_per_s: float | None, measured: Path | None) -> Speed:
        """`tokens_per_s`, else the speed in a file that `kvshelf bench speed` wrote, else an assumed one. Raises
        `InvalidRequest` if both are given, if the file has another format or lacks the policy, or if neither is given
        and nobody measured the policy's cost."""
        if measured is not None and tokens_per_s is not None:
            raise InvalidRequest("--rates and --tokens-per-s answer each other; give one", param="--rates")
        share = policy_info(policy).compress_share
        if tokens_per_s is not None:
            basis = f"{tokens_per_s:,g} tokens a second for each GPU, as given."
            return cls(tokens_per_s, basis, tokens_per_s * (1 + (share or 0.0)))
        if measured is None:
            if share is None:
                raise InvalidRequest(
                    f"what policy {policy!r} adds to a prefill is unknown; give --tokens-per-s or --rates",
                    param="--policy",
                )
            basis = _ASSUMED.format(policy=policy, share=share)
            prefill = ASSUMED_FLOPS["cuda"] / shape.flops
            return cls(prefill / (1 + share), basis, prefill)
        with _output_of("kvshelf bench speed --parts compression", measured, "--rates") as report:
            rows = [row for length in report["compression"] for row in length["rows"]]
            own_rows = [row for row in rows if row["policy"] == policy]
            seconds = sum(row["plain_s"]["median"] * row["whole"]["median"] for row in own_rows)
            plain_s = sum(row["plain_s"]["median"] for row in own_rows)
            gpu = report["machine"]["gpu"] or report["machine"]["processor"]
            basis = f"Measured: {policy} on {report['model']} in {report['dtype']} on {gpu}, {measured.name}."
        if not own_rows:
            others = ", ".join(sorted({row["policy"] for row in rows})) or "none"
            raise InvalidRequest(f"{measured} has no measurement of {policy!r}; it has {others}", param="--rates")
        tokens = sum(row["tokens"] for row in own_rows)
        return cls(tokens / seconds, basis, tokens / plain_s)


@dataclass(frozen=True)
class Plan:
    """The cost of a corpus: `gpus` GPUs for `hours` hours. Figures per second hold while all GPUs work. home_bytes: of
    manifests, index and job table. puts, gets: requests to object storage, with POSTs and HEADs. month_price: of the
    stored bytes, in the currency of the price."""

    documents: int
    tokens: int
    tokens_per_s: float
    gpus: int
    hours: float
    gpu_hours: float
    documents_per_hour: float
    bytes_full: int
    bytes_full_16bit: int
    bytes_stored: int
    home_bytes: float
    redis_memory_bytes: float | None
    network_bytes_per_s: float
    puts: int
    gets: int
    month_price: float | None
    assumptions: tuple[str, ...]


def shape_of(model: str) -> Dimensions:
    """The shape of a built-in name, a bundled model, a folder or a hub id. Raises `InvalidRequest`."""
    if (decoder := BUILT_IN.get(model.lower())) is not None:
        return decoder.shape()
    from kvshelf.model.loading import skeleton  # needs torch, as no built-in name does

    return Dimensions.of(skeleton(model))


def make_plan(
    lengths: Lengths,
    shape: Dimensions,
    work: PlannedWork,
    speed: Speed,
    rates: SharedRates,
    gpus: int | None,
    hours: float | None,
    gb_month_price: float | None = None,
) -> Plan:
    """Compute a plan. Raises `InvalidRequest` for a bad policy, ratio, codec or home, or both `gpus` and `hours`."""
    if work.home not in HOMES:
        raise InvalidRequest(f"--home {work.home!r:.40} is no home to plan with; {', '.join(HOMES)}", param="--home")
    if gpus is not None and hours is not None:
        raise InvalidRequest("--gpus and --hours answer each other; give one", param="--hours")
    Codec.parse(work.codec)
    documents, all_tokens = sum(count for _, count in lengths), sum(tokens * count for tokens, count in lengths)
    blobs = [(work.stored_bytes(shape, tokens), count) for tokens, count in lengths]
    stored = sum(nbytes * count for nbytes, count in blobs)
    requests = [object_requests(nbytes) if work.home == "objects" else (0, 0) for nbytes, _ in blobs]
    puts, gets = (
        sum(per_blob[i] * count for per_blob, (_, count) in zip(requests, blobs, strict=True)) for i in range(2)
    )
    gpu_hours = all_tokens / speed.tokens_per_s / 3600
    gpus = gpus or (1 if hours is None else max(1, math.ceil(gpu_hours / hours)))
    in_folder, hours = work.home == "disk", gpu_hours / gpus
    index = documents * (rates.disk_document_bytes if in_folder else rates.redis_document_bytes)
    assumptions = [
        speed.basis,
        "A GPU's tokens per second do not depend on the length: longer documents than those measured take longer.",
        f"{index / documents:,.0f} bytes of index, manifest and job table for each document: {rates.basis}",
        "Sizes are those of docs/internals/format.md; every head keeps as many entries.",
        "No document fails, none is a copy of another, and GPUs never wait: `--simulate` tells what stands in the way.",
    ]
    if puts:
        assumptions.append(
            f"S3 takes {S3_PUTS_PER_S:,} PUT and {S3_GETS_PER_S:,} GET requests a second for each shelf, the least for "
            "a prefix that AWS publishes. A question's first read takes the GETs again."
        )
    if gb_month_price is not None:
        assumptions.append(f"{gb_month_price:g} for a month of 10^9 bytes, as given; requests and traffic cost extra.")
    if len(lengths) == 1:
        assumptions.append("All documents are of one length; `--lengths FILE` takes a histogram.")
    return Plan(
        documents=documents,
        tokens=all_tokens,
        tokens_per_s=speed.tokens_per_s,
        gpus=gpus,
        hours=hours,
        gpu_hours=gpu_hours,
        documents_per_hour=documents / hours,
        bytes_full=sum(count * shape.full_bytes(tokens) for tokens, count in lengths),
        bytes_full_16bit=sum(count * shape.full_16bit_bytes(tokens) for tokens, count in lengths),
        bytes_stored=stored,
        home_bytes=index,
        redis_memory_bytes={"redis": stored + index, "disk": None, "objects": index}[work.home],
        network_bytes_per_s=0.0 if in_folder else stored / hours / 3600,
        puts=puts,
        gets=gets,
        month_price=None if gb_month_price is None else gb_month_price * stored / 1e9,
        assumptions=tuple(assumptions),
    )


@dataclass(frozen=True)
class Fleet:
    """The machines. A shelf is a Redis prefix with its own index; all shelves share the servers' space for blobs.
    node_mtbf_h: hours between two failures of a node; 6,300 is what 16,384 GPUs in nodes of 8 had in 54 days (419
    interruptions, by the report on Llama 3). poison: share of documents that kill their worker. restart_s: seconds
    until a replica is back; repair_s: seconds until a node is back. services: Ray clusters that share the corpus."""

    gpus: int = 1000
    gpus_per_node: int = 8
    node_gbit: float = 100.0
    servers: int = 1
    server_gbit: float = 25.0
    server_memory_bytes: float = 512e9
    shelves: int = 1
    services: int = 1
    node_mtbf_h: float = 6300.0
    repair_s: float = 900.0
    poison: float = 1e-5
    restart_s: float = 60.0


@dataclass(frozen=True)
class SharedResource:
    """A resource GPUs share. used: share of its capacity while all GPUs work; 1 is full. move: what raises the limit.
    by_rate: a rate fills it, not an amount. per_node: each node has one, which only that node's GPUs share."""

    name: str
    used: float
    move: str
    by_rate: bool = True
    per_node: bool = False

    def full_at(self, gpus: int) -> int | None:
        """The number of GPUs that fill this resource; None if an amount fills it, or if each node has its own."""
        return round(gpus / self.used) if self.used and self.by_rate and not self.per_node else None


def shared_resources(plan: Plan, fleet: Fleet, rates: SharedRates) -> list[SharedResource]:
    """The fullest first. The plan must have a home that is not a folder, and as many GPUs as the fleet."""
    rate, mb_per_s = plan.documents_per_hour / 3600, plan.bytes_stored / plan.hours / 3600 / 1e6
    nodes = math.ceil(fleet.gpus / fleet.gpus_per_node)
    assert plan.redis_memory_bytes is not None
    memory = plan.redis_memory_bytes / (fleet.servers * fleet.server_memory_bytes)
    wire = mb_per_s * 8e-3  # Gbit a second
    heads = fleet.gpus / fleet.services
    clusters, shelves = "several Ray clusters, each with a part of the corpus", "several shelves: ?prefix=a, ?prefix=b"
    index_s = rate * rates.redis_document_s / fleet.shelves
    of_home: list[tuple[Any, ...]] = [
        ("memory of the Redis servers", memory, "more of it removed, --codec int4, more servers", False),
        ("network of the Redis servers", wire / (fleet.servers * fleet.server_gbit), "more servers: redis-cluster://"),
        ("threads of the Redis servers, for bytes", mb_per_s * rates.redis_mb_s / fleet.servers, "more servers"),
    ]
    if plan.puts:
        puts, gets = (rate * requests / plan.documents / fleet.shelves for requests in (plan.puts, plan.gets))
        of_home = [
            ("memory of the Redis servers", memory, "more servers, with several shelves", False),
            ("PUT requests to S3", puts / S3_PUTS_PER_S, shelves),
            ("GET requests to S3", gets / S3_GETS_PER_S, shelves),
        ]
    resources = [
        *of_home,
        ("thread of the Redis server with the index", index_s, shelves),
        ("network of a node", wire / (nodes * fleet.node_gbit), "fewer GPUs in a node", True, True),
        ("Serve's controller", heads * rates.controller_replica_s, clusters),
        ("GCS of the Ray head", heads * rates.gcs_replica_s, clusters),
        ("process that runs the batch", rate * rates.driver_result_s / fleet.services, "several batches"),
        (FOLDERS, rate / nodes * rates.disk_document_s, "fewer GPUs in a node", True, True),
    ]
    return sorted((SharedResource(*fields) for fields in resources), key=lambda resource: -resource.used)


@dataclass(frozen=True)
class Outcome:
    """The end of a simulated run. lost_gpu_hours: work done twice, and GPUs waiting for a replica. innocent: expected
    number of documents given up although they kill no worker. slowed_h: hours in which a shared resource, not the GPUs,
    set the pace. stopped_by: the full resource that stopped all work."""

    hours: float
    documents: int
    error_rows: int
    node_failures: int
    worker_deaths: int
    lost_gpu_hours: float
    innocent: float
    slowed_h: dict[str, float]
    stopped_by: str | None


def simulate(plan: Plan, fleet: Fleet, rates: SharedRates, *, seed: int = 0) -> Outcome:
    """Let the fleet work through the plan's documents, from event to event; the same seed gives the same run. Between
    two events (a node dies, a document kills its worker, GPUs come back) the rate is constant: that of the GPUs that
    are up, or of the fullest resource. Times are hours. The attempts at a poison document are one event."""
    chance = random.Random(seed)
    shared = [resource for resource in shared_resources(plan, fleet, rates) if resource.name != FOLDERS]
    slowest, memory = (
        next(resource for resource in shared if resource.by_rate is by_rate) for by_rate in (True, False)
    )
    document_h = plan.gpu_hours / plan.documents  # of a GPU
    end = plan.documents / max(1.0, memory.used)
    now = done = lost = slowed = 0.0
    nodes = poison = 0
    down: list[tuple[float, int]] = []  # (when they are back, GPUs)

    def fail(gpus: int, away_h: float, times: int = 1) -> float:
        heapq.heappush(down, (now + times * away_h, gpus))
        return times * gpus * (away_h + _IN_FLIGHT * document_h / 2)

    while done < end:
        up = max(0, fleet.gpus - sum(gpus for _, gpus in down))
        alone = up / document_h  # documents an hour if no resource limited them
        rate = min(alone, plan.documents_per_hour / max(slowest.used, 1e-12))
        per_hour = up / fleet.gpus_per_node / fleet.node_mtbf_h, rate * fleet.poison
        to_node, to_poison = (chance.expovariate(hourly) if hourly > 0 else math.inf for hourly in per_hour)
        to_back = down[0][0] - now if down else math.inf
        to_end = (end - done) / rate if rate else math.inf
        passed = min(to_node, to_poison, to_back, to_end)
        now += passed
        done = end if passed == to_end else done + rate * passed
        slowed += passed if rate < alone else 0.0
        if passed == to_node:
            nodes += 1
            lost += fail(fleet.gpus_per_node, fleet.repair_s / 3600)
        elif passed == to_poison:
            poison += 1
            lost += fail(1, fleet.restart_s / 3600, ATTEMPTS)
        elif passed == to_back:
            heapq.heappop(down)
    innocent = plan.documents * (_IN_FLIGHT * document_h / fleet.node_mtbf_h) ** ATTEMPTS  # its node dies each time
    slowed_h, stopped_by = {slowest.name: slowed} if slowed else {}, memory.name if memory.used > 1 else None
    return Outcome(now, round(done), poison, nodes, poison * ATTEMPTS, lost, innocent, slowed_h, stopped_by)
