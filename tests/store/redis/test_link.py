"""Every way in which a server can be of no use, each with real processes: a named error, in time, and healed by itself.

A hung server is one that is stopped with SIGSTOP; the kernel still takes connections for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvshelf.errors import StorageFull, StoreUnavailable
from kvshelf.store.redis.link import RedisLink
from tests.store.redis.servers import (
    PATIENT,
    Certificates,
    Cluster,
    LyingServer,
    SentinelSet,
    TlsFront,
    ValkeyServer,
    free_port,
    wait_until,
)

Start = Callable[..., ValkeyServer]
Connect = Callable[[str], RedisLink]

ERROR_S = 1.0
"""How long an error may take."""

AT_ONCE_S = 0.1
"""How long it may take while a server is known not to answer."""


@contextmanager
def unavailable(match: str | None = None, within_s: float = ERROR_S) -> Iterator[None]:
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=match):
        yield
    assert time.monotonic() - started < within_s


def heals(link: RedisLink, within_s: float = 5.0) -> None:
    """The link answers again by itself; every error before is the one promised."""

    def answers() -> bool:
        try:
            return bool(link.call("PING") == b"PONG")
        except StoreUnavailable:
            return False

    wait_until(answers, "the link has healed", within_s)
    assert link.call("PING") == b"PONG", "and it stays so"


# What works


def test_commands_and_their_answers(valkey: ValkeyServer, connect: Connect) -> None:
    link = connect(valkey.url + PATIENT)
    assert link.call("SET", "a", b"\0\xff") == b"OK"
    assert link.call("GET", "a") == b"\0\xff"
    assert link.call("GET", "nothing") is None
    assert link.call("INCRBY", "n", 5) == 5
    assert link.pipeline([("GET", "a"), ("INCR", "n"), ("LRANGE", "l", 0, -1)]) == [b"\0\xff", 6, []]
    assert link.pipeline([]) == []


def test_a_script_runs_whether_the_server_knows_it_or_not(valkey: ValkeyServer, connect: Connect) -> None:
    link = connect(valkey.url + PATIENT)
    source = "return {KEYS[1], ARGV[1], redis.call('INCR', KEYS[1])}"
    assert link.script(source, ["n"], [1.5]) == [b"n", b"1.5", 1]
    valkey.client().script_flush()
    assert link.script(source, ["n"], ["x"]) == [b"n", b"x", 2]


def test_a_refused_command_is_an_error_and_the_link_stays_usable(valkey: ValkeyServer, connect: Connect) -> None:
    link = connect(valkey.url + PATIENT)
    with unavailable("WRONGTYPE"):
        link.pipeline([("LPUSH", "l", 1), ("GET", "l"), ("SET", "a", 1)])
    with unavailable("an error of ours"):
        link.script("return redis.error_reply('an error of ours')", ["a"], [])
    assert link.call("GET", "a") == b"1"


def test_many_threads_share_a_link(valkey: ValkeyServer, connect: Connect) -> None:
    link = connect(valkey.url + PATIENT)
    threads = [threading.Thread(target=lambda: [link.call("INCR", "n") for _ in range(100)]) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert link.call("GET", "n") == b"1600"


def test_scan_finds_every_key(valkey: ValkeyServer, connect: Connect) -> None:
    valkey.client().mset({f"a:{number}": 1 for number in range(3000)} | {"b": 1})
    keys_of_scan = {key for keys in connect(valkey.url + PATIENT).scan("a:*") for key in keys}
    assert keys_of_scan == {f"a:{number}".encode() for number in range(3000)}


def test_databases_are_apart(valkey: ValkeyServer, connect: Connect) -> None:
    one, two = connect(valkey.url + "/1" + PATIENT), connect(valkey.url + "/2" + PATIENT)
    one.call("SET", "a", 1)
    assert (one.call("GET", "a"), two.call("GET", "a")) == (b"1", None)


# What a server says of itself


def test_facts_problems_and_warnings(start_valkey: Start, connect: Connect) -> None:
    safe = connect(start_valkey(maxmemory="64mb", appendonly="yes").url)
    (facts,) = safe.facts()
    assert (facts.maxmemory, facts.maxmemory_policy, facts.aof_enabled) == (64 << 20, "noeviction", True)
    assert [text for facts in safe.facts() for text in (*facts.problems(), *facts.warnings())] == []


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_eviction_is_a_problem(start_valkey: Start, connect: Connect, policy: str) -> None:
    link = connect(start_valkey(maxmemory_policy=policy).url)
    (problem,) = [text for facts in link.facts() for text in facts.problems()]
    assert policy in problem
    assert "noeviction" in problem
    restart, memory = link.facts()[0].warnings()
    assert "appendonly" in restart
    assert "maxmemory" in memory


# Down, hung, restarted


def test_down(connect: Connect) -> None:
    port = free_port()
    link = connect(f"redis://me:s3cret@127.0.0.1:{port}/1")
    with unavailable(f"redis://127.0.0.1:{port}/1 cannot be reached") as _:
        link.call("PING")
    with pytest.raises(StoreUnavailable) as caught:
        link.call("PING")
    assert "s3cret" not in str(caught.value) + repr(caught.value.__cause__)


@pytest.mark.parametrize("connected", [True, False])
def test_hung(start_valkey: Start, connect: Connect, connected: bool) -> None:
    server = start_valkey()
    link = connect(server.url)
    if connected:
        link.call("PING")
    server.pause()
    operations: list[Callable[[], object]] = [
        lambda: link.call("PING"),
        lambda: link.pipeline([("GET", "a")] * 100),
        lambda: link.script("return 1", ["a"], []),
        lambda: list(link.scan("*")),
        link.facts,
        lambda: link.borrow("a"),
    ]
    with unavailable():
        operations[0]()
    for operation in operations:
        with unavailable("a moment ago", AT_ONCE_S):
            operation()
    server.resume()
    heals(link)


def test_twenty_threads_at_a_hung_server(start_valkey: Start, connect: Connect) -> None:
    server = start_valkey()
    link = connect(server.url)
    server.pause()
    took: list[float] = []

    def ask() -> None:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            link.call("PING")
        took.append(time.monotonic() - started)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == 20
    assert max(took) < ERROR_S


def test_one_caller_tries_a_server_that_rested(start_valkey: Start, connect: Connect) -> None:
    server = start_valkey()
    link = connect(server.url)
    server.pause()
    with unavailable():
        link.call("PING")
    time.sleep(1.1)
    trying = threading.Thread(target=lambda: _ignored(link))
    trying.start()
    breaker = link.route.server(b"").breaker
    wait_until(lambda: (breaker.resting_until or 0) > time.monotonic(), "it tries")
    with unavailable("a moment ago", AT_ONCE_S):
        link.call("PING")
    trying.join()
    server.resume()
    heals(link)


def _ignored(link: RedisLink) -> None:
    with pytest.raises(StoreUnavailable):
        link.call("PING")


def test_restarted_between_two_calls(start_valkey: Start, connect: Connect) -> None:
    """Idle connections that the server closed are not used: no call fails."""
    server = start_valkey()
    link = connect(server.url)
    loans = [link.borrow("a") for _ in range(5)]
    for loan in loans:
        loan.give_back()
    server.restart()
    assert [link.call("PING") for _ in range(6)] == [b"PONG"] * 6


def test_killed_while_it_is_asked(start_valkey: Start, connect: Connect) -> None:
    server = start_valkey()
    link = connect(server.url + "?timeout_s=20")
    asking = server.client()

    def kill() -> None:
        wait_until(lambda: asking.info("clients")["blocked_clients"] == 1, "it is asked")
        server.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    with unavailable("closed the connection|reset"):
        link.call("BLPOP", "nothing", 30)
    killing.join()  # the link may hear of the death before whoever brings it about
    server.start()
    heals(link)


def test_a_command_is_not_sent_twice(start_valkey: Start, connect: Connect) -> None:
    """The server did what it was asked while we gave up waiting."""
    server = start_valkey()
    link = connect(server.url)
    link.call("PING")
    server.pause()
    with unavailable():
        link.call("INCR", "n")
    server.resume()
    heals(link)
    assert link.call("GET", "n") == b"1"


# Refusals


def test_wrong_password(start_valkey: Start, connect: Connect) -> None:
    server = start_valkey(requirepass="s3cret")
    assert connect(server.url).call("PING") == b"PONG"
    with unavailable("NOAUTH"):
        connect(f"redis://127.0.0.1:{server.port}").call("PING")
    with unavailable("user and password") as _:
        connect(f"redis://:wrong@127.0.0.1:{server.port}").call("PING")


def test_wrong_database(valkey: ValkeyServer, connect: Connect) -> None:
    with unavailable("DB index"):
        connect(valkey.url + "/999").call("PING")


def test_no_permission(start_valkey: Start, connect: Connect) -> None:
    server = start_valkey()
    server.client().acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["*"], commands=["+get"])
    link = connect(f"redis://reader:pw@127.0.0.1:{server.port}")
    assert link.call("GET", "a") is None
    with unavailable("ACL SETUSER"):
        link.call("SET", "a", 1)


def test_full(start_valkey: Start, connect: Connect) -> None:
    server = start_valkey(maxmemory="8mb")
    link = connect(server.url)
    with pytest.raises(StorageFull, match="maxmemory"):
        link.pipeline([("SET", number, bytes(1 << 20)) for number in range(20)])
    server.client().config_set("maxmemory", "1mb")
    with pytest.raises(StorageFull):
        link.script("return redis.call('SET', KEYS[1], ARGV[1])", ["a"], [1])
    assert link.call("PING") == b"PONG"


def test_a_replica_is_refused_for_writing(start_valkey: Start, connect: Connect) -> None:
    primary = start_valkey(repl_diskless_sync_delay=0)
    replica = start_valkey(replicaof=f"127.0.0.1 {primary.port}")
    wait_until(lambda: replica.client().info()["master_link_status"] == "up", "the replica follows")
    with unavailable("address of the primary"):
        connect(replica.url).call("SET", "a", 1)


def test_too_many_connections_are_refused_and_the_server_is_not_blamed(valkey: ValkeyServer, connect: Connect) -> None:
    link = connect(valkey.url + PATIENT)
    loans = [link.borrow("a") for _ in range(512)]
    for _ in range(2):
        with unavailable("too many connections"):
            link.call("PING")
    for loan in loans:
        loan.give_back()
    assert link.call("PING") == b"PONG"


# Lies


@pytest.mark.parametrize("secret", ["", "u:p@"])
@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$x\r\n", b"$9999999999\r\n", b"*999999999\r\n", b"\xff" * 100, b""],
)
def test_a_lying_server(connect: Connect, answer: bytes, secret: str) -> None:
    """Without a password and with one, which is what it hears first then."""
    with LyingServer(answer) as server:
        link = connect(server.url.replace("//", f"//{secret}"))
        with unavailable():
            link.call("GET", "a")


def test_answers_without_end_are_cut_off(connect: Connect) -> None:
    with LyingServer(b"+" + b"x" * 65_000, endless=True) as server, unavailable("not speak the Redis protocol"):
        connect(server.url.replace("//", "//:p@")).call("GET", "a")


def test_a_connection_on_which_garbage_came_is_not_used_again(valkey: ValkeyServer, connect: Connect) -> None:
    link = connect(valkey.url + PATIENT)
    loan = link.borrow("a")
    with unavailable(), link.talking(loan) as wire:
        wire.send(("SET", "a", 1))
        wire.bulk()
    assert not loan.is_whole
    assert link.call("GET", "a") == b"1"


# TLS


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ours")


def test_tls(valkey: ValkeyServer, certificates: Certificates, connect: Connect) -> None:
    with TlsFront(valkey, certificates) as front:
        link = connect(f"rediss://127.0.0.1:{front.port}?ca={certificates.ca}")
        assert [link.call("PING") for _ in range(3)] == [b"PONG"] * 3
        value = bytes(range(256)) * 40_000
        link.call("SET", "a", value)
        assert link.call("GET", "a") == value


def test_tls_with_another_authority(
    valkey: ValkeyServer, certificates: Certificates, connect: Connect, tmp_path: Path
) -> None:
    other = Certificates(tmp_path / "other")
    with TlsFront(valkey, certificates) as front:
        for query in (f"?ca={other.ca}", ""):
            with unavailable("certificate"):
                connect(f"rediss://127.0.0.1:{front.port}{query}").call("PING")


def test_tls_with_another_name(valkey: ValkeyServer, connect: Connect, tmp_path: Path) -> None:
    elsewhere = Certificates(tmp_path / "elsewhere", host="127.0.0.9")
    with TlsFront(valkey, elsewhere) as front, unavailable("certificate"):
        connect(f"rediss://127.0.0.1:{front.port}?ca={elsewhere.ca}").call("PING")


def test_tls_where_there_is_none(valkey: ValkeyServer, certificates: Certificates, connect: Connect) -> None:
    with unavailable():
        connect(f"rediss://127.0.0.1:{valkey.port}?ca={certificates.ca}").call("PING")


# Sentinels


@pytest.mark.slow
def test_sentinels_lead_to_the_primary_and_after_its_death_to_the_next(tmp_path: Path, connect: Connect) -> None:
    with SentinelSet(tmp_path) as servers:
        link = connect(servers.url)
        assert link.call("SET", "a", 1) == b"OK"
        wait_until(lambda: servers.replica.client().get("a") == b"1", "the replica has it")
        servers.primary.kill()
        with unavailable():
            link.call("GET", "a")
        wait_until(lambda: servers.all_name(servers.replica), "the replica has taken over")
        servers.sentinels[0].pause()  # one of them may be of no use too
        heals(link)
        assert link.call("GET", "a") == b"1"
        assert link.call("SET", "a", 2) == b"OK"
        assert servers.replica.client().get("a") == b"2"


def test_a_primary_that_comes_back_as_a_replica_is_not_written_to(tmp_path: Path, connect: Connect) -> None:
    with SentinelSet(tmp_path, sentinels=1) as servers:
        link = connect(servers.url)
        for loan in [link.borrow("a") for _ in range(5)]:
            loan.give_back()
        servers.primary.pause()
        wait_until(servers.replica.is_primary, "the replica has taken over")
        servers.primary.resume()
        servers.primary.client().replicaof("127.0.0.1", servers.replica.port)  # a Sentinel would take 10 s to do it
        with unavailable("READONLY"):
            link.call("SET", "a", 2)
        heals(link)
        assert link.call("SET", "a", 2) == b"OK"
        assert servers.replica.client().get("a") == b"2"


def test_a_primary_that_was_demoted_is_not_read_from(tmp_path: Path, connect: Connect) -> None:
    """The Sentinels do not know it yet."""
    with SentinelSet(tmp_path, sentinels=1) as servers:
        link = connect(servers.url)
        for loan in [link.borrow("a") for _ in range(5)]:
            loan.give_back()
        servers.primary.client().replicaof("127.0.0.1", servers.replica.port)
        with unavailable("READONLY"):
            link.call("SET", "a", 1)
        with unavailable("no primary"):
            link.call("GET", "a")


def test_sentinels_that_are_down_hung_or_know_nothing(tmp_path: Path, connect: Connect) -> None:
    text = "sentinel monitor other 127.0.0.1 1 1\n"
    with ValkeyServer(tmp_path, sentinel=True, text=text) as first, ValkeyServer(tmp_path, sentinel=True) as second:
        hosts = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        with unavailable("knows no service 'mymaster'"):
            connect(f"redis-sentinel://{hosts}/mymaster").call("PING")
        first.pause()
        second.pause()
        link = connect(f"redis-sentinel://{hosts}/mymaster")
        with unavailable():
            link.call("PING")
    with unavailable():
        connect(f"redis-sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/mymaster").call("PING")


def test_a_sentinel_with_a_password_gets_ours(tmp_path: Path, connect: Connect) -> None:
    with ValkeyServer(tmp_path, requirepass="s3cret") as primary:
        text = f"requirepass s3cret\nsentinel monitor m 127.0.0.1 {primary.port} 1\nsentinel auth-pass m s3cret\n"
        with ValkeyServer(tmp_path, sentinel=True, text=text) as sentinel:
            assert connect(f"redis-sentinel://:s3cret@127.0.0.1:{sentinel.port}/m").call("PING") == b"PONG"
            with unavailable():
                connect(f"redis-sentinel://:wrong@127.0.0.1:{sentinel.port}/m").call("PING")


# A cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def test_a_cluster_is_used_as_a_whole(cluster: Cluster, connect: Connect) -> None:
    link = connect(f"redis-cluster://127.0.0.1:{cluster.nodes[0].port}{PATIENT}")
    for number in range(100):
        link.call("SET", f"k{number}", number)
    assert link.pipeline([("GET", f"k{number}") for number in range(100)]) == [b"%d" % number for number in range(100)]
    assert all(node.client().dbsize() > 10 for node in cluster.nodes)
    assert {key for keys in link.scan("k*") for key in keys} == {f"k{number}".encode() for number in range(100)}
    assert len(link.facts()) == 3
    assert link.script("return redis.call('GET', KEYS[1])", ["k7"], []) == b"7"


def test_a_key_that_moves_is_found(cluster: Cluster, connect: Connect) -> None:
    link = connect(cluster.url)
    link.call("SET", "{moving}a", 1)
    slot, home = cluster.place("{moving}a")
    source, target = cluster.nodes[home], cluster.nodes[(home + 1) % 3]
    ids = {node: node.client().execute_command("CLUSTER", "MYID") for node in (source, target)}
    target.client().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.client().execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    assert link.call("SET", "{moving}b", 2) == b"OK"  # sent on to the target for this once
    cluster.move_slot(slot, source, target)
    assert link.pipeline([("GET", "{moving}a"), ("GET", "{moving}b")]) == [b"1", b"2"]
    assert link.script("return redis.call('GET', KEYS[1])", ["{moving}a"], []) == b"1"
    redirected = source.client().info("errorstats")["errorstat_MOVED"]
    assert [link.call("GET", "{moving}a") for _ in range(5)] == [b"1"] * 5
    assert source.client().info("errorstats")["errorstat_MOVED"] == redirected, "the way is known by now"
    cluster.move_slot(slot, target, source)
    assert link.call("GET", "{moving}a") == b"1"


def test_one_node_that_hangs_does_not_stop_the_others(cluster: Cluster, connect: Connect) -> None:
    link = connect(cluster.url)
    keys = _a_key_of_each(cluster, link)
    cluster.nodes[0].pause()  # it is the first of the URL, too
    try:
        with unavailable():
            link.call("GET", keys[0])
        for pause_s in (0, 1.1):  # then the node may be tried again
            with unavailable():
                link.call("GET", keys[0])
            time.sleep(pause_s)
            assert [link.call("GET", key) for key in keys[1:]] == [b"1", b"1"]
    finally:
        cluster.nodes[0].resume()
    wait_until(lambda: all(_answers(link, key) for key in keys), "the node is used again", 10)


def test_a_cluster_that_hangs_as_a_whole(cluster: Cluster, connect: Connect) -> None:
    link = connect(cluster.url)
    for node in cluster.nodes:
        node.pause()
    try:
        with unavailable():
            link.call("GET", "a")
    finally:
        for node in cluster.nodes:
            node.resume()
    wait_until(lambda: _answers(link, "a"), "the cluster is used again", 10)


def test_a_server_that_is_no_cluster(valkey: ValkeyServer, cluster: Cluster, connect: Connect) -> None:
    with unavailable("cluster support disabled"):
        connect(f"redis-cluster://127.0.0.1:{valkey.port}").call("GET", "a")
    keys = _a_key_of_each(cluster, connect(cluster.url))
    with unavailable("redis-cluster://"):
        connect(cluster.nodes[0].url).call("GET", keys[1])


def _a_key_of_each(cluster: Cluster, link: RedisLink) -> list[str]:
    """A key on each node, in the order of the nodes."""
    places: dict[int, str] = {}
    for number in range(100):
        places.setdefault(cluster.place(f"k{number}")[1], f"k{number}")
    for key in places.values():
        link.call("SET", key, 1)
    return [places[index] for index in range(3)]


def _answers(link: RedisLink, key: str) -> bool:
    try:
        link.call("GET", key)
    except StoreUnavailable:
        return False
    return True
