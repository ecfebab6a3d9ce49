"""Fixtures of all tests: a small real model, and a real service that serves it."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import structlog

from kvshelf.workers.cluster.connect import prepare_environment
from tests.amounts import SOAK

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine
    from tests.collector import Collector
    from tests.store.objects.servers import S3Server

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Triton reads this variable when it is imported, and torch and transformers import it wherever it is installed: so set
# it here, before any test. Separate processes test compilation. For the kernels' tests on a GPU, set it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Ray reads its environment on import, and many tests import it without starting a cluster.
prepare_environment(None)

# What imports and collection make stays to the end: the collector would walk over it each time.
gc.disable()

# No test is about the time of one example, and a busy machine takes longer than the 0.2 s that hypothesis allows.
# Examples are the same in each run, so that a run fails because of a change; `make soak` tries new ones.
hypothesis.settings.register_profile("kvshelf", deadline=None, derandomize=not SOAK)
hypothesis.settings.load_profile("kvshelf")

# By default structlog shows the locals of every frame of an error, which takes seconds where they are tensors.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

# A unit test starts no service, no Ray and no browser, and interprets no kernel.
_STARTING = {"run_cluster", "bundled_service", "service", "start_service", "browser", "begin"}
_NO_UNITS = re.compile(
    r"tests/(bench/|kernels/|corpus/run/|(engine|methods|training|workers/cluster)/|(cli/)?test_(demo|docs|extend)|client/test_typing"
    r"|deploy/test_(wheel|address|compose|image)|service/process/test_rolling|store/test_(crash|state_machine|sealing|life)"
    r"|artifact/test_fuzz|store/redis/)"
)
_OWN_SERVICES = re.compile(
    r"tests/(corpus/(test_command|run/)|deploy/test_(address|image)|(cli/)?test_(cli_live|demo|docs|extend)"
    r"|service/process/test_(rolling|supervisor)|client/test_live|bench/batches/)"
)

_SLOW = re.compile(r"tests/(attack|bench|scripts)/")
"""A service under attack, and what measures and publishes: none of it is on the way of a document or a question."""

MOST_CASES = 3
"""Cases of one test that `make test` runs; `make test-slow` runs the others."""

_SHARED = ("run_cluster", "service", "bundled_service", "pages")
"""Fixtures that are one service or cluster for many tests; `pages` has `bundled_service`. The tests of `run_cluster`
kill processes by their names, so they run while no other service does."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the units, which `make test-fast` runs, and the tests with a service, which `make test` runs one by one.

    The tests of a shared service come last, and together: a Ray cluster takes processor time even while it idles.
    """

    def turn(item: pytest.Item) -> int:
        assert isinstance(item, pytest.Function)
        return max((1 + _SHARED.index(name) for name in _SHARED if name in item.fixturenames), default=0)

    for item in items:
        assert isinstance(item, pytest.Function)
        if item.location[0].startswith("tests/real/"):
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(600))
            continue
        if _SLOW.match(item.location[0]):
            item.add_marker(pytest.mark.slow)
        starts = bool(_STARTING & set(item.fixturenames))
        if starts or _OWN_SERVICES.match(item.location[0]):
            item.add_marker(pytest.mark.service)
        if not starts and not _NO_UNITS.match(item.location[0]):
            item.add_marker(pytest.mark.unit)
    for item in beyond(items):
        item.add_marker(pytest.mark.more)
    items.sort(key=turn)


def beyond(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of each test behind its first `MOST_CASES`, in an order that is drawn by their names: in the order of
    their table all of the first cases could share a value."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for several in cases.values():
        yield from sorted(several, key=lambda item: sha256(item.nodeid.encode()).digest())[MOST_CASES:]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file leaves stays, too: after some thousand tests one collection took four seconds."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def same_settings() -> Iterator[None]:
    """A test that left a setting behind would change how those after it in its process compute."""
    before = _settings()
    yield
    assert _settings() == before


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("KVSHELF_", "ATEN_", "TRITON_"))}


@pytest.fixture(autouse=True)
def seeded(soak: bool) -> None:
    """A test draws the same numbers in each run, so that a run fails because of a change; a soak draws new ones."""
    if not soak:
        random.seed(0)
        if torch := sys.modules.get("torch"):
            # torch.manual_seed notes its whole call stack for a GPU that is not in use yet: seconds in a run of tests.
            torch.default_generator.manual_seed(0)
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(0)


DOCS = Path(__file__).parent.parent / "docs"
TOKENIZER = Path(__file__).parent.parent / "kvshelf" / "model" / "bundled" / "kvshelf-tiny"


def save_random_model(
    folder: Path, *, layers: int = 2, width: int = 64, kv_heads: int = 2, positions: int = 16384, seed: int = 0
) -> Path:
    """A random Qwen2 with the bundled tokenizer and chat template, as a Hugging Face folder. Its answers are nonsense,
    and without an end token they have the maximum length."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len_tokenizer(),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """Put the bundled tokenizer beside a model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def save_transforms(folder: Path) -> None:
    """Transforms of a saved model, from two pages of the documentation, in its folder."""
    from kvshelf import Engine
    from kvshelf.model.calibration import OWN_FOLDER, TRANSFORMS_BESIDE_THE_WEIGHTS
    from kvshelf.training.transform_search import find_transforms

    engine = Engine.load(str(folder), device="cpu")
    assert engine.text is not None
    pages = [(DOCS / "use" / name).read_text()[:4000] for name in ("put.md", "secure.md")]
    data = find_transforms(engine, [engine.text.encode(page) for page in pages])
    (folder / OWN_FOLDER).mkdir(exist_ok=True)
    (folder / OWN_FOLDER / TRANSFORMS_BESIDE_THE_WEIGHTS).write_bytes(data)


def len_tokenizer() -> int:
    from tokenizers import Tokenizer

    size: int = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).get_vocab_size()
    return size


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 2 layers, with transforms for codec klt: a forward takes milliseconds."""
    folder = save_random_model(tmp_path_factory.mktemp("models") / "random-tiny")
    save_transforms(folder)
    return folder


@pytest.fixture
def frozen() -> Iterator[None]:
    """The collector lists and walks over only what is made from here on: all that tests hold takes it a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def soak() -> bool:
    """Whether the full counts are run (TESTS_SOAK=1, `make soak`) instead of the reduced ones."""
    return SOAK


@dataclass(frozen=True)
class LiveService:
    """A service, started as a user would start it: `process` is its supervisor, `log` its standard error."""

    process: subprocess.Popen[str]
    url: str
    home: Path
    log: Path

    def front_end_pid(self) -> int:
        """The process that answers HTTP. Fails while another one takes its place."""
        (pid,) = _children(self.process.pid)
        return pid

    def replica_pids(self) -> list[int]:
        """The processes that hold its models."""
        return [pid for pid in _descendants(self.process.pid) if _title(pid).startswith("ray::ServeReplica")]

    def controller_pid(self) -> int:
        """Ray's process that manages the replicas."""
        (pid,) = [pid for pid in _descendants(self.process.pid) if _title(pid).startswith("ray::ServeController")]
        return pid

    def kill(self) -> None:
        """Kill every process of the service at once, as in a power cut."""
        for pid in [self.process.pid, *_descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def live_service(home: Path, *models: Path | str, **settings: object) -> Iterator[LiveService]:
    """`kvshelf serve` on a free port with a local Ray of its own, stopped at the end of the block.

    Its shelf is a folder in `home`, unless the settings name another `store`.
    """
    home.mkdir(parents=True, exist_ok=True)
    log = home / f"service-{time.time_ns()}.log"
    command = [sys.executable, "-m", "kvshelf", "serve", "--port", "0"]
    command += [f"--model={model}" for model in models]
    settings = {"store": f"disk://{home}/shelf"} | settings
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    environment = clean | {f"KVSHELF_{name.upper()}": str(value) for name, value in settings.items()}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield LiveService(process, _ready_url(process, log), home, log)
    finally:
        _stop(process)


def _ready_url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("kvshelf is ready at "):
            return line.split()[-1]
    raise AssertionError(f"the service did not start:\n{log.read_text()[-4000:]}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # a thread that has ended since
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _descendants(pid: int) -> list[int]:
    children = _children(pid)
    return children + [below for child in children for below in _descendants(child)]


@pytest.fixture(scope="session")
def start_service() -> Callable[..., AbstractContextManager[LiveService]]:
    """For tests that need a service of their own, to kill it."""
    return live_service


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """The collector that `service` sends its traces to."""
    from tests.collector import Collector

    with Collector() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # milliseconds until a span is sent
        yield running


@pytest.fixture(scope="session")
def shared_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server for all tests that neither stop nor fill it."""
    from tests.store.objects.servers import MotoServer

    with MotoServer(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def service(tiny_folder: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """One service for the whole test run. Its caps are small, so that tests can go beyond them."""
    home = tmp_path_factory.mktemp("service")
    caps = {"max_body_bytes": 1 << 20, "max_import_bytes": 4 << 20, "max_file_bytes": 8 << 20, "upload_grace_s": 1}
    caps |= {"max_batch_rows": 200}
    caps |= {"max_ongoing_requests": 16, "max_queued_requests": 24}
    with live_service(home, tiny_folder, sweep_interval_s=1, otel_endpoint=collector.url, **caps) as running:
        yield running


@pytest.fixture(scope="session")
def service_url(service: LiveService) -> str:
    return service.url


@pytest.fixture(scope="session")
def bundled_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service as the documentation starts it: the bundled model and all defaults."""
    with live_service(tmp_path_factory.mktemp("bundled"), "kvshelf-tiny") as running:
        yield running.url


@pytest.fixture(scope="session")
def tiny() -> Engine:
    """The bundled model on the CPU, in this process."""
    from kvshelf.engine.engine import Engine

    return Engine.load("kvshelf-tiny", device="cpu")
