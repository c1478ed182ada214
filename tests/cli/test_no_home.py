"""Every command, run by a user id without a name and a home folder, as in containers: no traceback.

Such a user's errors are one line, or errors of the parser; they name the missing variable or flag.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest

from mlxpool.cli.admin import ask
from mlxpool.cli.main import FAILED, main
from mlxpool.cli.parser import COMMAND_MODULES
from mlxpool.common import paths
from mlxpool.worker.weights import hub_cache, ollama_store
from support.commands import SERVERS, run_here

ARGUMENTS = {
    "bench": ["engine", "--help"],
    "cancel": ["0" * 32],
    "classify": ["m", "x"],
    "completion": ["bash"],
    "config": ["show"],
    "decide": ["m", "--prompt", "x"],
    "embed": ["m", "x"],
    "fetch": ["key"],
    "keygen": ["x", "--role", "client"],
    "load": ["m"],
    "prefix": ["ls"],
    "pull": ["a name"],
    "ray": ["--help"],
    "rerank": ["m", "x", "y"],
    "restart": ["m/0"],
    "revoke": ["x"],
    "run": ["demo", "x"],
    "submit": ["demo", "x"],
    "unload": ["m"],
}
FURTHER = (["prefix", "verify"], ["config", "check"], ["chat", "~/x"])
OTHERS = SERVERS | {"check"}  # commands that start processes
NAMED = ([name, *ARGUMENTS.get(name, [])] for name in COMMAND_MODULES if name not in OTHERS)
COMMANDS = sorted([*NAMED, *FURTHER])


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a user without a name and a home folder, who cannot write to "/"."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    # Tests may run as root, who could write to "/".
    monkeypatch.setattr(paths, "home", lambda: Path("/proc/nobody"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("home", [None, "x" * 300], ids=["no home", "a closed home"])
def test_every_command(nobody: None, command: list[str], home: str | None) -> None:
    """Each command runs without a home folder, and with one whose name is too long.

    The long name stands for a folder without access: both raise OSError.
    """
    environment = {"PATH": "/usr/bin:/bin"} | ({} if home is None else {"HOME": home})
    with patch.dict(ask.__kwdefaults__, {"timeout": 0.01}):  # no broker answers
        done = run_here(command, environment)
    assert "Traceback" not in done.stderr + done.stdout
    assert done.returncode == 0 or done.stderr or done.stdout


def test_stores_of_models(nobody: None) -> None:
    with patch.dict(os.environ, clear=True):
        assert hub_cache.cache_folder() == Path("/proc/nobody/.cache/huggingface/hub")
        assert ollama_store.stores()[0] == Path("/proc/nobody/.ollama/models")


def test_the_error_of_a_home_folder_that_cannot_be_written_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(options: object) -> NoReturn:
        raise PermissionError(13, "Permission denied", "/proc/nobody/.cache/x")

    monkeypatch.setattr("mlxpool.cli.main.home", lambda: Path("/proc/nobody"))
    monkeypatch.setattr("mlxpool.cli.commands.prefix.ls", closed)
    assert main(["prefix", "ls"]) == FAILED
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "set HOME to one that this user can write to" in error
