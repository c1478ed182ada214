"""Who may change the pool over HTTP: the checks of request headers, and the file of the token."""

from __future__ import annotations

import os
from email.message import Message
from http import HTTPStatus
from pathlib import Path

import pytest

from mlxpool.broker.http.operator_access import MAX_TOKEN, is_loopback, read_token, refusal
from mlxpool.common.config.bounds import ConfigError

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "status.token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


def headers(**changed: str | None) -> Message:
    """Returns the headers of the page's own request; `changed` replaces or removes headers."""
    message = Message()
    own = {
        "Host": "127.0.0.1:9464",
        "Origin": "http://127.0.0.1:9464",
        "Authorization": f"Bearer {TOKEN}",
    }
    for name, value in {**own, **changed}.items():
        if value is not None:
            message[name] = value
    return message


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9464", "localhost:8000", "LOCALHOST:9464", "[::1]:9464", "127.8.9.1"]
)
def test_the_page_of_this_server_may_with_the_token(file: Path, host: str) -> None:
    own = headers(Host=host, Origin=f"http://{host}")
    assert refusal(own, read_token(file)) is None


@pytest.mark.parametrize(
    ("changed", "status", "why"),
    [
        # A name that resolves to the loopback address (DNS rebinding).
        (
            {"Host": "evil.example:9464", "Origin": "http://evil.example:9464"},
            403,
            "the host 'evil",
        ),
        (
            {"Host": "127.0.0.1.evil.example", "Origin": "http://127.0.0.1.evil.example"},
            403,
            "host",
        ),
        ({"Host": "localhost.evil.example:9464"}, 403, "the host"),
        ({"Host": "10.0.0.7:9464", "Origin": "http://10.0.0.7:9464"}, 403, "ssh -L"),
        ({"Host": ""}, 403, "the host ''"),
        ({"Host": None}, 403, "the host ''"),
        ({"Host": "[::1"}, 403, "the host"),
        ({"Host": "evil.example@127.0.0.1:9464"}, 403, "the origin"),
        # A script of another site (CSRF), of another port or of a file; and a client that is
        # not a browser.
        ({"Origin": "https://evil.example"}, 403, "the origin 'https://evil.example'"),
        ({"Origin": "http://127.0.0.1:8080"}, 403, "the origin"),
        ({"Origin": "https://127.0.0.1:9464"}, 403, "the origin"),
        ({"Origin": "null"}, 403, "the origin 'null'"),
        ({"Origin": None}, 403, "the origin ''"),
        # The browser reports another page, although the origin looks right.
        ({"Sec-Fetch-Site": "cross-site"}, 403, "Sec-Fetch-Site: 'cross-site'"),
        ({"Sec-Fetch-Site": "same-site"}, 403, "may change nothing"),
        # A missing token, a wrong token, a token in another form.
        ({"Authorization": None}, 401, "missing or wrong"),
        ({"Authorization": ""}, 401, "missing or wrong"),
        ({"Authorization": f"Bearer {TOKEN}0"}, 401, "missing or wrong"),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, 401, "missing or wrong"),
        ({"Authorization": f"Basic {TOKEN}"}, 401, "missing or wrong"),
        ({"Authorization": TOKEN}, 401, "missing or wrong"),
        ({"Authorization": "Bearer \udcff"}, 401, "missing or wrong"),
    ],
)
def test_each_check_refuses_by_itself(
    file: Path, changed: dict[str, str | None], status: int, why: str
) -> None:
    refused = refusal(headers(**changed), read_token(file))
    assert refused is not None
    assert refused.status == HTTPStatus(status)
    assert why in refused.why
    assert TOKEN[:8] not in refused.why


def test_two_tokens_are_refused(file: Path) -> None:
    """A request with two tokens is refused: a proxy may check one, and this server the other."""
    asked = headers()
    asked["Authorization"] = "Bearer other"
    refused = refusal(asked, read_token(file))
    assert refused is not None and "more than once" in refused.why


def test_only_loopback_addresses_are_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "::", "10.0.0.1", "localhost.example", "1")))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_token_that_others_can_reach_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{file} can be read by others \(mode 0{mode:o}\)"):
        read_token(file)


@pytest.mark.parametrize(
    "text", ["", "short", "x" * 31, "x" * (MAX_TOKEN + 1), f"{TOKEN} {TOKEN}", "é" * 40]
)
def test_a_text_that_is_no_token_is_refused_and_not_shown(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match="one token of 32 to 256 visible ASCII") as refused:
        read_token(file)
    assert not text or text not in str(refused.value)


def test_a_token_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool\.metrics_admin_token: cannot read .*: No such"):
        read_token(tmp_path / "none")


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    fifo = tmp_path / "status.token"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(ConfigError, match=f"cannot read {fifo}: it is not a regular file"):
        read_token(fifo)
