"""deploy/systemd/kvshelf.service."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvshelf.service.settings import load_settings
from tests.deploy.files import UNIT


def directives() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.M):
        found.setdefault(name, []).append(value)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on PATH")
def test_systemd_knows_every_line(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvshelf/bin/kvshelf", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert [line for line in done.stderr.splitlines() if "kvshelf.service" in line] == []
    assert done.returncode == 0


def test_the_service_can_write_its_state_and_nothing_else() -> None:
    found = directives()
    assert found["ProtectSystem"] == ["strict"]
    assert found["NoNewPrivileges"] == ["yes"]
    assert found["CapabilityBoundingSet"] == [""]
    settings = load_settings(UNIT.with_name("kvshelf.env"))
    assert settings.store.startswith(f"disk:///var/lib/{found['StateDirectory'][0]}/")
    assert found["ExecStart"][0].endswith(f" --env-file /etc/kvshelf/{UNIT.with_name('kvshelf.env').name}")
    assert "EnvironmentFile" not in found


def test_it_is_given_the_time_to_stop() -> None:
    (stop_s,) = directives()["TimeoutStopSec"]
    assert float(stop_s) > load_settings(UNIT.with_name("kvshelf.env")).shutdown_grace_s + 30
