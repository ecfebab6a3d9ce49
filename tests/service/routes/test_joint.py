"""Asking several stored caches together: POST /v1/query, and chat completions with `cache_ids`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvshelf import CompressedCache, Engine, open_store
from tests.conftest import copy_tokenizer, save_random_model
from tests.service.conftest import created, other_model, refused
from tests.service.observe.test_logs import lines, replica_log, the_line
from tests.service.routes.test_misses import flip
from tests.service.routes.test_queries import events
from tests.service.scrape import moving

if TYPE_CHECKING:
    from tests.conftest import LiveService

FIELDS = {"id", "object", "cache_ids", "text", "finish_reason", "usage", "load_ms", "sources", "exact"}
UNKNOWN = "kvs_" + "0" * 40
KINDS: tuple[dict[str, Any], ...] = (
    {"document": "The lamp of the lighthouse burns whale oil. " * 20, "compression_ratio": 0.75},
    {"document": "A ferry crosses the sound twice a day. " * 30, "policy": "full"},
    {"document": "Nobody has seen the keeper since March. " * 12, "policy": "ada", "codec": "int4"},
)


@pytest.fixture(scope="module")
def caches(http: httpx.Client) -> list[dict[str, Any]]:
    """Caches of several policies, codecs and lengths, which no test changes."""
    return [created(http, **kind) for kind in KINDS]


def ids_of(caches: list[dict[str, Any]]) -> list[str]:
    return [cache["id"] for cache in caches]


def post(http: httpx.Client, cache_ids: list[str], **body: Any) -> httpx.Response:
    return http.post("/v1/query", json={"cache_ids": cache_ids, "prompt": "tide", "max_tokens": 8} | body)


def ask(http: httpx.Client, cache_ids: list[str], **body: Any) -> dict[str, Any]:
    response = post(http, cache_ids, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_answer_is_the_engine_s_and_names_its_sources(
    http: httpx.Client, caches: list[dict[str, Any]], tiny_folder: Path
) -> None:
    answer = ask(http, ids_of(caches), prompt="Who lit it?", max_tokens=12)
    assert answer.keys() == FIELDS
    assert (answer["object"], answer["cache_ids"]) == ("answer", ids_of(caches))
    assert [source["cache_id"] for source in answer["sources"]] == ids_of(caches)
    assert answer["usage"]["cache_read_tokens"] == sum(cache["tokens"]["document"] for cache in caches)
    assert 0 < answer["usage"]["prefill_tokens"] < 30
    blobs = (http.get(f"/v1/caches/{cache['id']}/blob").content for cache in caches)
    engine = Engine.load(str(tiny_folder), device="cpu")
    here = engine.answer([CompressedCache.from_bytes(blob) for blob in blobs], "Who lit it?", max_new_tokens=12)
    assert answer["text"] == here.text
    assert [source["share"] for source in answer["sources"]] == pytest.approx(here.sources, abs=1e-4)


def test_one_cache_in_a_list_answers_as_by_itself(http: httpx.Client, caches: list[dict[str, Any]]) -> None:
    (cache_id,) = ids_of(caches[:1])
    together = ask(http, [cache_id])
    alone = http.post(f"/v1/caches/{cache_id}/query", json={"prompt": "tide", "max_tokens": 8}).json()
    assert (together["text"], together["usage"]) == (alone["text"], alone["usage"])
    assert together["sources"] == [{"cache_id": cache_id, "share": 1.0}]
    assert "exact" not in together


def test_prompts_messages_and_streams(http: httpx.Client, caches: list[dict[str, Any]]) -> None:
    ids = ids_of(caches)
    one, two = (ask(http, ids, prompt=prompt) for prompt in ("tide", "1984"))
    both = ask(http, ids, prompt=["tide", "1984"])
    assert both["object"] == "list"
    for found, alone in zip(both["data"], (one, two), strict=True):
        assert found.keys() == FIELDS
        assert (found["text"], found["usage"]) == (alone["text"], alone["usage"])
    turns = [{"role": "user", "content": "tide"}]
    assert ask(http, ids, prompt=None, messages=turns)["text"] == one["text"]
    *deltas, last = events(post(http, ids, stream=True))
    assert all(delta.keys() == {"object", "text"} and delta["object"] == "answer.delta" for delta in deltas)
    assert "".join(delta["text"] for delta in deltas) == last["text"] == one["text"]
    assert last.keys() == FIELDS
    assert last["cache_ids"] == ids


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"compare": True}, "compare", "one document"),
        ({"compare": False}, "compare", "one document"),
        ({"cache_ids": [UNKNOWN, UNKNOWN]}, "cache_ids", "twice"),
        ({"cache_ids": [f"kvs_{n:040x}" for n in range(65)]}, "cache_ids", "64"),
        ({"cache_ids": []}, "cache_ids", "at least 1"),
        ({"cache_ids": None}, "cache_ids", "array"),
        ({"cache_ids": [7, UNKNOWN]}, "cache_ids[0]", "string"),
        ({"cache_id": UNKNOWN}, "cache_id", "unknown field"),
        ({"prompt": None}, "prompt", "neither"),
        ({"prompt": ["a", "b"], "stream": True}, "stream", "several prompts"),
        ({"on_miss": "guess"}, "on_miss", "recompute"),
        ({"route": "nearest"}, "route", "several caches"),
        ({"route": "farthest"}, "route", "nearest"),
        ({"route": "likelihood"}, "route", "several caches"),
    ],
)
def test_bad_questions_name_their_field(http: httpx.Client, change: dict[str, Any], param: str, words: str) -> None:
    """No cache is looked up first: there is none of this id."""
    body = {"cache_ids": [UNKNOWN], "prompt": "tide"} | change
    error = refused(http.post("/v1/query", json=body), 400, "invalid_request")
    assert error["param"] == param
    assert words in error["message"]


TALK = "\n\n".join(
    ["The crane lifts grain.", "Is the crane oiled?", "The grain is dry.", "A crane needs rope."] * 2
    + ["Pupils sing loudly.", "The teacher sings, too.", "Songs end the lesson.", "Pupils clap."] * 2
)


def test_a_question_goes_to_the_nearest_of_the_caches_of_episodes(http: httpx.Client) -> None:
    fields = {"document": TALK, "episodes": {"count": 2}, "compression_ratio": 0.25, "keep_source": True}
    response = http.post("/v1/caches", json=fields)
    assert response.status_code == 201, response.text
    made = response.json()["data"]
    assert [cache["labels"]["episode"] for cache in made] == ["1/2", "2/2"]
    assert [(cache["policy"], cache["policy_params"]["prefill"]) for cache in made] == [("epicache", "chunked")] * 2
    ids = ids_of(made)
    for prompt, place in (("Who oiled the crane?", 0), ("What do pupils sing?", 1)):
        answer = ask(http, ids, prompt=prompt, route="nearest")
        assert [source["share"] for source in answer["sources"]] == [float(place == n) for n in (0, 1)]
        assert answer["cache_ids"] == ids
        alone = http.post(f"/v1/caches/{ids[place]}/query", json={"prompt": prompt, "max_tokens": 8}).json()
        assert (answer["text"], answer["usage"]) == (alone["text"], alone["usage"])
        *_, last = events(post(http, ids, prompt=prompt, route="nearest", stream=True))
        assert (last["text"], last["sources"]) == (answer["text"], answer["sources"])
    both = ask(http, ids, prompt=["crane", "pupils"], route="nearest")["data"]
    assert [[source["share"] for source in each["sources"]] for each in both] == [[1.0, 0.0], [0.0, 1.0]]
    other = created(http, document=TALK)
    error = refused(post(http, [*ids, other["id"]], route="nearest"), 400, "invalid_request")
    assert (error["param"], "episodes" in error["message"]) == ("cache_ids[2]", True)
    together = ask(http, ids)["sources"]
    assert min(source["share"] for source in together) > 0


@pytest.mark.parametrize("route", ["likelihood", "attention"])
def test_a_question_goes_to_the_one_or_two_that_it_is_about(
    http: httpx.Client, caches: list[dict[str, Any]], tiny_folder: Path, route: str
) -> None:
    ids = ids_of(caches)
    answer = ask(http, ids, prompt="Who lit it?", max_tokens=12, route=route)
    assert answer["cache_ids"] == ids
    read = [source["cache_id"] for source in answer["sources"] if source["share"]]
    assert len(read) in (1, 2)
    assert answer.keys() == (FIELDS if len(read) > 1 else FIELDS - {"exact"})
    assert sum(source["share"] for source in answer["sources"]) == pytest.approx(1)
    blobs = [CompressedCache.from_bytes(http.get(f"/v1/caches/{id}/blob").content) for id in ids]
    engine = Engine.load(str(tiny_folder), device="cpu")
    here = engine.answer(blobs, "Who lit it?", max_new_tokens=12, route=route)
    assert answer["text"] == here.text
    assert [source["share"] for source in answer["sources"]] == pytest.approx(here.sources, abs=1e-4)
    assert answer["usage"]["prefill_tokens"] == here.usage.prefill_tokens
    alone = ask(http, read, prompt="Who lit it?", max_tokens=12)
    assert answer["text"] == alone["text"]
    assert answer["usage"]["cache_read_tokens"] == alone["usage"]["cache_read_tokens"]
    *_, last = events(post(http, ids, prompt="Who lit it?", max_tokens=12, route=route, stream=True))
    assert (last["text"], last["sources"]) == (answer["text"], answer["sources"])


def test_an_episode_that_cannot_be_read_is_made_again(http: httpx.Client, service: LiveService) -> None:
    """With its probe and its centroid, so that it gets the same id and questions still find it."""
    fields = {"document": TALK + " ", "episodes": {"count": 2}, "keep_source": True, "name": "again"}
    ids = ids_of(http.post("/v1/caches", json=fields).json()["data"])
    flip(service, ids[0])
    refused(post(http, ids, prompt="crane", route="nearest"), 424, "cache_corrupt")
    answer = ask(http, ids, prompt="crane", route="nearest", on_miss="recompute")
    assert answer["recomputed"] == [{"cache_id": ids[0], "reason": "corrupt"}]
    assert [source["share"] for source in answer["sources"]] == [1.0, 0.0]
    assert answer["cache_ids"] == ids
    assert ask(http, ids, prompt="crane", route="nearest")["text"] == answer["text"]


def test_an_unknown_cache_among_others_is_as_if_asked_alone(http: httpx.Client, caches: list[dict[str, Any]]) -> None:
    alone = http.post(f"/v1/caches/{UNKNOWN}/query", json={"prompt": "tide"})
    for stream in (False, True):
        assert post(http, [*ids_of(caches), UNKNOWN], stream=stream).text == alone.text
    assert alone.status_code == 404


def test_a_question_behind_the_longest_document_needs_room(http: httpx.Client) -> None:
    long = created(http, token_ids=[5] * 16380, policy="streaming_llm")
    short = created(http, token_ids=[7] * 99)
    error = refused(post(http, [short["id"], long["id"]], prompt="Is there room left here?"), 400, "invalid_request")
    assert (error["param"], "16384" in error["message"]) == ("prompt", True)


def test_documents_that_end_in_different_ways_are_refused(http: httpx.Client, caches: list[dict[str, Any]]) -> None:
    plain = created(http, document="The buoy is green. " * 20, layout="plain")
    error = refused(post(http, [caches[0]["id"], plain["id"]]), 400, "invalid_request")
    assert error["param"] == "cache_ids"


@pytest.fixture(scope="module")
def window_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose layers see 24 tokens back."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    folder = save_random_model(tmp_path_factory.mktemp("models") / "window")
    config = Qwen2Config.from_pretrained(folder, use_sliding_window=True, sliding_window=24, max_window_layers=0)
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def two_models(
    start_service: Callable[..., AbstractContextManager[LiveService]],
    tiny_folder: Path,
    window_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    with (
        start_service(tmp_path_factory.mktemp("two"), tiny_folder, window_model) as running,
        httpx.Client(base_url=running.url, timeout=120) as client,
    ):
        yield client


@pytest.mark.slow
def test_caches_of_two_models_are_refused_and_of_one_that_cannot_join(two_models: httpx.Client) -> None:
    texts = ("The mast is striped. " * 20, "The hull is black. " * 20)
    ours = [created(two_models, document=text)["id"] for text in texts]
    theirs = [created(two_models, document=text, model="window", policy="full")["id"] for text in texts]
    for on_miss in ("error", "recompute"):
        error = refused(post(two_models, [ours[0], theirs[0]], on_miss=on_miss), 400, "invalid_request")
        assert error["param"] == "cache_ids"
        assert all(word in error["message"] for word in (ours[0], theirs[0], "random-tiny", "window"))
    error = refused(post(two_models, theirs), 422, "policy_unsupported")
    assert error["param"] == "cache_ids"
    assert "sliding window" in error["message"]
    for each in (ours, theirs[:1]):
        assert ask(two_models, each)["cache_ids"] == each


# Caches that cannot be used


def test_a_cache_that_cannot_be_used_is_named(http: httpx.Client, service: LiveService, tiny_folder: Path) -> None:
    sound, broken = (created(http, document=f"The {what} is at sea. " * 20) for what in ("sound one", "broken one"))
    flip(service, broken["id"])
    for stream in (False, True):
        error = refused(post(http, [sound["id"], broken["id"]], stream=stream), 424, "cache_corrupt")
        assert broken["id"] in error["message"]
        assert error["miss_reason"] == "corrupt"
    foreign = other_model(tiny_folder).compress("Another model's boat. " * 9)
    with open_store(f"disk://{service.home}/shelf") as store:
        cache_id = store.put(foreign).id
    error = refused(post(http, [sound["id"], cache_id]), 409, "model_mismatch")
    assert (error["miss_reason"], error["details"]["cache_id"]) == ("model_changed", cache_id)


@pytest.mark.parametrize("stream", [False, True])
def test_caches_that_cannot_be_used_are_made_again(
    http: httpx.Client, service: LiveService, tiny_folder: Path, stream: bool
) -> None:
    texts = [f"Boat {number} of {stream} leaves when the tide turns. " * 20 for number in range(4)]
    asked = ids_of([created(http, document=text, compression_ratio=0.5, keep_source=True) for text in texts[:3]])
    foreign = other_model(tiny_folder).compress(texts[3], compression_ratio=0.5)
    with open_store(f"disk://{service.home}/shelf") as store:
        asked.append(store.put(foreign, source=texts[3]).id)
    for cache_id in asked[:2]:
        flip(service, cache_id)
    response = post(http, asked, stream=stream, on_miss="recompute")
    answer = events(response)[-1] if stream else response.json()
    assert answer.keys() == FIELDS | {"recomputed"}
    reasons = zip((asked[0], asked[1], asked[3]), ("corrupt", "corrupt", "model_changed"), strict=True)
    assert answer["recomputed"] == [{"cache_id": cache_id, "reason": reason} for cache_id, reason in reasons]
    made = created(http, document=texts[3], compression_ratio=0.5)
    assert made["existing"]
    assert answer["cache_ids"] == [*asked[:3], made["id"]]
    usual = ask(http, answer["cache_ids"], on_miss="recompute")
    assert usual.keys() == FIELDS
    assert usual["text"] == answer["text"]


def test_without_a_source_a_miss_among_several_stays_one(http: httpx.Client, service: LiveService) -> None:
    sound, bare = (created(http, document=f"The {what} has no berth. " * 20) for what in ("sound one", "bare one"))
    flip(service, bare["id"])
    error = refused(post(http, [sound["id"], bare["id"]], on_miss="recompute"), 409, "source_not_kept")
    assert error["param"] == "on_miss"


# Numbers and logs


def test_a_joint_question_is_counted_and_logged_as_one(
    http: httpx.Client, service: LiveService, caches: list[dict[str, Any]]
) -> None:
    with moving(http) as moved:
        response = post(http, ids_of(caches))
        post(http, [caches[0]["id"], UNKNOWN])
    assert moved("kvshelf_queries_total", result="answered") == 1
    assert moved("kvshelf_queries_total", result="cache_not_found") == 1
    assert moved("kvshelf_cache_misses_total", reason="not_found") == 1
    assert moved("kvshelf_http_requests_total", route="/v1/query", method="POST", status="200") == 1
    read = sum(cache["tokens"]["document"] for cache in caches)
    assert moved("kvshelf_tokens_saved_total", model="random-tiny") == read
    line = the_line(service, response)
    longest = max(caches, key=lambda cache: cache["tokens"]["document"])
    assert (line["route"], line["status"], line["caches"]) == ("/v1/query", 200, 3)
    assert (line["cache_id"], line["cache_read_tokens"]) == (longest["id"], read)
    (there,) = lines(replica_log(service), response.headers["x-request-id"])
    assert (there["event"], there["caches"], there["cache_id"]) == ("answered", 3, longest["id"])


# Chat completions


def chat(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "tide"}], "max_tokens": 8} | body
    )


def test_a_chat_about_several_caches_has_sources(http: httpx.Client, caches: list[dict[str, Any]]) -> None:
    ids, answer = ids_of(caches), ask(http, ids_of(caches))
    whole = chat(http, cache_ids=ids).json()
    assert whole["choices"][0]["message"]["content"] == answer["text"]
    assert [source["cache_id"] for source in whole["sources"]] == ids
    assert [source["share"] for source in whole["sources"]] == pytest.approx(
        [source["share"] for source in answer["sources"]], abs=1e-6
    )
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["cache_read_tokens"]
    *chunks, last, usage = events(chat(http, cache_ids=ids, stream=True, stream_options={"include_usage": True}))
    assert not any("sources" in chunk for chunk in [*chunks, usage])
    assert last["choices"][0]["finish_reason"] == "length"
    assert [source["cache_id"] for source in last["sources"]] == ids
    assert (whole["exact"], last["exact"]) == (False, False)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == answer["text"]
    one = chat(http, cache_ids=ids[:1]).json()
    assert one["sources"] == [{"cache_id": ids[0], "share": 1.0}]
    assert one["choices"] == chat(http, cache_id=ids[0]).json()["choices"]


def test_a_chat_takes_one_of_cache_id_and_cache_ids(http: httpx.Client, caches: list[dict[str, Any]]) -> None:
    ids = ids_of(caches)
    for body, param in (
        ({"cache_id": ids[0], "cache_ids": ids}, "cache_ids"),
        ({}, "cache_id"),
        ({"cache_ids": []}, "cache_ids"),
        ({"cache_ids": [ids[0], ids[0]]}, "cache_ids"),
        ({"cache_ids": ids, "model": "gpt-17"}, "model"),
    ):
        assert refused(chat(http, **body), 400, "invalid_request")["param"] == param
    alone = chat(http, cache_id=UNKNOWN)
    assert alone.status_code == 404
    assert chat(http, cache_ids=[ids[0], UNKNOWN]).text == alone.text
