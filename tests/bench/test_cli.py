"""The command `mlxpool bench`: the form of its output, not its figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.bench import broker
from mlxpool.bench.measurement import OURS, Figures
from mlxpool.bench.traffic.firehose import Flood
from support.json_shapes import faults

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")
SECTIONS = PAGE[PAGE.index("## mlxpool bench engine") : PAGE.index("## mlxpool bench report")]
SHAPES = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", SECTIONS, re.S)]
PNG = b"\x89PNG"


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlxpool.cli.main", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True)


def figures(*words: str) -> Figures:
    done = bench(*words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(faults(found, SHAPES[0])) == []
    return Figures.from_json(found)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "tiny"
    done = bench("checkpoint", "--shape", "tiny", "--layers", "1", str(folder), "--json")
    told = json.loads(done.stdout)
    assert list(faults(told, SHAPES[1])) == []
    assert told == {"folder": str(folder), "bytes": sum(f.stat().st_size for f in folder.iterdir())}
    return folder


def by_group(found: Figures) -> Mapping[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for line in found.lines:
        groups.setdefault(line.group, []).append(line.name)
    return groups


def sides(found: Figures) -> Iterator[set[str]]:
    yield from (set(line.sides) for line in found.lines)


def test_engine_with_all_options(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    words = ["--model", str(tiny), "--rounds", "2", "--steps", "2", "--streams", "1", "2"]
    words += [
        "--prompt",
        "5",
        "9",
        "--prefill",
        "12",
        "--turn",
        "40",
        "--sampled",
        "top_k",
    ]
    found = figures("engine", *words, "--out", str(tmp_path))
    assert by_group(found) == {
        "decode, prompts of 5 and 9": ["1 stream", "2 streams"],
        "memory": ["weights read, 1 stream"],
        "sampled: temperature 0.8, top_k 40, top_p 0.9": ["1 stream", "2 streams"],
        "prefill": ["12 tokens"],
        "first token": ["next turn of 40 tokens"],
    }
    assert next(sides(found)) == {OURS, "mlx-lm BatchGenerator", "mlx-lm generate_step"}
    assert all(len(line.ratios()) == 2 for line in found.lines)
    assert str(tmp_path) not in found.command
    pictures = list(tmp_path.glob("*.png"))
    assert pictures and all(file.read_bytes().startswith(PNG) for file in pictures)
    saved = bench("report", str(tmp_path / "engine.json"))
    assert saved.stdout == (tmp_path / "engine.md").read_text()


def test_as_installed_runs_the_peer_in_its_own_process(tiny: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    words = ["--model", str(tiny), "--rounds", "1", "--steps", "2", "--streams", "1", "2"]
    found = figures("engine", *words, "--prefill", "8", "--as-installed")
    decode, _, _, prefill = found.lines
    assert set(decode.sides) == set(prefill.sides) == {OURS, "mlx-lm as installed"}


def test_engine_gives_the_share_of_the_bytes_bound(tiny: Path) -> None:
    words = ["--model", str(tiny), "--rounds", "2", "--steps", "2", "--streams", "1", "2"]
    found = figures("engine", *words, "--prompt", "5", "--no-peers", "--memory-rate", "1000")
    rates = [line for line in found.lines if line.group.startswith("decode, prompts")]
    shares = [line for line in found.lines if line.unit == "share of the bytes' bound"]
    assert [line.name for line in shares] == [line.name for line in rates]
    heads = 64 * 32 * (4 + 2 + 2 + 4)
    weights = 2 * (512 * 64 + heads + 3 * 64 * 128 + 3 * 64)
    for rate, share, rows in zip(rates, shares, (1, 2), strict=True):
        read = weights + rows * 5 * 2 * 2 * 32 * 4  # keys and values are float32 on a CPU
        bound = rows * 1e12 / read
        assert share.sides[OURS] == pytest.approx([one / bound for one in rate.sides[OURS]])
    assert "at 1,000 GB/s at most" in shares[0].note


def test_a_profile_names_the_parts_of_a_step(tiny: Path) -> None:
    words = ["--model", str(tiny), "--rounds", "1", "--steps", "2", "--streams", "2"]
    found = figures("engine", "--profile", *words)
    (names,) = by_group(found).values()
    assert names == [
        "whole step",
        "of it, the host builds",
        "of it, the host reads",
        "linear layers alone",
        "logits alone",
        "greedy sampler alone",
        "the rest: attention, norms, the host",
        "under Python's profiler",
    ]
    assert re.search(r"\w+\.py:\d+\(\w+\)", found.lines[-1].note)


def test_end_to_end_gives_the_engines_own_tokens(tiny: Path) -> None:
    words = ["--model", str(tiny), "--rounds", "1", "--streams", "1", "3", "--tokens", "12"]
    found = figures("end-to-end", *words, "--no-peers")
    rates = [line for line in found.lines if line.group == "end to end"]
    assert [line.at for line in rates] == [1, 3]
    assert set(rates[0].sides) == {OURS, "engine alone"}
    assert rates[1].note == "3 streams: 3 of 3 streams gave the engine's own tokens."


def test_end_to_end_beside_the_peers_server(tiny: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    words = ["--model", str(tiny), "--rounds", "1", "--streams", "2", "--tokens", "6"]
    found = figures("end-to-end", *words)
    assert set(found.lines[0].sides) == {OURS, "engine alone", "mlx_lm.server"}


def test_the_prefix_cache_finds_all_reusable_tokens(tiny: Path) -> None:
    words = ["--model", str(tiny), "--conversations", "2", "--turns", "2", "--tokens", "300"]
    found = {line.name: line for line in figures("prefix", *words, "--no-peers").lines}
    share = found["found of reusable prompt tokens"].sides
    assert share[OURS] == [100.0]
    assert share["single entry"][0] < 100


@pytest.mark.parametrize("batch", [False, True])
def test_every_token_of_a_flood_arrives(batch: bool) -> None:
    flood = Flood(4, 2, 400, rate=500)
    cost = broker.through_broker(flood, 2, batch=batch, delays=True)
    assert cost.per_s > 0
    assert len(cost.delays_ms) <= 1600
    relayed = broker.through_relay(flood, delays=True)
    assert relayed.delay(0.99) >= relayed.delay(0.5) > 0


def test_help_names_what_can_be_measured() -> None:
    done = bench("--help")
    assert done.returncode == 0
    for what in ("engine", "end-to-end", "load", "broker", "prefix", "checkpoint", "report"):
        assert re.search(rf"^ +{what}\b", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["engine", "--shape", "huge"], "there is no shape 'huge'; there are tiny, small"),
        (["engine", "--streams", "0"], "--streams 0 must be at least 1"),
        (["engine", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["prefix", "--rounds", "-3"], "--rounds -3 must be at least 1"),
        (["prefix", "--shape", "tiny", "--tokens", "5000"], "give --tokens 3836 or less"),
        (["checkpoint", "--shape", "tiny", "/tmp"], "/tmp is there already"),
        (["report", "/nowhere.json"], "/nowhere.json: No such file"),
    ],
)
def test_bad_input_is_one_line(words: list[str], says: str) -> None:
    done = bench(*words)
    assert done.returncode in (1, 2)
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_bad_json_says_which_file(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"what": "engine"}))
    done = bench("report", str(file))
    assert done.returncode == 2
    assert str(file) in done.stderr and "Traceback" not in done.stderr
