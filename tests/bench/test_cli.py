"""The command `mlxpool bench`: the form of its output, not its figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.bench.cli import MODULES
from mlxpool.bench.measurement import Figures
from support.json_shapes import faults, named_shapes, sections_of, shapes_of

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text("utf-8")
NAMED = named_shapes(PAGE)
PNG = b"\x89PNG"
SCENARIOS = (
    *("engine", "end-to-end", "load", "broker", "prefix", "routing", "groups", "speculation"),
    *("formats", "deaths"),
)


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlxpool.cli.main", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True)


def figures(*words: str) -> Figures:
    done = bench(*words, "--json")
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert list(faults(output, NAMED["FIGURES"])) == []
    return Figures.from_json(output)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "tiny"
    done = bench("checkpoint", "--shape", "tiny", "--layers", "1", str(folder), "--json")
    output = json.loads(done.stdout)
    (shape,) = shapes_of(sections_of(PAGE)["mlxpool bench checkpoint"], NAMED)
    assert list(faults(output, shape)) == []
    assert output == {
        "folder": str(folder),
        "bytes": sum(f.stat().st_size for f in folder.iterdir()),
    }
    return folder


def test_figures_are_printed_and_saved_with_pictures(tiny: Path, tmp_path: Path) -> None:
    words = ["--model", str(tiny), "--rounds", "2", "--steps", "2", "--streams", "2", "3"]
    results = figures("engine", *words, "--no-peers", "--out", str(tmp_path))
    assert [line.name for line in results.lines] == ["2 streams", "3 streams"]
    assert results.about == f"{tiny}, greedy, rounds: 2 of 2 steps."
    assert str(tmp_path) not in results.command
    pictures = list(tmp_path.glob("*.png"))
    assert pictures and all(file.read_bytes().startswith(PNG) for file in pictures)
    saved = bench("report", str(tmp_path / "engine.json"))
    assert saved.stdout == (tmp_path / "engine.md").read_text()


def test_help_names_what_can_be_measured() -> None:
    done = bench("--help")
    assert done.returncode == 0
    for what in (*SCENARIOS, "checkpoint", "report"):
        assert re.search(rf"^ +{what}\b", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["engine", "--shape", "huge"], "there is no shape 'huge'; there are tiny, small"),
        (["engine", "--streams", "0"], "--streams 0 must be at least 1"),
        (["engine", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["prefix", "--rounds", "-3"], "--rounds -3 must be at least 1"),
        (["prefix", "--shape", "tiny", "--tokens", "5000"], "give --tokens 3836 or less"),
        (["checkpoint", "--shape", "tiny", "/tmp"], "/tmp already exists"),
        (["engine", "--shape", "tiny", "--beside", "/tmp"], "/tmp is not a checkout of mlxpool"),
        (
            ["engine", "--llama-cpp", "/no/python"],
            "is not a GGUF file, and llama.cpp reads nothing",
        ),
        (["groups", "--setup", "1:2"], "--setup 1:2 must be WORKERSxDEVICES, such as 2x1"),
        (["routing", "--load", "cats"], "there is no load 'cats'; there are chats, tenants"),
        (["formats", "--rows", "1"], "--rows 1 must be at least 2"),
        (["speculation", "--loads", "x"], "--loads x: unknown, must be one of edits, comp"),
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


def test_the_page_of_scenarios_has_each_of_them() -> None:
    """The page names each scenario; the docstring of a scenario's module begins with a question."""
    page = (Path(__file__).parents[2] / "bench" / "README.md").read_text("utf-8")
    for name in SCENARIOS:
        assert f"| `mlxpool bench {name}" in page
        module = import_module(f"mlxpool.bench.{MODULES.get(name, name.replace('-', '_'))}")
        assert "?" in str(module.__doc__).partition("\n")[0]
