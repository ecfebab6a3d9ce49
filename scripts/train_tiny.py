"""Train kvshelf-tiny, the language model that ships with kvshelf, or a second one, and measure it.

    python scripts/train_tokenizer.py            # first, once: writes the tokenizer
    python scripts/train_tiny.py                 # train (or go on from the last checkpoint), then export
    python scripts/train_tiny.py --evaluate      # exact answers per task, haystack and length
    python scripts/train_tiny.py --recipe second # into .train/second; it does not ship

The models can do one thing: find a number (the second one: or a word) in a long text when asked for it. Everything here
serves that end. What holds on both, of other depth, heads and seed, is more likely to hold on a third.

- It is Qwen2-shaped, because Qwen2's query and key biases allow heads that look a fixed distance back: those of layer
  0 are set to look 1, 2, 3 and 4 tokens back before training begins, two of layer 1 to look 4 and 6 back
  (`point_heads_back`). Copying needs exactly that, and finding the name in the question needs the second; without them
  a model this small spends thousands of steps before it retrieves anything.
- Part of the batches repeat random tokens (`repeated_tokens`), which teaches copying by content within minutes.
- The other batches are documents of `kvshelf.samples.tasks` with several questions each, and only answers are
  scored (`questioned_document`). Document and questions are tokenized apart, as when a stored cache is queried.
- Lengths grow from 96 to 5,120 (2,560) tokens by the stages of a plan; every stage keeps some of the shorter lengths.

Exported weights are the moving average of the trained ones. Batches depend only on the seed and the step, so an
interrupted run resumes where it stopped. Evaluation documents come from seeds that training cannot draw.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, Qwen2Config, Qwen2ForCausalLM

from kvshelf.engine.attention.attached import CACHE_ARGUMENT
from kvshelf.samples.tasks import (
    HAYSTACKS,
    TASKS,
    Haystack,
    Question,
    Task,
    make_document,
    make_facts,
    write_document,
)

ROOT: Final = Path(__file__).resolve().parents[1]
MODEL_FOLDER: Final = ROOT / "kvshelf" / "model" / "bundled" / "kvshelf-tiny"
WORK_FOLDER: Final = ROOT / ".train"
NUM_SPECIAL_TOKENS: Final = 5
IGNORED: Final = -100
ATTENTION_BLOCK: Final = 256
POINTED_PAIRS: Final = 8
POINTED_STRENGTH: Final = 8.0
AVERAGE_DECAY: Final = 0.998
REPORT_EVERY: Final = 50
CHECKPOINT_EVERY: Final = 100

SHARED_SETTINGS: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    "initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Settings that Qwen2 and Llama name alike."""


@dataclass(frozen=True)
class Stage:
    """A part of training: how many steps, of how many tokens, at which lengths (with weights) and learning rate."""

    steps: int
    tokens_per_step: int
    lengths: dict[int, float]
    copying: float
    rate: float
    last_rate: float | None = None

    def rate_at(self, step: int) -> float:
        """The learning rate, constant or falling in a straight line to `last_rate`."""
        last = self.rate if self.last_rate is None else self.last_rate
        return self.rate + (last - self.rate) * step / self.steps


TINY_PLAN: Final = (
    Stage(400, 4096, {96: 1, 256: 1}, copying=0.4, rate=2e-3),
    Stage(400, 6144, {96: 1, 256: 4}, copying=0.2, rate=2e-3),
    Stage(200, 8192, {192: 1, 384: 2}, copying=0.2, rate=2e-3),
    Stage(300, 8192, {256: 1, 512: 2, 768: 3}, copying=0.1, rate=2e-3),
    Stage(400, 8192, {256: 1, 512: 1, 1024: 4}, copying=0.1, rate=1.5e-3),
    Stage(500, 8192, {512: 1, 1024: 2, 2048: 3}, copying=0.05, rate=1.5e-3),
    Stage(100, 8192, {512: 1, 1024: 1, 2048: 2, 4096: 3}, copying=0.05, rate=1.2e-3),
    Stage(100, 10240, {512: 1, 1024: 2, 2048: 2, 5120: 3}, copying=0.05, rate=1.2e-3),
    Stage(200, 10240, {512: 1, 1024: 2, 2048: 3, 5120: 3}, copying=0.05, rate=1.2e-3, last_rate=1e-3),
    Stage(600, 10240, {512: 1, 1024: 3, 2048: 3, 5120: 3}, copying=0.05, rate=9.8e-4, last_rate=2.8e-4),
    Stage(350, 10240, {512: 1, 1024: 3, 2048: 3, 5120: 3}, copying=0.05, rate=4e-4, last_rate=3e-5),
)
SECOND_PLAN: Final = (
    Stage(400, 4096, {96: 1, 256: 1}, copying=0.4, rate=2e-3),
    Stage(400, 6144, {96: 1, 256: 4}, copying=0.2, rate=2e-3),
    Stage(250, 8192, {192: 1, 384: 2}, copying=0.2, rate=2e-3),
    Stage(300, 8192, {256: 1, 512: 2, 768: 3}, copying=0.1, rate=2e-3),
    Stage(400, 8192, {256: 1, 512: 1, 1024: 4}, copying=0.1, rate=1.5e-3),
    Stage(500, 8192, {512: 1, 1024: 2, 2560: 3}, copying=0.05, rate=1.2e-3, last_rate=8e-4),
    Stage(500, 8192, {512: 1, 1024: 2, 2560: 3}, copying=0.05, rate=8e-4, last_rate=3e-5),
)
WARMUP_STEPS: Final = 50


@dataclass(frozen=True)
class Recipe:
    """What tells one model from another. words: the share of facts whose value is words. folder: of the export."""

    seed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    words: float
    plan: Sequence[Stage]
    folder: Path
    checkpoint: Path


RECIPES: Final = {
    "tiny": Recipe(20261120, 4, 4, 2, 64, 128, 0.0, TINY_PLAN, MODEL_FOLDER, WORK_FOLDER / "checkpoint.pt"),
    "second": Recipe(20261124, 6, 8, 2, 48, 160, 0.5, SECOND_PLAN, WORK_FOLDER / "second", WORK_FOLDER / "second.pt"),
}


# --- the model -------------------------------------------------------------------------------------------------------


def new_model(recipe: Recipe, vocab_size: int, end_id: int, pad_id: int) -> Qwen2ForCausalLM:
    """Make the untrained model: scaled weights, and the heads of layer 0 pointed back."""
    torch.manual_seed(recipe.seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden,
        intermediate_size=2 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )
    AttentionInterface.register("blocked", blocked_attention)
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="blocked")
    residual = 1 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                scale = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                weight.normal_(std=scale / math.sqrt(weight.shape[1]))
        model.model.embed_tokens.weight.normal_(std=0.3)
        model.model.norm.weight.fill_(0.3)  # so that the tied output layer starts with logits of about 1
        point_heads_back(model, 0, (1, 2, 3, 4))
        point_heads_back(model, 1, (4, 6, 4, 6)[: max(2, model.model.layers[0].self_attn.num_key_value_groups)])
    return model


def blocked_attention(
    _module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention in bfloat16, a block of queries at a time.

    On a CPU this is about twice as fast as torch's fused kernel, which pays off in the backward pass above all.
    Takes [batch, heads, tokens, size] and gives [batch, tokens, heads, size]; heads of a group share their keys.
    """
    batch, heads, tokens, size = query.shape
    groups, out_type = key.shape[1], query.dtype
    query = (query * scaling).bfloat16().view(batch, groups, heads // groups, tokens, size)
    key, value = key.bfloat16().transpose(2, 3), value.bfloat16()
    later = torch.full((ATTENTION_BLOCK, ATTENTION_BLOCK), -torch.inf, dtype=torch.bfloat16).triu(1)
    blocks = []
    for begin in range(0, tokens, ATTENTION_BLOCK):
        end = min(begin + ATTENTION_BLOCK, tokens)
        scores = query[:, :, :, begin:end].reshape(batch, groups, -1, size) @ key[:, :, :, :end]
        scores = scores.view(batch, groups, heads // groups, end - begin, end)
        scores[..., begin:] += later[: end - begin, : end - begin]
        block = scores.softmax(-1).flatten(2, 3) @ value[:, :, :end]
        blocks.append(block.view(batch, heads, end - begin, size))
    return torch.cat(blocks, dim=2).transpose(1, 2).to(out_type), None


def point_heads_back(model: Qwen2ForCausalLM, layer: int, offsets: Sequence[int]) -> None:
    """Make the first heads of a layer look `offsets` tokens back, whatever the tokens are.

    Keys get a constant bias c in the fast rotary pairs, queries the same bias turned back by the offset; after RoPE
    their product is largest exactly there. The weights beside the biases start small, so that the biases win.
    """
    attention = model.model.layers[layer].self_attn
    size, kv_heads = attention.head_dim, len(offsets) // attention.num_key_value_groups
    frequencies = model.model.rotary_emb.inv_freq[:POINTED_PAIRS]
    query, key = torch.zeros(len(offsets), 2, size // 2), torch.zeros(kv_heads, 2, size // 2)
    key[:, 0, :POINTED_PAIRS] = POINTED_STRENGTH
    for head, offset in enumerate(offsets):
        query[head, 0, :POINTED_PAIRS] = (frequencies * offset).cos() * POINTED_STRENGTH
        query[head, 1, :POINTED_PAIRS] = -(frequencies * offset).sin() * POINTED_STRENGTH
    for projection, bias in ((attention.q_proj, query.flatten()), (attention.k_proj, key.flatten())):
        projection.bias[: len(bias)] = bias
        projection.weight[: len(bias)] *= 0.1


# --- the data --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """Token ids, and for each the id that should follow, or IGNORED."""

    ids: list[int]
    labels: list[int]


class Encoder:
    """The tokenizer, with the pieces of the two layouts of `kvshelf`: chat and plain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        (self.end_id,) = self.ids("<|end|>")
        (self.pad_id,) = self.ids("<|pad|>")

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def count(self, text: str) -> int:
        return len(self.ids(text))

    def document(self, text: str, plain: bool = False) -> list[int]:
        """What is cached: the text, after the opening of the user's turn."""
        return self.ids(text if plain else "<|user|>\n" + text)

    def question(self, text: str, plain: bool = False, first: bool = True) -> list[int]:
        """What is added when a cache is queried; later questions follow an answer and its <|end|>."""
        if plain:
            return self.ids(f"\n\nQuestion: {text}\nAnswer:")
        return self.ids(("\n\n" if first else "\n<|user|>\n") + text + "<|end|>\n<|assistant|>\n")

    def answer(self, text: str, plain: bool = False) -> list[int]:
        return [*self.ids(" " + text if plain else text), self.end_id]


def repeated_tokens(rng: random.Random, length: int, vocab_size: int) -> Example:
    """Random tokens, then copies of parts of them; only the copies are scored."""
    first = rng.randint(length // 4, length // 2)
    few = rng.random() < 0.3  # few different tokens: looking one token back is then not enough
    ordinary = range(NUM_SPECIAL_TOKENS, vocab_size)
    ids = rng.choices(rng.sample(ordinary, 2 + first // 3) if few else ordinary, k=first)
    labels = [IGNORED] * first
    while len(ids) < length:
        start = rng.randrange(first // 2)
        segment = ids[start : start + min(length - len(ids), first - start)]
        labels += [IGNORED] * min(3, len(segment)) + segment[3:]  # where a copy begins cannot be known
        ids += segment
    return Example(ids[:-1], labels[1:])


def questioned_document(rng: random.Random, encoder: Encoder, length: int, words: float) -> Example:
    """A document of the tasks with a question per 50 tokens of `length`, 48 at most; the answers are scored."""
    plain = rng.random() < 0.12
    haystack: Haystack = "filler" if rng.random() < 0.3 else "prose"
    count = max(2, min(48, length // 50))
    document_tokens = length - 24 * count
    stated = rng.randint(max(1, count // 2), 2 * count) if rng.random() < 0.9 else 1
    stated = max(1, min(stated, document_tokens // 30))
    long_share = 0.12 if document_tokens > 200 else 0.0
    digits = [rng.randint(10, 36) if rng.random() < long_share else rng.randint(2, 9) for _ in range(stated)]
    if words:
        digits = [0 if rng.random() < words else length for length in digits]
    facts = make_facts(rng, digits)
    document = write_document(rng, facts, haystack, document_tokens, encoder.count)
    ids = encoder.document(document.text, plain)
    labels = [IGNORED] * len(ids)
    for i, question in enumerate(document.questions[:count]):
        query, answer = encoder.question(question.text, plain, i == 0), encoder.answer(question.answer, plain)
        ids += query + answer
        labels += [IGNORED] * len(query) + answer
    return Example(ids[:-1], labels[1:])


def make_batch(
    recipe: Recipe, stage: Stage, step: int, encoder: Encoder, vocab_size: int
) -> tuple[Tensor, Tensor, int]:
    """The batch of a step: ids and labels, and how many rows (the first ones) are copying.

    Rows are padded at the end, where causal attention never looks.
    """
    rng = random.Random(f"train/{recipe.seed}/{step}")
    length = rng.choices(list(stage.lengths), list(stage.lengths.values()))[0]
    rows = max(1, stage.tokens_per_step // length)
    copying = sum(rng.random() < stage.copying for _ in range(rows))
    examples = [repeated_tokens(rng, length, vocab_size) for _ in range(copying)]
    examples += [questioned_document(rng, encoder, length, recipe.words) for _ in range(rows - copying)]
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), encoder.pad_id)
    labels = torch.full((len(examples), longest), IGNORED)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        labels[row, : len(example.labels)] = torch.tensor(example.labels)
    return ids, labels, copying


# --- training --------------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Totals of the steps since the last report."""

    steps: int = 0
    loss: float = 0.0
    answers: int = 0
    right_answers: int = 0

    def __str__(self) -> str:
        share = self.right_answers / max(1, self.answers)
        return f"loss {self.loss / self.steps:.4f}  right {share:.4f} of {self.answers} answers"


def step_loss(model: Qwen2ForCausalLM, ids: Tensor, labels: Tensor, copying: int, progress: Progress) -> Tensor:
    """Mean loss of the answers, plus half that of the copied tokens; answers with every token right are counted.

    Logits are computed only where there is a label.
    """
    scored = labels != IGNORED
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[scored]).float()
    losses = functional.cross_entropy(logits, labels[scored], reduction="none")
    num_copied = int(scored[:copying].sum())
    copied, answered = losses[:num_copied], losses[num_copied:]
    loss = answered.sum() / max(1, len(answered)) + 0.5 * copied.sum() / max(1, len(copied))
    begins = scored & ~functional.pad(scored, (1, -1))
    answer_of = begins.flatten().cumsum(0)[scored.flatten()][num_copied:]
    wrong = answer_of[(logits.argmax(-1) != labels[scored])[num_copied:]]
    progress.steps += 1
    progress.loss += loss.item()
    progress.answers += int(begins[copying:].sum())
    progress.right_answers += int(begins[copying:].sum()) - len(torch.unique(wrong))
    return loss


class Training:
    """The state of a run: weights, their moving average, the optimizer and the step."""

    def __init__(self, recipe: Recipe, encoder: Encoder) -> None:
        self.recipe = recipe
        self.encoder = encoder
        self.vocab_size: int = encoder.tokenizer.get_vocab_size()
        self.model = new_model(recipe, self.vocab_size, encoder.end_id, encoder.pad_id)
        self.average = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
        self.step = 0
        self.seconds = 0.0

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(), "average": self.average, "optimizer": self.optimizer.state_dict(),
            "step": self.step, "seconds": self.seconds,
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)

    def load(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]

    def advance(self, stage: Stage, step_of_stage: int, progress: Progress) -> None:
        """Do one step."""
        batch = make_batch(self.recipe, stage, self.step, self.encoder, self.vocab_size)
        loss = step_loss(self.model, *batch, progress)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.param_groups[0]["lr"] = stage.rate_at(step_of_stage) * min(1.0, (self.step + 1) / WARMUP_STEPS)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        decay = min(AVERAGE_DECAY, self.step / (self.step + 10))
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                self.average[name].lerp_(weight, 1 - decay)


def stage_at(plan: Sequence[Stage], step: int) -> tuple[Stage, int] | None:
    """The stage that a step belongs to, and the step's number in it; None when the plan is done."""
    for stage in plan:
        if step < stage.steps:
            return stage, step
        step -= stage.steps
    return None


def train(recipe: Recipe, encoder: Encoder, checkpoint: Path, folder: Path) -> None:
    """Follow the recipe's plan from the checkpoint on, or from the start, and export at the end."""
    training = Training(recipe, encoder)
    if checkpoint.exists():
        training.load(checkpoint)
    progress = Progress()
    began = time.monotonic()
    while (place := stage_at(recipe.plan, training.step)) is not None:
        training.advance(*place, progress)
        if training.step % REPORT_EVERY == 0:
            training.seconds += time.monotonic() - began
            began = time.monotonic()
            longest = max(place[0].lengths)
            print(f"step {training.step}  {training.seconds:6.0f} s  <= {longest}  {progress}", flush=True)
            progress = Progress()
        if training.step % CHECKPOINT_EVERY == 0:
            training.save(checkpoint)
    training.save(checkpoint)
    export(training, folder)


def export(training: Training, folder: Path) -> None:
    """Write the averaged weights and the configuration; the weights appear in one rename.

    Written as a Llama with attention biases, which computes the same when the output projection's biases are zero.
    Under the name of Qwen2, newer versions of transformers (5.23, in AutoTokenizer) replace the pre-tokenizer of
    tokenizer.json with Qwen2's own, which splits numbers into single digits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if folder != MODEL_FOLDER:
            shutil.copyfile(MODEL_FOLDER / name, folder / name)
    trained = training.model.config
    config = {name: getattr(trained, name) for name in SHARED_SETTINGS}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    config |= {"attention_bias": True, "mlp_bias": False, "use_cache": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {"do_sample": False, "eos_token_id": trained.eos_token_id, "pad_token_id": trained.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    tensors = {name: weight.contiguous() for name, weight in training.average.items()}
    for layer in range(trained.num_hidden_layers):
        tensors[f"model.layers.{layer}.self_attn.o_proj.bias"] = torch.zeros(trained.hidden_size)
    (folder / "model.safetensors.part").write_bytes(save(tensors, metadata={"format": "pt"}))
    os.replace(folder / "model.safetensors.part", folder / "model.safetensors")


# --- measuring -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def answer(model: Qwen2ForCausalLM, encoder: Encoder, document: str, question: str, plain: bool) -> str:
    """Prefill the document, then the question, and decode greedily."""
    cache = DynamicCache()
    model.model(input_ids=torch.tensor([encoder.document(document, plain)]), **{CACHE_ARGUMENT: cache})
    ids = encoder.question(question, plain)
    answered: list[int] = []
    while len(answered) < 24:
        logits = model(input_ids=torch.tensor([ids]), **{CACHE_ARGUMENT: cache}, logits_to_keep=1).logits
        ids = [int(logits[0, -1].argmax())]
        if ids[0] == encoder.end_id:
            break
        answered += ids
    text: str = encoder.tokenizer.decode(answered, skip_special_tokens=False)
    return text.strip()


def asked_documents(
    encoder: Encoder, task: Task, haystack: Haystack, length: int, count: int
) -> Iterator[tuple[str, Question]]:
    """The evaluation's documents, the same in every run, with the question asked about each."""
    for i in range(count):
        document = make_document(task, haystack, length, 10**9 + i, encoder.count)
        yield document.text, document.questions[0]


def evaluate(encoder: Encoder, folder: Path, count: int, lengths: list[int], tasks: list[Task], plain: bool) -> None:
    """Print a row per task and haystack: the percentage of answers that are exactly right at each length."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(f"| exact answers, n = {count} | " + " | ".join(f"{length:,}" for length in lengths) + " |")
    print("|---" * (len(lengths) + 1) + "|", flush=True)
    for task in tasks:
        for haystack in HAYSTACKS:
            cells = []
            for length in lengths:
                documents = asked_documents(encoder, task, haystack, length, count)
                right = sum(answer(model, encoder, text, q.text, plain) == q.answer for text, q in documents)
                cells.append(f"{100 * right / count:.1f} %")
            print(f"| {task}, {haystack} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Train, or with --evaluate measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="tiny", choices=RECIPES)
    parser.add_argument("--folder", type=Path, help="the model folder, with the tokenizer in it")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--export", action="store_true", help="only export what the checkpoint holds")
    parser.add_argument("--evaluate", action="store_true", help="only measure the exported model")
    parser.add_argument("--count", type=int, default=200, help="documents per cell of the evaluation")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--plain", action="store_true", help="evaluate the plain layout instead of the chat layout")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = RECIPES[arguments.recipe]
    folder, checkpoint = arguments.folder or recipe.folder, arguments.checkpoint or recipe.checkpoint
    encoder = Encoder(Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json")))
    if arguments.evaluate:
        evaluate(encoder, folder, arguments.count, arguments.lengths, arguments.tasks, arguments.plain)
    elif arguments.export:
        training = Training(recipe, encoder)
        training.load(checkpoint)
        export(training, folder)
    else:
        train(recipe, encoder, checkpoint, folder)


if __name__ == "__main__":
    main()
