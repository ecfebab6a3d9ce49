"""The images of a document as the model reads them: states in place of their tokens' embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import torch

from kvshelf.engine.forward.passes import Passes
from kvshelf.engine.inputs.job import Job
from kvshelf.engine.progress import Checkpoint
from kvshelf.engine.soft import Placed
from kvshelf.model.images import Scaled

_PAUSE_S: Final = 0.002
"""Between two checkpoints while an image is read."""

_BESIDE: Final = ThreadPoolExecutor(1, thread_name_prefix="images")
"""One thread for all documents, so that one image is scaled at a time, also where its caller has left."""


def placed_images(passes: Passes, job: Job, checkpoint: Checkpoint) -> tuple[Placed | None, float]:
    """The states of the images of a job's document, None where it has none, and the seconds that they took.

    A file is decoded a second time here: while the job waited only the file was in memory, which is a tenth of its
    pixels. Decoding and scaling run beside this thread; `checkpoint` is called meanwhile and behind each image, and may
    raise. Then the image is still scaled to its end, before another of any document.
    """
    encoder = passes.facts.images
    if not job.images or encoder is None:
        return None, 0.0

    def scale(data: bytes, token_ids: Sequence[int], param: str) -> tuple[Scaled, float]:
        started = time.perf_counter()
        return encoder.scaled(data, token_ids, param), time.perf_counter() - started

    states, rows, seconds = [], list[int](), 0.0
    for number, image in enumerate(job.images):
        param, ids = f"images[{number}]", job.document.token_ids[image.first : image.end]
        scaling = _BESIDE.submit(scale, image.data, ids, param)
        try:
            while wait([scaling], _PAUSE_S).not_done:
                checkpoint()
        finally:
            scaling.cancel()  # a document whose caller has left does not hold up the model
        scaled, scaled_s = scaling.result()
        started = time.perf_counter()
        states.append(encoder.states(scaled, param))
        rows += [at for at, token in enumerate(ids, image.first) if token == encoder.token_id]
        seconds += scaled_s + time.perf_counter() - started
        checkpoint()
    return Placed(torch.tensor(rows), torch.cat(states)), seconds
