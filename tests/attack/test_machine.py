"""What other users and other programs of this machine can reach: connections, Ray's ports and folder."""

from __future__ import annotations

import os
import socket
import stat
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from tests.attack.conftest import Attacked
from tests.attack.watch import watched
from tests.conftest import _descendants, _title

MB = 1 << 20


def test_silent_connections_are_closed_and_the_service_answers_meanwhile(attacked: Attacked, soak: bool) -> None:
    """2,000 of them stayed for 110 s."""
    where = urlsplit(attacked.url)
    count, began = 2000 if soak else 300, time.monotonic()
    with ExitStack() as stack, watched(attacked.url, attacked.service.front_end_pid()) as seen:
        silent = [
            stack.enter_context(socket.create_connection((where.hostname, where.port), timeout=30))
            for _ in range(count)
        ]
        assert httpx.get(f"{attacked.url}/livez").status_code in (200, 503)
        for connection in silent:
            assert connection.recv(200)[:12] in (b"", b"HTTP/1.1 503")
    took_s = time.monotonic() - began
    print(f"{count} connections were gone after {took_s:.1f} s; silent for {seen.silent_s:.3f} s")
    assert took_s < 25


def test_headers_without_end_take_no_memory(attacked: Attacked) -> None:
    """64 MiB of them took 619 MB."""
    where = urlsplit(attacked.url)
    with watched(attacked.url, attacked.service.front_end_pid()) as seen:
        connection = socket.create_connection((where.hostname, where.port), timeout=30)
        try:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ")
            for _ in range(64):
                connection.sendall(b"y" * MB)
        except OSError:
            pass  # it is closed, as it should be
        connection.close()
    print(f"{(seen.peak_bytes - seen.base_bytes) / MB:.1f} MB more; silent for {seen.silent_s:.3f} s")
    assert seen.peak_bytes - seen.base_bytes < 16 * MB


def test_the_document_of_the_api_and_the_readiness_cost_little(attacked: Attacked) -> None:
    """Anyone may ask for both."""
    for path in ("/openapi.json", "/readyz"):
        with httpx.Client(base_url=attacked.url) as client:
            client.get(path)
            times = []
            for _ in range(50):
                began = time.monotonic()
                assert client.get(path).status_code == 200
                times.append(time.monotonic() - began)
            took_ms = statistics.median(times) * 1000
        print(f"{path}: {took_ms:.2f} ms")
        assert took_ms < 50


def listening(pids: set[int]) -> dict[tuple[str, int], str]:
    """Addresses at which processes accept TCP connections, as the kernel lists them, and the process."""
    inodes = {os.readlink(path): _title(pid) for pid in pids for path in _descriptors(pid)}
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                address, port = local.split(":")
                found[_readable(address), int(port, 16)] = inodes[f"socket:[{rest[5]}]"]
    return found


def _descriptors(pid: int) -> list[Path]:
    try:
        return [path for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    except OSError:  # it has ended
        return []


def _readable(address: str) -> str:
    data = b"".join(bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def test_ray_s_folder_is_the_user_s_own_and_its_ports_are_those_that_the_docs_name(attacked: Attacked) -> None:
    folder = Path("/tmp") / f"kvshelf-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    pids = {attacked.service.process.pid, *_descendants(attacked.service.process.pid)}
    logs = {os.readlink(path) for pid in pids for path in _descriptors(pid)}
    assert any(str(folder) in log for log in logs)
    assert not any(log.startswith("/tmp/ray/") for log in logs)
    found = listening(pids)
    print({place: title[:200] for place, title in found.items()})
    beyond = [place for place in found if place[0] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")]
    assert all(found[place].startswith("ray::ServeReplica") for place in beyond), "docs/use/secure.md names it alone"
    for _, port in beyond:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=30)
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
