"""Every policy and codec once on a real model."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from kvshelf import Client, Engine
from kvshelf.errors import PolicyUnsupported
from kvshelf.methods.policies import POLICIES

QUESTION = "Who founded the Larkfield Tool Library?"


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"kvdirect"}))  # SmolLM2 has grouped queries
def test_a_policy(engine: Engine, handbook: str, policy: str) -> None:
    """One that needs gates is first refused with the command that trains them, and that command is what is run, for one
    step: a cache of such gates loses what it likes, but it is made, and answers."""
    given = {"compression_ratio": 0.5} if POLICIES[policy].takes_budget else {}
    document = handbook[:1600]
    try:
        job = engine.prepare(document, policy=policy, **given)
    except PolicyUnsupported as error:
        command = error.message.split("train them with: kvshelf ")[1]
        subprocess.run(
            [sys.executable, "-m", "kvshelf", *shlex.split(command), "--steps", "1", "--length", "512"], check=True
        )
        job = engine.prepare(document, policy=policy, **given)
    cache = engine.run(job).cache
    assert 0 < cache.kept_tokens <= cache.num_tokens
    assert (cache.kept_tokens < cache.num_tokens) is POLICIES[policy].takes_budget
    assert cache.num_tokens == len(engine.encode_document(document).token_ids)
    assert engine.answer(cache, QUESTION, max_new_tokens=6).token_ids


@pytest.mark.parametrize("codec", ["none", "lossless", "int8", "int4", "int2", "mixed", "klt"])
def test_a_codec(shelf: Client, stored: str, handbook: str, codec: str) -> None:
    made = shelf.caches.create(document=handbook, policy="full", codec=codec, quality=False)
    whole = shelf.caches.retrieve(stored)
    assert (made.tokens, made.codec) == (whole.tokens, codec)
    assert made.bytes.stored <= whole.bytes.stored
    answer = shelf.caches.query(made.id, QUESTION, max_tokens=12)
    if codec in ("none", "lossless", "int8"):
        assert answer.text == shelf.caches.query(stored, QUESTION, max_tokens=12).text
