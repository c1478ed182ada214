"""The flags of `mlxpool bench load`, and their meaning."""

from __future__ import annotations

import argparse

import pytest

from mlxpool.bench import cli
from mlxpool.bench.load import scenario
from mlxpool.bench.load.targets import Target, body_of, server_url
from mlxpool.bench.load.workload import Request
from support.command_lines import parsed


def given(*words: str) -> argparse.Namespace:
    return parsed(["bench", "load", *words])


def test_the_defaults_fit_into_the_embedded_models_context() -> None:
    plan = scenario.plan_of(given())
    assert plan.whole_context == 2048
    assert (plan.rates, plan.warm_up, plan.rounds) == ([0.0], plan.workload.requests, 3)


def test_the_flags_make_the_plan() -> None:
    words = ["--rate", "0", "12.5", "--requests", "9", "--warm-up", "0", "--seed", "7"]
    words += ["--prompt-lengths", "270", "1", "16", "3000", "--context", "4352", "--sequences", "8"]
    words += ["--goodput", "--slo-ttft", "500", "--slo-itl", "80", "--clients", "3"]
    plan = scenario.plan_of(given(*words))
    assert plan.rates == [0.0, 12.5] and plan.workload.requests == 9
    assert (plan.warm_up, plan.seed, plan.clients) == (0, 7, 3)
    assert (plan.whole_context, plan.sequences) == (4352, 8)
    assert plan.slo.given() == {"ttft": 500.0, "itl": 80.0}
    assert plan.workload.prompt.maximum == 3000
    said = scenario.about(given(*words))
    assert "context 4,352" in said and "TTFT 500 ms, ITL 80 ms" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--goodput"], "--goodput needs an objective"),
        (["--prompt-lengths", "270", "1", "0", "9"], "--prompt-lengths: lengths from 0 to 9"),
        (["--output-lengths", "9", "1", "1.5", "9"], "--output-lengths: MIN and MAX are whole"),
        (["--context", "100"], "--context 100 is too small for requests of 2012"),
    ],
)
def test_flags_that_make_no_sense_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        scenario.plan_of(given(*words))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rate", "-1"], "--rate -1 must be at least 0"),
        (["--rate", "inf"], "--rate inf must be at least 0"),
        (["--requests", "0"], "--requests 0 must be at least 1"),
        (["--warm-up", "-1"], "--warm-up -1 must be at least 0"),
        (["--slo-itl", "-1"], "--slo-itl -1 must be at least 0"),
        (["--sequences", "0"], "--sequences 0 must be at least 1"),
    ],
)
def test_numbers_out_of_bounds_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cli.check_options(given(*words))


def test_the_server_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    assert scenario.other_server(given()) is None
    words = ["--against", "http://host:8000/", "--against-model", "m"]
    server = scenario.other_server(given(*words))
    assert server == Target("m", url="http://host:8000/v1", api_key="from-environment")
    assert "from-environment" not in repr(server)
    assert scenario.name_of(server) == "host:8000"
    keyed = scenario.other_server(given(*words, "--api-key", "k"))
    assert keyed is not None and keyed.api_key == "k"
    with pytest.raises(ValueError, match="--no-pool measures nothing"):
        scenario.other_server(given("--no-pool"))


def test_a_saved_command_line_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["bench", "load", "--api-key", "secret", "--api-key=secret2", "--rate", "0"]
    monkeypatch.setattr("sys.argv", ["x", *words, "--out", "/f", "--out=/g"])
    assert cli.command_line() == "mlxpool bench load --rate 0"


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1"),
        ("https://h/openai", "https://h/openai/v1"),
    ],
)
def test_urls_end_with_v1(url: str, wanted: str) -> None:
    assert server_url(url) == wanted


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://u@h", "http://h/?a=b"])
def test_urls_of_nothing_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--against"):
        server_url(url)


def test_the_body_has_ids_or_text() -> None:
    request = Request(0.0, [0, 1], 5)
    body = body_of(Target("m", url="u"), request)
    assert body["prompt"] == [0, 1] and body["max_tokens"] == 5 and body["ignore_eos"] is True
    text = body_of(Target("m", url="u", as_text=True, ignore_eos=False), request)
    assert text["prompt"] == "the of" and "ignore_eos" not in text
