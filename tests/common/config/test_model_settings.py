"""Settings of drafts and of the prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.config.loading import load
from mlxpool.common.paths import default_prefix_dir


def loaded(tmp_path: Path, model: str, path: str = "/models/m") -> None:
    file = tmp_path / "mlxpool.toml"
    file.write_text(f'[models.m]\npath = "{path}"\n{model}')
    load(file)


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (
            'speculation = "draft"',
            "models.m.speculation is 'draft', but no draft model is set: name one that has the"
            " tokenizer of this model",
        ),
        ('draft = "/d"', "models.m.draft is '/d', but speculation is 'off': set that to"),
        ('draft = "/d"\nspeculation = "ngram"', "speculation is 'ngram'"),
        ('draft = "/d"\nspeculation = "mtp"', "or leave draft out"),
    ],
)
def test_settings_of_drafts_that_contradict_each_other(
    tmp_path: Path, model: str, fault: str
) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, model)
    assert fault in str(error.value)


@pytest.mark.parametrize("speculation", ["draft", "auto"])
def test_a_draft_model_that_is_used(tmp_path: Path, speculation: str) -> None:
    loaded(tmp_path, f'draft = "/d"\nspeculation = "{speculation}"')


# ---- prefix settings -----------------------------------------------------------------------------
# The settings of prefixes on disk: refused values, and the default folder.


@pytest.mark.parametrize(
    ("model", "path", "fault"),
    [
        (
            'prefix_disk = "1MiB"',
            "/m",
            "on disk, or at least 16777216",
        ),
        ('prefix_cache = "off"', "/m", "needs prefix_cache = \"tree\", which is 'off': set"),
        ('prefix_cache = "single"', "/m", "needs prefix_cache = \"tree\", which is 'single'"),
        ("devices = 2", "/m", "is not built for models on several devices, devices is 2"),
        (
            'task = "embed"',
            "/m",
            "a model with task = 'embed' keeps no prefixes: leave",
        ),
        ("", "builtin:counting", "builtin:counting keeps no prefixes"),
        ("", "builtin:demo-embed", "builtin:demo-embed keeps no prefixes"),
    ],
)
def test_what_keeps_no_prefixes_is_refused_by_name(
    tmp_path: Path, model: str, path: str, fault: str
) -> None:
    more = "" if "prefix_disk" in model else '\nprefix_disk = "20GB"'
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, model + more, path)
    assert str(error.value).startswith("models.m.prefix_disk ") and fault in str(error.value)


def test_prefixes_on_disk_are_off_and_shared_by_default(tmp_path: Path) -> None:
    loaded(tmp_path, 'prefix_disk = "20GB"\nprefix_scope = "owner"')
    with pytest.raises(ConfigError, match="prefix_scope is 'user', must be of"):
        loaded(tmp_path, 'prefix_scope = "user"')
    model = load(None).models["demo"]
    assert (model.prefix_disk, model.prefix_scope) == (0, "pool")


def test_the_default_folder_is_among_the_users_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_prefix_dir() == Path.home() / ".cache/mlxpool/prefixes"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_prefix_dir() == Path("/caches/mlxpool/prefixes")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/mlxpool:/other")
    assert default_prefix_dir() == Path("/var/cache/mlxpool/prefixes")
