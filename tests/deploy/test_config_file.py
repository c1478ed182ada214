"""deploy/mlxpool.toml names every setting, each with its default."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import fields, replace

from mlxpool.common.config.loading import load
from mlxpool.common.config.schema import BUILTIN, Counting, KeyConfig, ModelConfig, PoolConfig

FILE = Path(__file__).parents[2] / "deploy" / "mlxpool.toml"
# Settings without a default, or with a default that depends on the machine.
SHOWN_AS_COMMENT = {
    "run_dir",
    "prefix_dir",
    "state_dir",
    "models_dir",
    "secret_key",
    "http_keys",
    "metrics_admin_token",
    "job_notify_secret",
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes settings from the environment, because they would override the file."""
    for name in [name for name in os.environ if name.startswith("MLXPOOL_")]:
        monkeypatch.delenv(name)


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def test_the_file_names_every_setting() -> None:
    table = tomllib.loads(FILE.read_text("utf-8"))
    assert set(table["pool"]) == names(PoolConfig) - {"models", "keys"} - SHOWN_AS_COMMENT
    assert set(table["models"]["demo"]) == names(ModelConfig) - {"counting", "scaling", "within"}
    assert set(table["models"]["counting"]["counting"]) == names(Counting)


@pytest.mark.parametrize("name", sorted(SHOWN_AS_COMMENT))
def test_settings_without_a_fixed_default_are_comments(name: str) -> None:
    assert f"\n# {name} = " in FILE.read_text("utf-8")


def test_a_key_section_is_a_comment() -> None:
    text = FILE.read_text("utf-8")
    assert "\n#   [keys.alice]\n" in text
    assert all(f"\n#   {name} = " in text for name in names(KeyConfig))


def test_every_value_is_the_default() -> None:
    assert load(FILE) == load(None)
    assert replace(load(FILE), state_dir="") == PoolConfig(models=BUILTIN)


def test_every_setting_has_a_comment() -> None:
    for line in FILE.read_text("utf-8").splitlines():
        if " = " in line and not line.startswith("#"):
            assert "  #" in line or line.startswith("path"), line
