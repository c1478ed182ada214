"""Help, the version, and the nearest known word for an unknown word."""

from __future__ import annotations

import json

import pytest

from mlxpool.cli.main import OK, USAGE, main
from mlxpool.cli.parser import COMMAND_MODULES, GROUPS
from mlxpool.common.version import VERSION


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_the_help_has_every_command_in_its_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert ended("--help") == OK
    text = capsys.readouterr().out
    sections = dict(part.split(":\n", 1) for part in text.split("\n\n") if ":\n" in part)
    for title, names in GROUPS.items():
        assert [line.split()[0] for line in sections[title].splitlines()] == list(names)
    assert max(map(len, text.splitlines())) <= 80
    assert sorted(COMMAND_MODULES) == sorted(name for names in GROUPS.values() for name in names)


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_of_help_is_wider_than_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for words in ([], *([name] for name in COMMAND_MODULES), ["bench", "load"], ["config", "show"]):
        assert ended("help", *words) == OK
        lines = capsys.readouterr().out.splitlines()
        assert lines and [line for line in lines if len(line) > width] == [], words


@pytest.mark.parametrize("words", [["help"], ["--help"], ["-h"]])
def test_three_ways_to_the_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(*words) == OK
    assert "run a pool:" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["run"], ["config", "show"], ["bench", "load"]])
def test_the_help_of_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("help", *words) == OK
    text = capsys.readouterr().out
    assert text.startswith(f"usage: mlxpool {' '.join(words)} ")
    assert ended(*words, "--help") == OK
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("command", "columns"),
    [
        ("ps", ["SLOT", "PHASE", "FOR", "RUN", "WAIT", "RESTARTS"]),
        ("top", ["RUN", "WAIT", "TOK/S", "TTFT", "KV%", "DRAFTS"]),
    ],
)
def test_the_help_of_a_table_explains_its_columns(
    command: str, columns: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(command, "--help") == OK
    text = " ".join(capsys.readouterr().out.partition("options:")[0].split())
    assert [name for name in columns if f"{name}: " not in text and f"{name}, " not in text] == []


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended() == USAGE
    written = capsys.readouterr()
    assert written.out == "" and "run a pool:" in written.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rum"], "there is no command 'rum'; did you mean 'run'?"),
        (["modles", "--json"], "there is no command 'modles'; did you mean 'models'?"),
        (["--run-dir", "/a", "serv"], "there is no command 'serv'; did you mean 'serve'?"),
        (["help", "chta"], "there is no command 'chta'; did you mean 'chat'?"),
        (["xyzzy"], "there is no command 'xyzzy'; known: serve, broker, "),
        (["config", "chek"], "there is no command 'chek'; did you mean 'check'?"),
        (["bench", "engin"], "there is no measurement 'engin'; did you mean 'engine'?"),
        (["top", "--sort", "memroy"], "argument --sort: not 'memroy'; did you mean 'memory'?"),
        (["ps", "--jsno"], "unrecognized arguments: --jsno; did you mean '--json'?"),
        (["run", "m", "x", "--temprature=1"], "did you mean '--temperature'?"),
        (["\x1b[2J"], r"there is no command '\x1b[2J'; known: "),
    ],
)
def test_the_nearest_word(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(*words) == USAGE
    written = capsys.readouterr()
    assert told in written.err and written.out == ""
    assert "\x1b" not in written.err


@pytest.mark.parametrize("words", [["--version"], ["-V"]])
def test_flags_for_the_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(*words) == OK
    assert capsys.readouterr().out == f"mlxpool {VERSION}\n"


def test_the_version_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == OK
    assert capsys.readouterr().out == f"mlxpool {VERSION}\n"
    assert main(["version", "--json"]) == OK
    assert json.loads(capsys.readouterr().out) == {"version": VERSION}
