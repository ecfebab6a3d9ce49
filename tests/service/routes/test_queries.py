"""Asking stored caches: JSON, several prompts, event streams, chat completions."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.service.conftest import stopped
from tests.service.scrape import moving
from tests.store.redis.servers import wait_until

if TYPE_CHECKING:
    from tests.conftest import LiveService

ANSWER_FIELDS = {"id", "object", "cache_id", "text", "finish_reason", "usage", "load_ms", "policy", "compression_ratio"}


def ask(http: httpx.Client, cache: dict[str, Any], **body: Any) -> dict[str, Any]:
    response = http.post(f"/v1/caches/{cache['id']}/query", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; every one is a single `data:` line, followed by an empty line."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    assert data.pop() == "[DONE]"
    return [json.loads(line) for line in data]


def test_a_question_costs_its_own_tokens_and_what_it_reads(http: httpx.Client, cache: dict[str, Any]) -> None:
    one, two, three = (ask(http, cache, prompt="tide", max_tokens=count)["usage"] for count in (1, 3, 5))
    costs = [usage["prefill_token_equivalents"] for usage in (one, two, three)]
    assert costs[1] - costs[0] == pytest.approx(costs[2] - costs[1])
    assert costs[0] == pytest.approx(one["prefill_tokens"] + (costs[1] - costs[0]) / 2)
    # Less than a quarter of the document's entries is read, and none of it is prefilled again.
    assert one["prefill_token_equivalents_saved"] > cache["tokens"]["document"]
    again = [usage["prefill_token_equivalents"] + usage["prefill_token_equivalents_saved"] for usage in (one, three)]
    assert again[1] - again[0] > costs[2] - costs[0]


def test_an_answer_proves_that_the_document_was_not_prefilled(http: httpx.Client, cache: dict[str, Any]) -> None:
    answer = ask(http, cache, prompt="Where is the green book?", max_tokens=6)
    assert answer.keys() == ANSWER_FIELDS
    assert (answer["object"], answer["cache_id"], answer["policy"]) == ("answer", cache["id"], "keydiff")
    assert answer["id"].startswith("ans_")
    assert answer["usage"]["cache_read_tokens"] == cache["tokens"]["document"]
    assert 0 < answer["usage"]["prefill_tokens"] < 30
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["finish_reason"] == "length"
    assert answer["compression_ratio"] == 0.75
    assert answer["load_ms"] > 0
    wait_until(lambda: last_used_at(http, cache) is not None, "the use is written down, which no answer waits for")
    assert last_used_at(http, cache) >= cache["created_at"]


def last_used_at(http: httpx.Client, cache: dict[str, Any]) -> Any:
    return http.get(f"/v1/caches/{cache['id']}").json()["last_used_at"]


def test_several_prompts_are_answered_in_order_as_if_asked_alone(http: httpx.Client, cache: dict[str, Any]) -> None:
    prompts = ["tide", "Who keeps the green book?", "1984", "a b c d"]
    answers = ask(http, cache, prompt=prompts, max_tokens=8)
    assert answers.keys() == {"object", "data"}
    alone = [ask(http, cache, prompt=prompt, max_tokens=8)["text"] for prompt in prompts]
    assert [answer["text"] for answer in answers["data"]] == alone
    assert ask(http, cache, prompt=["tide"], max_tokens=8)["object"] == "list"


def test_messages_continue_the_document_s_turn(http: httpx.Client, cache: dict[str, Any]) -> None:
    turns = [
        {"role": "user", "content": "tide"},
        {"role": "assistant", "content": "High at noon."},
        {"role": "user", "content": "And at night?"},
    ]
    one = ask(http, cache, messages=turns[:1], max_tokens=8)
    assert one["text"] == ask(http, cache, prompt="tide", max_tokens=8)["text"]
    three = ask(http, cache, messages=turns, max_tokens=8)
    assert three["usage"]["prefill_tokens"] > one["usage"]["prefill_tokens"]


def test_sampling_is_repeatable_with_a_seed(http: httpx.Client, cache: dict[str, Any]) -> None:
    drawn = [ask(http, cache, prompt="tide", temperature=5.0, seed=seed, max_tokens=16)["text"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]  # 16 draws from a wide distribution: equal by chance never


@pytest.mark.parametrize("temperature", [1e-20, 1e-40, 5e-324])
def test_the_smallest_temperatures_are_greedy(http: httpx.Client, cache: dict[str, Any], temperature: float) -> None:
    greedy = ask(http, cache, prompt="tide", max_tokens=8)["text"]
    assert ask(http, cache, prompt="tide", max_tokens=8, temperature=temperature, seed=1)["text"] == greedy


def test_stop_texts_end_an_answer_before_them(http: httpx.Client, cache: dict[str, Any]) -> None:
    whole = ask(http, cache, prompt="tide", max_tokens=30)["text"]
    stop = whole[12:15]
    stopped = ask(http, cache, prompt="tide", max_tokens=30, stop=stop)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole[: whole.index(stop)]


def test_a_stream_is_deltas_and_then_the_answer(http: httpx.Client, cache: dict[str, Any]) -> None:
    body = {"prompt": "tide", "max_tokens": 20, "stream": True}
    *deltas, answer = events(http.post(f"/v1/caches/{cache['id']}/query", json=body))
    assert len(deltas) > 5
    assert all(delta.keys() == {"object", "text"} and delta["object"] == "answer.delta" for delta in deltas)
    assert answer.keys() == ANSWER_FIELDS
    assert "".join(delta["text"] for delta in deltas) == answer["text"]
    whole = ask(http, cache, prompt="tide", max_tokens=20)
    assert (answer["text"], answer["usage"]) == (whole["text"], whole["usage"])


def test_the_first_piece_arrives_before_the_last_is_made(http: httpx.Client, cache: dict[str, Any]) -> None:
    started = time.monotonic()
    body = {"prompt": "tide", "max_tokens": 1500, "stream": True}
    with http.stream("POST", f"/v1/caches/{cache['id']}/query", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        first = time.monotonic() - started
        for _ in lines:
            pass
    assert first < 0.5 * (time.monotonic() - started)


def test_an_error_before_the_first_piece_is_a_plain_error(http: httpx.Client) -> None:
    response = http.post(f"/v1/caches/kvs_{'0' * 40}/query", json={"prompt": "?", "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "cache_not_found")


def cpu_s(pids: list[int]) -> float:
    """CPU seconds these processes have used (proc(5): fields 14 and 15 of stat, in hundredths)."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / 100


def test_a_caller_that_hangs_up_mid_stream_frees_the_model(
    http: httpx.Client, cache: dict[str, Any], service: LiveService
) -> None:
    body = {"prompt": "tide", "max_tokens": 15_000, "stream": True}
    with http.stream("POST", f"/v1/caches/{cache['id']}/query", json=body) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        pids, began = service.replica_pids(), time.monotonic()
        used = cpu_s(pids)
        # Until enough is used for the next measurement to tell, of a processor that others may use, too.
        while time.monotonic() < began + 1 or cpu_s(pids) - used < 0.3:
            next(lines)
        busy_per_s = (cpu_s(pids) - used) / (time.monotonic() - began)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        idle = cpu_s(pids)
        time.sleep(1)
        if cpu_s(pids) - idle < 0.2 * busy_per_s:
            return
    raise AssertionError("the replica goes on generating for nobody")


def test_a_question_is_answered_while_a_long_document_is_prefilled(http: httpx.Client, cache: dict[str, Any]) -> None:
    """The document takes seconds; the question must not wait for its end."""
    headers = {"prefer": "respond-async"}
    body = {"token_ids": [5 + n % 700 for n in range(16_000)], "policy": "kvzip"}
    request = http.post("/v1/caches", json=body, headers=headers).json()
    while (state := http.get(f"/v1/requests/{request['id']}").json()["state"]) == "queued":
        time.sleep(0.02)
    assert state == "running"
    assert ask(http, cache, prompt="tide", max_tokens=4)["usage"]["completion_tokens"] == 4
    assert http.get(f"/v1/requests/{request['id']}").json()["state"] == "running"
    ended = http.get(f"/v1/requests/{request['id']}", params={"wait_s": 120}).json()
    assert ended["state"] == "done"
    http.delete(f"/v1/caches/{ended['cache_id']}")


def test_a_creation_whose_caller_hung_up_is_not_finished(http: httpx.Client) -> None:
    """A compression of seconds; the caller leaves at its beginning. What is cancelled never reaches the shelf."""
    body = {"token_ids": [5 + n % 800 for n in range(16_000)], "policy": "kvzip", "labels": {"caller": "gone"}}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/caches", json=body, timeout=httpx.Timeout(60, read=0.2))
    # Another compression has its turn only after the abandoned one has ended, one way or the other.
    assert http.post("/v1/caches", json={"document": "The next one, please. " * 3}).status_code in (200, 201)
    assert http.get("/v1/caches", params={"label.caller": "gone"}).json()["data"] == []


def test_more_than_the_queue_holds_is_refused_with_a_time_to_come_back(
    http: httpx.Client, cache: dict[str, Any], service: LiveService
) -> None:
    """While the worker does nothing, 16 are sent to it and 24 wait."""

    def query() -> httpx.Response:
        return http.post(f"/v1/caches/{cache['id']}/query", json={"prompt": "tide", "max_tokens": 16})

    (replica,) = service.replica_pids()
    with moving(http) as moved, ThreadPoolExecutor(90) as threads:
        with stopped(replica):
            asked = [threads.submit(query) for _ in range(90)]
            wait_until(lambda: sum(each.done() for each in asked) == 50, "all others are refused")
        responses = [each.result() for each in asked]
    served = [response for response in responses if response.status_code == 200]
    refused = [response for response in responses if response.status_code == 429]
    others = [response.text for response in responses if response not in (*served, *refused)]
    assert (len(served), len(refused), others) == (16 + 24, 50, [])
    assert all(response.json()["error"]["code"] == "queue_full" for response in refused)
    assert moved("kvshelf_queries_total", result="queue_full") == len(refused)
    assert moved("kvshelf_queries_total") == 90
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert len({response.json()["text"] for response in served}) == 1


def chat(http: httpx.Client, cache: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"cache_id": cache["id"], "messages": [{"role": "user", "content": "tide"}], "max_tokens": 12} | more
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response


def test_chat_completions_have_openai_s_shape(http: httpx.Client, cache: dict[str, Any]) -> None:
    completion = chat(http, cache, model="random-tiny", n=1, tools=None, user="me").json()
    assert completion.keys() == {"id", "object", "created", "model", "choices", "usage"}
    assert completion["object"] == "chat.completion"
    assert completion["model"] == "random-tiny"
    (choice,) = completion["choices"]
    assert choice.keys() == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    answer = ask(http, cache, prompt="tide", max_tokens=12)
    assert choice["message"]["content"] == answer["text"]
    usage, read = completion["usage"], answer["usage"]["cache_read_tokens"]
    assert usage["prompt_tokens"] == read + answer["usage"]["prefill_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == read
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] == usage["prompt_tokens"] + 12
    costs = ("prefill_token_equivalents", "prefill_token_equivalents_saved")
    assert [usage[cost] for cost in costs] == [answer["usage"][cost] for cost in costs]


def test_chat_chunks_have_openai_s_shape(http: httpx.Client, cache: dict[str, Any]) -> None:
    whole = chat(http, cache).json()
    *chunks, last = events(chat(http, cache, stream=True))
    assert all(chunk.keys() == {"id", "object", "created", "model", "choices"} for chunk in [*chunks, last])
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    *chunks, last = events(chat(http, cache, stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_chat_needs_a_cache_and_refuses_what_it_does_not_do(http: httpx.Client, cache: dict[str, Any]) -> None:
    body = {"cache_id": cache["id"], "messages": [{"role": "user", "content": "tide"}]}
    for change, param in (
        ({"cache_id": None}, "cache_id"),
        ({"n": 17}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": "gpt-17"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"colour": "red"}, "colour"),
    ):
        response = http.post("/v1/chat/completions", json=body | change)
        assert response.status_code == 400, change
        assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("invalid_request", param)
