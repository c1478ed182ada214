"""Notices of batches, with real processes: every interface, signatures, a broker that is killed.

test_job_operations.py has the notices of single jobs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.webhooks import BatchCompletedWebhookEvent, BatchFailedWebhookEvent

from mlxpool.common.errors import BadRequest
from support.gateway_thread import GatewayThread
from support.http_owners import openai_client
from support.pool import Pool, until
from support.secret_file import secret_file
from support.web_receiver import OK, receiver

CONFIG = """\
[pool]
restart_delay = 0.05
job_notify_hosts = ["{url}", "{other}"]
job_notify_secret = "{secret}"
job_notify_url = "{url}/pool"
[models.m]
path = "builtin:counting"
"""
REFUSED = b"HTTP/1.1 503 Later\r\nRetry-After: 0\r\n\r\n"


def secret_text(byte: bytes) -> str:
    return "whsec_" + base64.b64encode(byte * 32).decode()


@dataclass
class Hooks:
    """A receiver; `refusing`: paths that it answers with 503."""

    port: int
    requests: list[bytes]
    secret: Path
    refusing: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def at(self, path: str) -> list[tuple[dict[str, str], bytes]]:
        """Returns headers and body of each notice that was posted to a path."""
        notices = []
        for request in list(self.requests):
            head, _, body = request.partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            if first == f"POST {path} HTTP/1.1":
                notices.append((dict(line.split(": ", 1) for line in lines), body))
        return notices

    def only(self, path: str) -> tuple[dict[str, str], bytes]:
        """Returns headers and body of the only notice to a path, from its first post.

        If a post is answered too late, as on a busy machine, the broker posts the notice again.
        """
        until(lambda: self.at(path), f"a notice to {path}")
        notices = self.at(path)
        assert len({(headers["webhook-id"], body) for headers, body in notices}) == 1
        return notices[0]

    def one(self, path: str) -> dict[str, Any]:
        """Returns the body of the only notice to a path."""
        return dict(json.loads(self.only(path)[1]))


@contextmanager
def hooks_of(folder: Path) -> Iterator[Hooks]:
    box: list[Hooks] = []

    def serve(connection: socket.socket, request: bytes) -> None:
        path = request.split(b" ", 2)[1].decode()
        connection.sendall(REFUSED if path in box[0].refusing else OK)

    secret = secret_file(folder / "secret", secret_text(b"a"))
    with receiver(serve) as (port, requests):
        box.append(Hooks(port, requests, secret))
        yield box[0]


def make_pool(folder: Path, hooks: Hooks, other: str = "https://hooks.example.org") -> Pool:
    config = CONFIG.format(url=hooks.url, other=other, secret=hooks.secret)
    return Pool(folder, config, arguments=("--state-dir", str(folder / "jobs")))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pool, Hooks]]:
    folder = tmp_path_factory.mktemp("pool")
    with hooks_of(folder) as hooks, make_pool(folder, hooks) as pool:
        yield pool, hooks


LINES: list[dict[str, Any]] = [{"id": f"l{number}", "prompt": f"p{number}"} for number in range(3)]


def test_both_clients_name_who_is_told_of_a_batch(running: tuple[Pool, Hooks]) -> None:
    pool, hooks = running
    with pool.client() as client:
        batch = client.submit_batch(LINES, "m", key="s", notify=f"{hooks.url}/s", max_tokens=2)
        assert batch.row["notify"] == f"{hooks.url}/s"
        with pytest.raises(BadRequest, match="job_notify_hosts"):
            client.submit_batch(LINES, "m", notify="http://127.0.0.1:1/")
        with pytest.raises(BadRequest, match=r"notify\.url"):
            client.submit_batch(LINES, "m", notify="http://user@127.0.0.1/")
        with pytest.raises(BadRequest, match=r"line 1 .*: notify is of the batch"):
            client.submit_batch([{**LINES[0], "notify": {"url": hooks.url}}], "m")

    async def ask() -> None:
        async with pool.async_client() as client:
            await client.submit_batch(LINES, "m", key="a", notify=f"{hooks.url}/a", max_tokens=2)

    asyncio.run(ask())
    for key in ("s", "a"):
        notice = hooks.one(f"/{key}")
        assert (notice["type"], notice["data"]["key"]) == ("batch.completed", key)
        assert (notice["data"]["done"], notice["data"]["lines"]) == (3, 3)
    with pool.client() as client:
        until(lambda: client.batch("s").row["notice"] == "delivered", "it is noted")


def test_the_command_line_names_who_is_told_and_shows_it(running: tuple[Pool, Hooks]) -> None:
    pool, hooks = running
    hooks.refusing.add("/cli")
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    flags = ("--key", "cli", "--notify", f"{hooks.url}/cli", "--max-tokens", "2", "--wait")
    assert pool.cli("submit", "--batch", "-", "m", *flags, stdin=text).returncode == 0
    until(lambda: hooks.at("/cli"), "it was refused")
    listed = pool.cli("jobs", "--notices").stdout
    assert "batch" in listed and "cli" in listed
    (row,) = [
        batch for batch in pool.cli_json("jobs", "--batches")["batches"] if batch["key"] == "cli"
    ]
    assert (row["notice"], row["outcome"]) == ("waiting", "completed")
    assert "NOTICE" in pool.cli("jobs", "--batches").stdout.splitlines()[0]
    released = pool.cli("release", "--batch", "cli", "--connect-timeout", "60")
    assert released.returncode == 0 and "was not delivered yet" in released.stderr
    refused = len(hooks.at("/cli"))  # on a busy machine, more than one attempt was refused
    hooks.refusing.clear()
    until(lambda: len(hooks.at("/cli")) > refused, "it is told after the release")
    ((_, notice),) = {(headers["webhook-id"], body) for headers, body in hooks.at("/cli")}
    assert json.loads(notice)["data"]["state"] == "done"


def begin(client: openai.OpenAI, lines: list[dict[str, Any]], **more: Any) -> Any:
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch").id
    given: Any = {"endpoint": "/v1/completions", "completion_window": "24h", **more}
    return client.batches.create(input_file_id=file, **given)


def line(name: str, **body: Any) -> dict[str, Any]:
    given = {"model": "m", "prompt": name, "max_tokens": 2, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": given}


def test_openais_client_reads_the_notice_of_its_batch(running: tuple[Pool, Hooks]) -> None:
    pool, hooks = running
    with GatewayThread(pool.run_dir) as gateway, openai_client(gateway.url) as client:
        batch = begin(client, [line("x"), line("y")], extra_body={"notify": f"{hooks.url}/http"})
        headers, body = hooks.only("/http")
        text = body.decode()
        event = client.webhooks.unwrap(text, headers, secret=secret_text(b"a"))
        assert isinstance(event, BatchCompletedWebhookEvent)
        assert (event.data.id, event.object) == (batch.id, "event")
        ended = client.batches.retrieve(batch.id)
        assert ended.status == "completed" and ended.completed_at == event.created_at
        data = json.loads(body)["data"]
        assert data["output_file_id"] == ended.output_file_id is not None
        assert data["error_file_id"] is ended.error_file_id is None
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(text, headers, secret=secret_text(b"b"))
        with pytest.raises(openai.BadRequestError, match="job_notify_hosts"):
            begin(client, [line("x")], extra_body={"notify": "http://127.0.0.1:1/"})
        with pytest.raises(openai.BadRequestError, match=r"notify\.url"):
            begin(client, [line("x")], extra_body={"notify": "http://0x7f.1/"})


def test_a_batch_over_http_that_fails_is_told_to_the_url_of_the_pool(
    running: tuple[Pool, Hooks],
) -> None:
    """A line must not name a receiver, so the batch fails; the pool's own URL is notified."""
    pool, hooks = running
    with GatewayThread(pool.run_dir) as gateway, openai_client(gateway.url) as client:
        batch = begin(client, [line("x", notify=f"{hooks.url}/line")])
        assert batch.status == "failed" and "notify" in batch.errors.data[0].message

        def told() -> Any:
            for headers, body in hooks.at("/pool"):
                event = client.webhooks.unwrap(body.decode(), headers, secret=secret_text(b"a"))
                if getattr(event.data, "id", "") == batch.id:
                    return event
            return None

        assert isinstance(until(told, "it is told"), BatchFailedWebhookEvent)
    assert not hooks.at("/line")


def test_a_notice_outlives_brokers_and_is_signed_with_the_secret_of_its_try(
    tmp_path: Path,
) -> None:
    """The broker is killed while the notice is refused; then a reload changes the secret."""
    with hooks_of(tmp_path) as hooks, make_pool(tmp_path, hooks) as pool:
        hooks.refusing.add("/b")
        with pool.client() as client:
            client.submit_batch(LINES, "m", key="b", notify=f"{hooks.url}/b", max_tokens=2)
        until(lambda: hooks.at("/b"), "it was refused")
        pool.kill()
        other = secret_file(tmp_path / "other", secret_text(b"b"))
        pool.config.write_text(pool.config.read_text().replace(str(hooks.secret), str(other)))
        pool.start()
        until(lambda: "b" in signers(hooks.at("/b")), "the next broker tries it")
        third = secret_file(tmp_path / "third", secret_text(b"c"))
        pool.config.write_text(pool.config.read_text().replace(str(other), str(third)))
        pool.ask("reload")
        # An attempt that was signed before the reload may arrive after the reload.
        until(lambda: "c" in signers(hooks.at("/b")), "it is tried with the third secret")
        hooks.refusing.clear()
        until(lambda: not pool.ask("notices")["notices"], "it is delivered")
        with pool.client() as client:
            assert client.batch("b").row["notice"] == "delivered"
    tries = hooks.at("/b")
    assert len({(headers["webhook-id"], body) for headers, body in tries}) == 1
    assert [key for key, _ in groupby(signers(tries))] == ["a", "b", "c"]


def signers(tries: Sequence[tuple[dict[str, str], bytes]]) -> list[str]:
    """Returns for each attempt the letter of the secret that signed it."""
    webhooks = openai.OpenAI(api_key="none").webhooks
    letters = []
    for headers, body in tries:
        for letter in "abc":
            with suppress(openai.InvalidWebhookSignatureError):
                webhooks.verify_signature(
                    body.decode(), headers, secret=secret_text(letter.encode())
                )
                letters.append(letter)
    assert len(letters) == len(tries), "each is signed with one secret"
    return letters


def test_a_host_that_never_answers_holds_up_neither_another_one_nor_the_end(
    tmp_path: Path,
) -> None:
    """Posts to a host that reads nothing delay neither other hosts nor the broker's end."""
    count = 20
    with hooks_of(tmp_path) as hooks, socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        pool = make_pool(tmp_path, hooks, url)
        try:
            pool.start()
            with pool.client() as client:
                for number in range(count):
                    client.submit("m", "x", key=f"silent{number}", max_tokens=1, notify=url)
            until(lambda: len(pool.ask("notices")["notices"]) == count, "all wait")
            for turn in range(2):
                with pool.client() as client:
                    client.submit("m", "x", max_tokens=1, notify=f"{hooks.url}/live{turn}")
                assert hooks.one(f"/live{turn}")["type"] == "job.ended"
                if not turn:
                    pool.kill()  # with attempts under way
                    pool.start()
            left = {notice["key"] for notice in pool.ask("notices")["notices"]}
            assert {f"silent{number}" for number in range(count)} <= left
            assert pool.stop() == 0
            assert "the thread of notices has not ended in time" not in pool.log()
        finally:
            pool.close()
