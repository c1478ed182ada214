"""Files and batches, by OpenAI's client."""

from __future__ import annotations

import gzip
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest
from mlxpool.gateway.openai.batches import fields, upload
from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.http_owners import ALICE, BOB, keys_file, openai_client
from support.openai_batches import COMPLETIONS, begin, over, results, sent
from support.openapi_answers import faults, unknown_members
from support.pool import PATIENCE, Pool, until

CONFIG = """
[pool]
restart_delay = 0.05
[models.m]
path = "builtin:counting"
counting.step_us = 2000
[models.small]
path = "builtin:counting"
context = 64
[models.stuck]
path = "builtin:counting"
counting.step_us = 60000000
"""
KEEPS_JOBS = True
CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"


def line(name: str, endpoint: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"model": "m", "seed": 7}
    if endpoint == COMPLETIONS:
        given |= {"prompt": name, "max_tokens": 5}
    elif endpoint == CHATS:
        given |= {"messages": [{"role": "user", "content": name}], "max_tokens": 5}
    else:
        given |= {"input": name, "max_output_tokens": 5}
    return {"custom_id": name, "method": "POST", "url": endpoint, "body": {**given, **body}}


def told(prompt: str, count: int = 5) -> str:
    return text_of(expected_ids(prompt, 7, count))


def test_a_file_is_kept_listed_read_and_deleted(api: openai.OpenAI, url: str) -> None:
    data = b"x" * 700_000 + b"\r\n--not the boundary\n"  # a file of several parts
    file = api.files.create(file=("träume.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(data), "träume.jsonl", "batch")
    assert api.files.content(file.id).read() == data
    assert api.files.retrieve(file.id) == file
    assert file.id in [listed.id for listed in api.files.list(purpose="batch", limit=1)]
    answer = httpx.get(f"{url}/v1/files/{file.id}", timeout=PATIENCE).json()
    assert not faults(answer, "File")
    assert not [*unknown_members(answer, {"$ref": "#/components/schemas/File"})]
    assert api.files.delete(file.id).deleted
    for call in (api.files.retrieve, api.files.content, api.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            call(file.id)


@pytest.mark.parametrize("endpoint", [CHATS, COMPLETIONS, RESPONSES])
def test_every_line_is_answered(api: openai.OpenAI, endpoint: str, url: str) -> None:
    names = [f"{endpoint} {number}" for number in range(30)]
    file = sent(api, [line(name, endpoint) for name in names])
    batch = begin(api, file, endpoint, metadata={"run": "a"})
    assert (batch.endpoint, batch.input_file_id) == (endpoint, file)
    assert batch.metadata == {"run": "a"} and batch.request_counts.total == 30
    batch = over(api, batch.id)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (30, 0)
    answer = httpx.get(f"{url}/v1/batches/{batch.id}", timeout=PATIENCE).json()
    assert not faults(answer, "Batch")
    assert not [*unknown_members(answer, {"$ref": "#/components/schemas/Batch"})]
    api.files.delete(file)  # the results do not need the input file
    answers = results(api, batch.output_file_id)
    assert [*answers] == names
    for name, row in answers.items():
        body = row["response"]["body"]
        assert row["error"] is None and row["response"]["status_code"] == 200
        if endpoint == RESPONSES:
            assert not faults(body, "Response")
            text = body["output"][0]["content"][0]["text"]
        elif endpoint == CHATS:
            assert not faults(body, "ChatCompletion")
            text = body["choices"][0]["message"]["content"]
        else:
            assert not faults(body, "Completion")
            text = body["choices"][0]["text"]
        assert text == told(name if endpoint == COMPLETIONS else f"user: {name}\n")
    assert results(api, batch.output_file_id) == answers


def test_files_of_results_are_deleted_one_by_one(api: openai.OpenAI, url: str) -> None:
    """The output and error files of a batch can be deleted, as with OpenAI; the batch remains."""
    lines = [line("a"), line("long", model="small", prompt="x" * 100), line("b")]
    batch = over(api, begin(api, sent(api, lines)).id)
    output, error = batch.output_file_id, batch.error_file_id
    assert [*results(api, output)] == ["a", "b"] and [*results(api, error)] == ["long"]
    deleted = api.files.delete(output)
    assert (deleted.id, deleted.deleted, deleted.object) == (output, True, "file")
    calls = (api.files.retrieve, api.files.content, api.files.delete)
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            call(output)
    assert [*results(api, error)] == ["long"]  # the error file has no other line
    assert api.batches.retrieve(batch.id) == batch
    api.files.delete(error)
    for call in calls:
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            call(error)
    assert batch.id in [listed.id for listed in api.batches.list(limit=5)]
    running = begin(api, sent(api, [line("slow", model="stuck")]))
    for kind in ("output", "error"):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            api.files.delete(f"file-{running.id.removeprefix('batch_')}-{kind}")
    api.batches.cancel(running.id)


def test_lines_with_faults_are_named(api: openai.OpenAI) -> None:
    lines = [
        line("good"),
        "{no json",
        line("good"),
        {**line("url"), "url": CHATS},
        line("model", model="nobody"),
        line("field", temprature=1),
        line("two", n=2),
        line("stream", stream=True),
        "",
        line("option", top_p=7),
        {"custom_id": "x"},
    ]
    new_batch = begin(api, sent(api, lines))
    batch = api.batches.retrieve(new_batch.id)
    assert batch.status == "failed" and batch.output_file_id is None
    counts: Any = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (0, 0, 0)
    assert batch.errors is not None and batch.errors.data is not None
    errors = sorted((error.line, error.code) for error in batch.errors.data)
    assert errors == [
        (2, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "mismatched_endpoint"),
        (5, "model_not_found"), (6, "unknown_parameter"), (7, "unsupported_parameter"),
        (8, "unsupported_parameter"), (10, "bad_request"), (11, "bad_request"),
    ]  # fmt: skip
    assert all(str(error.message).startswith(f"line {error.line}: ") for error in batch.errors.data)
    assert api.batches.cancel(batch.id).status == "failed"


def test_errors_of_lines_are_in_a_file_of_their_own(api: openai.OpenAI) -> None:
    lines = [line("fits"), line("long", model="small", prompt="x" * 100)]
    batch = over(api, begin(api, sent(api, lines)).id)
    assert batch.status == "completed" and batch.request_counts.failed == 1
    assert [*results(api, batch.output_file_id)] == ["fits"]
    (bad,) = results(api, batch.error_file_id).values()
    assert bad["custom_id"] == "long" and bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_cancelled(api: openai.OpenAI) -> None:
    batch = begin(api, sent(api, [line("a", model="stuck"), line("b", model="stuck")]))
    assert api.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = over(api, batch.id)
    assert batch.status == "cancelled" and batch.output_file_id is None
    assert api.batches.cancel(batch.id).status == "cancelled"


def test_listed_in_pages(api: openai.OpenAI) -> None:
    file = sent(api, [line("one")])
    ids = [begin(api, file).id for _ in range(5)]
    listed = [batch.id for batch in api.batches.list(limit=2)]
    assert listed[:5] == ids[::-1] and len(listed) == len(set(listed))
    page = api.batches.list(limit=2, after=ids[4])
    assert [batch.id for batch in page.data] == [ids[3], ids[2]] and page.has_more


def test_sent_twice_it_is_one_batch(api: openai.OpenAI, pool: Pool) -> None:
    file = sent(api, [line("once")])
    headers = {"Idempotency-Key": "nightly 7"}
    first, second = (begin(api, file, extra_headers=headers) for _ in range(2))
    assert first.id == second.id
    over(api, first.id)
    api.files.delete(file)
    with pool.client() as native, pytest.raises(BadRequest, match="release the batch"):
        native.delete_file(native.batch(first.id).row["file"])  # the results need this file
    assert begin(api, file, extra_headers=headers).id == first.id
    for more in ({"metadata": {"a": "b"}}, {"completion_window": "48h"}):
        with pytest.raises(openai.ConflictError, match="take another key"):
            begin(api, file, extra_headers=headers, **more)
    with pool.client() as native:
        native.batch(first.id).release()

        def status() -> int:
            try:
                begin(api, file, extra_headers=headers)
            except openai.APIStatusError as error:
                return error.status_code
            return 200

        until(lambda: status() == 410, "its results are deleted")


def test_sent_twice_at_once_it_is_one_batch(api: openai.OpenAI, pool: Pool, url: str) -> None:
    """Four concurrent requests with one key make one batch, and leave one file of its lines."""
    file = sent(api, [line(f"{number}") for number in range(2000)])
    headers = {"Idempotency-Key": "twice"}

    def make(_: int) -> str:
        with openai_client(url) as other:
            return str(begin(other, file, extra_headers=headers).id)

    with ThreadPoolExecutor(4) as threads:
        (id,) = set(threads.map(make, range(4)))
    with pool.client() as native:
        kept = native.batch(id).row["file"]
        until(lambda: lines_files(native, 100_000) == [kept], "one is left")
    api.batches.cancel(id)


def lines_files(native: Client, size: int) -> list[str]:
    """Returns the keys of the files of batch lines that have more than `size` bytes."""
    return [row["key"] for row in native.files(purpose="batch_lines") if row["size"] > size]


def test_a_form_that_is_none(url: str) -> None:
    def post(**more: Any) -> httpx.Response:
        return httpx.post(f"{url}/v1/files", timeout=PATIENCE, **more)

    file = {"file": ("a.jsonl", b"{}")}
    assert post(json={"purpose": "batch"}).status_code == 415
    for data, param in (
        ({}, "purpose"),
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch", "bogus": "1"}, "bogus"),
        ({"purpose": "batch", "expires_after[seconds]": "5"}, "expires_after.anchor"),
        (
            {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "5",
            },
            "expires_after.seconds",
        ),
    ):
        answer = post(data=data, files=file)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    empty = post(data={"purpose": "batch"}, files={"file": ("a", b"")})
    assert empty.status_code == 400 and "empty" in empty.json()["error"]["message"]
    kind = {"content-type": "multipart/form-data; boundary=B"}
    for body in (b"", b"--B--\r\n", b"--B\r\nx\r\n\r\n", b"--Bx", b"--B\r\n" + b"x" * 9000):
        assert post(content=body, headers=kind).status_code == 400, body


@pytest.mark.parametrize("size", [20, 300_000])
def test_the_parts_of_a_form_come_in_any_order(url: str, size: int) -> None:
    def part(name: str, value: str, more: str = "") -> str:
        return f'--B\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'

    parts = [
        part("file", "x" * size, '; filename="a.jsonl"'),
        part("purpose", "batch"),
        part("expires_after[anchor]", "created_at"),
        part("expires_after[seconds]", "7200"),
    ]
    kind = {"content-type": "multipart/form-data; boundary=B"}
    for turn in range(4):
        body = "".join((*parts[turn:], *parts[:turn], "--B--\r\n"))
        file = httpx.post(f"{url}/v1/files", content=body, headers=kind, timeout=PATIENCE).json()
        assert (file["bytes"], file["purpose"]) == (size, "batch"), file
        assert file["expires_at"] - file["created_at"] == 7200
    without = "".join((parts[0], "--B--\r\n"))
    refused = httpx.post(f"{url}/v1/files", content=without, headers=kind, timeout=PATIENCE)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "purpose")


def test_an_upload_may_be_compressed(url: str) -> None:
    kind = {"content-type": "multipart/form-data; boundary=B", "content-encoding": "gzip"}
    head = b'--B\r\ncontent-disposition: form-data; name="%s"\r\n\r\n'
    body = head % b'file"; filename="a' + b"abc\r\n" + head % b"purpose" + b"batch\r\n--B--\r\n"
    data = gzip.compress(body)
    file = httpx.post(f"{url}/v1/files", content=data, headers=kind, timeout=PATIENCE).json()
    response = httpx.get(f"{url}/v1/files/{file['id']}/content", timeout=PATIENCE)
    assert response.content == b"abc"
    shown = httpx.head(f"{url}/v1/files/{file['id']}/content", timeout=PATIENCE)
    assert (shown.status_code, shown.content) == (200, b"")
    assert shown.headers["content-type"] == response.headers["content-type"]
    cut = httpx.post(f"{url}/v1/files", content=data[:-9], headers=kind, timeout=PATIENCE)
    assert (cut.status_code, cut.json()["error"]["code"]) == (400, "broken_encoding")


def test_a_file_over_the_bound(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "MAX_FILE", 300_000)
    files = {"file": ("a", b"x" * 300_001)}
    answer = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files=files, timeout=PATIENCE)
    assert answer.status_code == 413 and "300000 bytes" in answer.json()["error"]["message"]
    left = httpx.get(f"{url}/v1/files", timeout=PATIENCE).json()["data"]
    assert not [row for row in left if row["bytes"] > 262_144 and row["filename"] == "a"]


def test_what_is_refused(api: openai.OpenAI) -> None:
    file = sent(api, [line("x")])
    for more, param in (
        ({"endpoint": "/v1/audio/speech"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}},
         "output_expires_after.seconds"),
    ):  # fmt: skip
        given: Any = {"endpoint": COMPLETIONS, "completion_window": "24h", **more}
        with pytest.raises(openai.BadRequestError) as caught:
            api.batches.create(input_file_id=file, **given)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        begin(api, "file-nothing")
    for call in (api.batches.retrieve, api.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no batch"):
            call("batch_nothing")
    empty = begin(api, sent(api, ["", ""]))
    assert empty.status == "failed" and empty.errors.data[0].code == "empty_file"


def test_more_lines_than_the_bound(api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpool.gateway.openai.batches.requests.MAX_LINES", 3)
    batch = begin(api, sent(api, [line(str(number)) for number in range(4)]))
    assert batch.status == "failed" and batch.errors.data[0].code == "too_many_lines"
    assert fields.MAX_LINES == 50_000


def test_a_key_sees_its_own_files_and_batches_alone(pool: Pool, tmp_path: Path) -> None:
    keys = keys_file(tmp_path)
    with (
        GatewayThread(pool.run_dir, keys=keys) as gateway,
        openai_client(gateway.url, ALICE) as alice,
        openai_client(gateway.url, BOB) as bob,
    ):
        file = sent(alice, [line("mine")])
        batch = over(alice, begin(alice, file).id)
        for name in (file, batch.output_file_id):
            for call in (bob.files.retrieve, bob.files.content):
                with pytest.raises(openai.NotFoundError):
                    call(name)
        with pytest.raises(openai.NotFoundError):
            bob.files.delete(file)
        for ask in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        with pytest.raises(openai.NotFoundError):
            begin(bob, file)
        assert not list(bob.files.list()) and not list(bob.batches.list())
        assert [listed.id for listed in alice.batches.list()] == [batch.id]


def test_a_batch_outlives_worker_broker_and_gateway(tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path / "jobs"))
    names = [f"line {number}" for number in range(60)]
    with Pool(tmp_path, CONFIG, arguments=flags) as pool:
        with GatewayThread(pool.run_dir) as gateway, openai_client(gateway.url) as client:
            new_batch = begin(client, sent(client, [line(name, max_tokens=40) for name in names]))

            def some() -> bool:
                counts = client.batches.retrieve(new_batch.id).request_counts
                assert counts is not None
                return counts.completed > 3

            until(some, "some lines are answered")
            pool.kill_worker("m/0")
        pool.kill()
        pool.start()
        with GatewayThread(pool.run_dir) as gateway, openai_client(gateway.url) as client:
            batch = over(client, new_batch.id)
            assert batch.status == "completed" and batch.request_counts.completed == 60
            answers = results(client, batch.output_file_id)
            for name in names:
                assert answers[name]["response"]["body"]["choices"][0]["text"] == told(name, 40)
