"""Dashboard, alerts and scrape configuration: their queries are asked about numbers that a live service has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvshelf import Client
from kvshelf.api.answers import Guarded
from kvshelf.service.observe.metrics import Metrics
from kvshelf.service.settings import Settings
from tests.deploy.files import COMPOSE, DEPLOY, documents, environment_of

MONITORING = DEPLOY / "monitoring"
DASHBOARD = MONITORING / "dashboards" / "kvshelf.json"

OF_PROMETHEUS = {"up"}
ADDED_WHEN_SCRAPED = {"instance", "job"}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> list[str]:
    """All of them, Grafana's variables replaced as Grafana does."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    for group in documents(MONITORING / "alerts.yml")[0]["groups"]:
        found += [rule["expr"] for rule in group["rules"]]
    return [query.replace("$__rate_interval", "5m").replace("$instance", ".*") for query in found]


def selectors(node: Any) -> Iterator[Any]:
    """The selectors of series in a parsed query, and how it is grouped: (name, labels)."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, {matcher.name for matcher in node.matchers.matchers}
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if (below := getattr(node, name, None)) is not None and not isinstance(below, str):
            yield from selectors(below)
    for below in getattr(node, "args", ()) or ():
        yield from selectors(below)


def grouping(query: str) -> set[str]:
    """The labels that a query groups or joins by, and those that its legend or its words show."""
    return {label.strip() for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for label in labels.split(",")}


@pytest.fixture(scope="module")
def live(service_url: str) -> dict[str, set[str]]:
    """The series of /metrics and the labels of each, after one document and one question, and those of a guard, which
    this service has not."""
    with Client(service_url) as client:
        cache = client.caches.create(document="The tide tables are green. " * 40, compression_ratio=0.5)
        client.caches.query(cache.id, prompt="Which colour?", max_tokens=2, conversation="tides")
    found: dict[str, set[str]] = {}
    guarded = Metrics()
    guarded.guarded("model", [Guarded("full", "law", differs=False, kl=0.0, below=False, drifts=False)])
    told = httpx.get(f"{service_url}/metrics").text + guarded.encoded("")[0].decode()
    for family in text_string_to_metric_families(told):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("query", queries())
def test_a_query_asks_for_numbers_that_are_there(query: str, live: dict[str, set[str]]) -> None:
    found = list(selectors(promql_parser.parse(query)))
    assert found, query
    labels = set(ADDED_WHEN_SCRAPED)
    for name, matched in found:
        assert name in live.keys() | OF_PROMETHEUS
        assert matched <= live.get(name, set()) | ADDED_WHEN_SCRAPED, name
        labels |= live.get(name, set())
    assert grouping(query) <= labels


def test_a_query_for_a_number_that_is_not_there_is_seen(live: dict[str, set[str]]) -> None:
    query = promql_parser.parse("sum by (x) (rate(kvshelf_querys_total[5m])) / kvshelf_store_up")
    assert [name for name, _ in selectors(query) if name not in live] == ["kvshelf_querys_total"]


def test_what_words_and_legends_show_is_a_label(live: dict[str, set[str]]) -> None:
    text = DASHBOARD.read_text() + (MONITORING / "alerts.yml").read_text()
    shown = set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", text))
    assert shown <= set().union(*live.values()) | ADDED_WHEN_SCRAPED
    assert {"model", "phase", "result"} <= shown


def test_the_dashboard_is_whole() -> None:
    found = dashboard()
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    (source,) = documents(MONITORING / "datasources" / "prometheus.yml")[0]["datasources"]
    named = [
        thing["datasource"]["uid"]
        for panel in panels
        for thing in (panel, *panel.get("targets", ()))
        if "datasource" in thing
    ]
    assert set(named) == {source["uid"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        area = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not area & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= area


def test_prometheus_and_grafana_find_their_files_and_each_other() -> None:
    services = documents(COMPOSE)[0]["services"]
    config = documents(MONITORING / "prometheus.yml")[0]
    (job,) = config["scrape_configs"]
    ((where,),) = [[way] for way in job["dns_sd_configs"]]
    assert where["names"][0] in services
    assert where["port"] == Settings.model_fields["port"].default
    mounts = dict(volume.split(":")[:2][::-1] for volume in services["prometheus"]["volumes"])
    for name in config["rule_files"]:
        assert (COMPOSE.parent / mounts[f"/etc/prometheus/{name}"]).exists()
    # The service that makes the key writes it where Prometheus reads it.
    (made,) = (volume for volume in services["keys"]["volumes"] if volume.startswith("scrape:"))
    assert "> scrape/key" in services["keys"]["command"][-1]
    assert made.split(":")[1] == "/var/lib/kvshelf/scrape"
    assert job["authorization"]["credentials_file"] == "/scrape/key"
    assert mounts["/scrape"] == "scrape"
    assert environment_of("cpu")["KVSHELF_API_KEY_FILE"].endswith("/keys/keys.json")
    (provider,) = documents(MONITORING / "dashboards" / "provider.yml")[0]["providers"]
    folders = dict(volume.split(":")[:2][::-1] for volume in services["grafana"]["volumes"])
    assert (COMPOSE.parent / folders[provider["options"]["path"]] / DASHBOARD.name).exists()
    assert (
        documents(MONITORING / "datasources" / "prometheus.yml")[0]["datasources"][0]["url"] == "http://prometheus:9090"
    )
