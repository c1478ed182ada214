"""The origin of each setting, and the files in which settings are looked for."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from mlxpool.common import paths
from mlxpool.common.config import origins
from mlxpool.common.config.loading import variables
from mlxpool.common.config.schema import NO_SETTINGS, PoolConfig

FILE = """\
[pool]
queue_limit = 7
beat_limit = 3  # queue_bytes = "1KiB"
front = [
  "ipc:///tmp/x",
]

[models.mine]
path = "/m"
pin = true

[models."org/name"]
path = "/n"
counting.step_us = 5

[models.inline]
path = "builtin:counting"
counting = { vocab = 300 }
replicas = { max = 3 }
"""


@pytest.fixture(autouse=True)
def nobody_elses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("MLXPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.toml"
    path.write_text(FILE)
    return path


def found(
    path: Path | None, flags: dict[str, object] | None = None, **folders: str
) -> dict[str, tuple[object, str]]:
    settings = origins.settings(path, flags or {}, folders)
    return {setting.key: (setting.value, setting.origin) for setting in settings}


def test_lines_of_the_file(file: Path) -> None:
    settings = found(file)
    assert settings["pool.queue_limit"] == (7, f"{file}:2")
    assert settings["pool.beat_limit"] == (3.0, f"{file}:3")
    assert settings["pool.front"] == (["ipc:///tmp/x"], f"{file}:4")
    assert settings["pool.queue_bytes"] == (256 * 1024 * 1024, "default")
    assert settings["models.mine.path"] == ("/m", f"{file}:9")
    assert settings["models.mine.keep_alive"] == (-1.0, f"{file}:10")  # set by `pin`
    assert settings['models."org/name".counting.step_us'] == (5, f"{file}:14")
    assert settings["models.inline.counting.vocab"] == (300, f"{file}:18")
    assert settings["models.inline.counting.step_us"] == (1000, "default")
    assert settings["models.inline.replicas.max"] == (3, f"{file}:19")
    assert settings["models.inline.replicas.min"] == (1, "default")
    assert settings["models.mine.replicas"] == (1, "default")
    assert settings["models.demo.path"] == ("builtin:demo", "default")


def test_flag_beats_environment_beats_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPOOL_QUEUE_LIMIT", "8")
    monkeypatch.setenv("MLXPOOL_LOG_FORMAT", "json")
    settings = found(file, {"log_format": "text", "models_dir": None}, mine="/other")
    assert settings["pool.queue_limit"] == (8, "$MLXPOOL_QUEUE_LIMIT")
    assert settings["pool.log_format"] == ("text", "--log-format")
    assert settings["pool.models_dir"] == (None, "default")
    assert settings["models.mine.path"] == ("/other", "--model")
    assert settings["models.mine.pin"] == (False, "default")


def test_models_of_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "models" / "x").mkdir(parents=True)
    (tmp_path / "models" / "x" / "config.json").write_text("{}")
    settings = found(None, {"models_dir": str(tmp_path / "models")})
    assert settings["models.x.path"] == (str(tmp_path / "models" / "x"), "models_dir")
    assert settings["pool.models_dir"] == (str(tmp_path / "models"), "--models-dir")


def test_every_setting_is_told() -> None:
    settings = found(None)
    pool = {key.removeprefix("pool.") for key in settings if key.startswith("pool.")}
    assert pool == set(PoolConfig.__struct_fields__) - set(NO_SETTINGS)


def test_variables_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPOOL_QUEUE_LIMTI", "1")
    monkeypatch.setenv("MLXPOOL_CONFIG", "/x")
    assert origins.unread_variables() == {"MLXPOOL_QUEUE_LIMTI": "MLXPOOL_QUEUE_LIMIT"}


def test_every_variable_of_the_code_is_known() -> None:
    """The list has every variable that the code reads; other variables are reported as unread."""
    root = Path(__file__).parents[3]
    read = {
        name
        for room in ("broker", "client", "common", "worker")
        for file in (root / room).rglob("*.py")
        for name in re.findall(r"\bMLXPOOL_[A-Z][A-Z_]*[A-Z]\b", file.read_text("utf-8"))
    }
    known = {*variables().values(), *origins.OTHER_VARIABLES}
    assert read - known - {"MLXPOOL_NAME"} == set()
    assert set(origins.OTHER_VARIABLES) - {"MLXPOOL_HYPOTHESIS"} <= read


# ---- the places ----------------------------------------------------------------------------------


def test_the_places_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user, machine = paths.default_config_files()
    assert (user, machine) == (
        tmp_path / "config" / "mlxpool" / "mlxpool.toml",
        Path("/etc/mlxpool/mlxpool.toml"),
    )
    monkeypatch.setattr(paths, "default_config_files", lambda: (user, tmp_path / "etc.toml"))
    assert paths.config_file() is None
    (tmp_path / "etc.toml").write_text("")
    assert paths.config_file() == tmp_path / "etc.toml"
    user.parent.mkdir(parents=True)
    user.write_text("")
    assert paths.config_file() == user
    monkeypatch.setenv("MLXPOOL_CONFIG", "/named")
    assert paths.config_file() == Path("/named")
    assert paths.config_file(Path("/flag")) == Path("/flag")


def test_commands_find_the_broker_by_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "a.toml"
    monkeypatch.setenv("MLXPOOL_CONFIG", str(file))
    default = tmp_path / "mlxpool"
    assert paths.run_dir_of() == default  # the file does not exist: `serve` fails, `ps` goes on
    for text, run_dir in (
        ('[pool]\nrun_dir = "/of/the/file"', Path("/of/the/file")),
        ("[pool]\nrun_dir = 5", default),
        ("pool = 5", default),
        ("= no TOML", default),
        ("", default),
    ):
        file.write_text(text)
        assert paths.run_dir_of() == run_dir
    file.write_text('[pool]\nrun_dir = "/of/the/file"')
    monkeypatch.setenv("MLXPOOL_RUN_DIR", "/env")
    assert paths.run_dir_of() == Path("/env")
    assert paths.run_dir_of(Path("/flag")) == Path("/flag")
