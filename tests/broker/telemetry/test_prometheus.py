"""The text for Prometheus, read by prometheus_client's parser."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from mlxpool.broker.core import events as ev
from mlxpool.broker.telemetry.metric_table import FAMILIES, WORKER_STATES
from mlxpool.broker.workers.worker import WorkerState
from mlxpool.common.metrics import HISTOGRAM, MetricsWriter
from support import snapshots
from support.core_harness import Story, model

DISK = (
    "hits_total",
    "tokens_total",
    "read_bytes_total",
    "written_bytes_total",
    "bad_total",
    "dropped_total",
    "bytes",
)
BEAT: dict[str, Any] = {
    "load_phase": "",
    "load_ms": {"weights": 1250, "kernels": 40},
    "memory": {
        "weights": 600,
        "kv": 160,
        "kv_used": 100,
        "prefix": 40,
        "compute": 50,
        "total": 850,
        "rss": 900,
        "prepare": 70,
        "limit": 1000,
        "preemptions": 3,
    },
    "prefix": {
        "hits": 4,
        "misses": 6,
        "tokens": 80,
        "disk_hits": 2,
        "disk_tokens": 50,
        "disk_read_bytes": 700,
        "disk_written_bytes": 900,
        "disk_bad": 1,
        "disk_dropped": 3,
        "disk_bytes": 5000,
    },
    "speculation": {"checks": 3, "drafted": 12, "accepted": 7},
}


def read(story: Story, writer: MetricsWriter[Any] | None = None, **about: Any) -> dict[str, Metric]:
    data = (writer or MetricsWriter(FAMILIES)).text(snapshots.of(story, **about))[0].decode()
    assert data.endswith("\n")
    return {metric.name: metric for metric in text_string_to_metric_families(data)}


def value(metrics: dict[str, Metric], name: str, **labels: str) -> float:
    """Returns the value of the only series with these labels."""
    values = [
        sample.value
        for metric in metrics.values()
        for sample in metric.samples
        if sample.name == name and sample.labels == labels
    ]
    assert len(values) == 1, f"{len(values)} series {name}{labels}"
    return float(values[0])


def busy(story: Story) -> None:
    """Makes four requests (done, failed, running, refused), a heartbeat, and two GPUs."""
    worker = story.ready_worker()
    story.do(ev.Spawned(worker.slot, 1, ("0", "GPU-a")))
    for end in (worker.end, worker.fail):
        request = story.generate()
        story.later(0.25)
        worker.tokens(request, facts={"prompt_tokens": 5})
        end(request)
    story.generate()
    story.generate(name="nowhere")
    worker.beat(**BEAT)


def test_the_phases_of_a_load_are_seconds(story: Story) -> None:
    busy(story)
    metrics, labels = read(story), {"model": "m", "worker": "m/0"}
    name = "mlxpool_worker_load_seconds"
    assert value(metrics, name, **labels, phase="weights") == 1.25
    assert value(metrics, name, **labels, phase="kernels") == 0.04


def test_each_gpu_of_a_worker_has_a_series(story: Story) -> None:
    busy(story)
    metrics, labels = read(story), {"model": "m", "worker": "m/0"}
    for gpu in ("0", "GPU-a"):
        assert value(metrics, "mlxpool_worker_gpu_info", **labels, gpu=gpu) == 1


def test_every_family_of_the_table_is_there_in_its_kind(story: Story) -> None:
    busy(story)
    metrics = read(story, gateway=snapshots.GATEWAY, jobs=snapshots.JOBS)
    for family in FAMILIES:
        metric = metrics[family.name.removesuffix("_total")]
        assert metric.type == family.kind, family.name
        assert metric.documentation == family.help
        assert metric.samples, f"{family.name} has no value"
        names = {sample.name for sample in metric.samples}
        assert names == set(family.series()), family.name
        for sample in metric.samples:
            assert set(sample.labels) - {"le"} == set(family.labels), sample
    assert len(metrics) == len(FAMILIES)


def test_names_of_metrics_follow_the_rules_of_prometheus() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.name.startswith(("mlxpool_", "process_")), family.name
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert not {"id", "owner", "pid", "link", "epoch"} & set(family.labels), family.name


def test_the_gateway_is_up_while_it_is_ready(story: Story) -> None:
    assert read(story)["mlxpool_gateway_up"].samples == []
    for state, up in (("ready", 1), ("restarting", 0), ("draining", 0)):
        metrics = read(story, gateway=replace(snapshots.GATEWAY, state=state))
        assert value(metrics, "mlxpool_gateway_up") == up
        assert value(metrics, "mlxpool_gateway_restarts_total") == 2


def test_refused_submissions_have_their_reasons(story: Story) -> None:
    name = "mlxpool_job_submissions_refused_total"
    assert read(story)["mlxpool_job_submissions_refused"].samples == []
    metrics = read(story, jobs=replace(snapshots.JOBS, refused={"over_quota": 3}))
    assert value(metrics, name, error="over_quota") == 3
    assert value(metrics, name, error="store_full") == 0


def test_metrics_have_the_values_of_the_snapshot(story: Story) -> None:
    busy(story)
    metrics = read(story, lag=0.125)
    assert value(metrics, "mlxpool_broker_loop_lag_seconds") == 0.125
    assert value(metrics, "mlxpool_requests_running", model="m") == 1
    assert value(metrics, "mlxpool_requests_waiting", model="m") == 0
    assert value(metrics, "mlxpool_requests_accepted_total", model="m") == 3
    assert value(metrics, "mlxpool_request_success_total", model="m", reason="stop") == 1
    assert value(metrics, "mlxpool_request_failures_total", model="m", error="internal") == 1
    assert value(metrics, "mlxpool_request_failures_total", model="m", error="queue_full") == 0
    assert value(metrics, "mlxpool_requests_rejected_total", error="unknown_model") == 1
    assert value(metrics, "mlxpool_prompt_tokens_total", model="m") == 10
    assert value(metrics, "mlxpool_generation_tokens_total", model="m") == 2
    assert value(metrics, "mlxpool_time_to_first_token_seconds_sum", model="m") == 0.5
    assert value(metrics, "mlxpool_workers", model="m", state="ready") == 1
    assert value(metrics, "mlxpool_model_state", model="other", state="cold") == 1
    at = {"model": "m", "worker": "m/0"}
    parts = [
        value(metrics, "mlxpool_worker_memory_bytes", kind=kind, **at)
        for kind in ("weights", "kv", "prefix", "compute")
    ]
    assert parts == [600, 160, 40, 50]
    assert value(metrics, "mlxpool_worker_memory_bytes", kind="total", **at) == sum(parts)
    assert value(metrics, "mlxpool_worker_memory_bytes", kind="prepare", **at) == 70
    assert value(metrics, "mlxpool_worker_memory_limit_bytes", **at) == 1000
    assert value(metrics, "mlxpool_kv_cache_usage_ratio", **at) == 0.25
    assert value(metrics, "mlxpool_kv_cache_info", model="m", kv="auto") == 1
    assert value(metrics, "mlxpool_preemptions_total", **at) == 3
    assert value(metrics, "mlxpool_prefix_cache_queries_total", **at) == 10
    assert value(metrics, "mlxpool_prefix_cache_hits_total", **at) == 4
    disk = {name: value(metrics, f"mlxpool_prefix_disk_{name}", **at) for name in DISK}
    assert disk == {
        "hits_total": 2,
        "tokens_total": 50,
        "read_bytes_total": 700,
        "written_bytes_total": 900,
        "bad_total": 1,
        "dropped_total": 3,
        "bytes": 5000,
    }
    assert value(metrics, "mlxpool_spec_decode_drafts_total", **at) == 3
    assert value(metrics, "mlxpool_spec_decode_draft_tokens_total", **at) == 12
    assert value(metrics, "mlxpool_spec_decode_accepted_tokens_total", **at) == 7


def test_histograms_add_up(story: Story) -> None:
    busy(story)
    metrics = read(story)
    for family in FAMILIES:
        if family.kind != HISTOGRAM:
            continue
        samples = metrics[family.name].samples
        counts = [s.value for s in samples if s.name.endswith("_bucket")]
        ends = [s.labels["le"] for s in samples if s.name.endswith("_bucket")]
        assert all(low <= high for low, high in pairwise(counts))
        assert ends[-1] == "+Inf"
        assert counts[-1] == value(metrics, f"{family.name}_count", model="m")


def test_the_states_are_all_there_and_one_holds(story: Story) -> None:
    metrics = read(story, state="draining")
    states = {s.labels["state"]: s.value for s in metrics["mlxpool_broker_state"].samples}
    assert states == {"ready": 0, "draining": 1, "stopping": 0}


def test_every_shown_state_of_a_worker_has_a_series() -> None:
    shown = {state.shown for state in WorkerState if state is not WorkerState.LOST}
    assert set(WORKER_STATES) == shown


def test_what_happens_to_requests_adds_no_series(story: Story) -> None:
    """New owners, ids and error texts add no series: labels are models, slots and codes."""
    busy(story)
    writer = MetricsWriter(FAMILIES)
    before = {name: len(metric.samples) for name, metric in read(story, writer).items()}
    worker = story.workers["m/0"]
    for number in range(20):
        worker.credit()
        request = story.generate(link=number, owner=f"uid:{number}", session=f"s{number}")
        worker.fail(request, f"code {number}")
        story.generate(name=f"nowhere-{number}")
        worker.beat(**{**BEAT, "memory": {**BEAT["memory"], f"kind {number}": 1}})
    assert {name: len(metric.samples) for name, metric in read(story, writer).items()} == before


def test_a_beat_that_lies_about_its_types_is_left_out(story: Story) -> None:
    worker = story.ready_worker()
    worker.beat(memory={"kv": "many", "rss": True, "weights": 5}, prefix=["hits"])
    metrics = read(story)
    kinds = [s.labels["kind"] for s in metrics["mlxpool_worker_memory_bytes"].samples]
    assert kinds == ["weights"]
    assert not metrics["mlxpool_prefix_cache_hits"].samples


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "100%d", "ü/é"])
def test_the_name_of_a_model_may_be_anything(name: str) -> None:
    story = Story({name: model()})
    worker = story.ready_worker(name)
    worker.end(story.generate(name=name))
    metrics = read(story)
    assert value(metrics, "mlxpool_requests_accepted_total", model=name) == 1
    assert value(metrics, "mlxpool_request_success_total", model=name, reason="stop") == 1
    assert value(metrics, "mlxpool_e2e_request_latency_seconds_count", model=name) == 1


def test_a_writer_renders_changed_histograms_again(story: Story) -> None:
    busy(story)
    writer = MetricsWriter(FAMILIES)
    first = read(story, writer)
    worker = story.workers["m/0"]
    for request in list(worker.runs):
        worker.end(request)
    second = read(story, writer)
    name = "mlxpool_e2e_request_latency_seconds_count"
    assert value(second, name, model="m") == value(first, name, model="m") + 1
