"""Runs each scenario of `mlxpool bench` at its smallest size; checks which figures it returns."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.bench import broker, checkpoint, engine, engine_process, speculation
from mlxpool.bench.cli import MODULES
from mlxpool.bench.measurement import OURS, Measurement
from mlxpool.bench.traffic.firehose import Flood
from support.command_lines import parsed

LENGTHS = ["--prompt-lengths", "12", "0.5", "4", "40", "--output-lengths", "8", "0.5", "2", "20"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "tiny"
    return checkpoint.write(folder, "tiny", layers=1)


def run(name: str, *words: str) -> list[Measurement]:
    """Runs a command line of `mlxpool bench` in this process, and returns its measurements."""
    options = parsed(["bench", name, *words])
    scenario = import_module(f"mlxpool.bench.{MODULES.get(name, name.replace('-', '_'))}")
    assert scenario.about(options).endswith(".")
    return [*scenario.measure(options, lambda text: None)]


def by_group(found: list[Measurement]) -> Mapping[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for line in found:
        groups.setdefault(line.group, []).append(line.name)
    return groups


# ---- the engine ----------------------------------------------------------------------------------


def test_engine_with_all_options(tiny: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    words = ["--model", str(tiny), "--rounds", "2", "--steps", "2", "--streams", "1", "2"]
    words += ["--prompt", "5", "9", "--prefill", "12", "--turn", "40", "--sampled", "top_k"]
    lines = run("engine", *words)
    assert by_group(lines) == {
        "decode, prompts of 5 and 9": ["1 stream", "2 streams"],
        "memory": ["weights read, 1 stream"],
        "sampled: temperature 0.8, top_k 40, top_p 0.9": ["1 stream", "2 streams"],
        "prefill": ["12 tokens"],
        "first token": ["next turn of 40 tokens"],
    }
    assert set(lines[0].sides) == {OURS, "mlx-lm BatchGenerator", "mlx-lm generate_step"}
    assert all(len(line.ratios()) == 2 for line in lines)


def test_as_installed_runs_the_peer_in_its_own_process(tiny: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    words = ["--model", str(tiny), "--rounds", "1", "--steps", "2", "--streams", "2", "1"]
    many, single, _, prefill = run("engine", *words, "--prefill", "8", "--as-installed")
    for line in (many, single, prefill):
        assert set(line.sides) == {OURS, "mlx-lm as installed"}


def test_engine_gives_the_share_of_the_bytes_bound(tiny: Path) -> None:
    words = ["--model", str(tiny), "--rounds", "2", "--steps", "2", "--streams", "2"]
    rate, share = run("engine", *words, "--prompt", "5", "--no-peers", "--memory-rate", "1000")
    heads = 64 * 32 * (4 + 2 + 2 + 4)
    weights = 2 * (512 * 64 + heads + 3 * 64 * 128 + 3 * 64)
    read = weights + 2 * 5 * 2 * 2 * 32 * 4  # keys and values are float32 on a CPU
    bound = 2 * 1e12 / read
    assert share.sides[OURS] == pytest.approx([value / bound for value in rate.sides[OURS]])
    assert "at 1,000 GB/s at most" in share.note


def test_engine_beside_a_checkout(tiny: Path) -> None:
    """Two checkouts are compared, each in its own process; here both are this checkout."""
    words = ["--model", str(tiny), "--rounds", "2", "--steps", "2", "--streams", "2"]
    words += ["--prompt", "5", "--prefill", "8", "--beside", str(engine_process.HERE)]
    decode, prefill = run("engine", *words)
    assert set(decode.sides) == set(prefill.sides) == {OURS, engine.OTHER}
    assert len(decode.ratios()) == len(prefill.ratios()) == 2


def test_formats_cost_rows_with_one_and_rows_beside_one() -> None:
    all_rows, one_row = run("formats", "--rounds", "1", "--rows", "2", "--tokens", "4")
    assert (all_rows.group, one_row.group) == ("a format: all rows", "a format: one row")
    assert set(all_rows.sides) == set(one_row.sides) == {OURS, "no row"}
    assert len(all_rows.ratios()) == len(one_row.ratios()) == 1


@pytest.mark.parametrize("words", [["--speculation", "ngram"], ["--acceptance", "0.9"]])
def test_speculation_tells_what_came_of_the_drafts(
    words: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "MODULES", ("heapq", "fractions"))  # short to read
    speculation.functions.cache_clear()
    words += [
        "--model",
        str(tiny),
        "--rounds",
        "1",
        "--streams",
        "1",
        "--tokens",
        "12",
        "--loads",
        "edits",
    ]
    (line,) = run("speculation", *words)
    speculation.functions.cache_clear()
    assert set(line.sides) == {OURS, "no drafts"} and len(line.ratios()) == 1
    if "ngram" in words:
        assert line.note.endswith("1 of 1 streams had the same ids.")


# ---- pools ---------------------------------------------------------------------------------------


def test_end_to_end_gives_the_engines_own_tokens(tiny: Path) -> None:
    words = ["--model", str(tiny), "--rounds", "1", "--streams", "3", "--tokens", "12"]
    rates, *times = run("end-to-end", *words, "--no-peers", "--clients", "2")
    assert (rates.group, rates.at) == ("end to end", 3)
    assert set(rates.sides) == {OURS, "engine alone"}
    assert rates.note == "3 streams: 3 of 3 streams gave the engine's own tokens."
    assert all(set(line.sides) == {OURS} for line in times)


def test_end_to_end_beside_the_peers_server(tiny: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    words = ["--model", str(tiny), "--rounds", "1", "--streams", "2", "--tokens", "6"]
    lines = run("end-to-end", *words)
    assert set(lines[0].sides) == {OURS, "engine alone", "mlx_lm.server"}


def test_groups_have_a_column_for_each_pool() -> None:
    words = ["--model", "builtin:counting", "--setup", "1x1", "2x1", "--rounds", "1"]
    words += ["--streams", "2", "--tokens", "6", "--prefill", "8"]
    lines = run("groups", *words, "--rate", "0", "--requests", "2", "--warm-up", "0", *LENGTHS)
    for line in lines:
        assert set(line.sides) == {"1 worker of 1 device", "2 workers of 1 device"}
    names = {(line.group, line.name) for line in lines}
    assert names >= {
        ("start", "load"),
        ("end to end", "2 streams"),
        ("prefill", "a prompt of 8 tokens"),
        ("all at once", "failed requests"),
    }


def test_the_broker_passes_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "SINGLE", Flood(streams=4, rows=1, tokens=400))
    monkeypatch.setattr(broker, "BATCHED", Flood(streams=4, rows=4, tokens=400))
    lines = run("broker", "--rounds", "1", "--seconds", "0.3")
    assert by_group(lines) == {
        "broker": ["one row a frame", "16 rows a frame, 4 clients"],
        "processor time": ["one row a frame", "16 rows a frame"],
        "50 streams of 100 tokens/s": ["batch", "no batch"],
        "50 streams of 100 tokens/s, worker to client": [
            *("batch, p50", "batch, p99", "no batch, p50", "no batch, p99"),
        ],
    }
    for line in lines:
        assert set(line.sides) == ({OURS} if "16 rows" in line.name else {OURS, broker.RELAY})


def test_every_token_of_a_flood_arrives() -> None:
    flood = Flood(streams=4, rows=2, tokens=400, rate=500)
    cost = broker.through_broker(flood, 2, batch=True, delays=True)
    assert cost.per_s > 0
    assert len(cost.delays_ms) <= 1600
    assert cost.delay(99) >= cost.delay(50) > 0


def test_the_prefix_cache_finds_all_reusable_tokens(tiny: Path) -> None:
    words = ["--model", str(tiny), "--conversations", "2", "--turns", "2", "--tokens", "300"]
    lines = {line.name: line for line in run("prefix", *words, "--no-peers")}
    share = lines["found of reusable prompt tokens"].sides
    assert share[OURS] == (100.0,)
    assert share["single entry"][0] < 100


def test_prefixes_come_back_from_the_disk(tiny: Path) -> None:
    words = ["--model", str(tiny), "--disk", "--rounds", "1", "--tokens", "400"]
    restart, memory, gaps = run("prefix", *words)
    assert restart.note == "Tokens from the disk: 399."
    assert set(restart.sides) == set(memory.sides) == {OURS, "cold"}
    assert set(gaps.sides) == {OURS, "no disk"}


def test_routing_has_a_side_for_each_policy() -> None:
    lines = run("routing", "--rounds", "2", "--load", "chats", "--count", "3")
    sides = {"round robin", "least loaded", "session", OURS, "oracle"}
    assert all(set(line.sides) == sides and len(line.ratios()) == 2 for line in lines)


def test_routing_on_real_workers() -> None:
    words = ["--real", "--rounds", "1", "--workers", "2", "--load", "long_prefixes"]
    lines = run("routing", *words, "--count", "3", "--cache", "7000")
    assert all(set(line.sides) == {OURS, "least_loaded"} for line in lines)
    assert lines[1].name == "read / unique" and min(lines[1].sides[OURS]) >= 1


@pytest.mark.parametrize("fault", ["kill", "stop", "broker"])
def test_no_stream_is_wrong_after_a_fault(fault: str) -> None:
    words = ["--rounds", "1", "--replicas", "2", "--streams", "2", "--tokens", "150"]
    lines = run("deaths", *words, "--faults", fault, "--limit", "1")
    for line in lines:
        assert "2 of 2 streams were right" in line.note
        assert 0 < line.sides["p50"][0] <= line.sides["max"][0]
    assert any("in decode" in line.name for line in lines)
