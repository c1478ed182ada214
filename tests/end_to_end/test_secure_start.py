"""Settings that a broker with CURVE refuses at start, and checks of docs/security.md."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from mlxpool.common.config import loading
from mlxpool.common.config.bounds import ConfigError
from support.secure_pool import Keys, SecurePool

ROOT = Path(__file__).parents[2]


def refusal(pool: SecurePool) -> str:
    """Returns the error output of `mlxpool serve` that does not start."""
    done = pool.cli("serve", "--config", str(pool.config))
    assert done.returncode in (1, 2), done.stderr
    return done.stderr


def test_a_server_key_that_others_can_read(tmp_path: Path) -> None:
    pool = SecurePool(tmp_path)
    pool.keys.path("pool").chmod(0o644)
    said = refusal(pool)
    assert "mode 0644" in said and "chmod 600" in said
    pool.close()


def test_a_server_key_of_another_role_and_none_at_all(tmp_path: Path) -> None:
    pool = SecurePool(tmp_path)
    pool.keys.path("alice").rename(pool.keys.path("pool"))
    assert "role 'client', 'server' is needed" in refusal(pool)
    pool.keys.path("pool").unlink()
    assert f"cannot read the key {pool.keys.path('pool')}: No such file" in refusal(pool)
    pool.close()


@pytest.mark.parametrize("name", ["front", "back", "admin"])
def test_a_port_in_use(tmp_path: Path, name: str) -> None:
    pool = SecurePool(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        text = re.sub(
            rf"^{name} = .*$", f'{name} = ["{endpoint}"]', pool.config.read_text(), flags=re.M
        )
        pool.config.write_text(text)
        assert f"cannot bind {endpoint}: Address already in use" in refusal(pool)
    pool.close()


PUBLIC = "a" * 40


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[keys.a]\nrole = "client"', ["keys.a.public is missing"]),
        (f'[keys.a]\npublic = "{PUBLIC}"', ["keys.a.role is missing"]),
        (f'[keys.a]\nrole = "boss"\npublic = "{PUBLIC}"', ["keys.a.role is 'boss'", "worker"]),
        (f'[keys.a]\nrole = "server"\npublic = "{PUBLIC}"', ["keys.a.role is 'server'"]),
        ('[keys.a]\nrole = "client"\npublic = "short"', ["keys.a.public is 'short'", "40"]),
        (f'[keys.a]\nrol = "client"\npublic = "{PUBLIC}"', ["'rol'", "did you mean 'role'?"]),
        ('[keys."../a"]\nrole = "client"', ["'../a'", "keygen"]),
        ("[keys]\na = 3", ["[a] must be a table"]),
        ("[key.a]", ["'key'", "did you mean 'keys'?"]),
        (
            f'[keys.a]\nrole = "client"\npublic = "{PUBLIC}"\n'
            f'[keys.b]\nrole = "admin"\npublic = "{PUBLIC}"',
            ["keys.b and keys.a have the same public key"],
        ),
        ('[pool]\nfront = ["tcp://0.0.0.0:1"]', ["pool.front", "secret_key", "keygen"]),
        ('[pool]\nback = ["tcp://127.0.0.1:1"]', ["pool.back", "never plain", "secret_key"]),
        ('[pool]\nadmin = ["tcp://127.0.0.1:1"]', ["pool.admin", "never plain", "secret_key"]),
        ('[pool]\nadmin = ["tcp://127.0.0.1"]', ["pool.admin", "tcp://HOST:PORT"]),
        ("[pool]\nquota_requests = -1", ["pool.quota_requests is -1", "from 0"]),
        ("[pool]\nquota_bytes = true", ["pool.quota_bytes must be a size"]),
        ("[pool]\nlocal_workers = 1", ["pool.local_workers must be true or false"]),
        ("[pool]\nsecret_key = 3", ["pool.secret_key must be a string"]),
    ],
)
def test_settings_of_keys_that_are_wrong(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        loading.load(path)
    for word in words:
        assert word in str(caught.value)


def test_local_workers_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPOOL_LOCAL_WORKERS", "false")
    assert loading.load(None).local_workers is False
    monkeypatch.setenv("MLXPOOL_LOCAL_WORKERS", "no")
    with pytest.raises(ConfigError, match="local_workers must be true or false"):
        loading.load(None)


def test_the_section_that_keygen_prints_is_valid(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    keys.make("alice", "client")
    path = tmp_path / "x.toml"
    path.write_text(keys.section("alice"))
    (key,) = loading.load(path).keys.values()
    assert (key.role, key.public) == ("client", keys.pairs["alice"].public)


def test_every_test_that_the_document_names_exists() -> None:
    text = (ROOT / "docs" / "security.md").read_text("utf-8")
    named = re.findall(r"tests/[\w/]+/test_\w+\.py", text)
    assert len(named) > 12
    assert [name for name in named if not (ROOT / name).is_file()] == []
