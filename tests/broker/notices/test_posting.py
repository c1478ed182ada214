"""One POST of a notice: to an address that was checked, bounded in time, without redirects."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mlxpool.broker.notices.posting import Outcome, Poster, resolve
from mlxpool.common.web_targets import Allowed, IpAddress
from support.pool import PATIENCE
from support.web_receiver import OK, answering, receiver

LOOPBACK = ipaddress.ip_address("127.0.0.1")


def allowed(port: int, networks: Sequence[str] = (), name: str = "127.0.0.1") -> Allowed:
    return Allowed.of([f"http://{name}:{port}"], networks)


def post(port: int, timeout: float = PATIENCE, path: str = "/ends") -> Outcome:
    headers = {"webhook-id": "id-1", "webhook-signature": "v1,x"}
    url = f"http://127.0.0.1:{port}{path}"
    return Poster(timeout).post(url, b'{"a": 1}', headers, allowed(port))


def test_a_notice_is_delivered() -> None:
    with receiver(answering(OK)) as (port, requests):
        assert post(port, path="/ends?x=1") == Outcome(True)
    head, _, body = requests[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /ends?x=1 HTTP/1.1" and body == b'{"a": 1}'
    assert {f"Host: 127.0.0.1:{port}", "webhook-id: id-1", "webhook-signature: v1,x"} <= set(lines)
    assert {"Content-Type: application/json", "User-Agent: mlxpool"} <= set(lines)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", Outcome(True)),
        (b"HTTP/1.1 500 No\r\n\r\n", Outcome(False, "HTTP 500")),
        (b"HTTP/1.1 503 No\r\nRetry-After: 7\r\n\r\n", Outcome(False, "HTTP 503", retry_after=7.0)),
        (
            b"HTTP/1.1 429 No\r\nRetry-After: 999999\r\n\r\n",
            Outcome(False, "HTTP 429", retry_after=3600.0),
        ),
        (b"HTTP/1.1 429 No\r\nRetry-After: Wed, 1\r\n\r\n", Outcome(False, "HTTP 429")),
    ],
)
def test_answers(answer: bytes, outcome: Outcome) -> None:
    with receiver(answering(answer)) as (port, _):
        assert post(port) == outcome


def test_a_receiver_that_is_gone_wants_no_more() -> None:
    with receiver(answering(b"HTTP/1.1 410 Gone\r\n\r\n")) as (port, _):
        assert post(port).final


def test_a_redirect_is_not_followed() -> None:
    with receiver(answering(OK)) as (other, reached):
        location = f"Location: http://127.0.0.1:{other}/\r\n".encode()
        answer = b"HTTP/1.1 307 Elsewhere\r\n" + location + b"\r\n"
        with receiver(answering(answer)) as (port, requests):
            outcome = post(port)
    assert (len(requests), reached) == (1, []) and "redirects are not followed" in outcome.why


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500,
        b"HTTP/1.1 " + b"2" * 70_000,
    ],
)
def test_an_answer_that_is_none_is_a_failure(answer: bytes) -> None:
    with receiver(answering(answer)) as (port, _):
        outcome = post(port)
    assert not outcome.delivered and outcome.why and len(outcome.why) <= 300


def test_the_body_of_an_answer_is_not_read() -> None:
    sent: list[bool] = []

    def serve(connection: socket.socket, request: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                connection.sendall(b"x" * 65536)
        except OSError:
            sent.append(True)

    with receiver(serve) as (port, _):
        assert post(port) == Outcome(True)
    assert sent  # the connection was closed while it sent


def test_a_server_that_sends_a_byte_now_and_then_is_left() -> None:
    done = threading.Event()

    def serve(connection: socket.socket, request: bytes) -> None:
        while not done.wait(0.02):
            connection.sendall(b"H")

    with receiver(serve) as (port, _):
        outcome = post(port, timeout=0.5)
        done.set()
    assert outcome == Outcome(False, "no answer in 0.5 s")


def test_a_server_that_does_not_answer_is_left() -> None:
    done = threading.Event()

    def serve(connection: socket.socket, request: bytes) -> None:
        done.wait()

    with receiver(serve) as (port, _):
        assert post(port, timeout=0.3) == Outcome(False, "no answer in 0.3 s")
        done.set()


# ---- whom it may reach ---------------------------------------------------------------------------


def named(answers: list[list[IpAddress]]) -> Callable[[str, int], list[IpAddress]]:
    """A resolver that gives another answer each time."""
    return lambda host, port: answers.pop(0)


def test_a_name_at_an_address_of_this_machine_is_not_reached() -> None:
    with receiver(answering(OK)) as (port, requests):
        poster = Poster(resolve=named([[LOOPBACK]]))
        outcome = poster.post(
            f"http://hooks.example:{port}/", b"", {}, allowed(port, name="hooks.example")
        )
    assert not requests and "127.0.0.1, which is not public" in outcome.why


def test_a_name_with_one_address_that_is_not_public_is_not_reached() -> None:
    public = ipaddress.ip_address("93.184.216.34")
    poster = Poster(resolve=named([[public, LOOPBACK]]))
    outcome = poster.post("http://hooks.example:1/", b"", {}, allowed(1, name="hooks.example"))
    assert "127.0.0.1, which is not public" in outcome.why


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """A name that means another host at the second look (DNS rebinding) is looked at once."""
    answers = [[LOOPBACK], [ipaddress.ip_address("127.0.0.9")]]
    with receiver(answering(OK)) as (port, requests):
        poster = Poster(resolve=named(answers))
        rules = allowed(port, ["127.0.0.1"], name="hooks.example")
        assert poster.post(f"http://hooks.example:{port}/", b"", {}, rules) == Outcome(True)
    assert len(answers) == 1 and f"Host: hooks.example:{port}".encode() in requests[0]


def test_hosts_that_are_not_allowed_any_more_are_not_reached() -> None:
    with receiver(answering(OK)) as (port, requests):
        outcome = Poster().post(f"http://127.0.0.1:{port}/", b"", {}, Allowed())
    assert not requests and "is not one of job_notify_hosts" in outcome.why and not outcome.final


def test_a_url_that_cannot_be_used_is_given_up() -> None:
    assert Poster().post("http://0x7f.1/", b"", {}, Allowed()).final


def test_a_refused_connection_and_an_unknown_name_are_failures() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "ConnectionRefusedError" in post(port).why

    def unknown(host: str, port: int) -> list[IpAddress]:
        raise socket.gaierror(-2, "Name or service not known")

    rules = allowed(80, name="none.example")
    outcome = Poster(resolve=unknown).post("http://none.example/", b"", {}, rules)
    assert "Name or service not known" in outcome.why


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver(answering(OK)) as (port, requests):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        assert post(port) == Outcome(True)
    assert requests[0].startswith(b"POST /ends ")


def test_names_are_resolved() -> None:
    assert LOOPBACK in resolve("localhost", 80) or ipaddress.ip_address("::1") in resolve(
        "localhost", 80
    )


# ---- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of a certificate for hooks.example and of its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(key), "-out", str(cert), "-subj", "/CN=hooks.example"),
            *("-addext", "subjectAltName=DNS:hooks.example"),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.mark.parametrize(
    ("host", "trusted", "delivered"),
    [
        ("hooks.example", True, True),
        ("hooks.example", False, False),
        ("other.example", True, False),
    ],
)
def test_the_certificate_has_to_be_that_of_the_name(
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    trusted: bool,
    delivered: bool,
) -> None:
    cert, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    with receiver(answering(OK), context) as (port, requests):
        poster = Poster(resolve=lambda host, port: [LOOPBACK])
        rules = Allowed.of([f"https://{host}:{port}"], ["127.0.0.1"])
        outcome = poster.post(f"https://{host}:{port}/", b"x", {}, rules)
    assert outcome.delivered is delivered and bool(requests) is delivered
    assert delivered or "certificate" in outcome.why
