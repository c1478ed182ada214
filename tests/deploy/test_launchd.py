"""The LaunchAgent, parsed by plistlib; it has not been loaded on a Mac."""

from __future__ import annotations

import plistlib
from pathlib import Path

import pytest

from mlxpool.common.config.schema import PoolConfig
from support.command_lines import parsed

FILE = Path(__file__).parents[2] / "deploy" / "launchd" / "dev.mlxpool.pool.plist"
HOME = "/Users/somebody"
TYPES = {
    "Label": str,
    "ProgramArguments": list,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "Umask": int,
    "SoftResourceLimits": dict,
    "WorkingDirectory": str,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}


@pytest.fixture
def agent() -> dict[str, object]:
    """Returns the LaunchAgent's property list as it is installed."""
    return dict(plistlib.loads(FILE.read_bytes().replace(b"@HOME@", HOME.encode())))


def test_its_keys_and_their_types(agent: dict[str, object]) -> None:
    assert {key: type(value) for key, value in agent.items()} == TYPES
    assert agent["Label"] == FILE.stem


def test_every_path_is_absolute(agent: dict[str, object]) -> None:
    """The paths contain neither ~ nor variables, which launchd would not expand."""
    for key in ("WorkingDirectory", "StandardOutPath", "StandardErrorPath"):
        assert str(agent[key]).startswith(f"{HOME}/")
    text = FILE.read_text("utf-8").partition("<plist")[2]
    assert "~" not in text and "$" not in text


def test_its_command_line_is_valid(agent: dict[str, object]) -> None:
    arguments = agent["ProgramArguments"]
    assert isinstance(arguments, list)
    options = parsed(arguments[1:])
    assert options.command == "serve"
    assert options.config == Path(HOME, ".mlxpool", "mlxpool.toml")
    assert options.run_dir == Path(HOME, ".mlxpool", "run")


def test_it_is_restarted_unless_it_ended_with_success(agent: dict[str, object]) -> None:
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert isinstance(agent["ExitTimeOut"], int)
    assert agent["ExitTimeOut"] > 2 * PoolConfig().stop_grace


def test_its_files_are_private(agent: dict[str, object]) -> None:
    assert agent["Umask"] == 0o077
