"""The images of a document as the model reads them: states in the places of their tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.job import Job
from kvshelf.engine.progress import Checkpoint
from kvshelf.engine.soft import Placed
from kvshelf.model.images import pixels


@dataclass(frozen=True, eq=False)
class Pictures:
    """placed: of a document's images; None where it has none. seconds: that the vision tower took."""

    placed: Placed | None = None
    seconds: float = 0.0

    @classmethod
    def of(cls, passes: Passes, job: Job, checkpoint: Checkpoint) -> Pictures:
        """Of the document of a job. A file is decoded here again: until now it waited, and is a tenth of its pixels.
        `checkpoint` is called behind each image, and may raise."""
        encoder = passes.facts.images
        if not job.images or encoder is None:
            return cls()
        states, rows, seconds = [], list[int](), 0.0
        for number, image in enumerate(job.images):
            started, param = time.perf_counter(), f"images[{number}]"
            ids = job.document.token_ids[image.first : image.end]
            states.append(encoder.states(pixels(image.data, param), ids, param))
            rows += [at for at, token in enumerate(ids, image.first) if token == encoder.token_id]
            seconds += time.perf_counter() - started
            checkpoint()
        return cls(Placed(torch.tensor(rows), torch.cat(states)), seconds)
