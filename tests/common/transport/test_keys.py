"""Key files: only their owner can read them; no file is overwritten.

A file that other users can read is refused.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tomllib
from pathlib import Path

import pytest
import zmq

from mlxpool.cli.main import main
from mlxpool.common.transport import endpoints, keys
from mlxpool.common.transport.keys import BadKey, Credentials


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("role", keys.ROLES)
def test_a_key_comes_back_as_it_was_made(tmp_path: Path, role: str) -> None:
    pair = keys.make("alice", role)
    path = keys.write(pair, tmp_path / "new" / "keys")
    assert keys.read(path) == keys.read(path, role) == pair
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)
    assert pair.secret not in repr(pair)


def test_an_open_umask_opens_no_key(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = keys.write(keys.make("alice", "client"), tmp_path / "keys")
    finally:
        os.umask(before)
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = keys.write(keys.make("alice", "client"), tmp_path)
    text = path.read_text()
    with pytest.raises(BadKey, match=r"there is a key .*alice\.key already"):
        keys.write(keys.make("alice", "worker"), tmp_path)
    assert path.read_text() == text


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o644, 0o666])
def test_a_key_that_others_can_read_is_refused_with_the_cure(tmp_path: Path, bits: int) -> None:
    path = keys.write(keys.make("alice", "client"), tmp_path)
    path.chmod(bits)
    with pytest.raises(BadKey, match=rf"mode 0{bits:o}\): chmod 600"):
        keys.read(path)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 65, "a b", "ä"])
def test_names_that_could_be_paths_are_refused(name: str) -> None:
    with pytest.raises(BadKey, match="a key's name"):
        keys.make(name, "client")


def test_an_unknown_role_and_a_key_of_another_role(tmp_path: Path) -> None:
    with pytest.raises(BadKey, match="the role is 'boss'"):
        keys.make("alice", "boss")
    path = keys.write(keys.make("alice", "client"), tmp_path)
    with pytest.raises(BadKey, match=r"role 'client', 'server' is needed.*--role server"):
        keys.read(path, "server")


@pytest.mark.parametrize("text", ["", "hello", 'name = "a"', "\x00\xff"])
def test_a_file_that_is_no_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.key"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(BadKey, match="no key that `mlxpool keygen` made"):
        keys.read(path)


def test_halves_of_two_keys_are_told(tmp_path: Path) -> None:
    first, second = keys.make("a", "client"), keys.make("b", "client")
    path = keys.write(first, tmp_path)
    path.write_text(path.read_text().replace(first.public, second.public))
    with pytest.raises(BadKey, match="do not belong together"):
        keys.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadKey, match=r"cannot read the key .*no\.key: No such file"):
        keys.read(tmp_path / "no.key")


def test_a_public_key_is_text_or_a_file(tmp_path: Path) -> None:
    public = keys.make("a", "server").public
    file = tmp_path / "pool.pub"
    file.write_text(f"{public}\n")
    assert keys.public_of(public) == keys.public_of(str(file)) == public
    with pytest.raises(BadKey, match="neither a public key"):
        keys.public_of("nonsense")
    file.write_text("nonsense")
    with pytest.raises(BadKey, match="must hold a public key"):
        keys.public_of(str(file))


def test_credentials_are_both_keys_or_none(tmp_path: Path) -> None:
    pair = keys.make("a", "client")
    path = keys.write(pair, tmp_path)
    assert Credentials.of(None, None) is None
    assert Credentials.of(pair.public, path) == Credentials(pair.public, pair)
    with pytest.raises(BadKey, match="--key"):
        Credentials.of(pair.public, None)
    with pytest.raises(BadKey, match="--server-key"):
        Credentials.of(None, path)


def test_keygen_prints_what_the_config_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ("--folder", str(tmp_path))
    assert main(["keygen", "alice", "--role", "client", *folder]) == 0
    pair = keys.read(tmp_path / "alice.key")
    said = capsys.readouterr().out
    assert f'[keys.alice]\nrole = "client"\npublic = "{pair.public}"\n' in said
    assert pair.secret not in said
    assert main(["keygen", "pool", "--role", "server", "--json", *folder]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "pool",
        "role": "server",
        "public": keys.read(tmp_path / "pool.key").public,
        "path": str(tmp_path / "pool.key"),
    }
    assert main(["keygen", "alice", "--role", "client", *folder]) == 2
    assert "already" in capsys.readouterr().err


def test_a_name_with_a_dot_is_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", "a.c", "--role", "client", "--folder", str(tmp_path)]) == 0
    assert list(tomllib.loads(capsys.readouterr().out)["keys"]) == ["a.c"]


def test_no_public_key_looks_like_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [(b"-" + b"a" * 39, b"s" * 40), (b"b" * 40, b"t" * 40)]
    monkeypatch.setattr(zmq, "curve_keypair", lambda: drawn.pop(0))
    assert keys.make("alice", "client").public == "b" * 40


def test_a_key_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pair = keys.make("alice", "client")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fchmod", full)
        with pytest.raises(BadKey, match=r"alice\.key: No space left"):
            keys.write(pair, tmp_path)
    assert keys.read(keys.write(pair, tmp_path)) == pair


@pytest.mark.parametrize(
    ("endpoint", "plain_front", "plain_back", "secured"),
    [
        ("ipc:///tmp/x", True, True, True),
        ("tcp://127.0.0.1:1", True, False, True),
        ("tcp://127.9.9.9:*", True, False, True),
        ("tcp://localhost:7200", True, False, True),
        ("tcp://[::1]:7200", True, False, True),
        ("tcp://0.0.0.0:7200", False, False, True),
        ("tcp://*:7200", False, False, True),
        ("tcp://[::]:7200", False, False, True),
        ("tcp://pool.example:7200", False, False, True),
        ("tcp://127.0.0.1.example:7200", False, False, True),
        ("tcp://127.0.0.1:70000", False, False, False),
        ("tcp://127.0.0.1", False, False, False),
        ("udp://127.0.0.1:1", False, False, False),
        ("inproc://x", False, False, False),
        ("", False, False, False),
    ],
)
def test_where_a_broker_may_listen(
    endpoint: str, plain_front: bool, plain_back: bool, secured: bool
) -> None:
    def allowed(*, secured: bool, local: bool) -> bool:
        return endpoints.fault(endpoint, secured=secured, local=local) is None

    assert allowed(secured=False, local=True) is plain_front
    assert allowed(secured=False, local=False) is plain_back
    assert allowed(secured=True, local=True) is allowed(secured=True, local=False) is secured
