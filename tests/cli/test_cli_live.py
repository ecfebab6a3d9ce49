"""The command line against a real service."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from typer.testing import CliRunner, Result

from kvshelf import Client, CompressedCache
from kvshelf.api import ReadShares
from kvshelf.artifact.blob import inspect
from kvshelf.artifact.exported import about_part
from kvshelf.cli import app
from kvshelf.cli.output import harmless
from kvshelf.cli.output.common import megabytes
from kvshelf.store.bundles.bundle import push
from kvshelf.store.bundles.places import BundleFolder
from kvshelf.store.erasure.signing import Signer
from tests.store.caches import make_cache

QUESTION = "What is the access code of the amber falcon?"


@pytest.fixture(autouse=True)
def _service(service_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHELF_URL", service_url)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.txt"
    path.write_text(f"[bold]{tmp_path}[/bold] The access code of the amber falcon is 482913.\n" * 4)
    return path


def run(*args: str | Path, code: int = 0, text: str | None = None) -> Result:
    done = CliRunner().invoke(app, [str(arg) for arg in args], input=text)
    assert done.exit_code == code, done.output
    return done


def test_put_prints_the_id_alone_on_stdout(report: Path) -> None:
    first = run("put", report, "--policy", "streaming_llm", "--budget-tokens", "24", "--param", "sink=2")
    assert first.stdout.startswith("kvs_")
    assert first.stdout.count("\n") == 1
    assert "24 kept by streaming_llm" in first.stderr
    again = run("put", report, "--policy", "streaming_llm", "--budget-tokens", "24", "--param", "sink=2")
    assert again.stdout == first.stdout
    assert "already on the shelf" in again.stderr


def test_put_carries_every_option(report: Path) -> None:
    options = (
        "--ttl",
        "2h",
        "--ttl-renew",
        "--label",
        "team=law",
        "--label",
        "year=2026",
        "--layout",
        "plain",
        "--codec",
        "none",
    )
    cache = json.loads(run("put", report, *options, "--name", "Report", "--policy", "full", "--json").stdout)
    assert (cache["name"], cache["layout"], cache["labels"]) == ("Report", "plain", {"team": "law", "year": "2026"})
    assert cache["expires_at"] == pytest.approx(cache["created_at"] + 7200, abs=60)
    assert (cache["ttl_renew"], cache["ttl_s"]) == (True, 7200)


def test_put_reads_standard_input(report: Path) -> None:
    from_file = run("put", report, "--policy", "full").stdout
    assert run("put", "-", "--policy", "full", text=report.read_text()).stdout == from_file


def test_put_goes_on_after_a_bad_file(report: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    done = run("put", empty, report, tmp_path / "none.txt", "--policy", "full", code=2)
    assert done.stdout.startswith("kvs_")
    assert done.stdout.count("\n") == 1


def test_put_tells_how_far_it_is_in_lines_and_prints_nothing_but_its_result(report: Path) -> None:
    done = run("put", report, "--policy", "knorm", "--compression-ratio", "0.5", "--json")
    assert json.loads(done.stdout)["policy"] == "knorm"
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"{report}: prefill and policy, 2 of 2 layers, ")
    assert [line.split(": ")[-1].split(",")[0] for line in lines] == ["prefill and policy", "quality", "store"]
    again = run("put", report, "--policy", "knorm", "--compression-ratio", "0.25")
    *told, summary, warning = again.stderr.splitlines()
    assert "removed 25% of the entries" in warning
    for line in told:
        phase, seconds = line.split(": ")[-1].split(", ")[0], line.split(", ")[-1]
        assert f"{phase} {seconds}" in summary, "the summary counts the seconds that the progress counted"


def test_an_error_of_put_names_its_file(report: Path, tmp_path: Path) -> None:
    binary, empty = tmp_path / "scan.bin", tmp_path / "empty.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    empty.write_text("")
    errors = [line for line in run("put", binary, report, empty, code=2).stderr.splitlines() if "kvshelf: " in line]
    assert [str(name) in line for name, line in zip((binary, empty), errors, strict=True)] == [True, True]
    told = json.loads(run("put", binary, "--json", code=2).stdout)["error"]
    assert str(binary) in told["message"]


@pytest.fixture
def long(tmp_path: Path) -> Path:
    path = tmp_path / f"{tmp_path.name}.txt"
    path.write_text("\n\n".join(f"Locker {n} of {tmp_path.name} has the code {n * 37}." for n in range(90)))
    return path


def test_a_split_document_is_asked_part_by_part(long: Path) -> None:
    split = ("--split", "--part-tokens", "400", "--policy", "full")
    put = run("put", long, *split)
    ids = put.stdout.splitlines()
    assert len(ids) > 2
    assert f"--label document={long.name}" in put.stderr
    assert run("put", long, *split).stdout == put.stdout
    document = ("--label", f"document={long.name}")
    asked = run("ask", *document, QUESTION, "--max-tokens", "4").stdout.splitlines()
    singly = [run("ask", id, QUESTION, "--max-tokens", "4").stdout.removesuffix("\n") for id in ids]
    assert asked == [f"part {n}/{len(ids)}: {answer}" for n, answer in enumerate(singly, 1)]
    objects = [json.loads(line) for line in run("ask", *document, "A?", "B?", "--json").stdout.splitlines()]
    assert [answer["cache_id"] for answer in objects] == ids * 2
    assert [answer["part"] for answer in objects] == [f"{n}/{len(ids)}" for n in range(1, len(ids) + 1)] * 2


def test_a_question_never_goes_to_parts_of_two_documents(long: Path, report: Path) -> None:
    split, document = ("--split", "--part-tokens", "400"), ("--label", f"document={long.name}")
    ids = run("put", long, *split, "--policy", "full").stdout.splitlines()
    run("put", long, *split, "--policy", "knorm")  # the same document in another way
    refused = run("ask", *document, QUESTION, code=2)
    assert "2 documents have the label" in refused.stderr
    one = json.loads(run("show", ids[0], "--json").stdout)["labels"]["split"]
    assert f"--label split={one}" in refused.stderr
    asked = run("ask", "--label", f"split={one}", "A?", "--json").stdout.splitlines()
    assert [json.loads(line)["cache_id"] for line in asked] == ids
    run("put", report, "--policy", "full", "--label", f"split={one}x", *document)
    assert "is no part of a split document" in run("ask", *document, "A?", code=2).stderr
    run("rm", ids[1])
    missing = run("ask", "--label", f"split={one}", "A?", code=3).stderr
    assert "lacks parts" in missing
    assert (f" 2/{len(ids)}" in missing, f" 3/{len(ids)}" in missing) == (False, True)
    assert "no cache has the label" in run("ask", "--label", "document=nothing at all", "A?", code=3).stderr


def test_several_documents_are_asked_together(report: Path, tmp_path: Path) -> None:
    """By an id, a name with a comma, and the beginning of an id."""
    texts = {"quays, two": "Two quays has the old harbour. ", "short": "The mole is long. "}
    ids = [run("put", report, "--policy", "full").stdout.strip()]
    for name, text in texts.items():
        (tmp_path / "more.txt").write_text(text * 9)
        ids.append(run("put", tmp_path / "more.txt", "--policy", "full", "--name", name).stdout.strip())
    references = f"{ids[0]}, {ids[1][:20]},short"
    found = json.loads(run("ask", references, QUESTION, "--max-tokens", "6", "--json").stdout)
    assert found["cache_ids"] == ids
    asked = run("ask", references, QUESTION, "--max-tokens", "6")
    assert "tokens from the shelf" in asked.stderr
    answer, table = asked.stdout.split("\nSOURCE")
    assert answer == harmless(found["text"])
    told = dict(line.split() for line in table.splitlines()[1:])
    shares = {source["cache_id"]: f"{source['share']:.1%}" for source in found["sources"]}
    assert told == {ids[0]: shares[ids[0]], ids[1][:20]: shares[ids[1]], "short": shares[ids[2]]}
    assert list(told.values()) == sorted(told.values(), key=lambda text: -float(text.rstrip("%")))
    alone = run("ask", "quays, two", QUESTION, "--max-tokens", "6", "--json").stdout
    assert json.loads(alone)["cache_id"] == ids[1]


def test_the_shelf_is_searched_and_the_best_documents_are_asked(tmp_path: Path) -> None:
    texts = {"lamp": "The lamp burns whale oil. ", "ferry": "A ferry crosses the sound. ", "horn": "The horn is loud. "}
    ids = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{tmp_path} {text}" * 9)
        options = ("--policy", "full", "--label", f"search={tmp_path.name}")
        ids[name] = run("put", tmp_path / name, *options).stdout.strip()
    question, label = "Which ferry crosses the sound?", f"search={tmp_path.name}"
    named = run("search", question, "--label", label)
    lines = named.stdout.splitlines()
    assert lines[0].split() == ["SCORE", "ID", "NAME"]
    assert lines[1].split()[-1] == "ferry"
    assert {line.split()[1] for line in lines[1:]} == set(ids.values())
    assert "3 documents searched" in named.stderr
    found = json.loads(run("search", question, "--label", label, "--limit", "2", "--json").stdout)
    best = [hit["cache_id"] for hit in found["data"]]
    asked = ("ask", "--all", "--best", "2", "--label", label, question, "--max-tokens", "4")
    answer = json.loads(run(*asked, "--json").stdout)
    assert answer["cache_ids"] == best
    told, table = run(*asked).stdout.split("\nSOURCE")
    assert told == harmless(answer["text"])
    assert "ferry" in table
    one = json.loads(run("ask", "--all", "--best", "1", "--label", label, question, "--json").stdout)
    assert one["cache_id"] == ids["ferry"]
    assert "no document to ask" in run("ask", "--all", "--label", "search=nothing", question, code=3).stderr


def test_several_documents_are_refused_by_name(report: Path) -> None:
    id = run("put", report, "--policy", "full").stdout.strip()
    assert "twice" in run("ask", f"{id},{id}", QUESTION, code=2).stderr
    assert "nothing" in run("ask", f"{id},nothing", QUESTION, code=3).stderr
    assert "--compare" in run("ask", f"{id},{id}", QUESTION, "--compare", code=2).stderr
    many = ",".join(f"kvs_{number:040x}" for number in range(65))
    assert "64" in run("ask", many, QUESTION, code=2).stderr


def test_ask_streams_the_answer_and_reports_its_cost(report: Path) -> None:
    id = run("put", report, "--policy", "full").stdout.strip()
    asked = run("ask", id, QUESTION, "--max-tokens", "6")
    assert "tokens from the shelf" in asked.stderr
    as_json = json.loads(run("ask", id, QUESTION, "--max-tokens", "6", "--json").stdout)
    assert asked.stdout == harmless(as_json["text"]) + "\n"
    assert "cut off after 6 tokens" in asked.stderr
    assert "cut off" not in run("ask", id, QUESTION, "--choice", "1").stderr
    several = run("ask", id, QUESTION, "And the colour?", "--max-tokens", "6")
    questions = several.stdout.splitlines()[::2]
    assert questions == [QUESTION, "And the colour?"], "a log has each answer below its question"
    assert several.stdout.startswith(f"{QUESTION}\n{asked.stdout}")


def test_ask_shows_the_prompt_that_is_built(report: Path) -> None:
    id = run("put", report, "--policy", "full", "--keep-source", "text").stdout.strip()
    shown = run("ask", id, QUESTION, "--show-prompt").stdout
    for line in (
        "template, ",
        "document, ",
        "question, ",
        " tokens, from the shelf:",
        " tokens, prefilled:",
        "more ...",
    ):
        assert line in shown
    assert run("ask", id, QUESTION, "--show-prompt", "--json").stdout.count("from_shelf") > 3
    assert "CACHE" in run("ask", "--all", QUESTION, "--show-prompt", code=2).stderr


def test_ls_show_and_rm(report: Path, tmp_path: Path) -> None:
    id = run("put", report, "--policy", "full", "--label", f"of={tmp_path.name}").stdout.strip()
    listed = run("ls", "--label", f"of={tmp_path.name}")
    assert listed.stdout.splitlines()[1].startswith(id[:12] + "  full")
    assert "report.txt" in listed.stdout
    assert [
        json.loads(line)["id"] for line in run("ls", "--label", f"of={tmp_path.name}", "--json").stdout.splitlines()
    ] == [id]
    blob = tmp_path / "report.kvshelf"
    shown = run("show", id, "--output", blob)
    assert id in shown.stdout
    assert " MB uncompressed in 16 bits; " in shown.stdout
    assert (
        CompressedCache.from_bytes(blob.read_bytes()).num_tokens
        == json.loads(run("show", id, "--json").stdout)["tokens"]["document"]
    )
    assert run("rm", id).stdout == f"{id}\n"
    assert id[:12] not in run("ls").stdout


def test_append_prints_the_id_of_a_cache_that_goes_on(report: Path, tmp_path: Path) -> None:
    id = run("put", report, "--policy", "full").stdout.strip()
    letter = tmp_path / "letter.txt"
    letter.write_text("The access code of the silver heron is 551093.\n" * 3)
    assert "report.txt, append 1" in run("append", id, letter, "--policy", "knorm", "--json").stdout
    made = run("append", id[:12], letter, "--name", "with a letter", "--ttl", "1h")
    assert "letter.txt: " in made.stderr
    child = json.loads(run("show", made.stdout.strip(), "--json").stdout)
    assert (child["parent_id"], child["name"], child["policy"]) == (id, "with a letter", "full")
    assert id in run("show", child["id"]).stdout
    piped = run("append", id, "-", "--policy", "keydiff", "--compression-ratio", "0.5", "--json", text="x y z " * 20)
    assert json.loads(piped.stdout)["policy"] == "keydiff"
    assert "cache_not_found" in run("append", "kvs_" + "0" * 40, letter, "--json", code=3).output
    assert "cascade" in run("rm", id, code=2).output
    deleted = run("rm", id, "--cascade").stdout.splitlines()
    assert (deleted[-1], len(deleted)) == (id, 4)
    assert {child["id"], json.loads(piped.stdout)["id"]} < set(deleted)
    run("show", child["id"], code=3)


def test_update_changes_what_is_named_and_nothing_else(report: Path, tmp_path: Path) -> None:
    id = run("put", report, "--policy", "full", "--label", f"of={tmp_path.name}", "--ttl", "1h").stdout.strip()
    before = json.loads(run("show", id, "--json").stdout)
    assert run("update", id[:12], "--next-use", "20s").stdout == f"{id}\n"
    assert json.loads(run("show", id, "--json").stdout) == before, "a hint is no property of a cache"
    changed = json.loads(run("update", id, "--name", "minutes", "--pin", "--ttl", "never", "--json").stdout)
    assert (changed["name"], changed["pinned"], changed["expires_at"]) == ("minutes", True, None)
    assert changed["labels"] == before["labels"]
    again = json.loads(run("update", id, "--label", "a=b", "--no-pin", "--next-use", "never", "--json").stdout)
    assert (again["labels"], again["pinned"], again["name"]) == ({"a": "b"}, False, "minutes")
    run("update", id, "--guarantee", "2d")
    assert "not evicted before" in run("show", id).stdout
    assert json.loads(run("update", id, "--guarantee", "never", "--json").stdout)["guaranteed_until"] is None
    assert "--guarantee" in run("update", id, "--guarantee", "long", code=2).stderr
    assert "nothing to change" in run("update", id, code=2).stderr
    assert "next_use_s" in run("update", id, "--next-use", "2d", code=2).stderr
    assert run("ask", id, QUESTION, "--max-tokens", "2", "--tool", "search").stdout
    warm = json.loads(run("warm", id[:12], "--json").stdout)
    assert (warm["caches"], warm["read_bytes"]) == (1, 0), "it was asked a moment ago"
    run("update", id, "--label", f"of={tmp_path.name}")
    told = run("warm", "--label", f"of={tmp_path.name}", "--replicas", "all").stdout
    assert "REPLICA" in told
    assert warm["replica"] in told
    assert "by cache_ids or by labels" in run("warm", code=2).stderr
    assert "replicas" in run("warm", id, "--replicas", "some", code=2).stderr
    assert "tool" in run("ask", id, QUESTION, "--tool", "a b", code=2).stderr


@pytest.fixture
def two(report: Path, tmp_path: Path) -> tuple[str, str, str]:
    """The ids of two caches, and the name of both."""
    name = f"of {tmp_path.name}: " + "a long name " * 9
    puts = (run("put", report, "--policy", policy, "--name", name) for policy in ("full", "layer_defensivekv"))
    return *(put.stdout.strip() for put in puts), name  # type: ignore[return-value]


def test_a_listing_fits_80_columns(two: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    *ids, name = two
    monkeypatch.setenv("COLUMNS", "80")
    heading, *lines = run("ls", "--limit", "2").stdout.splitlines()
    assert heading.split() == ["ID", "POLICY", "KEPT", "OF", "SIZE", "QUALITY", "NAME"]
    assert {len(line) for line in (heading, *lines)} == {80}
    assert [line.split()[0] for line in lines] == [id[:12] for id in reversed(ids)]
    for line, id in zip(lines, reversed(ids), strict=True):
        cache = json.loads(run("show", line.split()[0], "--json").stdout)
        whole = [cache["policy"], str(cache["tokens"]["kept"]), str(cache["tokens"]["document"])]
        assert (cache["id"], line.split()[1:4]) == (id, whole)
        assert f" {megabytes(cache['bytes']['stored'])}  " in line
        assert line.endswith("…")
    wide = run("ls", "--limit", "2", "--wide").stdout.splitlines()
    assert name.strip() in wide[1], "a line that is too long anyway is not cut"
    assert {"AGE", "EXPIRY", "USES", "CODEC", "MODEL"} <= set(wide[0].split())
    chosen = run("ls", "--limit", "1", "--columns", "expiry,id").stdout.splitlines()
    assert [line.split() for line in chosen] == [["EXPIRY", "ID"], ["never", ids[1][:12]]]
    monkeypatch.delenv("COLUMNS")
    assert name.strip() in run("ls", "--limit", "2").stdout, "nothing is cut in a pipe"
    assert [json.loads(line)["id"] for line in run("ls", "--limit", "2", "--json").stdout.splitlines()] == ids[::-1]


def test_every_command_takes_a_short_id_or_a_name(report: Path, tmp_path: Path) -> None:
    name, blob = f"{tmp_path.name}.txt", tmp_path / "blob"
    id = run("put", report, "--policy", "full", "--name", name).stdout.strip()
    for reference in (name, id, id[:12], id[4:12], id[:8]):
        assert json.loads(run("show", reference, "--json").stdout)["id"] == id
        assert run("ask", reference, QUESTION, "--max-tokens", "2").stdout
        assert json.loads(run("export", reference, "--output", blob, "--json").stdout)["id"] == id
    for reference in (name[:-1], id[:7], id[1:], id.upper(), f"{id[:12]}…", f"{id}0"):
        assert "kvshelf ls" in run("show", reference, code=3).stderr
    assert run("rm", id[:12], name).stdout == f"{id}\n", "both mean the same cache"


def test_what_may_be_one_of_several_caches_is_refused(two: tuple[str, str, str], tmp_path: Path) -> None:
    first, second, name = two
    blob = tmp_path / "blob"
    commands = [("ask", name, QUESTION), ("show", name), ("export", name, "--output", blob), ("rm", name)]
    for command in commands:
        said = run(*command, code=2).stderr
        assert f"{first[:12]}  full, 0% removed" in said
        assert f"{second[:12]}  layer_defensivekv" in said
    assert not blob.exists()
    refused = json.loads(run("show", name, "--json", code=2).stdout)["error"]
    assert refused["details"]["candidates"] == [second, first]
    # The name is refused although the first deletion leaves one cache of this name.
    assert run("rm", first[:12], name, "kvs_", code=2).stdout == f"{first}\n"
    assert run("show", second).stdout


def test_a_name_that_another_id_begins_with_is_refused(report: Path, tmp_path: Path) -> None:
    id = run("put", report, "--policy", "full", "--name", tmp_path.name).stdout.strip()
    named = run("put", report, "--policy", "streaming_llm", "--budget-tokens", "24", "--name", id[4:12]).stdout.strip()
    assert "several caches" in run("rm", id[4:12], code=2).stderr
    assert json.loads(run("show", id[:12], "--json").stdout)["id"] == id
    assert run("rm", named, id).stdout == f"{named}\n{id}\n"


def test_token_ids_are_kept_and_make_a_lost_cache_again(report: Path) -> None:
    id = run("put", report, "--policy", "knorm", "--keep-source", "tokens", "--ttl", "1h").stdout.strip()
    assert "tokens kept" in run("show", id).stdout
    with Client() as client:
        # Once made again it has as long as it had: enough to be asked, however busy the machine is.
        ends_at = max(time.time() + 0.2, client.caches.retrieve(id).created_at + 4)
        client.caches.update(id, expires_at=ends_at)
    while time.time() <= ends_at:
        time.sleep(0.1)
    refused = json.loads(run("ask", id, "Who?", "--max-tokens", "4", "--json", code=3).stdout)["error"]
    assert refused["code"] == "cache_expired"
    with Client() as client:
        answer = client.caches.query(id, "Who?", max_tokens=4, on_miss="recompute")
        assert (answer.recomputed, answer.cache_id) == ("expired", id)
    run("rm", id)
    other = json.loads(
        run("put", report, "--policy", "knorm", "--keep-source", "text", "--source-ttl", "2h", "--json").stdout
    )
    assert (other["source"]["form"], other["existing"]) == ("text", False)
    assert other["source"]["expires_at"] == pytest.approx(time.time() + 7200, abs=60)
    run("rm", id)


def test_export_and_import(report: Path, tmp_path: Path) -> None:
    named = ("--name", "the report", "--label", "team=tax", "--label", "year=2024")
    id = run("put", report, "--policy", "full", "--keep-source", "text", *named).stdout.strip()
    before = json.loads(run("show", id, "--json").stdout)
    assert before["has_source"]
    assert "kept" in run("show", id).stdout
    blob = tmp_path / "report.kvshelf"
    assert run("export", id, "--output", blob).stdout == f"{blob}\n"
    run("rm", id)
    assert run("import", blob, "--ttl", "1h", "--label", "team=law").stdout == f"{id}\n"
    cache = json.loads(run("show", id, "--json").stdout)
    assert (cache["name"], cache["labels"]) == ("the report", {"team": "law", "year": "2024"})
    assert (cache["has_source"], cache["quality"]) == (True, before["quality"])
    assert json.loads(run("import", blob, "--json").stdout)["existing"]
    blob.write_bytes(blob.read_bytes()[:-1])
    refused = json.loads(run("import", blob, "--json", code=2).stdout)["error"]
    assert (refused["code"], refused["param"]) == ("invalid_request", "FILE")
    assert str(blob) in refused["message"]


@pytest.mark.parametrize("command", [("show",), ("rm",), ("ask", QUESTION)])
def test_an_unknown_id_ends_with_exit_code_3(command: tuple[str, ...]) -> None:
    unknown = "kvs_" + "0" * 40
    done = run(command[0], unknown, *command[1:], code=3)
    assert unknown in done.stderr
    as_json = run(command[0], unknown, *command[1:], "--json", code=3)
    assert json.loads(as_json.stdout)["error"]["code"] == "cache_not_found"


def test_policies_and_selectors_of_the_service() -> None:
    assert "keydiff" in run("policies").stdout
    assert "quest" in run("selectors").stdout


def test_usage_of_the_service(report: Path) -> None:
    cache_id = run("put", report, "--policy", "full").stdout.strip()
    run("ask", cache_id, QUESTION, "--max-tokens", "2")
    end = time.monotonic() + 60
    while not (rows := json.loads(run("usage", "--group-by", "day", "--json").stdout)["data"]):
        assert time.monotonic() < end
        time.sleep(0.1)
    shown = run("usage", "--group-by", "day", "--group-by", "model")
    assert rows[-1]["day"] in shown.stdout
    assert shown.stdout.split()[:3] == ["DAY", "MODEL", "ANSWERS"]
    assert "default stores" in shown.stderr
    run("ask", cache_id, QUESTION, "--max-tokens", "2", "--conversation", "conv_of_the_command_line")
    while "conv_of_the_command_line" not in (turns := run("usage", "--group-by", "conversation").stdout):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert turns.split()[:5] == ["CONVERSATION", "ANSWERS", "CREATED", "READ", "HITS"]
    assert "is after to" in run("usage", "--from", "2026-02-01", "--to", "2026-01-01", code=2).stderr
    prices = report.with_name("prices.json")
    prices.write_text('{"currency": "EUR", "worker_hour": 36000, "gb_month": 100}')
    paid = run("usage", "--prices", prices, "--label", "team")
    assert "COST EUR" in paid.stdout
    assert "EUR a month" in paid.stderr
    assert " asked so far), in seconds of the model" in run("show", cache_id).stdout
    assert "EUR, kept for" in run("show", cache_id, "--prices", prices).stdout
    prices.write_text('{"worker_hour": 36000}')
    assert "prices need a currency" in run("usage", "--prices", prices, code=2).stderr


def test_a_bundle_of_the_service(report: Path, tmp_path: Path) -> None:
    private, public, place, trust = (tmp_path / name for name in ("key.pem", "public.pem", "place", "trust.json"))
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    cache_id = run("put", report, "--codec", "lossless", "--keep-source", "text", "--name", "b").stdout.strip()
    run("push", place, cache_id, "--name", "own", "--key", private)
    run("trust", "us", public, "--trust", trust)
    before = json.loads(run("show", cache_id, "--json").stdout)
    run("rm", cache_id)
    assert run("pull", place, "--trust", trust).stdout.strip() == cache_id
    after = json.loads(run("show", cache_id, "--json").stdout)
    for same in ("name", "labels", "quality", "codec", "has_source", "bytes"):
        assert after[same] == before[same]
    blob = make_cache().to_bytes()
    foreign = blob + about_part(inspect(blob).root, b'{"name": "foreign"}', b"")
    push(BundleFolder(place), "other", [foreign], Signer(key))
    refused = run("pull", place, "--bundle", "other", "--trust", trust, code=2)
    assert "which is not served here" in refused.stderr


def test_an_answer_that_reads_a_part(report: Path) -> None:
    cache_id = run("put", report, "--policy", "full", "--codec", "int4").stdout.strip()
    selecting = ("--select", "quest", "--select-tokens", "96", "--select-param", "over=mean")
    answer = json.loads(run("ask", cache_id, QUESTION, *selecting, "--json").stdout)
    assert 0 < answer["usage"]["read_tokens"] <= 96
    assert f"{answer['usage']['read_tokens']} entries read" in " ".join(
        run("ask", cache_id, QUESTION, *selecting).stderr.split()
    )
    alone = run("ask", cache_id, QUESTION, "--select-tokens", "96", code=2)
    assert "need a selector" in " ".join(alone.stderr.split())
    alone = run("ask", cache_id, QUESTION, "--passages", code=2)
    assert "need a selector" in " ".join(alone.stderr.split())
    refused = run("ask", cache_id, QUESTION, "--select", "quets", code=2)
    assert "did you mean 'quest'" in " ".join(refused.stderr.split())


def test_an_answer_that_shrinks_with_its_document(report: Path) -> None:
    sums = ("--policy", "h2o", "--compression-ratio", "0", "--param", "keep_scores=true")
    cache_id = run("put", report, *sums).stdout.strip()
    scoped = ("--suffix", "h2o", "--suffix-scope", "cache", "--suffix-budget", "96", "--suffix-param", "every=4")
    usage = json.loads(run("ask", cache_id, QUESTION, *scoped, "--json").stdout)["usage"]
    assert (usage["read_tokens"], usage["suffix_tokens"] <= 100) == (2, True)  # the chat template's


def test_an_answer_in_a_shape(report: Path, tmp_path: Path) -> None:
    cache_id = run("put", report, "--policy", "full").stdout.strip()
    schema = tmp_path / "schema.json"
    of_one = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    schema.write_text(json.dumps(of_one | {"additionalProperties": False}))
    assert run("ask", cache_id, QUESTION, "--schema", schema).stdout in ('{"yes": true}\n', '{"yes": false}\n')
    assert run("ask", cache_id, QUESTION, "--choice", "left", "--choice", "right").stdout.strip() in ("left", "right")
    grammar = tmp_path / "grammar.lark"
    grammar.write_text("start: missing")
    assert "missing" in run("ask", cache_id, QUESTION, "--grammar", grammar, code=2).stderr
    nowhere = run("ask", cache_id, QUESTION, "--schema", tmp_path / "none.json", code=2)
    assert "cannot be read" in " ".join(nowhere.stderr.split())


def test_a_question_goes_to_the_nearest_episode(tmp_path: Path) -> None:
    talk = tmp_path / "talk.txt"
    about = [
        ["The crane lifts grain.", "Is the crane oiled?"] * 4,
        ["Pupils sing loudly.", "The teacher sings, too."] * 4,
    ]
    talk.write_text("\n\n".join(utterance for topic in about for utterance in topic))
    put = run("put", talk, "--episodes", "2", "--compression-ratio", "0.3")
    ids = put.stdout.split()
    assert len(ids) == 2
    assert "talk.txt episode 2/2: " in put.stderr
    assert "--route nearest" in put.stderr
    asking = ("ask", ",".join(ids), "What do pupils sing?", "--route", "nearest")
    answer = json.loads(run(*asking, "--json").stdout)
    assert [source["share"] for source in answer["sources"]] == [0.0, 1.0]
    assert "100.0%" in run(*asking).stdout
    one = run("ask", ids[0], "What?", "--route", "nearest", code=2)
    assert "among several caches" in " ".join(one.stderr.split())
    unknown = run("ask", ",".join(ids), "What?", "--route", "farthest", code=2)
    assert "nearest" in unknown.stderr


PARTS = "".join(f"The locker of unit {number} has the code {number * 37}.\n" for number in range(60))


def test_the_passages_that_an_answer_read(tmp_path: Path) -> None:
    document = tmp_path / "lockers.txt"
    document.write_text(PARTS)
    kept = run("put", document, "--policy", "full", "--keep-source", "text").stdout.strip()
    asking = ("What is the code of unit 7?", "--select", "quest", "--select-tokens", "96", "--passages")
    answer = json.loads(run("ask", kept, *asking, "--json").stdout)
    (told,) = answer["passages"]
    told_runs = ReadShares(**told).most_read()
    with Client() as client:
        tokens = client.caches.kept(kept).tokens
    _, *table = run("ask", kept, *asking).stdout.splitlines()
    assert table[0].split() == ["TOKENS", "READ", "TEXT"]
    assert len(table) - 1 == len(told_runs) > 1
    for line, (share, first, end) in zip(table[1:], told_runs, strict=True):
        place, read, *words = line.split()
        assert (place, read) == (f"{first}-{end - 1}", f"{share:.0%}")
        assert words == "".join(tokens[first:end]).split()
    bare = run("put", document, "--policy", "full", "--codec", "int8").stdout.strip()
    _, *table = run("ask", bare, *asking).stdout.splitlines()
    assert table[0].split() == ["TOKENS", "READ"]
    other = run("put", document, "--policy", "full", "--codec", "int4", "--keep-source", "text").stdout.strip()
    together = run("ask", f"{kept},{other}", *asking).stdout.splitlines()
    assert together[-6].split() == ["SOURCE", "TOKENS", "READ", "TEXT"]
    assert {line.split()[0] for line in together[-5:]} <= {kept, other}


@pytest.mark.slow
def test_doctor_looks_at_the_service_and_a_store(tmp_path: Path, service_url: str) -> None:
    done = run("doctor", "--url", service_url, "--store", f"disk://{tmp_path}/home")
    for found in ("model", "store", "service", "template", "tools", "klt", "gates", "vllm", "restart"):
        assert f"ok    {found} " in done.stdout
    assert " tokens prefilled a second, " in done.stdout
    bad = run("doctor", "--url", "http://127.0.0.1:9", "--model", tmp_path / "no-model", "--json", code=1)
    checks = {check["check"]: check["ok"] for check in map(json.loads, bad.stdout.splitlines())}
    assert (checks["torch"], checks["model"], checks["service"]) == (True, False, False)


def test_a_name_that_is_not_utf8_can_be_put_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9 \x1b[31m.txt"
    path.write_text("The access code of the amber falcon is 482913. " * 4)
    put = run("put", path, "--json")
    assert json.loads(put.stdout)["name"] == "caf\\xe9 \x1b[31m.txt"
    assert "\x1b[31m" not in put.output
    id = json.loads(put.stdout)["id"]
    for command in (("show", id), ("ls",), ("search", "amber falcon"), ("ask", id, QUESTION)):
        shown = run(*command)
        assert "\x1b[31m" not in shown.output
    assert r"caf\xe9 \x1b[31m.txt" in run("show", id).stdout
    run("put", tmp_path / "gone\udce9.txt", code=2)
    run("rm", id)


def test_batches_are_listed_shown_and_cancelled() -> None:
    rows = "".join(json.dumps({"document": f"Boat {number} is in. " * 200}) + "\n" for number in range(200)).encode()
    with Client() as client:
        file = client.files.create(file=("rows.jsonl", rows), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, metadata={"by": "the \x1b[31mnight"})
    assert batch.id in run("batches", "list").stdout
    (listed,) = map(json.loads, run("batches", "list", "--limit", "1", "--json").stdout.splitlines())
    assert listed["id"] == batch.id
    shown = run("batches", "show", batch.id).stdout
    assert file.id in shown
    assert r"by=the \x1b[31mnight" in shown
    assert json.loads(run("batches", "show", batch.id, "--json").stdout)["metadata"] == {"by": "the \x1b[31mnight"}
    cancelled = run("batches", "cancel", batch.id)
    assert cancelled.stdout == f"{batch.id}\n"
    end = time.monotonic() + 60
    while (ended := json.loads(run("batches", "cancel", batch.id, "--json").stdout))["status"] != "cancelled":
        assert time.monotonic() < end
        time.sleep(0.2)
    assert ended["id"] == batch.id
    for verb in ("show", "cancel"):
        run("batches", verb, "batch_" + "0" * 40, code=3)
