"""The training of gates: steps over lessons, a journal, checkpoints, and an early stop.

The number of a step decides its lesson. So a resumed training ends with the same gates, to the bit on one machine.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from kvshelf.artifact.identity import canonical_json, digest
from kvshelf.atomic import written
from kvshelf.errors import InvalidRequest
from kvshelf.methods.policies.gate_file import GateHeader, Gates, Training, metadata, to_safetensors
from kvshelf.methods.policies.gates.base import GatePolicy
from kvshelf.training.gates.lessons import Lesson

if TYPE_CHECKING:
    from kvshelf.engine.engine import Engine

CHECKPOINT_EVERY: Final = 50
HELD_OUT: Final = 8
"""Lessons that no step learns from; a training of fewer steps has as many as steps."""
_PATIENCE: Final = 8
"""Checkpoints without a better agreement on the held-out lessons, in a row, that end a training."""
_WARM_UP: Final = 50
_CLIP: Final = 0.5
_MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")

Lessons = Callable[[int], Lesson]
"""A lesson by its number, the same one each time; the held-out ones have numbers below 0."""


@dataclass(eq=False)
class Objective(ABC):
    """The gates of one policy while they are trained. width: of the network. rate: of learning. state: all tensors by
    their names in the file, fp32; those that require a gradient are trained."""

    policy: type[GatePolicy]
    engine: Engine
    width: int
    rate: ClassVar[float] = 2e-3
    state: dict[str, Tensor] = field(default_factory=dict, init=False)

    @abstractmethod
    def begin(self, lesson: Lesson) -> None:
        """Fit the tensors that are not trained, as the scale of the inputs, to the first lesson."""

    @abstractmethod
    def learn(self, lesson: Lesson) -> tuple[float, str]:
        """Add the gradients of one lesson. Returns its loss and a digest of the text that the model read."""

    @abstractmethod
    def agreement(self, lesson: Lesson) -> float:
        """The rank correlation of the gates' scores with their targets on a held-out lesson, 1 at best."""


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training: a checkpoint of others is refused."""

    steps: int
    length: int
    seed: int


@dataclass(frozen=True)
class Checkpoint:
    """The paths of the journal and the last checkpoint of a training, beside the gate file that it will write."""

    output: Path

    @property
    def journal(self) -> Path:
        return self.output.with_suffix(".journal.jsonl")

    @property
    def state(self) -> Path:
        return self.output.with_suffix(".checkpoint")


@dataclass
class Trainer:
    """Trains one objective. report: called with each line of the journal."""

    engine: Engine
    objective: Objective
    lessons: Lessons
    settings: TrainingSettings
    files: Checkpoint
    report: Callable[[Mapping[str, Any]], None] = lambda _: None
    _journal: list[dict[str, Any]] = field(default_factory=list, init=False)
    _losses: list[float] = field(default_factory=list, init=False)
    _data: str = field(default="", init=False)
    _best: dict[str, Tensor] = field(default_factory=dict, init=False)

    def run(self, *, resume: bool) -> Gates:
        """Train, and write the gate file; then the checkpoint goes, and the journal stays.

        resume: go on from the checkpoint. Raises `InvalidRequest` where there is none, or it is of another training.
        """
        torch.manual_seed(self.settings.seed)
        self.objective.begin(self.lessons(0))
        trained = [tensor for tensor in self.objective.state.values() if tensor.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.objective.rate, betas=(0.9, 0.95))
        first = self._restore(optimizer) if resume else 0
        for step in range(first, self.settings.steps):
            if self._stopped():
                break
            self._step(step, optimizer, trained)
            if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == self.settings.steps:
                self._save(step + 1, optimizer)
        gates = self._gates()
        with written(self.files.output) as file:
            file.write(gates.to_bytes())
        self.files.state.unlink(missing_ok=True)
        return gates

    def _step(self, step: int, optimizer: torch.optim.Optimizer, trained: list[Tensor]) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.objective.rate * min((step + 1) / _WARM_UP, 1 - step / self.settings.steps)
        optimizer.zero_grad()
        loss, read = self.objective.learn(self.lessons(step))
        torch.nn.utils.clip_grad_value_(trained, _CLIP)
        optimizer.step()
        self._losses.append(loss)
        self._data = digest("kvshelf.gates.data", self._data, read)

    def _stopped(self) -> bool:
        """Whether the last `_PATIENCE` checkpoints were no better."""
        held_out = [line["held_out"] for line in self._journal]
        return len(held_out) > _PATIENCE and max(held_out[-_PATIENCE:]) <= max(held_out[:-_PATIENCE])

    def _save(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Write the state, and then the journal: after a crash between the two, the state has the journal."""
        lessons = range(min(HELD_OUT, self.settings.steps))
        held_out = fmean(self.objective.agreement(self.lessons(-1 - i)) for i in lessons)
        line = {"step": step, "loss": round(fmean(self._losses), 6), "held_out": round(held_out, 6)}
        self._losses = []
        if all(line["held_out"] > before["held_out"] for before in self._journal):
            self._best = {name: tensor.detach().clone() for name, tensor in self.objective.state.items()}
        self._journal.append(line)
        about = {"of": self._of(), "step": step, "journal": self._journal, "data": self._data}
        with written(self.files.state) as file:
            file.write(to_safetensors(self._tensors(optimizer), canonical_json(about)))
        with written(self.files.journal) as file:
            file.write("".join(canonical_json(line) + "\n" for line in self._journal).encode())
        self.report(line)

    def _restore(self, optimizer: torch.optim.Optimizer) -> int:
        """Load the checkpoint. Returns the number of the next step."""
        path = self.files.state
        try:
            data = path.read_bytes()
            about = json.loads(metadata(data))
            tensors = load(data)
        except FileNotFoundError as error:
            raise InvalidRequest(f"{path} is not there: train without --resume", param="resume") from error
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InvalidRequest(f"{path} is broken ({error}); train without --resume", param="resume") from error
        if about["of"] != self._of():
            raise InvalidRequest(
                f"{path} is of another training, {about['of']}, and this one is {self._of()}; give the same options, "
                "or train without --resume",
                param="resume",
            )
        for name, tensor in self.objective.state.items():
            tensor.data.copy_(tensors[name])
            if tensor.requires_grad:
                optimizer.state[tensor] = {key: tensors[f"{key} of {name}"] for key in _MOMENTS}
            self._best[name] = tensors[f"best of {name}"]
        self._journal, self._data = about["journal"], about["data"]
        return int(about["step"])

    def _tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The tensors of a checkpoint: the gates, the best ones so far, and the optimizer's moments."""
        tensors = {f"best of {name}": tensor for name, tensor in self._best.items()}
        for name, tensor in self.objective.state.items():
            tensors[name] = tensor.detach()
            if tensor.requires_grad:
                tensors |= {f"{key} of {name}": optimizer.state[tensor][key] for key in _MOMENTS}
        return tensors

    def _of(self) -> str:
        """The text that tells this training from others."""
        policy = self.objective.policy
        about = {"policy": policy.name, "revision": policy.gate_revision, "width": self.objective.width}
        return canonical_json(asdict(self.settings) | about | {"weights": self.engine.identity.weights})

    def _gates(self) -> Gates:
        """The gates of the checkpoint that did best on the held-out lessons."""
        policy, best = self.objective.policy, max(self._journal, key=lambda line: line["held_out"])
        training = Training(
            model=self.engine.name,
            steps=best["step"],
            length=self.settings.length,
            data=self._data,
            seed=self.settings.seed,
            loss=best["loss"],
            held_out=best["held_out"],
        )
        header = GateHeader(
            weights=self.engine.identity.weights,
            policy=policy.name,
            family=policy.family,
            revision=policy.gate_revision,
            width=self.objective.width,
            training=training,
        )
        tensors = {name: stored(tensor) for name, tensor in self._best.items()}
        return Gates.of(header, tensors)


def stored(tensor: Tensor) -> Tensor:
    """A tensor as a gate file has it: matrices with 16 bits a number, vectors with 32."""
    return tensor.detach().to(torch.bfloat16 if tensor.dim() > 1 else torch.float32)


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's correlation of all numbers of two tensors; equal numbers rank by their place."""
    ranks = torch.stack([numbers.flatten().argsort(stable=True).argsort().double() for numbers in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])
