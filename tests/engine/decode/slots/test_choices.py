"""The next tokens of rows: drawn as `torch.multinomial` draws them, and the same in a recording as behind any pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvshelf.api.answers import Answer
from kvshelf.api.options import Ask
from kvshelf.engine.attention.attachment import Attachment
from kvshelf.engine.decode.batch import DecodeBatch
from kvshelf.engine.decode.generation import Generation, Sampler, Sampling
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.decode.slots.choices import Draws, TokenRules, choose
from kvshelf.engine.decode.slots.slots import Slots
from kvshelf.engine.engine import Engine
from kvshelf.methods.policies.gate_file import gate_path
from kvshelf.model import loading
from tests.engine.decode.slots.test_slots import Counted, Tape
from tests.methods.policies.gates import random_gates


def drawn(logits: torch.Tensor, samplers: list[Sampler]) -> list[int]:
    """Tokens of rows `[rows, vocabulary]`, which are then taken."""
    settings = torch.tensor([(sampler.temperature, sampler.top_p) for sampler in samplers]).T
    numbers = torch.stack([sampler.numbers(logits.shape[1]) for sampler in samplers])
    tokens = choose(logits, TokenRules(None, Draws(*settings, numbers))).tolist()
    for sampler in samplers:
        sampler.took()
    return tokens


def by_multinomial(logits: torch.Tensor, ask: Ask, generator: torch.Generator) -> int:
    """One row by itself."""
    scaled = (logits.float() - logits.float().max()) / max(ask.temperature, 1e-30)
    ranked, order = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
    beyond = ranked.cumsum(0) - ranked >= ask.top_p
    beyond[0] = False
    ranked[beyond] = 0
    return int(order[torch.multinomial(ranked, 1, generator=generator)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_draws_what_multinomial_draws_whatever_rows_are_beside(dtype: torch.dtype) -> None:
    asks = [
        Ask(temperature=temperature, top_p=top_p, seed=seed)
        for seed, (temperature, top_p) in enumerate(
            [
                (1.0, 1.0),
                (0.7, 0.9),
                (3.0, 0.5),
                (1e-40, 1.0),
                (1.0, 1e-300),
                (0.2, 1.0),
                (5.0, 0.99),
                (1.0, 0.2),
                (2.0, 1.0),
            ]
        )
    ]
    samplers = [Sampler(ask) for ask in asks]
    generators = [torch.Generator().manual_seed(ask.seed or 0) for ask in asks]
    logits = 3 * torch.randn(40, len(asks), 1009, generator=torch.Generator().manual_seed(0))
    logits[:, :, ::7] = -torch.inf
    logits[:, :, 5] = logits[:, :, 6]
    for step in logits.to(dtype):
        alone = [by_multinomial(*each) for each in zip(step, asks, generators, strict=True)]
        assert drawn(step, samplers) == alone


def test_numbers_are_the_same_until_the_token_is_taken() -> None:
    sampler = Sampler(Ask(temperature=1.0, seed=1))
    first = sampler.numbers(50)
    assert torch.equal(sampler.numbers(50), first)
    sampler.took()
    assert not torch.equal(sampler.numbers(50), first)


def test_top_p_cuts_the_tail_and_keeps_the_first() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])  # probabilities 0.64, 0.24, 0.09, 0.03

    def draws(top_p: float) -> set[int]:
        samplers = [Sampler(Ask(temperature=1.0, top_p=top_p, seed=seed)) for seed in range(300)]
        return set(drawn(logits.expand(300, -1), samplers))

    assert draws(1e-320) == {0}  # as a float32 it is 0
    assert draws(0.01) == {0}
    assert draws(0.8) == {0, 1}
    assert draws(0.9) == {0, 1, 2}
    assert draws(1.0) == {0, 1, 2, 3}  # 300 draws miss the last one with a chance of 1e-4, and the seeds are fixed


def test_sampling_follows_the_probabilities() -> None:
    sampler = Sampler(Ask(temperature=0.5, seed=3))
    share = sum(drawn(torch.tensor([[1.0, 0.0]]), [sampler]) == [0] for _ in range(2000)) / 2000
    assert abs(share - 0.8808) < 0.03  # four standard deviations


def test_a_row_without_numbers_has_no_token_and_others_have_theirs() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(4, 1)
    logits[1, 0], logits[2, 1] = torch.nan, torch.inf
    bits = torch.tensor([[0b011], [-1], [-1], [0]], dtype=torch.int32)
    assert choose(logits, TokenRules(bits, None)).tolist() == [1, -1, -1, -1]
    assert torch.equal(logits[0], torch.tensor([0.0, 1.0, 2.0])), "what the model gave is told as it is"


DRAWN = Ask(temperature=0.9, seed=3)
SAMPLINGS = (
    Sampling(14),
    Sampling(14, DRAWN),
    Sampling(14, Ask(temperature=1.5, top_p=0.8, seed=4), logprobs=2),
    Sampling(14, DRAWN, Grammar.of({"grammar": "start: /[0-9 ]{20,30}/"})),
    Sampling(14, Ask(), Grammar.of({"choices": ["the tide turns and the boats wait", "yes"]}), logprobs=1),
    Sampling(14, Ask(temperature=0.5, seed=9)),
)
SUFFIXES = (None, "h2o", None, "trimkv", None, "h2o")
"""Of the answers: `h2o` asks what each token gave to the suffix, and `trimkv` for queries, keys and values."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    """By modules that torch's operations compute, of which a tape sees each."""
    return Engine(*loading.load("kvshelf-tiny", device="cpu", dtype="float32"), name="kvshelf-tiny")


@pytest.fixture
def document(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Attachment:
    """With gates for its model."""
    monkeypatch.setenv("KVSHELF_GATES", str(tmp_path))
    weights = engine.identity.weights
    gates = random_gates("trimkv", engine.preparer.geometry, weights=weights)
    gate_path(weights, "trimkv").write_bytes(gates.to_bytes())
    return engine.attach(engine.compress("The gate code is 482913. " * 12, policy="full"))


def begun(engine: Engine, document: Attachment, number: int) -> Generation:
    question = engine.encode_query(document, f"Tell me more of {number}.")
    suffix, reducer = SUFFIXES[number], None
    if suffix is not None:
        reducer = engine.bound(suffix, question_tokens=len(question), budget=len(question) + 5, params={"every": 2})
    return engine.start(document, question, SAMPLINGS[number], reducer=reducer)


def answers(engine: Engine, document: Attachment, slots: Slots | None, *, together: bool) -> list[Answer]:
    """Of all kinds; those that join later find the others under way."""
    rows = [begun(engine, document, number) for number in range(len(SAMPLINGS))]
    batch = DecodeBatch(engine.passes, slots)
    for group in [rows] if together else [[row] for row in rows]:
        while any(not row.finished for row in group):
            batch.step([row for row in group if not row.finished])
        for row in group:
            batch.leave(row)
    return [row.answer() for row in rows]


@pytest.mark.parametrize("form", ["eager", "native"])
def test_answers_of_every_kind_sit_in_slots_together_and_are_what_they_are_alone(
    engine: Engine, document: Attachment, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    if form == "eager":
        monkeypatch.setenv("KVSHELF_KERNELS", form)
    alone = answers(engine, document, None, together=False)
    tape = Tape()
    slots = Counted(tape if form == "eager" else None)
    together = answers(engine, document, slots, together=True)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    for mine, own in zip(together, alone, strict=True):
        for told, expected in zip(mine.logprobs or (), own.logprobs or (), strict=True):
            assert told.token == expected.token
            assert told.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert len(slots.sat) == max(len(answer.token_ids) for answer in alone) - 1, "every step but that of the questions"
    if form == "eager":
        assert tape.recorded >= 2, "with the weights of suffixes, and without"
        assert slots.replayed > 4
