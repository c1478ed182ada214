"""Files by OpenAI's client: pages of lists, quotas of owners, uploads that break off."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from mlxpool.client import Client
from mlxpool.common.errors import OverQuota, UnknownJob
from support.gateway_thread import GatewayThread
from support.http_owners import ALICE, BOB, http_client, keys_file, openai_client
from support.pool import PATIENCE, Pool, until

QUOTA = 1_000_000
CONFIG = f"""
[pool]
quota_file_bytes = {QUOTA}
[models.m]
path = "builtin:counting"
"""
KEEPS_JOBS = True
FORM = "multipart/form-data; boundary=B"
HEAD = (
    b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
TAIL = b"\r\n--B--\r\n"


@pytest.fixture(scope="module")
def gateway(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    with GatewayThread(pool.run_dir, keys=keys_file(tmp_path_factory.mktemp("keys"))) as running:
        yield running


@pytest.fixture
def alice(gateway: GatewayThread) -> Iterator[openai.OpenAI]:
    with openai_client(gateway.url, ALICE) as new_client:
        yield new_client
        for file in new_client.files.list():
            new_client.files.delete(file.id)


@pytest.fixture
def native(pool: Pool) -> Iterator[Client]:
    """A client that reads alice's files from the pool, incomplete files included."""
    with pool.client() as client:
        yield client.for_owner("alice")


def sent(client: openai.OpenAI, size: int, name: str = "a") -> str:
    return client.files.create(file=(name, b"x" * size), purpose="batch").id


def test_pages(alice: openai.OpenAI, gateway: GatewayThread) -> None:
    ids = [sent(alice, 10, f"f{number}") for number in range(7)]
    assert [file.id for file in alice.files.list()] == ids[::-1]
    assert [file.id for file in alice.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in alice.files.list(limit=3, order="asc")] == ids
    assert [file.id for file in alice.files.list(after=ids[4], limit=2)] == ids[3::-1]
    assert [file.id for file in alice.files.list(purpose="batch")] == ids[::-1]
    assert list(alice.files.list(purpose="fine-tune")) == []
    with http_client(gateway.url, ALICE) as http:
        page = http.get("/v1/files", params={"limit": 3}).json()
        assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[6], ids[4], True)
        page = http.get("/v1/files", params={"limit": 3, "after": ids[3]}).json()
        assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[0], False)
        page = http.get("/v1/files", params={"after": ids[0]}).json()
        assert (page["data"], page["first_id"], page["has_more"]) == ([], None, False)
        for query, param in (
            ({"limit": 0}, "limit"), ({"limit": 10_001}, "limit"), ({"order": "up"}, "order"),
        ):  # fmt: skip
            answer = http.get("/v1/files", params=query)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        answer = http.get("/v1/files", params={"after": "file-none"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "after")


def test_a_program_deletes_what_it_lists(alice: openai.OpenAI) -> None:
    """The last file of each page is deleted before the next page is asked for."""
    ids = {sent(alice, 10) for _ in range(7)}
    deleted = []
    for file in alice.files.list(limit=2):
        alice.files.delete(file.id)
        deleted.append(file.id)
    assert len(deleted) == 7 and set(deleted) == ids
    assert list(alice.files.list()) == []


def test_the_client_and_the_command_line_list_and_delete(pool: Pool, native: Client) -> None:
    with pool.client() as client:
        for number in range(3):
            client.submit_batch([{"prompt": "x"}], "m", key=f"b{number}", max_tokens=1).wait()
        keys = [row["key"] for row in client.files()]
        assert keys == ["b2", "b1", "b0"]
        assert [row["key"] for row in client.files(limit=2, oldest_first=True)] == ["b0", "b1"]
        assert client.files(purpose="batch") == native.files() == []
        listed = pool.cli("jobs", "--files").stdout.splitlines()
        assert listed[0].split()[:3] == ["KEY", "NAME", "PURPOSE"]
        assert [line.split()[0] for line in listed[1:]] == keys
        assert pool.cli("release", "--file", "b0").stdout.startswith("b0: deleted, ")
        assert pool.cli("release", "--file", "b0").returncode != 0
        assert client.delete_file("b1")["key"] == "b1"
        with pytest.raises(UnknownJob):
            client.delete_file("b1")
        assert [row["key"] for row in client.files()] == ["b2"]
        client.delete_file("b2")


# ---- quotas of owners ----------------------------------------------------------------------------


def test_the_bytes_of_an_owner_are_bounded(
    alice: openai.OpenAI, gateway: GatewayThread, native: Client
) -> None:
    kept = sent(alice, 600_000)
    with pytest.raises(openai.RateLimitError) as caught:
        sent(alice, 600_000)
    body: Any = caught.value.body
    assert body["code"] == "over_quota" and f"at most {QUOTA} (quota_file_bytes)" in body["message"]
    assert "delete files" in body["message"]
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert [row["key"] for row in native.files()] == [kept]  # nothing is left of the refused file
    with openai_client(gateway.url, BOB) as bob:
        bob.files.delete(sent(bob, 600_000))
    alice.files.delete(kept)
    alice.files.delete(sent(alice, 900_000))


def test_uploads_at_once_do_not_pass_the_bound_together(
    gateway: GatewayThread, alice: openai.OpenAI, native: Client
) -> None:
    def upload(number: int) -> bool:
        with openai_client(gateway.url, ALICE) as client:
            try:
                return bool(sent(client, 400_000, f"f{number}"))
            except openai.RateLimitError:
                return False

    with ThreadPoolExecutor(6) as threads:
        taken = list(threads.map(upload, range(6)))
    assert sum(taken) <= 2
    assert sorted(row["size"] for row in native.files()) == [400_000] * sum(taken)
    for file in alice.files.list():
        alice.files.delete(file.id)
    assert len(sent(alice, 900_000)) > 0


def test_the_lines_of_a_batch_count(alice: openai.OpenAI, native: Client) -> None:
    """The file of a batch's lines counts in the quota of its owner.

    If the quota refuses the batch, the file is deleted.
    """
    line = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions",'
        b' "body": {"model": "m", "prompt": "%s"}}\n' % (b"x" * 600_000)
    )
    file = alice.files.create(file=("a", line), purpose="batch").id
    with pytest.raises(openai.RateLimitError, match="quota_file_bytes"):
        alice.batches.create(
            input_file_id=file, endpoint="/v1/completions", completion_window="24h"
        )
    until(lambda: [row["key"] for row in native.files()] == [file], "the lines are deleted")


def test_a_native_client_is_told_the_bound(native: Client) -> None:
    lines = ({"prompt": "x" * 1000} for _ in range(2000))
    with pytest.raises(OverQuota) as caught:
        native.submit_batch(lines, "m", key="much", max_tokens=1)
    assert caught.value.details is not None and caught.value.details["bound"] == QUOTA
    native.delete_file("much")


# ---- uploads that break off ----------------------------------------------------------------------


def raw(gateway: GatewayThread, length: int | None, *pieces: bytes) -> socket.socket:
    """Opens a connection with the beginning of an upload of alice."""
    at = urlsplit(gateway.url)
    connection = socket.create_connection((at.hostname, at.port), timeout=PATIENCE)
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    connection.sendall(
        f"POST /v1/files HTTP/1.1\r\nhost: {at.netloc}\r\nauthorization: Bearer {ALICE}\r\n"
        f"content-type: {FORM}\r\n{size}\r\n\r\n".encode()
    )
    for piece in pieces:
        connection.sendall(piece)
    return connection


def answer_of(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_client_that_leaves_in_the_middle(gateway: GatewayThread, native: Client) -> None:
    part = b"x" * 400_000
    connection = raw(gateway, len(HEAD) + 900_000, HEAD, part)
    until(native.files, "a part of it is in the store")
    connection.close()
    until(lambda: not native.files(), "it is deleted")


def test_a_content_length_that_is_not_true(pool: Pool, native: Client, tmp_path: Path) -> None:
    body = HEAD + b"x" * 300_000 + TAIL
    times = {"header_time": 1.0, "body_time": 1.0}
    with GatewayThread(pool.run_dir, keys=keys_file(tmp_path), **times) as impatient:
        short = answer_of(raw(impatient, len(body) - 100, body))
        assert short.startswith(b"HTTP/1.1 400 ") and b"last boundary" in short
        # The rest of the body never comes.
        for length, part in ((len(body) + 100, body), (len(body), HEAD)):
            assert answer_of(raw(impatient, length, part)).startswith(b"HTTP/1.1 408 ")
    until(lambda: not native.files(), "nothing is left of them")


def test_a_broker_that_is_killed_in_the_middle(tmp_path: Path) -> None:
    """The upload continues with the next broker, and the file has each byte once."""
    flags = ("--state-dir", str(tmp_path / "jobs"))
    with Pool(tmp_path, CONFIG, arguments=flags) as pool, GatewayThread(pool.run_dir) as gateway:
        with pool.client() as native:

            def pieces() -> Iterator[bytes]:
                yield HEAD + b"x" * 300_000
                until(native.files, "a part of it is in the store")
                pool.kill()
                pool.start()
                yield b"y" * 300_000
                yield TAIL

            kind = {"content-type": FORM}
            answer = httpx.post(
                f"{gateway.url}/v1/files", content=pieces(), headers=kind, timeout=PATIENCE
            )
            assert answer.status_code == 200 and answer.json()["bytes"] == 600_000
            (row,) = native.files()
            assert (row["size"], row["complete"]) == (600_000, True)
            read = httpx.get(
                f"{gateway.url}/v1/files/{row['key']}/content", timeout=PATIENCE
            ).content
            assert [(key, len(list(group))) for key, group in itertools.groupby(read)] == [
                (ord("x"), 300_000), (ord("y"), 300_000),
            ]  # fmt: skip
            native.delete_file(row["key"])
        with openai_client(gateway.url) as client:
            assert len(sent(client, QUOTA - 1000)) > 0  # the quota counts no other bytes
