"""Every test of a kernel runs with poisoned memory, and those of an operation that has a C form run under both of a
CPU's forms: without a compiler it is torch's own that everybody gets. In `make test-slow` C forms run
for AVX2, too (`test_native.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvshelf.kernels import compiling, native
from kvshelf.kernels.native import bf16_products, library
from tests.kernels.compiling import Compiler


def pytest_generate_tests(metafunc):
    """Where there is no form but the compiled one, that of each level of processors."""
    folder = compiling.FOLDER / Path(metafunc.module.__file__).stem.removeprefix("test_")
    if (folder / "native.py").exists():
        forms = ["eager", "native"] if (folder / "eager.py").exists() else list(compiling.levels())
        metafunc.parametrize("cpu_form", forms, indirect=True, scope="module")


@pytest.fixture(autouse=True, scope="module")
def cpu_form(request):
    """The form that operations on a CPU take: what dispatch chooses, or the one that is named by a parameter."""
    form = getattr(request, "param", "")
    with pytest.MonkeyPatch.context() as patch:
        if form in compiling.levels():
            patch.setenv(native.LEVEL, form)
            forget_library()
            form = "native"
        if form == "native" and library() is None:
            pytest.skip("no library was compiled for this CPU: python -m kvshelf.kernels.compiling")
        if form:
            patch.setenv("KVSHELF_KERNELS", form)
        yield
    if getattr(request, "param", "") in compiling.levels():
        forget_library()


def forget_library():
    """Let the next operation load the library anew, of the level that is forced now."""
    library.cache_clear()
    bf16_products.cache_clear()


@pytest.fixture(autouse=True)
def poisoned_memory():
    """`torch.empty` gives NaN: an operation that reads what it never wrote fails its comparison."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def compile_all():
    compiler = Compiler()
    yield compiler
    compiler.close()


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forced_triton(monkeypatch):
    """Dispatch to Triton's kernels, which the interpreter runs on the CPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("KVSHELF_KERNELS", "triton")
