"""Whether the Hugging Face hub has a model, asked before transformers downloads it.

transformers tries for half a minute and more to reach a hub that is not there. Needs no torch.
"""

from __future__ import annotations

import time
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final

from kvshelf.errors import InvalidRequest

_CONFIG: Final = "config.json"
_PAUSES_S: Final = (1.0, 2.0)
"""Between attempts to reach the hub: a network that comes up with the machine may be a little late."""

_FOLDER: Final = "give a folder of this machine (./NAME)"
_CACHED: Final = "copy the hub's cache of a machine that has the model (HF_HOME) and set HF_HUB_OFFLINE=1"


def require_available(source: str, *, weights: bool = True) -> None:
    """Raise `InvalidRequest` for a hub id whose model can neither be downloaded nor found in the hub's cache.

    source: what `source_of` returns; a folder or file is not looked into. weights: whether they are needed, or the
    configuration alone. For a model in the cache the hub is not asked. The answer takes at most HF_HUB_ETAG_TIMEOUT
    seconds, 10 by default. Nothing is raised where the hub answers with another error, after which transformers may try
    again.
    """
    if Path(source).exists():
        return
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    try:
        cached = _is_cached(source, weights=weights)
    except HFValidationError as error:
        raise InvalidRequest(
            f"the model {source!r} is no folder here, and no name that the hub can have: {error}", param="model"
        ) from error
    if cached:
        return
    if constants.HF_HUB_OFFLINE:
        raise InvalidRequest(
            f"the model {source!r} is not in the hub's cache, {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to "
            f"download it; unset that, or {_FOLDER}",
            param="model",
        )
    answer = _answer(source, constants.HF_HUB_ETAG_TIMEOUT)
    if answer is not None and (problem := _problem(answer, constants.ENDPOINT)):
        raise InvalidRequest(f"the model {source!r} cannot be downloaded: {problem}", param="model") from answer


def _is_cached(name: str, *, weights: bool) -> bool:
    """Raises `HFValidationError` for a name that no model of the hub can have."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    snapshots = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
    needed = (_CONFIG, "*.safetensors") if weights else (_CONFIG,)
    return all(any(file.is_file() for file in snapshots.glob(f"*/{pattern}")) for pattern in needed)


def _answer(name: str, limit_s: float) -> Exception | None:
    """The reason why the hub does not give the model's configuration; None if it does.

    It is asked on a thread that may be abandoned: nothing else bounds how long the look-up of an address takes.
    """
    answers: SimpleQueue[Exception | None] = SimpleQueue()
    Thread(target=lambda: answers.put(_request(name, limit_s)), name="hub", daemon=True).start()
    try:
        return answers.get(timeout=limit_s)
    except Empty:
        return TimeoutError(f"no answer within {limit_s:g} s (HF_HUB_ETAG_TIMEOUT)")


def _request(name: str, limit_s: float) -> Exception | None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    failure: Exception | None = None
    for pause_s in (0.0, *_PAUSES_S):
        time.sleep(pause_s)
        try:
            get_hf_file_metadata(hf_hub_url(name, _CONFIG), timeout=limit_s)
            return None
        except HfHubHTTPError as error:
            return error
        except Exception as error:  # of its HTTP client, which differs between its versions
            failure = error
    return failure


def _problem(answer: Exception, endpoint: str) -> str:
    """The problem and what to do about it; "" where transformers reports it, or may try again."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    match answer:
        case GatedRepoError():
            return f"it is gated; accept its terms at {endpoint}, and set HF_TOKEN to a token of yours"
        case RepositoryNotFoundError():
            return f"{endpoint} has no such model; check the name, set HF_TOKEN if it is private, or {_FOLDER}"
        case HfHubHTTPError():
            return ""
    reason = str(answer) or type(answer).__name__
    return (
        f"{endpoint} cannot be reached ({reason}), and the model is not in the hub's cache; check the name and the "
        f"network, {_FOLDER}, or {_CACHED}"
    )
