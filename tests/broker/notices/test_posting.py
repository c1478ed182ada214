"""One POST of a notice: to a checked address, with a time limit, without redirects."""

from __future__ import annotations

import asyncio
import ipaddress
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import h11
import pytest

from mlxpool.broker.notices.posting import Names, Outcome, Poster, outcome_of, resolve
from mlxpool.common.web_targets import Allowed, IpAddress
from support.free_ports import free_port
from support.pool import PATIENCE
from support.web_receiver import OK, answering, receiver

LOOPBACK = ipaddress.ip_address("127.0.0.1")


def allowed(port: int, networks: Sequence[str] = (), name: str = "127.0.0.1") -> Allowed:
    return Allowed.of([f"http://{name}:{port}"], networks)


HEADERS = {"webhook-id": "id-1", "webhook-signature": "v1,x"}


def post_to(
    url: str,
    rules: Allowed,
    resolve: Callable[[str, int], Sequence[IpAddress]] = resolve,
    timeout: float = PATIENCE,
    headers: Mapping[str, str] = HEADERS,
) -> Outcome:
    async def run() -> Outcome:
        return await Poster(timeout, Names(resolve)).post(url, b'{"a": 1}', headers, rules)

    return asyncio.run(run())


def post(port: int, timeout: float = PATIENCE, path: str = "/ends") -> Outcome:
    return post_to(f"http://127.0.0.1:{port}{path}", allowed(port), timeout=timeout)


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


@pytest.mark.parametrize(
    ("field", "seconds"),
    [
        (b"0", 0.0),
        (b"120", 120.0),
        (b"9" * 40, 3600.0),
        (b"Mon, 05 Jan 2026 10:21:30 GMT", 60.0),
        (b"Mon, 05 Jan 2026 09:00:00 GMT", 0.0),  # a time in the past
        (b"Mon, 05 Jan 2036 09:00:00 GMT", 3600.0),
        (b"Mon, 99 Jan 2026 09:00:00 GMT", 0.0),
        (b"-5", 0.0),
        (b"1e9", 0.0),
        (b"\xb2", 0.0),
    ],
)
def test_the_wait_that_a_receiver_asks_for(field: bytes, seconds: float) -> None:
    response = h11.Response(status_code=429, headers=[(b"Retry-After", field)])
    assert outcome_of(response, 1767608430.0).retry_after == seconds  # 2026-01-05T10:20:30Z


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
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 8000,
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
    assert sent  # the connection was closed during the answer


def test_a_server_that_sends_a_byte_now_and_then_is_left() -> None:
    done = threading.Event()

    def serve(connection: socket.socket, request: bytes) -> None:
        while not done.wait(0.02):
            connection.sendall(b"H")

    with receiver(serve) as (port, _):
        left_unanswered(port)
        done.set()


def left_unanswered(port: int) -> None:
    """Asserts that a post gives up because no answer comes in time.

    On a busy machine even the connection may take too long: then a longer time limit is tried.
    """
    unconnected = f"no connection to http://127.0.0.1:{port} in"
    for seconds in (0.8, 8.0, 80.0):
        outcome = post(port, timeout=seconds)
        if not outcome.why.startswith(unconnected):
            break
    assert outcome == Outcome(False, f"no answer in {seconds:g} s")


def test_a_server_that_does_not_answer_is_left() -> None:
    done = threading.Event()

    def serve(connection: socket.socket, request: bytes) -> None:
        done.wait()

    with receiver(serve) as (port, _):
        left_unanswered(port)
        done.set()


# ---- allowed addresses ---------------------------------------------------------------------------


def named(answers: list[list[IpAddress]]) -> Callable[[str, int], list[IpAddress]]:
    """Makes a resolver that returns these answers one after the other."""
    return lambda host, port: answers.pop(0)


def test_a_name_at_an_address_of_this_machine_is_not_reached() -> None:
    with receiver(answering(OK)) as (port, requests):
        url, rules = f"http://hooks.example:{port}/", allowed(port, name="hooks.example")
        outcome = post_to(url, rules, named([[LOOPBACK]]))
    assert not requests and "127.0.0.1, which is not public" in outcome.why


@pytest.mark.parametrize(
    "other",
    ["127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "64:ff9b::7f00:1", "fe80::1"],
)
def test_a_name_with_one_address_that_is_not_public_is_not_reached(other: str) -> None:
    public = ipaddress.ip_address("93.184.216.34")
    resolve = named([[public, ipaddress.ip_address(other)]])
    outcome = post_to("http://hooks.example:1/", allowed(1, name="hooks.example"), resolve)
    assert "which is not public" in outcome.why and outcome.unreachable


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    """The name is looked up once: a second look-up could return another host (DNS rebinding)."""
    answers = [[LOOPBACK], [ipaddress.ip_address("127.0.0.9")]]
    with receiver(answering(OK)) as (port, requests):
        rules = allowed(port, ["127.0.0.1"], name="hooks.example")
        url = f"http://hooks.example:{port}/"
        assert post_to(url, rules, named(answers)) == Outcome(True)
    assert len(answers) == 1 and f"Host: hooks.example:{port}".encode() in requests[0]


def test_an_address_that_takes_no_connection_is_followed_by_the_next() -> None:
    dead = ipaddress.ip_address("127.0.0.9")
    with receiver(answering(OK)) as (port, requests):
        rules = allowed(port, ["127.0.0.0/8"], name="hooks.example")
        url = f"http://hooks.example:{port}/"
        assert post_to(url, rules, named([[dead, LOOPBACK]])) == Outcome(True)
    assert len(requests) == 1


def test_hosts_that_are_not_allowed_any_more_are_not_reached() -> None:
    with receiver(answering(OK)) as (port, requests):
        outcome = post_to(f"http://127.0.0.1:{port}/", Allowed())
    assert not requests and "is not one of job_notify_hosts" in outcome.why and not outcome.final


@pytest.mark.parametrize(
    "host",
    [
        "0x7f.1", "0177.0.0.1", "2130706433", "127.1", "127.0.0.1.", "hooks.example.", "[::1",
        "user@hooks.example", "user:word@hooks.example", "hooks.example:0", "hooks.example:99999",
        "b\u00fccher.example", "hooks\u3002example", "\uff11\uff12\uff17.0.0.1",
        "hooks.example#@127.0.0.1", "hooks.example\\@127.0.0.1", "hooks.example%2f",
        "hooks.example\r\nHost: x", "127.0.0.1\t",
    ],
)  # fmt: skip
def test_a_url_that_programs_read_differently_is_given_up(host: str) -> None:
    rules = Allowed.of(["http://hooks.example", "http://127.0.0.1"], ["0.0.0.0/0"])
    outcome = post_to(f"http://{host}/", rules, named([]))
    assert outcome.final and "the URL cannot be used" in outcome.why


@pytest.mark.parametrize(
    ("url", "allowed_origin"),
    [
        ("http://[::ffff:127.0.0.1]:1/", "http://127.0.0.1:1"),  # another spelling of the same host
        ("http://127.0.0.1:2/", "http://127.0.0.1:1"),
        ("https://127.0.0.1:1/", "http://127.0.0.1:1"),
        ("http://hooks.example.evil.example:1/", "http://hooks.example:1"),
        ("http://xn--bcher-kva.example/", "http://bucher.example"),
    ],
)
def test_another_origin_than_that_of_the_settings_is_not_asked_for(
    url: str, allowed_origin: str
) -> None:
    outcome = post_to(url, Allowed.of([allowed_origin], ["0.0.0.0/0", "::/0"]), named([]))
    assert "is not one of job_notify_hosts" in outcome.why


def test_a_refused_connection_and_an_unknown_name_are_failures_of_their_host() -> None:
    refused = post(free_port())
    assert "ConnectionRefusedError" in refused.why and refused.unreachable

    def unknown(host: str, port: int) -> list[IpAddress]:
        raise socket.gaierror(-2, "Name or service not known")

    outcome = post_to("http://none.example/", allowed(80, name="none.example"), unknown)
    assert "Name or service not known" in outcome.why and outcome.unreachable


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
    with pytest.raises(OSError, match="cannot be looked up"):
        resolve("a" * 64 + ".example", 80)  # not a DNS label


# ---- within its time -----------------------------------------------------------------------------


@contextmanager
def hanging_resolver() -> Iterator[tuple[Callable[[str, int], Sequence[IpAddress]], list[str]]]:
    """Makes a resolver that only answers for `well.example`, and the list of resolved names."""
    over, asked = threading.Event(), list[str]()

    def resolve(host: str, port: int) -> list[IpAddress]:
        asked.append(host)
        if host != "well.example":
            assert over.wait(PATIENCE)
        return [LOOPBACK]

    yield resolve, asked
    over.set()


def test_a_resolver_that_hangs_ends_no_other_notice_and_is_asked_once() -> None:
    """Posts to a host whose look-up hangs time out and share one look-up; other posts succeed."""

    async def run(port: int) -> list[Outcome]:
        rules = Allowed.of(
            [f"http://{name}.example:{port}" for name in ("hangs", "well")], ["127.0.0.1"]
        )
        with hanging_resolver() as (resolve, asked):
            poster, late = Poster(PATIENCE, Names(resolve)), Poster(0.2, Names(resolve))
            hanging = [
                asyncio.ensure_future(late.post(f"http://hangs.example:{port}/", b"", {}, rules))
                for _ in range(20)
            ]
            well = await poster.post(f"http://well.example:{port}/", b"", {}, rules)
            outcomes = [well, *await asyncio.gather(*hanging)]
            outcomes.append(await late.post(f"http://hangs.example:{port}/", b"", {}, rules))
            assert asked.count("hangs.example") == 1
        return outcomes

    with receiver(answering(OK)) as (port, requests):
        well, *hung = asyncio.run(run(port))
    why = f"no connection to http://hangs.example:{port} in 0.2 s"
    assert well == Outcome(True) and hung == [Outcome(False, why, unreachable=True)] * 21
    assert len(requests) == 1


@pytest.mark.parametrize("trickles", [False, True])
def test_a_tls_handshake_that_does_not_end_is_left(trickles: bool) -> None:
    """The server accepts the connection, then sends nothing, or one byte of a record at a time."""
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"\x16\x03\x03\x40\x00")  # the start of a record of 16 KiB
        while not over.wait(0.02):
            if trickles:
                connection.sendall(b"\x02")

    with accepting(serve) as port:
        rules = Allowed.of([f"https://127.0.0.1:{port}"], [])
        outcome = post_to(f"https://127.0.0.1:{port}/", rules, timeout=0.4)
        over.set()
    assert outcome.unreachable and not outcome.delivered and "no connection to" in outcome.why


@contextmanager
def accepting(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Makes a server that passes each new connection to `serve`, without reading a request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        serve(connection)
            except OSError:
                return

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE)


def test_a_server_that_answers_in_its_time_has_the_notice() -> None:
    def serve(connection: socket.socket, request: bytes) -> None:
        for byte in b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 Yes\r\n\r\n":
            connection.sendall(bytes([byte]))

    with receiver(serve) as (port, _):
        assert post(port) == Outcome(True)


def test_a_cancelled_try_leaves_nothing_open() -> None:
    over = threading.Event()

    async def run(port: int) -> None:
        post = Poster(PATIENCE).post(f"http://127.0.0.1:{port}/", b"", {}, allowed(port))
        task = asyncio.ensure_future(post)
        while not requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with receiver(lambda connection, request: _until_closed(connection, over)) as (port, requests):
        asyncio.run(run(port))
        assert over.wait(PATIENCE)


def _until_closed(connection: socket.socket, over: threading.Event) -> None:
    try:
        while connection.recv(1024):
            pass
    finally:
        over.set()


# ---- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Makes the files of a certificate for hooks.example, and of its key."""
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
        rules = Allowed.of([f"https://{host}:{port}"], ["127.0.0.1"])
        outcome = post_to(f"https://{host}:{port}/", rules, lambda host, port: [LOOPBACK])
    assert outcome.delivered is delivered and bool(requests) is delivered
    assert delivered or "certificate" in outcome.why
