"""The Ray cluster: connect to a running one, or start one on this machine and take it down again."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvshelf.errors import NoWorker

_LISTENER_S: Final = 10.0
"""How long the head of a cluster may take to accept a connection."""


def prepare_environment(address: str | None) -> None:
    """Set the variables that Ray and torch read when they start. Call it before the first import of ray; variables that
    are set already stay.

    Anyone who reaches a cluster could run code. So a local one listens on loopback, where Ray can be told to, and asks
    for a token, generated here and known only to this process and its children. (Without a mode Ray would write a token
    to the home folder and print a banner.) Nothing is reported to Ray's makers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None:
        return
    # Despite its name, on Linux too: without it Ray takes the machine's network address.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray starts its workers with a niceness of 15, so that they yield to everything else. Here they are the service.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_preload_python_modules", "kvshelf.workers.cluster.preload")
    # Threads that spin while they wait for each other hold the core that the other needs. On two cores busy with other
    # work, a query took 266 ms with spinning and 12 ms with sleeping threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def ray_cluster(address: str | None, *, min_cpus: int) -> Iterator[bool]:
    """Connect to Ray for the block; yields whether this process started the cluster.

    A local cluster declares at least `min_cpus`, even if the machine has fewer: replicas are placed by declared CPUs,
    and two of them on a machine with one CPU should share it, not wait for ever.
    """
    import ray  # here, because it reads the environment when it is imported

    local = address is None
    if address is not None:
        _require_listener(address)
    folder, of_operator = None, os.environ.get("RAY_TMPDIR")
    if local and of_operator is not None:
        make_private(Path(of_operator))
    elif local:
        folder = own_folder()
    with _named_errors(address):
        if address is not None:
            _require_head(address)
        ray.init(
            address="local" if local else address,
            _temp_dir=folder,
            num_cpus=max(os.cpu_count() or 1, min_cpus) if local else None,
            include_dashboard=False if local else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    try:
        if local:
            yield True
        else:
            from kvshelf.workers.cluster import orphans  # here, because it imports ray.serve

            with orphans.registered():
                yield False
    finally:
        ray.shutdown()


def own_folder() -> str:
    """Ray's folder for local clusters, with its sockets and logs, inside a folder that only this user may enter.

    Ray's own choice, `ray` in the temporary folder, is shared by all users of the machine; and Ray opens whatever
    folder it gets to all of them.
    """
    folder = Path(tempfile.gettempdir()) / f"kvshelf-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise NoWorker(f"{folder} is not a folder that only this user may access; remove it, or set RAY_TMPDIR")
    return str(folder / "ray")


def make_private(folder: Path) -> None:
    """Make the operator's folder for Ray's files accessible to this user alone: objects that Ray spills have texts.

    Raises `NoWorker` for another user's folder, and for an open one that others may have written to, or that is for
    other things, too: /tmp stays as it is, even if root asks.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = _opened_up(folder)
        if not problem:
            folder.chmod(0o700)
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise NoWorker(
            f"RAY_TMPDIR={folder} is not for this user alone ({problem}); name a folder of Ray's own with mode 700, or "
            "leave RAY_TMPDIR out"
        )


def _opened_up(folder: Path) -> str:
    """Why a folder cannot be closed to others, "" if it can."""
    status = folder.stat()  # follows a link, as Ray does
    if status.st_uid != os.getuid():
        return "it is another user's"
    if status.st_mode & 0o022:
        return f"others may write to it, its mode is {stat.S_IMODE(status.st_mode):o}"
    if status.st_mode & 0o077 and set(os.listdir(folder)) - {"ray"}:
        return f"others may read it, its mode is {stat.S_IMODE(status.st_mode):o}, and it is not Ray's alone"
    return ""


@contextmanager
def _named_errors(address: str | None) -> Iterator[None]:
    """Raises `NoWorker` if Ray is unavailable. For a node that does not start, Ray raises a bare `Exception`."""
    from ray.exceptions import AuthenticationError, RpcError

    try:
        yield
    except Exception as error:
        if address is None:
            raise NoWorker(
                f"Ray did not come up on this machine: {error}. It gives its processes 30 seconds: if they were late, "
                "start again when the machine does less, or give the address of a cluster that is up. Its own logs are "
                f"in session_latest/logs below {os.environ.get('RAY_TMPDIR') or own_folder()}"
            ) from error
        if isinstance(error, AuthenticationError):
            reason = str(error).partition(". Ensure")[0]  # what follows is about Ray's own files and commands
            raise NoWorker(
                f"the Ray cluster at {address!r} does not let us in: {reason}. Set RAY_AUTH_TOKEN (with "
                "RAY_AUTH_MODE=token) to the cluster's"
            ) from error
        if isinstance(error, ConnectionError | RpcError):
            raise NoWorker(
                f"there is no Ray cluster that lets us in at {address!r}: {error}. Is `ray start` running on this "
                "machine, and is RAY_AUTH_TOKEN (with RAY_AUTH_MODE=token) the cluster's?"
            ) from error
        raise


def _require_listener(address: str) -> None:
    """Raise `NoWorker` if nothing listens at `host:port` or `ray://host:port`: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdecimal()):  # auto, or a name that Ray knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LISTENER_S).close()
    except (OSError, OverflowError) as error:
        raise NoWorker(
            f"there is no Ray cluster at {address!r}: {error}. Is `ray start` running there, and is this its address?"
        ) from error


def _require_head(address: str) -> None:
    """Raise `NoWorker` if nothing listens at the address that Ray makes of `address`, and Ray's own error if the
    cluster does not accept RAY_AUTH_TOKEN. `ray.init` would try for 20 seconds with a wrong token and for minutes
    without a listener, and say only that it failed to connect.

    With parts of Ray that it does not document. Where a later version has others, the wait comes back, no more.
    """
    if address.startswith("ray://"):
        return
    try:
        from ray._private.services import canonicalize_bootstrap_address
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
    except ImportError:
        return
    head = canonicalize_bootstrap_address(address)  # auto, or a loopback address, becomes one of the network
    if head is None:  # no cluster is known here: Ray searches for one
        return
    _require_listener(head)
    # Without any token this client would end the whole process.
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" and os.environ.get("RAY_AUTH_TOKEN"):
        GcsClient(address=head)
