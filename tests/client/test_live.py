"""Both clients against a real service over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvshelf import AsyncClient, Client, CompressedCache, errors
from kvshelf.api import CacheObject, CreationProgress, Select, SplitOptions

TEXT = "The minutes were read and approved. The access code of the amber falcon is 482913. Ada Brown signed it. " * 3
QUESTION = "What is the access code of the amber falcon?"


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[Client]:
    with Client(service_url) as client:
        yield client


@pytest.fixture
async def aclient(service_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service_url) as client:
        yield client


@pytest.fixture(scope="module")
def cache(client: Client) -> CacheObject:
    return client.caches.create(document=TEXT, policy="lagkv", policy_params={"lag": 16}, compression_ratio=0.5)


def test_what_was_created_can_be_retrieved(client: Client, cache: CacheObject) -> None:
    found = client.caches.retrieve(cache.id)
    assert found.policy_params["lag"] == 16
    assert found.model_copy(update={"existing": False, "last_used_at": None}) == cache.model_copy(
        update={"existing": False, "last_used_at": None}
    )


def test_the_same_document_in_the_same_way_is_there_already(client: Client, cache: CacheObject) -> None:
    again = client.caches.create(document=TEXT, policy="lagkv", policy_params={"lag": 16}, compression_ratio=0.5)
    assert (again.id, again.existing) == (cache.id, True)
    assert client.caches.create(document=TEXT, policy="full").id != cache.id


def test_a_file_is_the_same_as_its_text(client: Client, cache: CacheObject, tmp_path: Path) -> None:
    path = tmp_path / "Bericht für März.txt"
    path.write_text(TEXT, encoding="utf-8")
    given = client.caches.create(file=path, policy="lagkv", policy_params={"lag": 16}, compression_ratio=0.5)
    assert (given.id, given.existing) == (cache.id, True)


def test_a_file_that_is_not_text_is_refused(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(b"\xff\xfe in another encoding")
    with pytest.raises(errors.InvalidRequest, match="byte 0") as caught:
        client.caches.create(file=path)
    assert caught.value.param == "file"


def test_token_ids_and_messages_are_documents_too(client: Client) -> None:
    ids = client.caches.create(token_ids=tuple(range(100, 140)), policy="full")
    assert (ids.tokens.document, ids.tokens.kept, ids.layout) == (40, 40, "plain")
    talk = client.caches.create(messages=[{"role": "system", "content": "Be brief."}], policy="full")
    assert talk.layout == "chat"
    answer = client.caches.query(talk.id, messages=[{"role": "user", "content": "Hello."}], max_tokens=2)
    assert answer.usage.cache_read_tokens == talk.tokens.document


def test_one_question_and_several(client: Client, cache: CacheObject) -> None:
    one = client.caches.query(cache.id, QUESTION, max_tokens=5)
    assert one.usage.cache_read_tokens == cache.tokens.document
    assert 0 < one.usage.prefill_tokens < cache.tokens.document
    several = client.caches.query(cache.id, [QUESTION, "Who signed it?"], max_tokens=5)
    assert [several[0].text, len(several)] == [one.text, 2]


@pytest.mark.anyio
async def test_several_caches_are_asked_together(client: Client, aclient: AsyncClient, cache: CacheObject) -> None:
    other = client.caches.create(document="The harbour has two quays. " * 9, policy="full")
    ids = [cache.id, other.id]
    one = client.caches.query(ids, QUESTION, max_tokens=5)
    assert one.cache_ids == [source.cache_id for source in one.sources] == ids
    assert sum(source.share for source in one.sources) == pytest.approx(1)
    assert one.usage.cache_read_tokens == cache.tokens.document + other.tokens.document
    assert [answer.text for answer in client.caches.query(ids, [QUESTION], max_tokens=5)] == [one.text]
    with client.caches.stream(ids, QUESTION, max_tokens=5) as stream:
        assert "".join(stream) == stream.answer.text == one.text
        assert stream.answer.cache_ids == ids
    assert (await aclient.caches.query(ids, QUESTION, max_tokens=5)).text == one.text
    final = await (await aclient.caches.stream(ids, QUESTION, max_tokens=5)).final()
    assert (final.text, final.cache_ids) == (one.text, ids)


@pytest.mark.anyio
async def test_a_search_names_what_to_ask(client: Client, aclient: AsyncClient) -> None:
    labels = {"shelf": "client"}
    texts = ("The lamp burns whale oil. ", "A ferry crosses the sound. ")
    ids = [client.caches.create(document=text * 20, policy="full", labels=labels).id for text in texts]
    found = client.caches.search("Which ferry crosses the sound?", labels=labels, limit=1)
    assert [hit.cache_id for hit in found.data] == ids[1:]
    assert found.searched == 2
    assert (await aclient.caches.search("Which ferry crosses the sound?", labels=labels, limit=1)) == found
    with pytest.raises(errors.InvalidRequest) as refusal:
        client.caches.search("ferry", limit=65)
    assert refusal.value.param == "limit"


def test_a_comparison_of_several_caches_is_refused_before_it_is_sent() -> None:
    with Client("http://127.0.0.1:1") as nowhere:
        with pytest.raises(errors.InvalidRequest, match="one document") as caught:
            nowhere.caches.query(["kvs_1", "kvs_2"], QUESTION, compare=True)  # type: ignore[call-overload]
        assert caught.value.param == "compare"
        with pytest.raises(errors.InvalidRequest, match="twice"):
            nowhere.caches.stream(["kvs_1", "kvs_1"], QUESTION)


def test_a_stream_is_the_same_answer_in_pieces(client: Client, cache: CacheObject) -> None:
    whole = client.caches.query(cache.id, QUESTION, max_tokens=8)
    with client.caches.stream(cache.id, QUESTION, max_tokens=8) as stream:
        pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == stream.answer.text == whole.text
    assert stream.answer.usage == whole.usage


def test_hanging_up_in_the_middle_does_no_harm(client: Client, cache: CacheObject) -> None:
    for _ in range(3):
        with client.caches.stream(cache.id, QUESTION, max_tokens=4000) as stream:
            next(stream)
    assert client.ready().status == "ready"
    assert client.limits().scopes == ["read", "write", "admin"], "without keys, everything"
    assert client.caches.query(cache.id, QUESTION, max_tokens=2).usage.completion_tokens == 2


def test_a_download_is_the_cache(client: Client, cache: CacheObject) -> None:
    blob = client.caches.download(cache.id)
    assert len(blob) == cache.bytes.stored
    mine = CompressedCache.from_bytes(blob)
    assert (mine.num_tokens, mine.kept_tokens) == (cache.tokens.document, cache.tokens.kept)
    assert mine.to_bytes() == blob


def test_a_cache_is_changed_and_verified(client: Client) -> None:
    made = client.caches.create(document="Ever changing. " * 9, keep_source=True, ttl_s=60)
    assert made.has_source
    changed = client.caches.update(made.id, ttl_s=None, name="kept", labels={"a": "b"}, pinned=True)
    assert (changed.expires_at, changed.name, changed.labels, changed.pinned) == (None, "kept", {"a": "b"}, True)
    assert [(of.caches, of.left_out) for of in client.caches.warm([made.id])] == [(1, [])]
    verified = client.caches.verify(made.id)
    assert (verified.ok, verified.bytes) == (True, made.bytes.stored + len("Ever changing. " * 9))


def test_a_download_can_be_imported(client: Client) -> None:
    made = client.caches.create(document="There and back again. " * 9, policy="full")
    blob = client.caches.download(made.id)
    client.caches.delete(made.id)
    back = client.caches.import_blob(blob, name="hobbit", labels={"a": "b"}, ttl_s=60)
    assert (back.id, back.existing, back.name, back.labels) == (made.id, False, "hobbit", {"a": "b"})
    assert client.caches.import_blob(blob).existing
    with pytest.raises(errors.CacheCorrupt) as caught:
        client.caches.import_blob(blob[:-1])
    assert caught.value.details["reason"] == "truncated"


def test_the_list_finds_by_label_page_by_page(client: Client) -> None:
    made = [client.caches.create(document=f"Note {i}.", policy="full", labels={"list": "me"}).id for i in range(5)]
    found = [cache.id for cache in client.caches.list(labels={"list": "me"}, limit=2)]
    assert sorted(found) == sorted(made)
    assert list(client.caches.list(labels={"list": "nobody"})) == []


def test_a_creation_in_the_background_ends_on_the_shelf(client: Client) -> None:
    request = client.caches.create(document="In the background. " + TEXT, policy="snapkv", respond_async=True)
    done = client.requests.retrieve(request.id, wait_s=60)
    assert done.state == "done"
    assert done.cache_id is not None
    assert client.caches.retrieve(done.cache_id).policy == "snapkv"


def test_what_is_deleted_is_gone(client: Client) -> None:
    gone = client.caches.create(document="Soon gone.", policy="full")
    assert client.caches.delete(gone.id).deleted
    for call in (client.caches.retrieve, client.caches.delete, client.caches.download):
        with pytest.raises(errors.CacheNotFound):
            call(gone.id)
    with pytest.raises(errors.CacheNotFound):
        client.caches.stream(gone.id, QUESTION)


def test_the_errors_of_the_service_are_the_errors_here(client: Client) -> None:
    with pytest.raises(errors.InvalidRequest, match="keydif") as caught:
        client.caches.create(document=TEXT, policy="keydif")
    assert caught.value.param == "policy"
    assert caught.value.details["request_id"]
    with pytest.raises(errors.DocumentTooShort):
        client.caches.create(document="")
    with pytest.raises(errors.DocumentTooLong):
        client.caches.create(document="word " * 40_000)
    with pytest.raises(errors.RequestNotFound):
        client.requests.retrieve("req_nothing")


def test_models_and_policies_are_listed(client: Client) -> None:
    assert client.models.list()[0].max_tokens > 0
    assert {"full", "keydiff", "lagkv", "snapkv", "streaming_llm"} <= {policy.id for policy in client.policies.list()}
    assert {"quest", "fasa", "sage", "policy:tova"} <= {selector.id for selector in client.selectors.list()}


@pytest.mark.anyio
async def test_the_asynchronous_client_does_the_same(aclient: AsyncClient, cache: CacheObject) -> None:
    again = await aclient.caches.create(document=TEXT, policy="lagkv", policy_params={"lag": 16}, compression_ratio=0.5)
    assert (again.id, again.existing) == (cache.id, True)
    whole = await aclient.caches.query(cache.id, QUESTION, max_tokens=6)
    stream = await aclient.caches.stream(cache.id, QUESTION, max_tokens=6)
    assert "".join([piece async for piece in stream]) == whole.text == (await stream.final()).text
    assert cache.id in [found.id async for found in aclient.caches.list(policy="lagkv", limit=1)]
    assert CompressedCache.from_bytes(await aclient.caches.download(cache.id)).num_tokens == cache.tokens.document
    assert (await aclient.caches.verify(cache.id)).ok
    assert (await aclient.caches.update(cache.id, name="async")).name == "async"
    assert (await aclient.caches.import_blob(await aclient.caches.download(cache.id))).existing
    with pytest.raises(errors.CacheNotFound):
        await aclient.caches.retrieve("kvs_" + "0" * 40)
    assert (await aclient.ready()).status == "ready"


@pytest.mark.anyio
async def test_an_answer_says_which_tokens_it_read(client: Client, aclient: AsyncClient) -> None:
    whole = client.caches.create(document=LONG, policy="full")
    select = Select(method="quest", tokens=128, passages=True)
    answer = client.caches.query(whole.id, QUESTION, max_tokens=6, select=select)
    assert answer.passages is not None
    (read,) = answer.passages
    assert (read.cache_id, read.tokens) == (whole.id, whole.tokens.document)
    shares = read.fractions()
    assert len(shares) == read.tokens
    assert shares[0] == 1.0
    assert 0.0 in shares
    assert sum(shares) == pytest.approx(answer.usage.read_tokens, rel=0.2)  # that of the last token
    with client.caches.stream([whole.id], QUESTION, max_tokens=6, select=dict(select)) as stream:
        assert stream.answer.passages == answer.passages
    again = await aclient.caches.query(whole.id, QUESTION, max_tokens=6, select=select)
    assert again.passages == answer.passages
    assert client.caches.query(whole.id, QUESTION, max_tokens=6).passages is None


LONG = "\n\n".join(f"Entry {number}. The locker of unit {number} has the code {number * 37}." for number in range(90))


@pytest.mark.anyio
async def test_events_of_a_creation_end_with_its_answer(client: Client, aclient: AsyncClient) -> None:
    *events, made = client.caches.create_events(document=LONG + "Watched.", policy="knorm", compression_ratio=0.5)
    assert isinstance(made, CacheObject)
    assert {event.phase for event in events if isinstance(event, CreationProgress)} == {"prefill", "quality", "store"}
    assert all(isinstance(event, CreationProgress) for event in events)
    there = client.caches.create(document=LONG + "Watched.", policy="knorm", compression_ratio=0.5)
    assert (there.id, there.existing) == (made.id, True)
    again = [event async for event in aclient.caches.create_events(document=LONG, policy="knorm", levels=[0.5, 0.75])]
    assert isinstance(again[-1], list)
    assert [cache.compression_ratio for cache in again[-1]] == [0.5, 0.75]
    with pytest.raises(errors.InvalidRequest):
        list(client.caches.create_events(document=LONG, policy="streaming_llm", policy_params={"sink": -1}))
    with pytest.raises(errors.DocumentTooShort):  # of the worker, before the first event
        list(client.caches.create_events(document=""))


@pytest.mark.anyio
async def test_a_document_is_split_by_both_clients(client: Client, aclient: AsyncClient) -> None:
    parts = client.caches.create(document=LONG, policy="full", name="entries", split={"max_tokens": 400})
    assert len(parts) > 2
    again = await aclient.caches.create(
        document=LONG, policy="full", name="entries", split=SplitOptions(max_tokens=400)
    )
    assert [cache.id for cache in again] == [cache.id for cache in parts]
    assert [cache.labels["part"] for cache in parts] == [f"{n}/{len(parts)}" for n in range(1, len(parts) + 1)]
    found = client.caches.list(labels={"split": parts[0].labels["split"]})
    assert {cache.id for cache in found} == {cache.id for cache in parts}
    request = client.caches.create(document=LONG, policy="knorm", split={"max_tokens": 400}, respond_async=True)
    assert len(client.requests.retrieve(request.id, wait_s=60).cache_ids) == len(parts)


@pytest.mark.anyio
async def test_a_subject_is_erased_with_what_was_said_about_it(client: Client, aclient: AsyncClient) -> None:
    labels = {"subject": "heliotrope"}
    made = client.caches.create(document=TEXT + " It is heliotrope.", keep_source=True, labels=labels, policy="full")
    said = client.caches.query(made.id, "Which colour?", max_tokens=2, store=True)
    assert said.stored_cache_id is not None
    shown = await aclient.erasures.create(labels=labels, dry_run=True)
    assert (shown.status, shown.counts) == ("dry_run", {"cache": 2, "source": 2})
    receipt = client.erasures.create(labels=labels)
    assert (receipt.status, receipt.counts) == ("completed", shown.counts)
    assert {made.id, said.stored_cache_id} <= {each.id for each in receipt.erased}
    assert (await aclient.erasures.create(labels=labels)).erased == receipt.erased
    for id in (made.id, said.stored_cache_id):
        with pytest.raises(errors.CacheNotFound):
            client.caches.retrieve(id)
    with pytest.raises(errors.InvalidRequest, match="say what is to be erased"):
        client.erasures.create()
    with pytest.raises(errors.InvalidRequest, match="its own tenant alone"):
        client.erasures.create(tenant="another")
