"""What a shape costs and what it gives (docs/internals/answers.md): answers held to a schema beside answers that are
not.

python scripts/measure_shapes.py      # kvshelf-tiny, one thread
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import jsonschema

from kvshelf.api.answers import Answer
from kvshelf.artifact.cache import CompressedCache
from kvshelf.engine.decode.generation import Sampling
from kvshelf.engine.decode.grammar import Grammar
from kvshelf.engine.engine import Engine
from kvshelf.samples.suite import Case, make_case, score
from kvshelf_bench.engines import EngineOptions, endless_answers
from kvshelf_bench.speed.subject import Subject, load_subject

DOCUMENTS, QUESTIONS, TOKENS = 25, 8, 1024
SCHEMA = {
    "type": "object",
    "properties": {"found": {"type": "boolean"}, "value": {"type": "string", "maxLength": 20}},
    "required": ["found", "value"],
    "additionalProperties": False,
}
NUMBER = {"type": "integer"}
REPEATS, STEPS = 15, 48


def of_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def together(engine: Engine, asks: list[tuple[CompressedCache, str, Mapping[str, Any]]], tokens: int) -> list[Answer]:
    """One batch of answers, each in its shape."""
    batch, rows = engine.batch(), []
    for cache, question, shape in asks:
        sampling = Sampling(tokens, grammar=Grammar.of(shape))
        rows.append(engine.start(cache, engine.encode_query(cache, question), sampling))
    while open_ones := [row for row in rows if not row.finished]:
        for output in batch.step(open_ones):
            if isinstance(output, Exception):
                raise output
    return [row.answer() for row in rows]


def extractions(engine: Engine) -> None:
    count = engine.encoder.require_text("document").count_tokens
    cases: list[Case] = [
        make_case("multikey", "prose", TOKENS, seed, count, questions=QUESTIONS) for seed in range(DOCUMENTS)
    ]
    valid = same = 0
    right = {"free": 0, "within an object": 0, "as a number": 0, "chosen": 0}
    for case in cases:
        cache = engine.compress(case.text, policy="full")
        values = {"choices": [ask.references[0] for ask in case.asks]}
        alone = [engine.answer(cache, ask.text, max_new_tokens=24) for ask in case.asks]
        shapes = [{}, of_schema(SCHEMA), of_schema(NUMBER), values]
        answers = together(engine, [(cache, ask.text, shape) for ask in case.asks for shape in shapes], 64)
        for at, (ask, single) in enumerate(zip(case.asks, alone, strict=True)):
            plain, inside, number, chosen = answers[len(shapes) * at :][: len(shapes)]
            jsonschema.validate(json.loads(inside.text), SCHEMA)
            jsonschema.validate(json.loads(number.text), NUMBER)
            assert chosen.text in values["choices"]
            valid += inside.finish_reason == number.finish_reason == "stop"
            same += plain.text == single.text
            texts = plain.text, json.loads(inside.text)["value"], number.text, chosen.text
            for how, text in zip(right, texts, strict=True):
                right[how] += score(ask, text).exact
    questions = sum(len(case.asks) for case in cases)
    print(
        f"{questions} extractions in batches of {len(shapes) * QUESTIONS}: {valid} valid JSON in both shapes, "
        f"{same} rows without a shape unchanged"
    )
    print("right values:", ", ".join(f"{count / questions:.1%} {how}" for how, count in right.items()))


def costs(subject: Subject, rows: int) -> None:
    engine = subject.engine
    cache = engine.compress(subject.tokens(2048, seed=1), policy="full")
    item = {**SCHEMA, "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name", "n"]}
    endless = {"type": "array", "items": item, "minItems": 200}
    grammar = Grammar.of(of_schema(endless))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for shaped in (True, False) * REPEATS:
        batch, sampling = engine.batch(), Sampling(8 * STEPS * 100, grammar=grammar if shaped else None)
        open_ones = [engine.start(cache, subject.tokens(16, seed=row), sampling) for row in range(rows)]
        batch.step(open_ones)
        began = time.perf_counter()
        for _ in range(STEPS):
            batch.step(open_ones)
        seconds[shaped].append((time.perf_counter() - began) / STEPS)
    inside, outside = (1e3 * median(seconds[shaped]) for shaped in (True, False))
    print(f"{rows} rows: a step {inside:.3f} ms in a shape, {outside:.3f} ms without, ratio {inside / outside:.3f}")


if __name__ == "__main__":
    with load_subject(EngineOptions("kvshelf-tiny", "cpu", "float32")) as subject:
        extractions(subject.engine)
        with endless_answers(subject.engine):
            for rows in (1, 8, 32):
                costs(subject, rows)
