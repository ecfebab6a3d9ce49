"""Compile kvshelf's C kernels during installation, if there is a C compiler; without one the installation succeeds too.

`kvshelf/kernels/compiling.py` says what is compiled, and for which processors. It is loaded by its path, because
kvshelf's dependencies are not installed where a wheel is built.
"""

from __future__ import annotations

import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "kvshelf/kernels"


class CompiledKernels(BuildHookInterface):
    """An editable install gets its libraries beside their sources. Those of a wheel are compiled elsewhere, because the
    sources may be read-only, and bind the wheel to this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiling = _load(Path(self.root, KERNELS, "compiling.py"))
        try:
            if version == "editable":
                compiling.compile_all()
            else:
                self._folder = TemporaryDirectory(prefix="kvshelf-kernels-")  # removed with this object
                _include(compiling.compile_all(Path(self._folder.name)), build_data)
        except compiling.CannotCompile as exc:
            reason = str(exc).splitlines()[0]
            self.app.display_warning(f"kvshelf is installed without compiled kernels, and is slower on a CPU: {reason}")


def _include(libraries: list[Path], build_data: dict[str, Any]) -> None:
    build_data["force_include"] |= {str(path): f"{KERNELS}/{path.name}" for path in libraries}
    build_data["pure_python"] = False
    build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _load(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
