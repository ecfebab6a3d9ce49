"""How doctor --isolation tells a leak from chance."""

from __future__ import annotations

import random
import socket

import pytest
from typer.testing import CliRunner

from kvshelf.cli import app
from kvshelf.cli.checks.isolation import PAIRS, ROUNDS, Party, auc, is_leak, most_auc, nobodys


def test_the_auc() -> None:
    assert auc([1, 2, 3], [4, 5]) == 0
    assert auc([4, 5], [1, 2, 3]) == 1
    assert auc([1, 2], [1, 2]) == 0.5
    assert auc([2, 3], [1, 2]) == pytest.approx((1 + 0.5 + 1 + 1) / 4)


def rounds(draw: random.Random, shift: float) -> list[float]:
    """As `probe` measures: again where the limit was exceeded. shift: in standard deviations of the times."""
    found: list[float] = []
    while len(found) < ROUNDS:
        theirs = [draw.gauss(shift, 1) for _ in range(PAIRS)]
        found.append(auc(theirs, [draw.gauss(0, 1) for _ in range(PAIRS)]))
        if abs(found[-1] - 0.5) <= most_auc(PAIRS) - 0.5:
            break
    return found


def test_chance_is_no_leak_and_a_fifth_of_a_deviation_is() -> None:
    """A shift of 0.36 deviations is an AUC of 0.6."""
    draw = random.Random(43)
    assert not any(is_leak(rounds(draw, 0)) for _ in range(300))
    found = sum(is_leak(rounds(draw, shift)) for shift in (0.36, -0.36) for _ in range(20))
    assert found >= 36


def test_rounds_on_both_sides_are_chance() -> None:
    assert is_leak([0.56, 0.6, 0.57])
    assert is_leak([0.44, 0.4, 0.43])
    assert not is_leak([0.56, 0.4, 0.57])
    assert not is_leak([0.56, 0.6])
    assert not is_leak([0.56, 0.6, 0.55])
    assert most_auc(100) == pytest.approx(0.6)
    assert not is_leak([0.58, 0.59, 0.57], pairs=100)


def test_an_unknown_id_has_the_form_of_a_known_one() -> None:
    known = "kvs_" + "0123456789" * 4
    unknown = nobodys(known)
    assert unknown != known
    assert (len(unknown), unknown[:4]) == (len(known), "kvs_")


@pytest.mark.parametrize(
    ("keys", "said"),
    [([], "two keys"), (["kvsk_a"], "two keys"), (["kvsk_a", "kvsk_a"], "same key"), (["kvsk_a", "gone"], "no key")],
)
def test_what_proves_nothing_is_refused(keys: list[str], said: str) -> None:
    options = [text for key in keys for text in ("--key", key)]
    done = CliRunner().invoke(app, ["doctor", "--isolation", "http://127.0.0.1:9", *options])
    assert done.exit_code == 2
    assert said in done.stderr


def test_what_a_silent_service_keeps_is_named() -> None:
    """Nobody listens at the port: what was made before is left, and the caller hears of all of it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    party = Party(f"http://127.0.0.1:{port}", "key")
    party.created = ["/v1/caches/one", "/v1/caches/two"]
    left = party.clean()
    party.http.close()
    assert [path.split()[0] for path in left] == ["/v1/caches/two", "/v1/caches/one"]
