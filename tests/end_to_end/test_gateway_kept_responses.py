"""Stored responses, with OpenAI's client: run in the background, read late, cancelled, deleted."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from mlxpool.client import AsyncClient, Client, Job
from mlxpool.gateway.operations import connections
from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.http_owners import ALICE, BOB, keys_file, openai_client
from support.openapi_answers import faults, unknown_members
from support.pool import PATIENCE, Pool, until

CONFIG = """
[pool]
restart_delay = 0.05
[models.slow]
path = "builtin:counting"
counting.step_us = 4000
[models.stuck]
path = "builtin:counting"
counting.step_us = 60000000
[models.cut]
path = "builtin:counting"
counting = { step_us = 4000, fault = "segfault", fault_at = 20, fault_times = 2 }
"""
KEEPS_JOBS = True
SEED: Any = {"extra_body": {"seed": 7}}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"x" * 40).decode()


def told(line: str, count: int) -> str:
    return text_of(expected_ids(line, 7, count))


def ended(client: openai.OpenAI, id: str) -> Any:
    """Returns the response after its end."""

    def found() -> Any:
        response = client.responses.retrieve(id)
        return response if response.status not in ("queued", "in_progress") else None

    return until(found, "the response has ended")


def begin(client: openai.OpenAI, text: str, count: int, model: str = "slow", **more: Any) -> Any:
    return client.responses.create(
        model=model, input=text, max_output_tokens=count, background=True, **SEED, **more
    )


def test_in_the_background_and_read_later(api: openai.OpenAI, url: str) -> None:
    response = begin(api, "later", 20, metadata={"run": "a"}, instructions="Count.")
    assert (response.status, response.background, response.output) == ("queued", True, [])
    whole = ended(api, response.id)
    assert whole.status == "incomplete" and whole.metadata == {"run": "a"}
    assert whole.output_text == told("system: Count.\nuser: later\n", 20)
    assert (whole.created_at, whole.usage.output_tokens) == (response.created_at, 20)
    answer = httpx.get(f"{url}/v1/responses/{response.id}", timeout=PATIENCE).json()
    assert not faults(answer, "Response") and answer["store"] is True
    assert not [*unknown_members(answer, {"$ref": "#/components/schemas/Response"})]


def test_every_reading_has_the_same_events(api: openai.OpenAI) -> None:
    live = list(begin(api, "events", 40, stream=True))
    assert [event.type for event in live[:3]] == [
        "response.created", "response.queued", "response.in_progress",
    ]  # fmt: skip
    assert [event.sequence_number for event in live] == list(range(len(live)))
    id = live[0].response.id
    again = list(api.responses.retrieve(id, stream=True))
    assert [event.model_dump() for event in again] == [event.model_dump() for event in live]
    for after in (0, 2, 7, len(live) - 2, len(live) - 1):
        rest = list(api.responses.retrieve(id, stream=True, starting_after=after))
        assert [e.model_dump() for e in rest] == [e.model_dump() for e in live[after + 1 :]]
    assert live[-1].type == "response.incomplete"
    assert live[-1].response.output_text == told("user: events\n", 40)


def test_a_response_that_failed_and_went_on_loses_and_doubles_no_event(
    api: openai.OpenAI, url: str
) -> None:
    """The response fails because its job ends two workers at token 20; then it is retried."""
    first: list[Any] = list(begin(api, "cut", 40, model="cut", stream=True))
    assert [event.sequence_number for event in first] == list(range(len(first)))
    assert first[-1].type == "response.failed"
    id, failed = first[0].response.id, first[-1].sequence_number
    again = list(api.responses.retrieve(id, stream=True))
    assert [event.model_dump() for event in again] == [event.model_dump() for event in first]
    assert not list(api.responses.retrieve(id, stream=True, starting_after=failed))
    httpx.post(f"{url}/v1/jobs/{id}/retry", timeout=PATIENCE).raise_for_status()
    rest: list[Any] = list(api.responses.retrieve(id, stream=True, starting_after=failed))
    numbers = [event.sequence_number for event in rest]
    assert numbers == list(range(failed + 1, failed + 1 + len(rest)))
    assert rest[-1].response.output_text == told("user: cut\n", 40)
    texts = [event.delta for event in [*first, *rest] if event.type == "response.output_text.delta"]
    assert "".join(texts) == told("user: cut\n", 40)
    whole = [event.model_dump() for event in api.responses.retrieve(id, stream=True)]
    assert whole == [event.model_dump() for event in [*first[:-1], *rest]]


def test_a_reader_that_goes_and_comes_again(api: openai.OpenAI) -> None:
    stream = begin(api, "gone", 60, stream=True)
    events = []
    for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta":
            break
    stream.close()
    id = events[0].response.id
    after = events[-1].sequence_number
    events += list(api.responses.retrieve(id, stream=True, starting_after=after))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == told("user: gone\n", 60)


def test_cancelled_before_its_end(api: openai.OpenAI) -> None:
    response = begin(api, "cancel", 50, model="stuck")
    cancelled = api.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert api.responses.cancel(response.id).status == "cancelled"
    last: Any = list(api.responses.retrieve(response.id, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        api.responses.create(model="slow", input="go on", previous_response_id=response.id)


def test_deleted(api: openai.OpenAI) -> None:
    response = begin(api, "delete", 50, model="stuck")
    api.responses.delete(response.id)
    for call in (api.responses.retrieve, api.responses.cancel, api.responses.delete):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            call(response.id)


def test_stored_without_background_and_gone_on_from(api: openai.OpenAI) -> None:
    first = api.responses.create(
        model="slow", input="one", max_output_tokens=4, store=True, instructions="Count.", **SEED
    )
    assert first.store is True and first.background is False
    assert api.responses.retrieve(first.id).output_text == first.output_text
    with pytest.raises(openai.BadRequestError, match="not in the background"):
        api.responses.cancel(first.id)
    second = api.responses.create(
        model="slow", input="two", previous_response_id=first.id, max_output_tokens=4, **SEED
    )
    line = f"user: one\nassistant: {first.output_text}\nuser: two\n"
    assert second.output_text == told(line, 4) and second.previous_response_id == first.id
    assert second.store is False
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        api.responses.retrieve(second.id)


def test_input_items(api: openai.OpenAI) -> None:
    given: Any = [
        {"role": "user", "content": "one"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"role": "user", "content": "two"},
    ]
    response = api.responses.create(
        model="slow", input=given, max_output_tokens=1, store=True, instructions="x", **SEED
    )
    items = list(api.responses.input_items.list(response.id, order="asc", limit=2))
    assert [item.type for item in items] == [
        "message", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    first, call, output, last = [item.model_dump() for item in items]
    assert first["content"][0]["text"] == "one" and last["content"][0]["text"] == "two"
    assert call["arguments"] == '{"a": 1}' and output["output"] == "done"
    newest = api.responses.input_items.list(response.id).data
    assert newest[0].id == items[-1].id


def test_the_same_key_is_the_same_response(url: str) -> None:
    body = {"model": "slow", "input": "once", "max_output_tokens": 3, "background": True, "seed": 1}
    headers = {"Idempotency-Key": "order 7"}
    first, second = (
        httpx.post(f"{url}/v1/responses", json=body, headers=headers, timeout=PATIENCE).json()
        for _ in range(2)
    )
    assert first["id"] == second["id"] and first["created_at"] == second["created_at"]
    other = httpx.post(
        f"{url}/v1/responses", json={**body, "input": "another"}, headers=headers, timeout=PATIENCE
    )
    assert other.status_code == 409 and other.json()["error"]["code"] == "duplicate_id"


@pytest.fixture
def attentive(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A gateway that soon notices that a client is gone."""
    monkeypatch.setattr(connections, "FIRST_PROBE", 0.1)
    monkeypatch.setattr(connections, "SECOND_PROBE", 0.1)
    with GatewayThread(pool.run_dir, keep_alive=0.2) as gateway:
        yield gateway.url


@pytest.mark.parametrize("background", [False, True])
def test_a_client_that_leaves_before_it_was_told_the_id(
    pool: Pool, attentive: str, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response's job is cancelled and released, because nobody can read the response."""
    submitted, allowed = threading.Event(), threading.Event()
    submit = AsyncClient.submit

    async def slow(client: AsyncClient, *given: Any, **more: Any) -> Job:
        """Submits the job, but holds back the answer until `allowed` is set."""
        job = await submit(client, *given, **more)
        submitted.set()
        await asyncio.to_thread(allowed.wait)
        return job

    monkeypatch.setattr(AsyncClient, "submit", slow)
    body = {"model": "stuck", "input": "left", "store": True, "background": background}
    at = urlsplit(attentive)
    connection = HTTPConnection(at.hostname or "", at.port)
    connection.request(
        "POST", "/v1/responses", json.dumps(body), {"content-type": "application/json"}
    )
    try:
        assert submitted.wait(PATIENCE)
        with pool.client() as client:
            (row,) = until(lambda: running(client), "it runs")
            connection.close()
            until(lambda: nobody_waits(attentive), "the gateway knows that the client is gone")
            allowed.set()
            until(lambda: client.job(row["job"])["state"] == "gone", "the job is released")
    finally:
        allowed.set()
        connection.close()


def test_a_client_that_leaves_while_it_waits_for_the_answer(pool: Pool, attentive: str) -> None:
    at = urlsplit(attentive)
    with pool.client() as client:
        for stream, end in ((False, "gone"), (True, "cancelled")):
            body = {"model": "stuck", "input": f"{stream}", "store": True, "stream": stream}
            connection = HTTPConnection(at.hostname or "", at.port)
            connection.request(
                "POST", "/v1/responses", json.dumps(body), {"content-type": "application/json"}
            )
            (row,) = until(lambda: running(client), "it runs")
            if stream:  # the client reads the id before it leaves
                assert b"response.created" in connection.getresponse().read1(4096)
            connection.close()
            until(partial(is_in, client, row["job"], end), f"the job is {end}")


def running(client: Client) -> list[dict[str, Any]]:
    """Returns the running jobs of the stuck model, perhaps with jobs of another test."""
    return [row for row in client.jobs(state="running") if row["model"] == "stuck"]


def is_in(client: Client, job: bytes, state: str) -> bool:
    """Whether a job is in this state."""
    return bool(client.job(job)["state"] == state)


def nobody_waits(url: str) -> bool:
    """Whether the gateway serves no request for a response now."""
    metric = 'mlxpool_gateway_requests_in_flight{route="/v1/responses"} 0\n'
    return metric in httpx.get(f"{url}/metrics", timeout=PATIENCE).text


def test_what_is_refused(api: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="'store': false"):
        api.responses.create(model="slow", input="x", background=True, store=False)
    with pytest.raises(openai.NotFoundError, match="there is no response 'resp_x'"):
        api.responses.create(model="slow", input="x", previous_response_id="resp_x")
    for query in ("starting_after=3", "stream=1", "stream=true&starting_after=x", "bogus=1"):
        answer = httpx.get(f"{url}/v1/responses/resp_x?{query}", timeout=PATIENCE)
        assert answer.status_code == 400, query
    assert httpx.put(f"{url}/v1/responses/resp_x", timeout=PATIENCE).status_code == 405


def test_a_key_sees_its_own_responses_alone(pool: Pool, tmp_path: Path) -> None:
    keys = keys_file(tmp_path)
    with (
        GatewayThread(pool.run_dir, keys=keys) as gateway,
        openai_client(gateway.url, ALICE) as alice,
        openai_client(gateway.url, BOB) as bob,
    ):
        response = begin(alice, "mine", 5)
        for call in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                call(response.id)
        assert ended(alice, response.id).output_text == told("user: mine\n", 5)
    with (
        GatewayThread(pool.run_dir, keys=keys, name_owners=False) as gateway,
        openai_client(gateway.url, ALICE) as alice,
        pytest.raises(openai.InternalServerError, match="--name-owners"),
    ):
        begin(alice, "mine", 5)


def through_text(stream: Any) -> list[Any]:
    """Returns the next events up to one with text, or all remaining events.

    On a busy machine one event has the text of many tokens.
    """
    events = []
    while (event := next(stream, None)) is not None:
        events.append(event)
        if event.type == "response.output_text.delta":
            break
    return events


def test_a_broker_and_a_gateway_that_end_meanwhile(tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path / "jobs"))
    with Pool(tmp_path, CONFIG, arguments=flags) as pool:
        with GatewayThread(pool.run_dir) as gateway, openai_client(gateway.url) as client:
            stream = begin(client, "killed", 400, stream=True)
            events = through_text(stream)
            pool.kill()
            pool.start()
            events += through_text(stream)
            stream.close()
        with pool.client() as native:
            id = events[0].response.id
            pool.kill_worker("slow/0", over=lambda: native.job(id)["state"] == "done")
        with GatewayThread(pool.run_dir) as gateway, openai_client(gateway.url) as client:
            after = events[-1].sequence_number
            events += list(client.responses.retrieve(id, stream=True, starting_after=after))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(pieces) == told("user: killed\n", 400)
