"""The folder of jobs: by default a folder of the user for each run directory."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.config.loading import load
from mlxpool.common.config.origins import settings
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.paths import (
    default_config_files,
    default_prefix_dir,
    default_run_dir,
    default_state_dir,
    expanded,
    run_dir_of,
)
from mlxpool.common.transport.keys import default_folder

RUN_DIR = Path("/run/user/1000/mlxpool")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME", "MLXPOOL_STATE_DIR", "MLXPOOL_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/ann")


def test_the_default_is_in_the_users_folder_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "run-user-1000-mlxpool"
    assert default_state_dir(RUN_DIR) == Path("/home/ann/.local/state/mlxpool/jobs") / name
    monkeypatch.setenv("XDG_STATE_HOME", "/states")
    assert default_state_dir(RUN_DIR) == Path("/states/mlxpool/jobs") / name
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/mlxpool:/other")
    assert default_state_dir(RUN_DIR) == Path("/var/lib/mlxpool/jobs") / name


def test_each_run_directory_has_a_folder_of_its_own(tmp_path: Path) -> None:
    paths = ["a/b", "a-b", "a_/b", "a_-b", "a__b", "a/_b", "a/-b", "a-/b", "a_b"]
    assert len({default_state_dir(tmp_path / path) for path in paths}) == len(paths)
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert default_state_dir(tmp_path / "link" / "b") == default_state_dir(tmp_path / "a" / "b")


def test_it_follows_the_run_directory_of_flag_and_file(tmp_path: Path) -> None:
    file = tmp_path / "mlxpool.toml"
    file.write_text('[pool]\nrun_dir = "/run/file"\n')
    assert load(file).state_dir == "/home/ann/.local/state/mlxpool/jobs/run-file"
    flags = {"run_dir": Path("/run/flag"), "state_dir": None}
    assert load(file, flags).state_dir == "/home/ann/.local/state/mlxpool/jobs/run-flag"


@pytest.mark.parametrize("place", ["", "jobs", "~/jobs", "postgresql://host/jobs"])
def test_what_is_set_counts(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mlxpool.toml"
    file.write_text(f'[pool]\nstate_dir = "{place}"\n')
    assert load(file).state_dir == place
    assert load(None, {"state_dir": place}).state_dir == place
    monkeypatch.setenv("MLXPOOL_STATE_DIR", "/elsewhere")
    assert load(file).state_dir == "/elsewhere"
    assert load(file, {"state_dir": place}).state_dir == place
    monkeypatch.setenv("MLXPOOL_STATE_DIR", "")
    assert load(file).state_dir == place, "an empty variable is not set"


def test_config_show_has_the_folder_and_says_that_it_is_the_default() -> None:
    flags: dict[str, Any] = {"run_dir": RUN_DIR}
    (setting,) = (entry for entry in settings(None, flags, {}) if entry.key == "pool.state_dir")
    assert (setting.value, setting.origin) == (str(default_state_dir(RUN_DIR)), "default")


def test_settings_that_are_made_in_a_program_keep_nothing() -> None:
    assert PoolConfig().state_dir == ""


def test_a_user_without_a_home_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are read for a user id that /etc/passwd lacks, as in a container."""

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "CACHE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(RuntimeError):
        Path.home()
    assert default_run_dir() == run_dir_of() == Path("/.mlxpool/run")
    assert default_prefix_dir() == Path("/.cache/mlxpool/prefixes")
    assert default_folder() == Path("/.mlxpool/keys")
    assert default_config_files()[0] == Path("/.config/mlxpool/mlxpool.toml")
    assert expanded("~/a") == Path("/a") and expanded("~nobody-here/a") == Path("~nobody-here/a")
    config = load(None, {"models_dir": "~", "prefix_dir": "~/prefixes"})
    assert config.prefix_dir == Path("/prefixes")
    assert config.state_dir == "/.local/state/mlxpool/jobs/.mlxpool-run"
    monkeypatch.setenv("MLXPOOL_RUN_DIR", "/run/pool")
    assert load(Path(os.devnull)).state_dir == "/.local/state/mlxpool/jobs/run-pool"
