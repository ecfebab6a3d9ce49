"""A batch from the page: its file goes up, its progress is told as it happens, its results are saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.page.conftest import OpenPage, document

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

TIMEOUT_MS = 180_000


def begin(page: Page, source: Path) -> Locator:
    """Begin a batch with a file; returns its card."""
    page.get_by_label("File of documents").set_input_files(source)
    page.get_by_role("combobox", name="Policy").select_option("lagkv")
    page.get_by_role("combobox", name="Codec").select_option("int4")
    page.get_by_role("button", name="Begin the batch").click()
    page.wait_for_url("**/#batches/batch_*")
    return page.get_by_role("region", name="The chosen batch")


def test_a_batch_is_begun_followed_and_cancelled(open_page: OpenPage, tmp_path: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text(json.dumps({"custom_id": "one", "document": document(95, words=60)}) + "\n")
    page = open_page("batches")
    every = page.get_by_role("region", name="All batches")
    before = every.bounding_box()
    with page.expect_request(lambda request: request.url.endswith("/v1/batches") and request.method == "POST") as asked:
        card = begin(page, source)
    assert asked.value.post_data_json["codec"] == "int4"
    card.get_by_text("the batch then ends with the rows that are done").wait_for()
    card.get_by_role("button", name="Cancel").click()
    card.get_by_text("cancelled, ").wait_for(timeout=TIMEOUT_MS)
    card.get_by_role("button", name="Continue").wait_for()
    every.get_by_text("cancelled, ").first.wait_for()
    after = every.bounding_box()
    assert before is not None
    assert after is not None
    assert after["y"] == before["y"], "the list stays where it is while the chosen batch changes"


def test_the_results_of_a_batch_are_saved(open_page: OpenPage, tmp_path: Path, soak: bool) -> None:
    if not soak:
        pytest.skip("a whole batch brings up a pipeline of its own, which takes long: only with TESTS_SOAK=1")
    rows = [
        json.dumps({"custom_id": f"row-{number}", "document": document(90 + number, words=60)}) for number in range(4)
    ]
    source = tmp_path / "corpus.jsonl"
    source.write_text("\n".join([*rows, '{"custom_id": "bad"}']) + "\n")
    page = open_page("batches")
    card = begin(page, source)
    card.get_by_text("completed, 4 of 5 rows, 1 failed").wait_for(timeout=TIMEOUT_MS)
    card.get_by_role("list", name="Failed rows").get_by_text("bad: ").wait_for()
    page.get_by_role("region", name="All batches").get_by_text("completed, 4 of 5 rows").first.wait_for()
    with page.expect_download() as saving:
        card.get_by_role("button", name="Save the results").click()
    results = [json.loads(line) for line in saving.value.path().read_text().splitlines()]
    assert {result["custom_id"] for result in results} == {f"row-{number}" for number in range(4)}
    with page.expect_download() as saving:
        card.get_by_role("button", name="Save the errors").click()
    (error,) = [json.loads(line) for line in saving.value.path().read_text().splitlines()]
    assert error["custom_id"] == "bad"
    page.get_by_role("link", name="Shelf").click()
    page.locator(".grid .all [role=row]", has_text="lagkv").nth(3).wait_for()


def test_a_file_that_is_no_batch_says_what_is_wrong(open_page: OpenPage, tmp_path: Path) -> None:
    source = tmp_path / "empty.jsonl"
    source.write_text("")
    page = open_page("batches")
    page.get_by_label("File of documents").set_input_files(source)
    page.get_by_role("button", name="Begin the batch").click()
    page.get_by_role("alert").get_by_text("empty_file").or_(page.get_by_text("invalid_request")).wait_for(
        timeout=TIMEOUT_MS
    )
