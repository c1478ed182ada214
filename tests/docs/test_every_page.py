"""What pages say and no other test runs: commands there are, programs that compile, settings."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_lines import parsed
from doc_blocks import blocks
from mlxpool.common import config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
PLACEHOLDER = re.compile(r"…|\[-|\bNAME\b|\bCOMMAND\b|\bFILE\b")
OTHERS = ("openai",)  # packages that programs of the pages need beside this one


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command of ours in an indented or a fenced block."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    for line in re.findall(r"^(?:    |\$ |> )+((?:mlxpool|python|make) .*)$", text, re.M):
        line = re.split(r" (?:&|2?>|\||;|#) ?", f"{line} ")[0]
        if not PLACEHOLDER.search(line):
            yield shlex.split(line)


def the(found: list[tuple[Path, list[str]]]) -> list[object]:
    return [pytest.param(*one, id=f"{one[0].stem}: {' '.join(one[1])}"[:80]) for one in found]


EVERY = [(page, words) for page in PAGES for words in commands(page)]


def test_there_are_commands() -> None:
    assert {words[0] for _, words in EVERY} == {"mlxpool", "python", "make"}


@pytest.mark.parametrize(("page", "words"), the([one for one in EVERY if one[1][0] == "mlxpool"]))
def test_our_command_line_understands_it(page: Path, words: list[str]) -> None:
    parsed(words[1:])


@pytest.mark.parametrize(("page", "words"), the([one for one in EVERY if one[1][0] == "make"]))
def test_there_is_such_a_target(page: Path, words: list[str]) -> None:
    assert next(word for word in words[1:] if "=" not in word) in TARGETS


@pytest.mark.parametrize(("page", "words"), the([one for one in EVERY if one[1][0] == "python"]))
def test_there_is_such_a_program_with_such_options(page: Path, words: list[str]) -> None:
    if words[1:3] == ["-m", "pytest"]:
        assert (ROOT / words[3].partition("::")[0].replace("test_NAME.py", "")).exists()
        return
    program = ROOT / words[1]
    text = program.read_text("utf-8")
    for option in (word for word in words[2:] if word.startswith("--")):
        assert f'"{option}"' in text, f"{program} has no {option}"


PROGRAMS = [
    pytest.param(block.text, id=f"{page.stem}:{block.line}")
    for page in PAGES
    for block in blocks(page.read_text("utf-8"))
    if block.kind == "python"
]
SETTINGS = [
    pytest.param(block.text, id=f"{page.stem}:{block.line}")
    for page in PAGES
    for block in blocks(page.read_text("utf-8"))
    if block.kind == "toml"
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_imports_what_there_is(program: str) -> None:
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and node.module and "NAME" not in node.module:
            if node.module.partition(".")[0] in OTHERS:
                pytest.importorskip(node.module, reason=f"{node.module} is not installed")
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names)


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_are_sound(settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An excerpt may leave out a model's path; folders of the page are not here."""
    names = re.findall(r"^\[models\.([^.\]]+|\"[^\"]+\")\]$", settings, re.M)
    table = tomllib.loads(settings)
    for name in names:
        if "path" not in table["models"][name.strip('"')]:
            settings = settings.replace(f"[models.{name}]", f'[models.{name}]\npath = "/x"')
    file = tmp_path / "mlxpool.toml"
    file.write_text(re.sub(r"^models_dir = .*$", "", settings, flags=re.M), "utf-8")
    monkeypatch.setenv("MLXPOOL_RUN_DIR", str(tmp_path))
    config.load(file)
