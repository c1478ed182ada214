"""`mlxpool revoke`: the settings that remain, and files that it refuses to change."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from mlxpool.cli.commands.revoke import without
from mlxpool.cli.main import USAGE, main

TEXT = """\
[pool]
queue_limit = 3

# of the team
[keys.alice]
role = "client"  # since May
public = "a"

# a machine
[keys."gpu.1"]
role = "worker"
public = "b"
"""


def test_only_the_section_of_the_key_is_removed() -> None:
    rest = TEXT.replace('[keys.alice]\nrole = "client"  # since May\npublic = "a"\n', "")
    assert without(TEXT, "alice", "x") == rest
    assert without(TEXT, "gpu.1", "x") == TEXT[: TEXT.index('[keys."gpu.1"]')]


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        (TEXT, "alise", "x has no key 'alise'; did you mean 'alice'?"),
        ("[pool]", "alice", "known: none"),
        ("[pool", "alice", "is not TOML"),
        ('[keys]\nalice = {role = "client"}', "alice", "in no section of its own"),
        ('[keys.alice]\nrole = "client"\n[keys.alice.more]\na = 1', "alice", "by hand"),
        ('[pool]\na = """\n[keys.bob]\n"""\n[keys.bob]\nb = 1', "bob", "by hand"),
    ],
)
def test_sections_that_cannot_be_removed(text: str, name: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        without(text, name, "x")
    assert words in str(caught.value)


def test_the_file_keeps_its_mode_and_no_temporary_file_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    file.write_text(TEXT)
    file.chmod(0o640)
    command = ["--run-dir", str(tmp_path), "revoke", "alice", "--config", str(file)]
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"name": "alice", "file": str(file), "reloaded": False}
    assert "alice" not in file.read_text() and stat.S_IMODE(file.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [file]
    assert main(command) == USAGE
    assert f"{file} has no key 'alice'" in capsys.readouterr().err
