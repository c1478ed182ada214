"""The file of bearer keys, and the names of keys in logs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mlxpool.gateway.auth import ApiKeys, is_local_host
from mlxpool.gateway.settings import Settings
from support.secret_file import secret_file

KEY, OTHER = "k" * 32, "o" * 32


def named(keys: ApiKeys, key: str) -> str | None:
    owner = keys.owner(f"Bearer {key}")
    assert owner is not None
    return owner.name


def test_a_key_has_the_name_of_its_line_or_digits_of_its_digest(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "keys", f"# comment\n\nalice@example.com {KEY}\n{OTHER}\n")
    keys = ApiKeys(file)
    assert named(keys, KEY) == "alice@example.com"
    assert named(keys, OTHER) == f"sha256:{hashlib.sha256(OTHER.encode()).hexdigest()[:32]}"
    assert keys.owner(f"Bearer {'x' * 32}") is None
    nobody = ApiKeys().owner(None)
    assert nobody is not None and nobody.name is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("short", "a line is KEY or NAME KEY"),
        (f"alice {KEY} more", "it has 3 words"),
        (f"{KEY} short", "at least 16 characters"),
        (f"a'lice {KEY}", "a name has 1 to 64 letters"),
        ("# none", "has no key"),
    ],
)
def test_a_line_that_is_none(tmp_path: Path, line: str, words: str) -> None:
    file = secret_file(tmp_path / "keys", line)
    with pytest.raises(ValueError, match=words) as caught:
        ApiKeys(file)
    assert KEY not in str(caught.value)


def test_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "keys", KEY)
    keys = ApiKeys(file)
    for text, known in ((OTHER, OTHER), ("short", OTHER), (KEY, KEY)):
        file.write_text(text)
        keys.reload()
        assert keys.owner(f"Bearer {known}") is not None


@pytest.mark.parametrize(
    ("host", "program", "page"),
    [
        ("localhost", True, True), ("localhost.", True, True), ("127.0.1.1", True, True),
        ("::1", True, True), ("0.0.0.0", True, True), ("192.168.1.5", True, True),
        ("172.17.0.1", True, True), ("host.docker.internal", True, False),
        ("gateway.docker.internal", True, False), ("host.containers.internal", True, False),
        ("studio.local", True, False), ("app.localhost", True, False), ("studio", True, False),
        ("8.8.8.8", False, False), ("::2", False, False), ("evil.example", False, False),
        ("localhost.example", False, False), ("local", False, False), ("", False, False),
        ("host.docker.internal.example", False, False), ("studio.example", False, False),
    ],
)  # fmt: skip
def test_hosts_that_a_page_on_the_internet_cannot_have(
    host: str, program: bool, page: bool
) -> None:
    assert is_local_host(host, "studio", from_page=False) is program
    assert is_local_host(host, "studio", from_page=True) is page


@pytest.mark.parametrize(
    "origin", ["https://app.example", "http://localhost:3000", "app://obsidian.md", "*"]
)
def test_an_origin(origin: str) -> None:
    assert Settings(cors_origins=(origin,)).cors_origins == (origin,)


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://*.a", "null", ""]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin: write scheme://host"):
        Settings(cors_origins=(origin,))


@pytest.mark.parametrize("origin", ["https://x.example:443", "http://x.example:80"])
def test_an_origin_with_its_default_port_is_refused(origin: str) -> None:
    without = origin.rpartition(":")[0]
    with pytest.raises(ValueError, match=f"leave the default port out, so write '{without}'"):
        Settings(cors_origins=(origin,))
    assert Settings(cors_origins=("http://x.example:443",))


@pytest.mark.parametrize("proxy", ["127.0.0.1", "::1", "10.0.0.0/8", "fd00::/8"])
def test_a_trusted_proxy(proxy: str) -> None:
    assert Settings(trusted_proxies=(proxy,)).trusted_proxies == (proxy,)


@pytest.mark.parametrize("proxy", ["*", "localhost", "10.0.0.1/8", ""])
def test_what_is_no_trusted_proxy(proxy: str) -> None:
    with pytest.raises(ValueError, match="is no address of a proxy"):
        Settings(trusted_proxies=(proxy,))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o644])
def test_keys_that_others_can_reach_are_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY)
    file.chmod(mode)
    with pytest.raises(ValueError, match=rf"{file} can be read or written .* \(mode 0{mode:o}\)"):
        ApiKeys(file)


def test_an_operator_is_named_in_the_file(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "keys", f"prometheus {KEY} operator\nalice {OTHER}\n")
    keys = ApiKeys(file)
    operators = [keys.owner(f"Bearer {key}") for key in (KEY, OTHER)]
    assert [owner and owner.operator for owner in operators] == [True, False]
    nobody = ApiKeys().owner(None)
    assert nobody is not None and nobody.operator, "without keys everybody is"
