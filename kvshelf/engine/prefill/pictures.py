"""The images of a document as the model reads them: states in the places of their tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

import torch

from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.job import Job
from kvshelf.engine.progress import Checkpoint
from kvshelf.engine.soft import Placed
from kvshelf.model.images import ImageEncoder, PlacedImage, Scaled

_PAUSE_S: Final = 0.002
"""Between two checkpoints while an image is read."""

_BESIDE: Final = ThreadPoolExecutor(1, thread_name_prefix="images")
"""One thread for all, so that one image is read at a time, however many have left while theirs was."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """placed: of a document's images; None where it has none. seconds: that they took."""

    placed: Placed | None = None
    seconds: float = 0.0

    @classmethod
    def of(cls, passes: Passes, job: Job, checkpoint: Checkpoint) -> Pictures:
        """Of the document of a job. A file is decoded here again: until now it waited, and is a tenth of its pixels.
        That, and what makes the image smaller, is beside this thread; `checkpoint` is called meanwhile and behind each
        image, and may raise. Then the image that is being read is read to its end, before another of any document."""
        encoder = passes.facts.images
        if not job.images or encoder is None:
            return cls()
        states, rows, seconds = [], list[int](), 0.0
        for number, image in enumerate(job.images):
            param, ids = f"images[{number}]", job.document.token_ids[image.first : image.end]
            reading = _BESIDE.submit(_scaled, encoder, image, ids, param)
            try:
                while wait([reading], _PAUSE_S).not_done:
                    checkpoint()
            finally:
                reading.cancel()  # who has left does not hold up the model
            scaled, read_s = reading.result()
            started = time.perf_counter()
            states.append(encoder.states(scaled, param))
            rows += [at for at, token in enumerate(ids, image.first) if token == encoder.token_id]
            seconds += read_s + time.perf_counter() - started
            checkpoint()
        return cls(Placed(torch.tensor(rows), torch.cat(states)), seconds)


def _scaled(encoder: ImageEncoder, image: PlacedImage, token_ids: Sequence[int], param: str) -> tuple[Scaled, float]:
    """With the seconds that it took."""
    started = time.perf_counter()
    return encoder.scaled(image.data, token_ids, param), time.perf_counter() - started
