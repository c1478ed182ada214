"""Batches while broker and gateway are killed, and while their files are deleted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from mlxpool.client import Client
from mlxpool.gateway.openai.batches import kept
from support.counting_checker import expected_ids, text_of
from support.http_owners import openai_client
from support.openai_batches import begin, over
from support.pool import PATIENCE, Pool, until

CONFIG = """
[pool]
restart_delay = 0.05
[models.m]
path = "builtin:counting"
sequences = 64
counting.step_us = 500
[models.stuck]
path = "builtin:counting"
counting.step_us = 60000000
"""
KEEPS_JOBS = True
COMPLETIONS = "/v1/completions"
TOKENS = 3


def lines(count: int, model: str = "m", padding: int = 0) -> bytes:
    """Returns the lines of a batch; the prompt of each line has the line's number."""
    return "\n".join(
        json.dumps(
            {
                "custom_id": f"l{number}",
                "method": "POST",
                "url": COMPLETIONS,
                "body": {
                    "model": model,
                    "prompt": prompt(number, padding),
                    "max_tokens": TOKENS,
                    "seed": 7,
                },
            }
        )
        for number in range(count)
    ).encode()


def prompt(number: int, padding: int = 0) -> str:
    return f"p{number}" + " " * padding


def upload(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("a", data), purpose="batch").id


def written(client: Client) -> dict[str, int]:
    """Returns the files that were written for batches, with their sizes."""
    return {row["key"]: row["size"] for row in client.files(purpose="batch_lines")}


def check(client: openai.OpenAI, batch: Any, count: int, padding: int = 0) -> None:
    """Asserts that every line was answered once, with the text of its prompt."""
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert (batch.request_counts.total, batch.request_counts.completed) == (count, count)
    text = client.files.content(batch.output_file_id).text
    rows = [json.loads(line) for line in text.splitlines()]
    assert [item["custom_id"] for item in rows] == [f"l{number}" for number in range(count)]
    for number, row in enumerate(rows):
        wanted = text_of(expected_ids(prompt(number, padding), 7, TOKENS))
        assert row["response"]["body"]["choices"][0]["text"] == wanted


# ---- a broker that is killed ---------------------------------------------------------------------


def test_a_broker_that_is_killed_while_a_batch_is_made(
    pool: Pool, api: openai.OpenAI, client: Client
) -> None:
    count, padding = 600, 2000
    file, before = upload(api, lines(count, padding=padding)), written(client)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(begin, api, file)
        until(lambda: making.done() or written(client) != before, "its lines are written")
        pool.kill()
        pool.start()
        batch = making.result(PATIENCE)
    assert len(written(client)) == len(before) + 1
    check(api, over(api, batch.id), count, padding)


def test_a_broker_that_is_killed_while_it_cancels(pool: Pool, api: openai.OpenAI) -> None:
    file = upload(api, lines(200, "stuck"))
    batch = begin(api, file)
    api.batches.cancel(batch.id)
    pool.kill()
    pool.start()
    batch = over(api, batch.id)
    assert batch.status == "cancelled" and batch.output_file_id is None
    assert batch.request_counts.failed <= 200


def test_a_broker_that_is_killed_while_results_are_read(
    pool: Pool, api: openai.OpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "PAGE_LINES", 20)
    batch = over(api, begin(api, upload(api, lines(300))).id)
    check(api, batch, 300)
    whole = api.files.content(batch.output_file_id).read()
    path = f"{url}/v1/files/{batch.output_file_id}/content"
    with httpx.stream("GET", path, timeout=PATIENCE) as answer:
        pieces = answer.iter_raw()
        read = next(pieces)
        pool.kill()
        pool.start()
        read += b"".join(pieces)
    assert read == whole


def test_a_cancel_that_meets_the_end(api: openai.OpenAI) -> None:
    """The cancel or the end may come first: the batch ends once, and its answers remain."""
    file = upload(api, lines(40))
    states = Counter[str]()
    for done in (0, 1, 20, 38, 39, 40):
        new_batch = begin(api, file)

        def far_enough(id: str = new_batch.id, done: int = done) -> bool:
            counts = api.batches.retrieve(id).request_counts
            return counts is not None and counts.completed >= done

        until(far_enough, f"{done} lines are done")
        api.batches.cancel(new_batch.id)
        batch = over(api, new_batch.id)
        states[batch.status] += 1
        counts: Any = batch.request_counts
        assert counts.completed + counts.failed <= 40
        names: list[str] = []
        for name in (batch.output_file_id, batch.error_file_id):
            text = "" if name is None else api.files.content(name).text
            names += [json.loads(line)["custom_id"] for line in text.splitlines()]
        assert len(names) == len(set(names)) and len(names) >= counts.completed
        again = api.batches.cancel(new_batch.id)
        assert (again.status, again.request_counts) == (batch.status, counts)
    assert states["cancelled"] + states["completed"] == 6


# ---- files that go under a batch -----------------------------------------------------------------


def test_a_file_that_is_deleted_while_its_batch_is_made(api: openai.OpenAI, client: Client) -> None:
    count, padding = 600, 2000
    file, before = upload(api, lines(count, padding=padding)), written(client)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(begin, api, file)
        until(lambda: making.done() or written(client) != before, "its lines are written")
        api.files.delete(file)
        try:
            batch = making.result(PATIENCE)
        except openai.NotFoundError as error:
            assert error.code == "file_not_found" and error.param == "input_file_id"
            until(lambda: written(client) == before, "its lines are deleted")
        else:
            check(api, over(api, batch.id), count, padding)


def test_two_batches_of_a_file_that_is_deleted_while_they_run(api: openai.OpenAI) -> None:
    file = upload(api, lines(100))
    batches = [begin(api, file) for _ in range(2)]
    api.files.delete(file)
    for batch in batches:
        check(api, over(api, batch.id), 100)


def test_a_client_that_leaves_while_its_batch_is_made(
    url: str, api: openai.OpenAI, client: Client
) -> None:
    """Afterwards either the batch exists, or the files made for it are deleted."""
    file, before = upload(api, lines(5000, padding=1000)), written(client)
    listed = [batch.id for batch in api.batches.list()]
    body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
    at = urlsplit(url)
    connection = HTTPConnection(at.hostname or "", at.port)
    kind = {"content-type": "application/json"}
    connection.request("POST", "/v1/batches", json.dumps(body), kind)
    until(lambda: written(client) != before, "its lines are written")
    connection.close()
    metric = 'mlxpool_gateway_requests_in_flight{route="/v1/batches"} 0\n'
    until(
        lambda: metric in httpx.get(f"{url}/metrics", timeout=PATIENCE).text, "nobody waits for it"
    )

    def new_ones() -> list[str]:
        return [batch.id for batch in api.batches.list() if batch.id not in listed]

    # The gateway finishes work that ran when the client left.
    until(lambda: new_ones() or written(client) == before, "it is made, or its lines are deleted")
    for id in new_ones():
        api.batches.cancel(id)


# ---- a gateway that is killed --------------------------------------------------------------------


def test_a_gateway_that_is_killed_while_a_batch_is_made(
    pool: Pool, url: str, client: Client
) -> None:
    """The client repeats the request at another gateway, which makes the batch once."""
    count, padding = 2000, 1000
    command = [sys.executable, "-m", "mlxpool.cli.main", "--run-dir", str(pool.run_dir), "gateway"]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    key = {"Idempotency-Key": "killed"}
    with process, openai_client(url) as second:
        assert process.stdout is not None
        first = openai_client(process.stdout.readline().split()[-1])
        with first, ThreadPoolExecutor(1) as threads:
            file = upload(first, lines(count, padding=padding))
            before = written(client)
            making = threads.submit(begin, first, file, extra_headers=key)
            until(lambda: making.done() or written(client) != before, "its lines are written")
            process.kill()
            succeeded = making.exception(60) is None
        batch, again = (begin(second, file, extra_headers=key) for _ in range(2))
        assert batch.id == again.id
        check(second, over(second, batch.id), count, padding)
        left = [row for row in client.files(purpose="batch_lines") if not row["complete"]]
        assert len(left) <= (0 if succeeded else 1)  # an incomplete file is deleted after an hour
        for row in left:
            client.delete_file(row["key"])
