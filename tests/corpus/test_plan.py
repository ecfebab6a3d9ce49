"""`kvshelf plan`: sums computed by hand, invariants of the simulation, and the output that
docs/internals/scale.md shows."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from kvshelf.cli import app
from kvshelf.corpus.plan import (
    ATTEMPTS,
    BUILT_IN,
    FOLDERS,
    MEASURED,
    Fleet,
    Plan,
    PlannedWork,
    SharedRates,
    SharedResource,
    Speed,
    make_plan,
    object_requests,
    read_lengths,
    shape_of,
    shared_resources,
    simulate,
)
from kvshelf.errors import InvalidRequest, PolicyUnsupported
from kvshelf.methods.catalog import compress_share
from kvshelf.model.source import bundled_folder
from kvshelf.store.url import open_store
from kvshelf.workers.replica.create.sizes import Dimensions
from kvshelf_bench.stores.store import random_cache
from tests.amounts import few
from tests.store.objects.faulty import FaultyProxy
from tests.store.objects.servers import BUCKET, S3Server

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "internals" / "scale.md"

LLAMA = Dimensions(layers=32, kv_heads=8, head_dim=128, itemsize=2, device="meta", flops=1.5e10)
SPEED = Speed(10_000.0, "as given", 10_000.0)


def planned(**changes: Any) -> Plan:
    work = PlannedWork("keydiff", 0.75, codec="none")
    arguments: dict[str, Any] = {"lengths": ((4096, 1_000_000),), "work": work, "rates": MEASURED}
    return make_plan(shape=LLAMA, speed=SPEED, **{**arguments, "gpus": 100, "hours": None, **changes})


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_sums_are_those_made_by_hand() -> None:
    plan = planned()
    assert plan.tokens == 4096 * 10**6
    assert plan.gpu_hours == pytest.approx(4096 * 10**6 / 10_000 / 3600)
    assert plan.hours == pytest.approx(plan.gpu_hours / 100)
    assert plan.documents_per_hour == pytest.approx(10**6 / plan.hours)
    assert plan.bytes_full == plan.bytes_full_16bit == 10**6 * 4096 * 32 * 8 * 2 * 128 * 2
    # A quarter of that, positions (a bitmap of 512 bytes for each head) and at most 600 bytes for each layer.
    assert plan.bytes_stored == pytest.approx(plan.bytes_full / 4 + 10**6 * 32 * 8 * 512, rel=1e-3)
    assert plan.redis_memory_bytes == plan.bytes_stored + 10**6 * MEASURED.redis_document_bytes
    assert plan.network_bytes_per_s == pytest.approx(plan.bytes_stored / (plan.hours * 3600))


def test_an_fp32_cache_is_planned_against_16_bits() -> None:
    words = ("--model", "kvshelf-tiny", "--documents", "1000", "--tokens", "1000", "--policy", "full")
    plan = json.loads(run(*words, "--json"))["plan"]
    assert plan["bytes_full"] == 2 * plan["bytes_full_16bit"] == 4096 * 10**6
    said = lines(run(*words))
    assert "full KV in 16 bits 2.0 GB" in said
    assert "stored 4.1 GB, 200.6% of that, 4.11 MB a document" in said


def test_hours_give_gpus_and_gpus_hours() -> None:
    wanted = planned(gpus=None, hours=10.0)
    assert wanted.gpus == math.ceil(wanted.gpu_hours / 10)
    assert wanted.hours <= 10
    assert planned(gpus=wanted.gpus) == wanted
    assert planned(gpus=None, hours=None).gpus == 1


def test_a_folder_takes_no_memory_of_redis_and_no_network() -> None:
    plan = planned(work=PlannedWork("keydiff", 0.75, codec="none", home="disk"))
    assert plan.redis_memory_bytes is None
    assert plan.network_bytes_per_s == 0
    assert plan.home_bytes == 10**6 * MEASURED.disk_document_bytes


def test_objects_leave_the_index_in_redis_and_take_requests() -> None:
    plan = planned(work=PlannedWork("keydiff", 0.75, codec="none", home="objects"), gb_month_price=0.02)
    assert plan.redis_memory_bytes == plan.home_bytes == 10**6 * MEASURED.redis_document_bytes
    assert plan.network_bytes_per_s == pytest.approx(plan.bytes_stored / (plan.hours * 3600))
    assert plan.bytes_stored == pytest.approx(134.36e12, rel=1e-3)
    # Each has 9 parts of 16 MiB, and ranges of 1, 2, 4 and 16 x 8 MiB behind its head.
    assert (plan.puts, plan.gets) == (11 * 10**6, 22 * 10**6)
    assert plan.month_price == pytest.approx(134_360 * 0.02, rel=1e-3)
    both = planned(lengths=((4096, 7), (100, 3)), work=PlannedWork("keydiff", 0.75, codec="none", home="objects"))
    assert (both.puts, both.gets) == (7 * 11 + 3 * 1, 7 * 22 + 3 * 4)  # 3.3 MB: head, tail, ranges of 1 and 2 MiB
    assert (planned().puts, planned().gets) == (0, 0)


@pytest.mark.parametrize("megabytes", few(4, [0.1, 0.5, 9, 16.7, 17, 34, 70]))
def test_requests_to_object_storage_are_as_many_as_are_planned(
    megabytes: float, tmp_path: Path, shared_s3: S3Server
) -> None:
    with FaultyProxy(shared_s3) as proxy:
        blobs = quote(f"s3://{BUCKET}/plan?endpoint={proxy.endpoint}", safe="")
        with open_store(f"disk://{tmp_path}/home?blobs={blobs}") as store:

            def requests() -> tuple[int, int]:
                methods = [method for method, _ in proxy.requests]
                proxy.requests.clear()
                return sum(method in ("PUT", "POST") for method in methods), sum(
                    method in ("GET", "HEAD") for method in methods
                )

            requests()
            stored = store.put(random_cache(megabytes, 2))
            nbytes = stored.bytes_stored
            puts, gets = object_requests(nbytes)
            assert requests() == (puts, gets)
            store.get(stored.id)
            assert requests() == (0, gets - (puts > 1))  # without the HEAD of an upload in parts


def test_lengths_are_added_up_one_by_one() -> None:
    parts = [planned(lengths=((tokens, count),)) for tokens, count in ((1000, 7), (50_000, 3))]
    both = planned(lengths=((1000, 7), (50_000, 3)))
    for name in ("documents", "tokens", "bytes_full", "bytes_stored"):
        assert getattr(both, name) == sum(getattr(part, name) for part in parts)


def test_a_policy_without_a_budget_keeps_everything_and_a_budget_no_more_than_there_is() -> None:
    assert PlannedWork("full").kept(1000) == 1000
    assert PlannedWork("keydiff", budget_tokens=256).kept(1000) == 256
    assert PlannedWork("keydiff", budget_tokens=256).kept(100) == 100
    assert PlannedWork().kept(1000) == 1000  # the default of a creation
    assert PlannedWork("keydiff").kept(1000) == 500


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_shape_of_a_built_in_name_is_that_of_the_model(name: str) -> None:
    config = AutoConfig.for_model("llama", **asdict(BUILT_IN[name]), dtype="bfloat16")
    with torch.device("meta"):
        assert shape_of(name) == Dimensions.of(AutoModelForCausalLM.from_config(config))


def test_what_a_policy_adds_to_a_prefill_is_planned() -> None:
    plain = 1e14 / LLAMA.flops
    for policy in ("full", "keydiff", "kvzip"):
        share = compress_share(policy)
        assert share is not None
        speed = Speed.of(LLAMA, policy, None, None)
        assert speed.tokens_per_s == pytest.approx(plain / (1 + share))
        assert f"{policy} adds {share:.0%} to a prefill" in speed.basis
    assert plain / Speed.of(LLAMA, "kvzip", None, None).tokens_per_s == pytest.approx(5.01, abs=0.01)


def test_shapes_are_those_of_the_published_models() -> None:
    assert shape_of("Llama-3.1-8B").full_bytes(1) == 131072
    assert shape_of("llama-3.1-8b").flops / 2 == pytest.approx(7.50e9, rel=0.01)  # 8.03e9 without its embeddings
    assert shape_of("qwen2.5-7b").full_bytes(1) == 28 * 4 * 128 * 2 * 2
    config = AutoConfig.from_pretrained(bundled_folder("kvshelf-tiny"))
    tiny = shape_of("kvshelf-tiny")
    assert (tiny.layers, tiny.kv_heads) == (config.num_hidden_layers, config.num_key_value_heads)
    assert shape_of(bundled_folder("kvshelf-tiny")) == tiny
    with pytest.raises(InvalidRequest, match="does not exist"):
        shape_of("/nowhere")
    assert len(BUILT_IN) == 4


@pytest.mark.parametrize("text", ["", "12 3 4 5", "a", "0", "-1", "100 0", "1.5", "100\n\nx 3\n"])
def test_a_file_of_lengths_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(InvalidRequest) as error:
        read_lengths(tmp_path / "lengths", None)
    assert error.value.param == "--lengths"
    assert "line 3" in error.value.message or text != "100\n\nx 3\n"


def test_a_file_of_lengths_is_read_and_scaled(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("100 30\n\n2000,10\n50\n")
    assert read_lengths(tmp_path / "lengths", None) == ((100, 30), (2000, 10), (50, 1))
    assert read_lengths(tmp_path / "lengths", 41_000) == ((100, 30_000), (2000, 10_000), (50, 1000))


def test_measured_rates_are_used_and_foreign_files_refused(tmp_path: Path) -> None:
    row = {"policy": "keydiff", "tokens": 8192, "plain_s": {"median": 2.0}, "whole": {"median": 1.05}}
    speed = {"model": "m", "dtype": "bfloat16", "machine": {"gpu": "a GPU", "processor": "x"}}
    (tmp_path / "speed.json").write_text(json.dumps(speed | {"compression": [{"rows": [row]}]}))
    words = ("--rates", str(tmp_path / "speed.json"), "--json", "--model", "kvshelf-tiny")
    plan = json.loads(run(*words, "--policy", "keydiff"))["plan"]
    assert plan["tokens_per_s"] == pytest.approx(8192 / 2.1)
    assert any("keydiff on m in bfloat16 on a GPU" in line for line in plan["assumptions"])
    refused = CliRunner().invoke(app, ["plan", *words, "--policy", "snapkv"])
    assert (refused.exit_code, "it has keydiff" in refused.output) == (2, True)

    rates = {name: value for name, value in MEASURED.__dict__.items() if name != "basis"}
    (tmp_path / "rates.json").write_text(json.dumps({"rates": rates, "machine": {"processor": "x"}}))
    assert replace(SharedRates.read(tmp_path / "rates.json"), basis=MEASURED.basis) == MEASURED
    for content in ("{}", "[]", "x", '{"rates": {"redis_mb_s": null}}'):
        (tmp_path / "foreign").write_text(content)
        with pytest.raises(InvalidRequest):
            SharedRates.read(tmp_path / "foreign")


@pytest.mark.parametrize(
    "words",
    [
        "--gpus 1 --hours 1", "--home tape", "--home disk --simulate", "--tokens-per-s 1 --rates x", "--codec x",
        "--policy x", "--compression-ratio 1", "--budget-tokens 0", "--lengths /nowhere", "--rates /nowhere",
        "--shared-rates /nowhere", "--model /nowhere", "--documents 0", "--gb-month-price -1",
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(words: str) -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "kvshelf-tiny", *words.split()])
    assert done.exit_code == 2, done.output


ROOMY = Fleet(gpus=100, servers=1000, server_memory_bytes=1e15, shelves=1000, services=100)


def test_a_run_where_nothing_fails_takes_as_long_as_planned() -> None:
    plan = planned()
    calm = simulate(plan, replace(ROOMY, node_mtbf_h=1e12, poison=0.0), MEASURED)
    assert calm.hours == pytest.approx(plan.hours)
    assert (calm.documents, calm.error_rows, calm.node_failures, calm.lost_gpu_hours) == (10**6, 0, 0, 0)
    assert (calm.stopped_by, calm.slowed_h) == (None, {})


def test_failures_cost_what_they_must() -> None:
    plan = planned()
    outcome = simulate(plan, replace(ROOMY, node_mtbf_h=1.0, poison=1e-3), MEASURED)
    nodes = 100 / 8
    assert outcome.node_failures == pytest.approx(nodes * outcome.hours, rel=0.5)
    assert outcome.error_rows == pytest.approx(1000, rel=0.15)
    assert outcome.worker_deaths == ATTEMPTS * outcome.error_rows
    assert outcome.hours > plan.hours
    assert outcome.hours * 100 == pytest.approx(plan.gpu_hours + outcome.lost_gpu_hours, rel=0.05)
    assert simulate(plan, replace(ROOMY, node_mtbf_h=1.0, poison=1e-3), MEASURED) == outcome
    assert simulate(plan, replace(ROOMY, node_mtbf_h=1.0, poison=1e-3), MEASURED, seed=1) != outcome


def test_a_full_resource_sets_the_pace_and_full_memory_ends_the_run() -> None:
    plan = planned()
    calm = replace(ROOMY, node_mtbf_h=1e12, poison=0.0)
    narrow = simulate(plan, replace(calm, servers=2, server_gbit=10.0), MEASURED)
    (slowest, *_) = (
        part for part in shared_resources(plan, replace(calm, servers=2, server_gbit=10.0), MEASURED) if part.by_rate
    )
    assert slowest.used > 1
    assert narrow.hours == pytest.approx(plan.hours * slowest.used)
    assert narrow.slowed_h == {slowest.name: pytest.approx(narrow.hours)}
    small = simulate(plan, replace(calm, servers=10, server_memory_bytes=plan.redis_memory_bytes / 40), MEASURED)  # type: ignore[operator]
    assert small.documents == pytest.approx(10**6 / 4, abs=1)
    assert small.stopped_by == "memory of the Redis servers"


def test_each_setting_moves_the_resource_that_names_it() -> None:
    plan = planned(gpus=1000)
    before = {part.name: part for part in shared_resources(plan, Fleet(), MEASURED)}

    def used(name: str, **changes: Any) -> float:
        return next(
            part.used for part in shared_resources(plan, replace(Fleet(), **changes), MEASURED) if part.name == name
        )

    for change, names in {
        "servers": [
            "memory of the Redis servers",
            "network of the Redis servers",
            "threads of the Redis servers, for bytes",
        ],
        "shelves": ["thread of the Redis server with the index"],
        "services": ["Serve's controller", "GCS of the Ray head", "process that runs the batch"],
    }.items():
        for name in names:
            assert used(name, **{change: 4}) == pytest.approx(before[name].used / 4), name
    first = max(before.values(), key=lambda part: part.used)
    assert shared_resources(plan, Fleet(), MEASURED)[0] == first


def test_requests_to_s3_are_those_a_second_and_shelves_share_them() -> None:
    plan = planned(gpus=1000, work=PlannedWork("keydiff", 0.75, codec="none", home="objects"))
    puts_per_s = plan.documents_per_hour / 3600 * 11
    for shelves in (1, 4):
        by_name = {part.name: part for part in shared_resources(plan, Fleet(shelves=shelves), MEASURED)}
        assert by_name["PUT requests to S3"].used == pytest.approx(puts_per_s / 3500 / shelves)
        assert by_name["GET requests to S3"].used == pytest.approx(puts_per_s / 11 * 22 / 5500 / shelves)
        assert by_name["memory of the Redis servers"].used == pytest.approx(plan.home_bytes / 512e9)
        assert "network of the Redis servers" not in by_name
    roomy = replace(ROOMY, gpus=1000, shelves=1, node_mtbf_h=1e12, poison=0.0)
    slow = simulate(plan, roomy, replace(MEASURED, redis_document_s=0.0))
    assert slow.slowed_h == {"GET requests to S3": pytest.approx(slow.hours)}
    assert slow.hours == pytest.approx(plan.documents * 22 / 5500 / 3600)


def test_a_resource_is_full_at_the_gpus_that_are_said_and_no_number_of_them_fills_the_others() -> None:
    def parts(gpus: int) -> dict[str, SharedResource]:
        resources = shared_resources(planned(gpus=gpus), Fleet(gpus=gpus), MEASURED)
        return {part.name: part for part in resources}

    at = {name: part.full_at(8000) for name, part in parts(8000).items()}
    never = {name for name, gpus in at.items() if gpus is None}
    assert never == {"memory of the Redis servers", "network of a node", FOLDERS}
    for name, gpus in at.items():
        if gpus is None:
            assert parts(16_000)[name].used == pytest.approx(parts(8000)[name].used)
        else:
            assert parts(gpus)[name].used == pytest.approx(1, rel=0.5 / gpus + 1e-9), name


def test_what_no_number_of_gpus_fills_is_a_dash_and_no_number() -> None:
    words = ("--model", "kvshelf-tiny", "--gpus", "1000", "--simulate")
    rows = {row["name"]: row for row in json.loads(run(*words, "--json"))["parts"]}
    assert rows["network of a node"]["breaks_at_gpus"] is None
    assert rows["Serve's controller"]["breaks_at_gpus"] == round(1 / MEASURED.controller_replica_s)
    (line,) = (line for line in lines(run(*words)) if line.startswith("network of a node"))
    assert line.endswith(" times - fewer GPUs in a node")


COMMANDS = re.findall(r"```text\n\$ kvshelf plan (.*?)\n\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("words", "shown"), COMMANDS, ids=range(len(COMMANDS)))
def test_the_page_shows_what_the_command_says(words: str, shown: str) -> None:
    said = run(*shlex.split(words.replace("\\\n", " ")))
    assert lines(said) == lines(shown)


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def test_the_page_states_the_rates_that_the_command_reckons_with() -> None:
    text = PAGE.read_text()
    assert len(COMMANDS) >= 3
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.,]+) (?:ms|bytes)", text, re.M))
    reckoned = {name: value for name, value in MEASURED.__dict__.items() if name != "basis"}
    assert rows.keys() == reckoned.keys()
    for name, shown in rows.items():
        value = reckoned[name] * (1 if name.endswith("bytes") else 1000)
        assert float(shown.replace(",", "")) == pytest.approx(value, rel=1e-6), name


def test_residuals_that_are_no_smaller_are_in_no_plan() -> None:
    for shape in (LLAMA, replace(LLAMA, width=4096), BUILT_IN["llama-3.1-8b"].shape()):
        with pytest.raises(PolicyUnsupported, match="numbers for each token and layer are no smaller than keys and"):
            PlannedWork(policy="kvdirect", codec="none").stored_bytes(shape, 1000)
    wide = replace(LLAMA, width=4096, kv_heads=32)
    direct, full = (PlannedWork(policy=name, codec="none").stored_bytes(wide, 1000) for name in ("kvdirect", "full"))
    assert direct == pytest.approx(full / 2, rel=0.02)
