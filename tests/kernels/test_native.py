"""The compiled kernels: where they can be had they are, and where they cannot be had nothing is missing."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvshelf
from kvshelf.cli import app
from kvshelf.errors import InternalError
from kvshelf.kernels import compiling
from kvshelf.kernels.compiling import FOLDER, CannotCompile, compile_all, levels, library_path
from kvshelf.kernels.dispatch import implementation
from kvshelf.kernels.native import LEVEL, architecture, library
from kvshelf.kernels.prefix_attention import BatchLayout, LogitRules, PackedPrefix, SuffixRows, prefix_attention
from kvshelf.kernels.quantize.rows import QuantizedRows
from tests.compilers import needs_compiler
from tests.kernels.tensors import TOLERANCE, LargestTensor, error, random

KERNELS = Path("kvshelf/kernels")
OPERATIONS = sorted(path.parent.name for path in Path(kvshelf.__file__).parent.glob("kernels/*/eager.py"))

CHOSEN = f"""
import json, os, torch
from kvshelf.errors import InternalError
from kvshelf.kernels import dispatch
cpu = torch.device("cpu")
told = dispatch.cpu_form()
forms = [dispatch.implementation(operation, cpu).__name__ for operation in {OPERATIONS}]
os.environ["KVSHELF_KERNELS"] = "native"
try:
    forced = dispatch.implementation("prefix_attention", cpu).__name__
except InternalError as error:
    forced = error.message
print(json.dumps([dispatch.__file__, told, forms, forced]))
"""

needs_library = pytest.mark.skipif(library() is None, reason="no library was compiled for this CPU")


@needs_compiler
def test_what_was_checked_out_is_compiled():
    """Else everything below would be skipped where the sources do not compile, or have changed since."""
    assert all(library_path(level).exists() for level in levels().values()), "python -m kvshelf.kernels.compiling"
    assert (library() is None) == (architecture() is None)


@needs_compiler
def test_a_library_for_each_of_the_machines_cpus_is_compiled(tmp_path, monkeypatch):
    """Of a part of the sources: `test_what_was_checked_out_is_compiled` is about all of them."""
    part = tmp_path / "sources"
    for name in ("native.c", "native.h", "rows.h", "row_norms/native.c"):
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FOLDER / name, part / name)
    monkeypatch.setattr(compiling, "FOLDER", part)
    tmp_path = tmp_path / "libraries"
    tmp_path.mkdir()
    (tmp_path / "compiled-x86-64-v3-0123456789abcdef.so").write_bytes(b"of other sources")
    made = compile_all(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(made)
    assert {path.name for path in made} == {library_path(level).name for level in levels().values()}
    for path in made:
        assert ctypes.CDLL(str(path)).kvshelf_use_threads


@needs_compiler
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("false", "false failed: exit code 1"),
        ("true", "true failed: exit code 0, and no library"),
        ("no-such-compiler", "there is no C compiler 'no-such-compiler'"),
        ("cc -include no-such.h", "no-such.h: No such file"),
        ("cc 'and", 'CC is "cc \'and", which is no command'),
    ],
)
def test_what_cannot_be_compiled_says_why_in_its_first_line_and_leaves_nothing(tmp_path, monkeypatch, command, reason):
    monkeypatch.setenv("CC", command)
    with pytest.raises(CannotCompile) as failed:
        compile_all(tmp_path)
    assert reason in str(failed.value).splitlines()[0]
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(CannotCompile, match=r"cannot be compiled into .*not-there"):
        compile_all(tmp_path / "not-there")


@pytest.fixture
def package(tmp_path):
    """kvshelf in a folder of its own, with the libraries of this one."""
    shutil.copytree(
        Path(kvshelf.__file__).parent,
        tmp_path / "kvshelf",
        ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
    )
    return tmp_path


def run(package, *words, code=0, **settings):
    """Python, as a process in which this package is the one that is imported."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")}
    done = subprocess.run(
        [sys.executable, *words], cwd=package, env=clean | settings, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done


def chosen(package, **settings):
    """What a CPU gets: the form that is told of, the form of each operation, and what forcing the compiled one says."""
    file, cpu_form, modules, forced = json.loads(run(package, "-c", CHOSEN, **settings).stdout)
    assert Path(file).is_relative_to(package)
    return cpu_form, dict(zip(OPERATIONS, [name.rpartition(".")[2] for name in modules], strict=True)), forced


def libraries(package):
    return list((package / KERNELS).glob("compiled-*.so"))


@needs_library
def test_a_cpu_gets_what_was_compiled(package, monkeypatch):
    monkeypatch.delenv(LEVEL, raising=False)
    cpu_form, forms, forced = chosen(package)
    assert forced.endswith("prefix_attention.native")
    assert cpu_form == f"native ({architecture()})"
    has = {operation for operation in OPERATIONS if (package / KERNELS / operation / "native.py").exists()}
    assert {operation for operation, form in forms.items() if form == "native"} == has
    assert "prefix_attention" in has
    assert implementation("prefix_attention", torch.device("meta")).__name__.endswith(".eager")


@pytest.mark.slow
def test_without_a_library_everything_is_torchs_own(package):
    """And doctor names the way to the faster form."""
    for path in libraries(package):
        path.unlink()
    cpu_form, forms, said = chosen(package)
    assert (cpu_form, forms) == ("eager", dict.fromkeys(OPERATIONS, "eager"))
    assert "compiled kernels were forced on a cpu tensor" in said
    assert "python -m kvshelf.kernels.compiling" in said
    text = finding(run(package, "-m", "kvshelf", *DOCTOR, code=1).stdout)
    assert ("python -m kvshelf.kernels.compiling" in text) == (architecture() is not None)


DOCTOR = ["doctor", "--json", "--model", "./no-model"]


def finding(lines):
    (check,) = [check for check in map(json.loads, lines.splitlines()) if check["check"] == "kernels"]
    assert check["ok"]
    return check["finding"]


@pytest.mark.slow
@needs_library
def test_doctor_names_the_form(monkeypatch):
    monkeypatch.delenv("KVSHELF_KERNELS", raising=False)
    assert f"native ({architecture()})" in finding(CliRunner().invoke(app, DOCTOR).stdout)
    *_, (lowest, made) = levels().items()
    monkeypatch.setenv(LEVEL, lowest)
    forced = f"native ({made}), compiled from C, the level set by {LEVEL}"
    assert forced in finding(CliRunner().invoke(app, DOCTOR).stdout)
    monkeypatch.setenv("KVSHELF_KERNELS", "eager")
    assert "eager, set by KVSHELF_KERNELS" in finding(CliRunner().invoke(app, DOCTOR).stdout)
    monkeypatch.setenv("KVSHELF_KERNELS", "")
    assert forced in finding(CliRunner().invoke(app, DOCTOR).stdout)


@pytest.mark.slow
@needs_library
def test_a_library_of_other_sources_is_not_loaded(package, monkeypatch):
    monkeypatch.setattr(compiling, "FOLDER", package / KERNELS)
    for changed in ("native.c", "native.h", "prefix_attention/native.c"):
        own = library_path(architecture())
        assert own.exists()
        source = (package / KERNELS / changed).read_text()
        (package / KERNELS / changed).write_text(source + "/* changed since */\n")
        assert not library_path(architecture()).exists()
        if changed != "prefix_attention/native.c":
            (package / KERNELS / changed).write_text(source)
    assert chosen(package)[0] == "eager"


@pytest.mark.slow
@needs_library
def test_a_library_that_the_system_refuses_is_none(package):
    for path in libraries(package):
        path.write_bytes(b"\x7fELF of another machine")
    assert chosen(package)[:2] == ("eager", dict.fromkeys(OPERATIONS, "eager"))


@pytest.mark.slow
@pytest.mark.skipif(architecture() != "x86-64-v4" or library() is None, reason="tested as this CPU's own form, or not")
def test_the_form_for_avx2_passes_the_tests_of_every_operation():
    here = Path(__file__).parent
    files = [path for path in sorted(here.glob("test_*.py")) if (FOLDER / path.stem[5:] / "native.py").exists()]
    assert len(files) > 1
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "native", *files],
        cwd=here.parents[1], env=os.environ | {LEVEL: "avx2"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture
def forced(monkeypatch):
    """Force a level. The library in use is not loaded anew."""
    monkeypatch.delenv("KVSHELF_KERNELS", raising=False)
    return lambda level: monkeypatch.setenv(LEVEL, level)


@needs_library
def test_a_level_can_be_forced(forced):
    forced("")
    own = architecture()
    for level, made in levels().items():
        forced(level)
        runs = made == own or own == "x86-64-v4"
        assert architecture() == (made if runs else None)


@needs_library
def test_a_level_of_another_name_is_refused(forced):
    forced("sse9")
    with pytest.raises(InternalError, match="KVSHELF_CPU_LEVEL is 'sse9'; it must be one of avx512, avx2, or unset"):
        architecture()


@pytest.mark.slow
@needs_library
def test_where_a_level_cannot_run_torchs_own_operations_do(package):
    """And doctor names the level."""
    lower = {"ATEN_CPU_CAPABILITY": "avx2", LEVEL: "avx512"}
    cpu_form, forms, _ = chosen(package, **lower)
    assert (cpu_form, forms) == ("eager", dict.fromkeys(OPERATIONS, "eager"))
    text = finding(run(package, "-m", "kvshelf", *DOCTOR, code=1, **lower).stdout)
    assert "KVSHELF_CPU_LEVEL is avx512, which cannot run where torch finds avx2" in text


TIMED = """
import time, torch
from kvshelf.kernels.column_sums import eager, native
torch.set_num_threads(1)
queries, keys = torch.randn(4, 1024, 64), torch.randn(2, 1024, 64)
def seconds(form):
    started = time.process_time()
    form.column_sums(queries, keys, 0.125)
    return time.process_time() - started
print(min(seconds(native) for _ in range(8)) / min(seconds(eager) for _ in range(8)))
"""


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_no_form_is_far_behind_torch(capability):
    """As wide vectors were on AVX2, which the compiler kept in memory: 43 times. Today it is 0.3 to 1.3 times."""
    if capability == "avx2" and architecture() != "x86-64-v4":
        pytest.skip("tested as this CPU's own form, or not")
    forced = {"ATEN_CPU_CAPABILITY": "avx2"} if capability == "avx2" else {}
    done = subprocess.run([sys.executable, "-c", TIMED], env=os.environ | forced, capture_output=True, text=True)
    assert float(done.stdout) < 6, done.stderr


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_threads_compute_what_one_does(monkeypatch, dtype):
    """Long enough for several runs of each head, which threads take in any order."""
    monkeypatch.setenv("KVSHELF_KERNELS", "native")
    prefixes = [(_document(dtype, 3000, 700),), (_document(dtype, 2000, 2100),)]
    layout = BatchLayout((1, 2), (SuffixRows((1,), (0,), 1), SuffixRows((2,), (1,), 2)), torch.device("cpu"))
    suffixes = [(random(1, 2, n, 32, dtype=dtype), random(1, 2, n, 32, dtype=dtype, seed=n)) for n in (1, 2)]
    queries = random(3, 4, 32, dtype=dtype)
    results = {
        threads: _on(threads, prefix_attention, queries, prefixes, suffixes, layout, LogitRules(0.2))
        for threads in (1, 2)
    }
    assert error(results[2], results[1]) < TOLERANCE[dtype]


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_never_stand_in_memory_as_numbers(monkeypatch, dtype):
    monkeypatch.setenv("KVSHELF_KERNELS", "native")
    plain, lengths = random(6000, 64, dtype=dtype), (3000, 3000)
    codes = [QuantizedRows.quantize(plain, lengths, bits=4, group=64, axis=axis) for axis in ("tokens", "channels")]
    layout = BatchLayout((1,), (SuffixRows((1,), (0,), 1),), torch.device("cpu"))
    suffix = random(1, 2, 1, 64, dtype=dtype), random(1, 2, 1, 64, dtype=dtype, seed=1)
    with LargestTensor() as largest:
        prefix_attention(
            random(1, 4, 64, dtype=dtype), [(PackedPrefix(*codes, lengths),)], [suffix], layout, LogitRules(0.2)
        )
    assert largest.bytes < 100 * 64 * dtype.itemsize


def _document(dtype, *lengths):
    keys, values = (random(sum(lengths), 32, dtype=dtype, seed=seed) for seed in lengths)
    return PackedPrefix(keys, values, lengths)


def _on(threads, function, *arguments):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(before)
