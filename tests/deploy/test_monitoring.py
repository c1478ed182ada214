"""Dashboard, alerts and runbook: each query parses, and names metrics of broker or gateway."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import make_metrics
from mlxpool.broker.telemetry import metric_table
from mlxpool.broker.telemetry.metric_table import FAMILIES
from mlxpool.gateway.operations.exchange import FURTHER_ROUTES, Exchange
from mlxpool.gateway.operations.metrics import CAUSES, Metrics
from mlxpool.gateway.route_table import ROUTES as ROUTE_TABLE
from mlxpool.gateway.settings import Settings
from support.pool import PATIENCE

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "mlxpool.json"
PROMETHEUS = ROOT / "deploy" / "prometheus"
RUNBOOK = ROOT / "docs" / "operate.md"


def gateway_series() -> dict[str, set[str]]:
    """Returns the labels of each series of a gateway that has answered a request."""
    metrics = Metrics("1", ROUTES)
    exchange = Exchange("id", "POST", ROUTES[0], 0.0, status=200, first_token=1.0)
    exchange.count({"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1})
    metrics.begun(exchange)
    metrics.ended(exchange, 2.0)
    data, _ = metrics.text("text/plain")
    families = list(text_string_to_metric_families(data.decode()))
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


ROUTES = tuple(route.shown_path for route in ROUTE_TABLE)
OF_GATEWAY = {
    name: labels for name, labels in gateway_series().items() if name.startswith("mlxpool_")
}
OF_BROKER = {name: {*metric.labels, "le"} for metric in FAMILIES for name in metric.series()}
OF_PROMETHEUS: dict[str, set[str]] = {"up": set()}  # metrics of Prometheus itself
LABELS = {**OF_GATEWAY, **OF_BROKER, **OF_PROMETHEUS}
ANYWHERE = {"job", "instance", "namespace"}
VALUES: dict[str, tuple[str, ...]] = {
    "error": metric_table.FAILURES,
    "kind": metric_table.MEMORY,
    "reason": metric_table.REASONS,
    "state": (
        *metric_table.BROKER_STATES,
        *metric_table.MODEL_STATES,
        *metric_table.WORKER_STATES,
        *metric_table.JOB_STATES,
        *metric_table.NOTICE_STATES,
    ),
    "job": ("mlxpool", "mlxpool-gateway"),
    "cause": CAUSES,
    "route": (*ROUTES, *FURTHER_ROUTES),
}


def panels() -> Iterator[dict[str, Any]]:
    return (panel for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"])


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


DASHED = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
ALERTED = [rule["expr"] for rule in alerts()]
NAMES = [rule["alert"] for rule in alerts()]


def adapted() -> list[str]:
    """Returns prometheus-adapter's queries: for finding series, and for the values of a series."""
    rules = yaml.safe_load((PROMETHEUS / "adapter.yaml").read_text("utf-8"))["externalRules"]
    queries = []
    for rule in rules:
        (series,) = selectors(rule["seriesQuery"])
        (name,) = (
            matcher.value for matcher in series.matchers.matchers if matcher.name == "__name__"
        )
        filled = rule["metricsQuery"].replace("<<.Series>>", name)
        queries.append(filled.replace("<<.LabelMatchers>>", 'namespace="mlxpool",model="demo"'))
    return queries


def selectors(query: str) -> list[promql_parser.VectorSelector]:
    """Returns the selectors of a query, with Grafana's variables replaced.

    Raises if it is not PromQL.
    """
    filled = query.replace("$__rate_interval", "5m").replace("$model", ".*")
    assert "$" not in filled, filled
    selected: list[promql_parser.VectorSelector] = []

    def visit(expr: promql_parser.Expr) -> bool:
        if isinstance(expr, promql_parser.MatrixSelector):
            selected.append(expr.vector_selector)
        elif isinstance(expr, promql_parser.VectorSelector):
            selected.append(expr)
        return True

    promql_parser.walk(promql_parser.parse(filled), visit)
    return selected


ADAPTED = adapted()


def check(selector: promql_parser.VectorSelector) -> None:
    """Asserts that the metric, its labels and their values exist."""
    name = selector.name or ""
    assert name in LABELS, f"no metric is called {name!r}"
    labels = LABELS[name] | ANYWHERE
    for matcher in selector.matchers.matchers:
        assert matcher.name in labels, f"{name} has no label {matcher.name!r}"
        if matcher.name in VALUES:
            for value in matcher.value.split("|"):
                assert value in VALUES[matcher.name], f"{name} has no {matcher.name} {value!r}"


@pytest.mark.parametrize("query", [*DASHED, *ALERTED, *ADAPTED])
def test_a_query_parses_and_names_existing_series(query: str) -> None:
    selected = selectors(query)
    assert selected
    for selector in selected:
        check(selector)


@pytest.mark.parametrize(
    "query",
    [
        "mlxpool_requests_run",
        "mlxpool_time_to_first_token_seconds",
        'mlxpool_workers{worker="a"}',
        'mlxpool_workers{state="wild"}',
        'rate(mlxpool_request_failures_total{error="nope"}[5m])',
        'mlxpool_gateway_requests_total{model="a"}',
        'mlxpool_gateway_stream_failures_total{cause="nope"}',
    ],
)
def test_the_query_check_finds_errors(query: str) -> None:
    with pytest.raises(AssertionError):
        for selector in selectors(query):
            check(selector)


def test_every_metric_of_requests_workers_and_gateways_is_shown_or_watched() -> None:
    used = {
        selector.name for query in (*DASHED, *ALERTED, *ADAPTED) for selector in selectors(query)
    }
    unused = {f.name for f in FAMILIES if not used & set(f.series())}
    assert unused == {
        "mlxpool_backlog_bytes",
        "mlxpool_broker_uptime_seconds",
        "mlxpool_kv_cache_info",
        "mlxpool_poisoned_requests",
        "mlxpool_prefix_cache_tokens_total",
        "mlxpool_prefix_disk_bytes",
        "mlxpool_prefix_disk_read_bytes_total",
        "mlxpool_prefix_disk_tokens_total",
        "mlxpool_prefix_disk_written_bytes_total",
        "mlxpool_request_inference_time_seconds",
        "mlxpool_requests_waiting_bytes",
        "mlxpool_spec_decode_drafts_total",
        "mlxpool_worker_gpu_info",
        "process_start_time_seconds",
        "process_virtual_memory_bytes",
    }
    families = {re.sub(r"_(sum|count|bucket)$", "", name) for name in OF_GATEWAY}
    assert not [
        name for name in families if not any(series.startswith(name) for series in used if series)
    ]


def test_panels_do_not_overlap() -> None:
    idents = [panel["id"] for panel in panels()]
    assert len(set(idents)) == len(idents)
    places = [
        (panel["gridPos"]["x"] + column, panel["gridPos"]["y"] + row)
        for panel in panels()
        for column in range(panel["gridPos"]["w"])
        for row in range(panel["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24


@pytest.mark.parametrize("rule", alerts(), ids=NAMES)
def test_an_alert_is_in_the_runbook(rule: dict[str, Any]) -> None:
    """The runbook has a section for the alert: its meaning, then the actions."""
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"].endswith(".")
    assert rule["annotations"]["runbook"] == f"docs/operate.md#{rule['alert'].lower()}"
    section = re.search(
        rf"^### {rule['alert']}\n(.*?)(?=^#|\Z)", RUNBOOK.read_text("utf-8"), re.M | re.S
    )
    assert section is not None
    meaning, do = section[1].split("**Do:**")
    assert meaning.strip() and do.strip()


def test_the_runbook_has_no_other_alerts() -> None:
    headings = re.findall(r"^### (Mlxpool\w+)$", RUNBOOK.read_text("utf-8"), re.M)
    assert headings == NAMES


def test_the_page_of_metrics_is_made_of_every_family() -> None:
    page = make_metrics.PAGE.read_text("utf-8")
    assert page == make_metrics.page(), "run `python docs/make_metrics.py`"
    assert re.findall(r"^\| `((?:mlxpool|process)_\w+)`", page, re.M) == [
        family.name for families in make_metrics.GROUPS.values() for family in families[1]
    ]
    assert {f for _, families in make_metrics.GROUPS.values() for f in families} == set(FAMILIES)


def test_the_gateways_page_names_each_of_its_metrics() -> None:
    text = (ROOT / "docs" / "gateway.md").read_text("utf-8")
    families = {re.sub(r"_(sum|count|bucket)$", "", name) for name in OF_GATEWAY}
    assert [name for name in families if f"`{name}`" not in text] == []


def test_prometheus_scrapes_broker_and_gateway_at_their_ports() -> None:
    settings = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text("utf-8"))
    jobs = {job["job_name"]: job["static_configs"] for job in settings["scrape_configs"]}
    port = Settings().port
    assert jobs == {
        "mlxpool": [{"targets": ["127.0.0.1:9464"]}],
        "mlxpool-gateway": [{"targets": [f"127.0.0.1:{port}"]}],
    }


# ---- promtool ----------------------------------------------------------------------------------


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("missing program: promtool, of Debian's prometheus")
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_promtool_accepts_the_settings_and_the_rules() -> None:
    done = promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert done.returncode == 0, done.stderr
    assert f"{len(NAMES)} rules found" in done.stdout


_B = '{job="mlxpool",instance="HERE"'
_M, _W = f'{_B},model="m"', f'{_B},model="m",worker="m/0"'
_G = '{job="mlxpool-gateway",instance="HERE"'
_ANSWERS, _BROKEN_OFF = "mlxpool_gateway_requests_total", "mlxpool_gateway_stream_failures_total"
_HTTP_FIRST = "mlxpool_gateway_time_to_first_token_seconds_bucket"
_QUEUE = "mlxpool_request_queue_time_seconds_bucket"
_FIRST = "mlxpool_time_to_first_token_seconds_bucket"

# alert -> series that make it fire, and similar series that do not; one value a minute
STORIES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "MlxpoolBrokerDown": ({f"up{_B}}}": "0x60"}, {f"up{_B}}}": "1x60"}),
    "MlxpoolBrokerLate": (
        {f"mlxpool_broker_loop_lag_seconds{_B}}}": "1.5x60"},
        {f"mlxpool_broker_loop_lag_seconds{_B}}}": "0.2x58 3 0.2"},
    ),
    "MlxpoolGatewayDown": (
        {f"mlxpool_gateway_up{_B}}}": "0x60"},
        {f"mlxpool_gateway_up{_B}}}": "1x57 0 1 1"},
    ),
    "MlxpoolGatewayRestarting": (
        {f"mlxpool_gateway_restarts_total{_B}}}": "0x45 1+1x14"},
        {f"mlxpool_gateway_restarts_total{_B}}}": "0x50 1x10"},
    ),
    "MlxpoolGatewayErrors": (
        {
            f'{_ANSWERS}{_G},route="/v1/completions",status="200"}}': "0+10x60",
            f'{_BROKEN_OFF}{_G},route="/v1/completions",cause="error"}}': "0+1x60",
        },
        {
            f'{_ANSWERS}{_G},route="/v1/completions",status="200"}}': "0+10x60",
            f'{_ANSWERS}{_G},route="/v1/completions",status="404"}}': "0+10x60",
            f'{_ANSWERS}{_G},route="/health",status="503"}}': "0+10x60",
            f'{_BROKEN_OFF}{_G},route="/v1/completions",cause="disconnect"}}': "0+9x60",
        },
    ),
    "MlxpoolGatewayFirstTokenSlow": (
        {f'{_HTTP_FIRST}{_G},le="80.0"}}': "0x60", f'{_HTTP_FIRST}{_G},le="+Inf"}}': "0+9x60"},
        {f'{_HTTP_FIRST}{_G},le="1.0"}}': "0+9x60", f'{_HTTP_FIRST}{_G},le="+Inf"}}': "0+9x60"},
    ),
    "MlxpoolDrainDoesNotEnd": (
        {f'mlxpool_broker_state{_B},state="draining"}}': "1x60"},
        {f'mlxpool_broker_state{_B},state="draining"}}': "0x40 1x20"},
    ),
    "MlxpoolInternalErrors": (
        {f"mlxpool_internal_errors_total{_B}}}": "0x50 1x10"},
        {f"mlxpool_internal_errors_total{_B}}}": "7x60"},
    ),
    "MlxpoolDescriptorsShort": (
        {f"process_open_fds{_B}}}": "800x60", f"process_max_fds{_B}}}": "1024x60"},
        {f"process_open_fds{_B}}}": "600x60", f"process_max_fds{_B}}}": "1024x60"},
    ),
    "MlxpoolFrontShut": (
        {f"mlxpool_front_shut_total{_B}}}": "0x55 1x5"},
        {f"mlxpool_front_shut_total{_B}}}": "3x60"},
    ),
    "MlxpoolHostilePeers": (
        {f"mlxpool_auth_failures_total{_B}}}": "0x55 1x5"},
        {f"mlxpool_bad_frames_total{_B}}}": "0x55 1x5"},
    ),
    "MlxpoolModelBroken": (
        {f'mlxpool_model_state{_M},state="broken"}}': "1x60"},
        {f'mlxpool_model_state{_M},state="cold"}}': "1x60"},
    ),
    "MlxpoolWorkersRestarting": (
        {f"mlxpool_worker_restarts_total{_W}}}": "0x45 1+1x14"},
        {f"mlxpool_worker_restarts_total{_W}}}": "0x50 1x10"},
    ),
    "MlxpoolWorkerSuspect": (
        {f'mlxpool_workers{_M},state="suspect"}}': "1x60"},
        {f'mlxpool_workers{_M},state="ready"}}': "1x60"},
    ),
    "MlxpoolMemoryNearLimit": (
        {
            f'mlxpool_worker_memory_bytes{_W},kind="active"}}': "98x60",
            f"mlxpool_worker_memory_limit_bytes{_W}}}": "100x60",
        },
        {
            f'mlxpool_worker_memory_bytes{_W},kind="peak"}}': "98x60",
            f"mlxpool_worker_memory_limit_bytes{_W}}}": "100x60",
        },
    ),
    "MlxpoolPreempting": (
        {f"mlxpool_preemptions_total{_W}}}": "0+60x60"},
        {f"mlxpool_preemptions_total{_W}}}": "0+2x60"},
    ),
    "MlxpoolQueueStuck": (
        {f"mlxpool_requests_waiting{_M}}}": "3x60", f"mlxpool_requests_running{_M}}}": "0x60"},
        {f"mlxpool_requests_waiting{_M}}}": "3x60", f"mlxpool_requests_running{_M}}}": "1x60"},
    ),
    "MlxpoolQueueLong": (
        {f'{_QUEUE}{_M},le="40.0"}}': "0x60", f'{_QUEUE}{_M},le="+Inf"}}': "0+9x60"},
        {f'{_QUEUE}{_M},le="1.0"}}': "0+9x60", f'{_QUEUE}{_M},le="+Inf"}}': "0+9x60"},
    ),
    "MlxpoolQueueFull": (
        {f'mlxpool_requests_rejected_total{_B},error="queue_full"}}': "0+6x60"},
        {f'mlxpool_requests_rejected_total{_B},error="bad_request"}}': "0+6x60"},
    ),
    "MlxpoolFirstTokenSlow": (
        {f'{_FIRST}{_M},le="80.0"}}': "0x60", f'{_FIRST}{_M},le="+Inf"}}': "0+9x60"},
        {f'{_FIRST}{_M},le="1.0"}}': "0+9x60", f'{_FIRST}{_M},le="+Inf"}}': "0+9x60"},
    ),
    "MlxpoolFailures": (
        {
            f'mlxpool_request_failures_total{_M},error="worker_lost"}}': "0+1x60",
            f"mlxpool_requests_accepted_total{_M}}}": "0+10x60",
        },
        {
            f'mlxpool_request_failures_total{_M},error="context_exceeded"}}': "0+9x60",
            f"mlxpool_requests_accepted_total{_M}}}": "0+10x60",
        },
    ),
    "MlxpoolPoisoned": (
        {f'mlxpool_request_failures_total{_M},error="poisoned"}}': "0x30 1x30"},
        {f'mlxpool_request_failures_total{_M},error="poisoned"}}': "2x60"},
    ),
    "MlxpoolSlowConsumers": (
        {f'mlxpool_request_failures_total{_M},error="slow_consumer"}}': "0+1x60"},
        {f'mlxpool_request_failures_total{_M},error="slow_consumer"}}': "0x50 1x10"},
    ),
    "MlxpoolJobStoreDown": (
        {f"mlxpool_job_store_up{_B}}}": "0x60"},
        {f"mlxpool_job_store_up{_B}}}": "1x57 0 1 1"},
    ),
    "MlxpoolJobStoreFull": (
        {f"mlxpool_job_store_bytes{_B}}}": "80x60", f"mlxpool_job_store_max_bytes{_B}}}": "100x60"},
        {f"mlxpool_job_store_bytes{_B}}}": "70x60", f"mlxpool_job_store_max_bytes{_B}}}": "100x60"},
    ),
    "MlxpoolJobsRefused": (
        {f"mlxpool_job_store_room_bytes{_B}}}": "0x60"},
        {f"mlxpool_job_store_room_bytes{_B}}}": "1x60"},
    ),
    "MlxpoolJobsDead": (
        {f'mlxpool_jobs{_B},state="dead"}}': "1x30 3x30"},
        {
            f'mlxpool_jobs{_B},state="dead"}}': "5x30 4x30",
            f'mlxpool_jobs{_B},state="done"}}': "0+9x60",
        },
    ),
    "MlxpoolNoticesGivenUp": (
        {f'mlxpool_job_notices{_B},state="given_up"}}': "0x30 1x30"},
        {f'mlxpool_job_notices{_B},state="waiting"}}': "0+1x60"},
    ),
    "MlxpoolPrefixDiskFailing": (
        {
            f"mlxpool_prefix_disk_bad_total{_W}}}": "0x45 1+1x14",
            f"mlxpool_prefix_disk_dropped_total{_W}}}": "0x60",
        },
        {
            f"mlxpool_prefix_disk_bad_total{_W}}}": "3x60",
            f"mlxpool_prefix_disk_dropped_total{_W}}}": "0x60",
        },
    ),
}  # fmt: skip


def test_every_alert_has_a_scenario() -> None:
    assert list(STORIES) == NAMES


def test_alerts_fire_in_their_scenarios_only(tmp_path: Path) -> None:
    """promtool evaluates the rules over one hour; the label `instance` is the scenario's name."""
    series, checks = [], []
    for name, stories in STORIES.items():
        for mood, story in zip(("loud", "calm"), stories, strict=True):
            here = f"{name}-{mood}"
            series += [
                {"series": key.replace("HERE", here), "values": values}
                for key, values in story.items()
            ]
            firing = f'alertname="{name}",alertstate="firing",instance="{here}"'
            expected = [{"labels": "{}", "value": 1}] if mood == "loud" else []
            checks.append(
                {"expr": f"count(ALERTS{{{firing}}})", "eval_time": "59m", "exp_samples": expected}
            )
    hour = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(PROMETHEUS / "alerts.yml")], "tests": [hour]}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
