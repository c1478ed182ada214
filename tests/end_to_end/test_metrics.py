"""Metrics, health and log lines of a running pool, with a real Prometheus."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.doc_blocks import blocks
from support.gateway_thread import GatewayThread
from support.pool import PATIENCE, Pool, until
from support.prometheus_process import Prometheus

CONFIG = """
[pool]
metrics = "127.0.0.1:0"
log_format = "json"
[models.slow]
path = "builtin:counting"
counting.step_us = 20000
"""
SECRET = "do not tell anybody"


def url(pool: Pool) -> str:
    return str(pool.ask("ps")["broker"]["metrics"])


def get(base: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(base + path, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def series(base: str) -> dict[tuple[str, ...], float]:
    """Returns the values of /metrics; a key is the name followed by the values of the labels."""
    status, text = get(base, "/metrics")
    assert status == 200, text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    }


def log_lines(pool: Pool) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in pool.log().splitlines()]
    return [line for line in lines if line["event"] == "request"]


def test_a_request_is_counted(pool: Pool) -> None:
    done = ("mlxpool_request_success_total", "counting", "length")
    with pool.client() as client:
        before = series(url(pool))
        assert client.generate("counting", "hello", max_tokens=20, seed=7).reason == "length"
    until(lambda: series(url(pool)).get(done, 0.0) > before.get(done, 0.0), "it is counted")
    after = series(url(pool))

    def grown(*key: str) -> float:
        return after[key] - before.get(key, 0.0)

    assert grown("mlxpool_generation_tokens_total", "counting") == 20
    assert grown("mlxpool_prompt_tokens_total", "counting") == 5
    assert grown("mlxpool_request_success_total", "counting", "length") == 1
    assert grown("mlxpool_time_to_first_token_seconds_count", "counting") == 1
    assert grown("mlxpool_request_generation_tokens_sum", "counting") == 20
    assert after["mlxpool_workers", "counting", "ready"] == 1
    assert after["mlxpool_worker_memory_bytes", "counting", "counting/0", "rss"] > 1e6


def test_pauses_between_tokens_are_counted(pool: Pool) -> None:
    """Sends requests until the broker has measured a gap between two tokens.

    Tokens that the broker reads at the same time have no gap.
    """
    name = "mlxpool_inter_token_latency_seconds"
    with pool.client() as client:

        def total() -> float:
            client.generate("slow", "hello", max_tokens=5, seed=7)
            return series(url(pool)).get((f"{name}_sum", "slow"), 0.0)

        assert until(total, "a pause was counted") > 0
    counts = series(url(pool))
    assert 1 <= counts[f"{name}_count", "slow"] <= counts[f"{name}_bucket", "slow", "+Inf"]


def same(told: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any] | None:
    return told if told["requests"] == asked["requests"] else None


def test_stats_are_those_of_the_command_line(pool: Pool) -> None:
    asked = pool.cli_json("stats")
    stats = until(lambda: same(json.loads(get(url(pool), "/stats")[1]), asked), "the same figures")
    assert stats.keys() == asked.keys()
    assert stats["conserved"] is True


def test_health_of_a_pool_whose_models_are_cold(pool: Pool) -> None:
    assert get(url(pool), "/healthz") == (200, "ok\n")
    assert get(url(pool), "/readyz") == (200, "ready\n")


def test_the_log_line_of_a_request(pool: Pool) -> None:
    with pool.client() as client:
        client.generate("counting", SECRET, max_tokens=3, seed=7)
    lines = until(lambda: [r for r in log_lines(pool) if r["prompt_tokens"] == len(SECRET)], "line")
    assert len(lines) == 1
    (line,) = lines
    page = (Path(__file__).parents[2] / "docs" / "operate.md").read_text("utf-8")
    (shown,) = (json.loads(block.text) for block in blocks(page) if block.kind == "json")
    assert set(line) == set(shown) >= {"id", "model", "outcome", "queue_ms", "total_ms"}
    assert line["logger"] == "request"
    assert (line["model"], line["asked_for"]) == ("counting", None)
    assert line["worker"] == "counting/0"
    assert (line["outcome"], line["tokens"], line["attempts"]) == ("length", 3, 1)
    assert line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"]
    assert SECRET not in pool.log()


def test_a_real_prometheus_scrapes_a_running_pool(pool: Pool, tmp_path: Path) -> None:
    with (
        pool.client() as client,
        GatewayThread(pool.run_dir) as gateway,
        Prometheus(url(pool), gateway.url, tmp_path) as prometheus,
    ):
        until(lambda: prometheus.value("sum(up)") == 2, "it scraped broker and gateway")
        assert get(gateway.url, "/v1/models")[0] == 200
        answered = 'mlxpool_gateway_requests_total{route="/v1/models",status="200"}'
        until(lambda: prometheus.value(answered) == 1, "the answer is counted")
        with client.stream("slow", "hello", max_tokens=10_000) as stream:
            reading = iter(stream)  # deleting this iterator cancels the stream
            next(reading)
            query = 'mlxpool_requests_running{model="slow"}'
            until(lambda: prometheus.value(query) == 1, "the stream is seen running")
            rate = 'rate(mlxpool_generation_tokens_total{model="slow"}[1m])'
            until(lambda: (prometheus.value(rate) or 0) > 0, "tokens a second")
            p50 = (
                "histogram_quantile(0.5, sum by (le)"
                ' (rate(mlxpool_inter_token_latency_seconds_bucket{model="slow"}[1m])))'
            )
            until(lambda: (prometheus.value(p50) or 0) > 0, "a quantile")
        rules = prometheus.get("rules")["groups"]
        assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}
        # A scrape that takes longer than 200 ms fails and gives no value, so the query is repeated.
        until(lambda: prometheus.value("count(mlxpool_build_info)") == 1, "it names one version")


def test_a_scrape_while_the_broker_drains(tmp_path: Path) -> None:
    with Pool(tmp_path, CONFIG) as pool, pool.client() as client:
        base = url(pool)
        with client.stream("slow", "hello", max_tokens=10_000) as stream:
            reading = iter(stream)  # deleting this iterator cancels the stream
            next(reading)
            pool.ask("drain", timeout_ms=3_600_000)
            until(lambda: get(base, "/readyz") == (503, "draining\n"), "it is not ready")
            assert get(base, "/healthz") == (200, "ok\n")
            seen = series(base)
            assert seen["mlxpool_broker_state", "draining"] == 1
            assert seen["mlxpool_requests_running", "slow"] == 1
            assert json.loads(get(base, "/stats")[1])["broker"]["state"] == "draining"
        assert pool.process is not None
        assert pool.process.wait(PATIENCE) == 0, "the last stream ended, and so does the broker"
        pool.process = None
        with pytest.raises(urllib.error.URLError):
            get(base, "/metrics")


def test_without_the_setting_nothing_listens(tmp_path: Path) -> None:
    with Pool(tmp_path) as pool:
        assert pool.ask("ps")["broker"]["metrics"] is None


def test_workers_log_at_the_level_of_the_settings(tmp_path: Path) -> None:
    with Pool(tmp_path, '[pool]\nlog_level = "debug"') as quiet, quiet.client() as client:
        client.generate("counting", SECRET, max_tokens=1)
        logs = quiet.run_dir / "logs"
        paths = until(
            lambda: [path for path in logs.glob("counting*") if "prefix miss" in path.read_text()],
            "the request is in the worker's log",
        )
        text = paths[0].read_text()
    assert f"cached=0 left={len(SECRET)} " in text and "the model has no prefix cache" in text
    assert SECRET not in text
