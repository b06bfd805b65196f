"""The Prometheus collector, scraped as Prometheus does; and the dashboard, which must show what it
gives."""

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from llama_worker import ConfigError, LlamaWorker
from llama_worker.exit_tools import ALL_EXIT_TOOLS
from llama_worker.metrics import WorkerCollector
from llama_worker.server.journal import BOUNDS_S
from llama_worker.testing import scripts as fs
from tests.actors.conftest import WAIT_S, MakeWorker

DOCS = Path(__file__).parents[2] / "docs"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(worker: LlamaWorker) -> Samples:
    registry = CollectorRegistry()
    registry.register(WorkerCollector([worker]))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in families
        for s in family.samples
    }


def sample(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"llama_worker_{name}", frozenset(labels.items())]


def workers_in(collector: WorkerCollector) -> set[str]:
    return {sample.labels["worker"] for family in collector.collect() for sample in family.samples}


def test_unused_worker_shows_its_state_slots_and_zeros(make_worker: MakeWorker) -> None:
    rig = make_worker(slots=3, start=False)
    seen = scrape(rig.worker)
    states = {
        state: sample(seen, "state", worker="w1", state=state)
        for state in ("stopped", "running", "ready")
    }
    assert states == {"stopped": 1, "running": 0, "ready": 0}
    assert sample(seen, "slots", worker="w1") == 3
    zeros = [sample(seen, name, worker="w1") for name in ("slots_used", "generated_tokens_total")]
    zeros.append(sample(seen, "request_duration_seconds_count", worker="w1", outcome="failed"))
    assert zeros == [0, 0, 0]


def test_requests_tokens_and_times_match_the_results(make_worker: MakeWorker) -> None:
    rig = make_worker(slots=2)
    results = [
        rig.run(*fs.plain_reply(fs.Tokens(7))),
        rig.run(*fs.plain_reply(fs.Tokens(5), reason="length")),
    ]
    waiting = rig.submit(fs.Headers(), fs.Text("a"), fs.WaitClose())
    rig.wait_text(waiting, "a")
    canceled = rig.submit(fs.Headers(), fs.Text("a"), fs.WaitClose())
    assert rig.worker.cancel(canceled).get(timeout=WAIT_S)

    seen = scrape(rig.worker)
    assert sample(seen, "state", worker="w1", state="ready") == 1
    assert (sample(seen, "slots", worker="w1"), sample(seen, "slots_used", worker="w1")) == (2, 1)
    for outcome, reason in (
        ("completed", "stop"),
        ("completed", "max_tokens"),
        ("canceled", "canceled"),
    ):
        assert sample(seen, "requests_total", worker="w1", outcome=outcome, reason=reason) == 1
    counted = [
        sample(seen, f"prompt_{name}_total", worker="w1") for name in ("tokens", "cached_tokens")
    ]
    assert counted == [
        sum(result["usage"][name] for result in results)
        for name in ("prompt_tokens", "cached_tokens")
    ]
    assert sample(seen, "prompt_cache_ratio", worker="w1") == counted[1] / counted[0]
    assert 0 <= sample(seen, "since_progress_seconds", worker="w1") < WAIT_S
    assert sample(seen, "generated_tokens_total", worker="w1") - 12 in (
        0,
        1,
    )  # a cancel may come before the token
    took_s = sum(result["timings"]["total_s"] for result in results)
    assert sample(
        seen, "request_duration_seconds_sum", worker="w1", outcome="completed"
    ) == pytest.approx(took_s)
    assert sample(seen, "request_duration_seconds_count", worker="w1", outcome="canceled") == 1
    assert sample(seen, "time_to_first_token_seconds_count", worker="w1") in (2, 3)
    bounds = {
        dict(labels)["le"]
        for name, labels in seen
        if name.endswith("request_duration_seconds_bucket")
    }
    assert sorted(map(float, bounds)) == [*BOUNDS_S, float("inf")]


def test_open_workers_have_unique_names(make_worker: MakeWorker) -> None:
    registry, collector = CollectorRegistry(), WorkerCollector()
    registry.register(collector)
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(WorkerCollector())
    first, second = make_worker(start=False), make_worker(start=False)
    namesake = make_worker(start=False, name=first.config.name)
    assert workers_in(collector) == set()
    for worker in (first.worker, second.worker, second.worker):
        collector.add(worker)
    assert workers_in(collector) == {"w1", "w2"}
    with pytest.raises(ConfigError, match="'w1'"):
        collector.add(namesake.worker)
    first.worker.close()
    assert workers_in(collector) == {"w2"}
    collector.add(namesake.worker)


def test_the_collector_keeps_no_worker_alive(make_worker: MakeWorker) -> None:
    worker = LlamaWorker(make_worker(start=False).config)
    lost = weakref.ref(worker)
    collector = WorkerCollector([worker])
    del worker
    gc.collect()
    assert lost() is None
    assert workers_in(collector) == set()


# ------------------------------------------------------------ conventions, documentation, dashboard


def families() -> dict[str, str]:
    """Name as Prometheus stores it, and kind, of every family."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in WorkerCollector().describe()
    }


def test_names_follow_the_conventions() -> None:
    for name, kind in families().items():
        assert re.fullmatch(r"llama_worker_[a-z]+(_[a-z]+)*", name)
        assert name.endswith("_seconds") or kind != "histogram"
        assert name.endswith("_total") == (kind == "counter")


def test_the_documentation_names_every_metric_and_no_other() -> None:
    named = set(
        re.findall(
            r"^\| `(llama_worker_\w+)", (DOCS / "metrics.md").read_text(), flags=re.MULTILINE
        )
    )
    assert named == set(families())


DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana-dashboard.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_dashboard_asks_for_exactly_the_existing_metrics() -> None:
    expressions = [target["expr"] for target in TARGETS] + [
        DASHBOARD["templating"]["list"][1]["query"]["query"]
    ]
    asked = {name for text in expressions for name in re.findall(r"llama_worker_\w+", text)}
    given = {
        name: {f"{name}_bucket"} if kind == "histogram" else {name}
        for name, kind in families().items()
    }
    assert asked == set().union(*given.values())


def test_restarts_and_failures_have_causes_dashboard_labels_exist(make_worker: MakeWorker) -> None:
    rig = make_worker(exit_tools=ALL_EXIT_TOOLS)
    rig.run(fs.Headers(), fs.Text("a"), fs.ToolCall("declare_outcome", {}), fs.KillSelf())
    rig.wait_restarted()
    rig.stop()
    rig.start()  # which forgets nothing
    seen = scrape(rig.worker)
    assert sample(seen, "requests_total", worker="w1", outcome="failed", reason="server_died") == 1
    assert sample(seen, "restarts_total", worker="w1", reason="server_died") == 1
    labels: dict[str, set[str]] = {}
    for name, pairs in seen:
        labels.setdefault(name, set()).update(label for label, _ in pairs)
    for target in TARGETS:
        (name,) = set(re.findall(r"llama_worker_\w+", target["expr"])) or {""}
        used = re.findall(r"by \(([^)]*)\)", target["expr"]) + re.findall(
            r"{(.*?)[=!]", target["expr"]
        )
        used += re.findall(r"{{(\w+)}}", target["legendFormat"])
        assert {label.strip() for text in used for label in text.split(",")} <= labels[name], target
