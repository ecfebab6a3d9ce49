"""What a user imports: one list of names, and no more than they need."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvshelf
from kvshelf._extras import install_command, needs_extra
from kvshelf.errors import MissingExtra

PUBLIC = ["AsyncClient", "Client", "CompressedCache", "Engine", "ParallelEngine", "__version__", "errors", "open_store"]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_these() -> None:
    assert sorted(kvshelf.__all__) == PUBLIC
    assert dir(kvshelf) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(kvshelf, name) is getattr(kvshelf, name)


def test_type_checkers_see_every_lazy_name() -> None:
    tree = ast.parse(Path(kvshelf.__file__).read_text())
    block = next(s for s in tree.body if isinstance(s, ast.If) and ast.unparse(s.test) == "TYPE_CHECKING")
    declared = {a.name: s.module for s in block.body if isinstance(s, ast.ImportFrom) for a in s.names}
    assert declared == kvshelf._HOMES
    assert (Path(kvshelf.__file__).parent / "py.typed").exists()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Shelf'"):
        _ = kvshelf.Shelf


@pytest.mark.parametrize(
    "code",
    ["import kvshelf", "import kvshelf.client", "from kvshelf import Client, AsyncClient", "import kvshelf.cli"],
)
def test_the_client_and_the_command_line_need_no_torch(code: str) -> None:
    heavy = ["torch", "transformers", "ray", "fastapi", "blake3", "msgpack"]
    loaded = run_python(f"{code}\nimport sys\nprint([name for name in {heavy} if name in sys.modules])")
    assert loaded == "[]"


def test_a_missing_extra_is_named_with_its_command() -> None:
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    code = """
import sys
sys.modules["torch"] = None
import kvshelf
try:
    kvshelf.Engine
except kvshelf.errors.MissingExtra as error:
    print(error)
"""
    told = run_python(code)
    assert f"run: {install_command('serve')}" in told
    assert "kvshelf.Engine" in told


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'kvshelf[serve]'"),
        ({"url": "https://host/kvshelf.zip"}, "pip install 'kvshelf[serve]'"),
        ({"url": "file:///src/a%20b", "dir_info": {"editable": True}}, "pip install --editable '/src/a b[serve]'"),
        ({"url": "file:///src/kvshelf", "dir_info": {}}, "pip install '/src/kvshelf[serve]'"),
        ({"url": "file:///w/kvshelf-1.whl", "archive_info": {}}, "pip install '/w/kvshelf-1.whl[serve]'"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came_from(
    origin: dict[str, object] | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is on no index, so the plain name would find nothing."""
    folder = tmp_path / "kvshelf-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kvshelf\nVersion: 9\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command("serve") == command


def test_a_broken_installation_of_kvshelf_is_not_called_a_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("serve", purpose="this test"):
        import kvshelf.no_such_room  # noqa: F401
    with pytest.raises(MissingExtra), needs_extra("serve", purpose="this test"):
        import no_such_package  # noqa: F401


def test_a_service_imports_no_model_code_and_nothing_slow_before_ray_starts() -> None:
    """Its replicas run the models. What it needs of torch it imports while Ray's processes start."""
    loaded = run_python(
        "import sys, kvshelf.service.process.server; print('torch' in sys.modules, 'ray' in sys.modules)\n"
        "import kvshelf.service.process.replicas, kvshelf.service.app\n"
        "print('transformers.modeling_utils' in sys.modules)"
    )
    assert loaded.split() == ["False", "False", "False"]


@pytest.mark.slow
def test_what_a_service_imports_beside_ray_shares_no_package_with_it() -> None:
    """Two threads that import parts of one package can get half a module: 1 start in 40 ended with a KeyError."""
    loaded = run_python(
        "import sys, kvshelf.service.process.server as server; before = set(sys.modules)\n"
        "from importlib import import_module; import_module(server.IMPORTED_ASIDE)\n"
        "print('torch' in sys.modules)\n"
        "print({name.partition('.')[0] for name in set(sys.modules) - before} & {'ray', 'fastapi', 'aiohttp', 'grpc'})"
    )
    assert loaded.split() == ["True", "set()"]


@pytest.mark.parametrize("name", ["policies.ScoringPolicy", "policies.LayerView", "selectors.UnitSelector"])
def test_plug_ins_have_their_names_where_they_had_them(name: str) -> None:
    kind, _, name = name.partition(".")
    with pytest.warns(DeprecationWarning, match=f"import {name} from kvshelf.methods.{kind}"):
        value = getattr(import_module(f"kvshelf.workers.{kind}"), name)
    assert value is getattr(import_module(f"kvshelf.methods.{kind}"), name)
