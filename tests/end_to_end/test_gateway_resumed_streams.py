"""Streams over HTTP that outlive their gateway: Idempotency-Key and Last-Event-ID."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.http_owners import ALICE, BOB, http_client, keys_file
from support.pool import PATIENCE, Pool

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume_stream.py"
CONFIG = """
[pool]
http = "127.0.0.1:0"
restart_delay = 0.05
[models.slow]
path = "builtin:counting"
counting.step_us = 30000
[models.cut]
path = "builtin:counting"
counting = { step_us = 1000, fault = "segfault", fault_at = 5, fault_times = 2 }
"""
KEEPS_JOBS = True
COUNT, SEED = 60, 7
HI = [{"role": "user", "content": "hi"}]
CHAT = {"model": "slow", "messages": HI, "max_tokens": COUNT, "seed": SEED, "stream": True}
AS_CHAT = text_of(expected_ids("user: hi\n", SEED, COUNT))
Event = dict[str, Any]


def of_choices(event: Event) -> str:
    """Returns the text of the first choice in an event of a completion or a chat."""
    first = [choice for choice in event.get("choices", ()) if choice["index"] == 0]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in first
    )


# interface -> path, body, the text in an event, the complete text
CASES: dict[str, tuple[str, dict[str, Any], Callable[[Event], str], str]] = {
    "chat": ("/v1/chat/completions", CHAT, of_choices, AS_CHAT),
    "choices": ("/v1/chat/completions", {**CHAT, "n": 2}, of_choices, AS_CHAT),
    "completion": (
        "/v1/completions",
        {"model": "slow", "prompt": "hi", "max_tokens": COUNT, "seed": SEED, "stream": True},
        of_choices,
        text_of(expected_ids("hi", SEED, COUNT)),
    ),
    **{
        name: (
            "/v1/responses",
            {"model": "slow", "input": "hi", "max_output_tokens": COUNT, "seed": SEED,
             "stream": True, "store": name == "stored response"},
            lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
            AS_CHAT,
        )
        for name in ("response", "stored response")
    },
    "message": (
        "/v1/messages", CHAT, lambda event: event.get("delta", {}).get("text", ""), AS_CHAT,
    ),
    "Ollama's chat": (
        "/api/chat",
        {"model": "slow", "messages": HI, "options": {"num_predict": COUNT, "seed": SEED}},
        lambda event: event["message"]["content"],
        AS_CHAT,
    ),
    "Ollama's prompt": (
        "/api/generate",
        {"model": "slow", "prompt": "hi", "options": {"num_predict": COUNT, "seed": SEED}},
        lambda event: event["response"],
        AS_CHAT,
    ),
}  # fmt: skip


class Stream:
    """A request, and the received part of its answer: complete events, or lines."""

    def __init__(self, url: str, path: str, body: dict[str, Any], **headers: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=PATIENCE
        )
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(
            "POST", path, json.dumps(body), {"content-type": "application/json", **named}
        )
        self._answer = self._connection.getresponse()
        self.end = b"\n" if path.startswith("/api/") else b"\n\n"
        self._data = b""

    def read(self, count: int) -> None:
        """Waits for `count` events."""
        while self._data.count(self.end) < count:
            line = self._answer.readline()
            assert line, self._data
            self._data += line

    def read_rest(self) -> bytes:
        """Returns the data until the connection ends."""
        try:
            self._data += self._answer.read()
        except http.client.IncompleteRead as error:
            self._data += error.partial
        except OSError:
            pass
        self._connection.close()
        return self.events

    @property
    def events(self) -> bytes:
        whole = self._data.rpartition(self.end)
        return whole[0] + whole[1]

    @property
    def last(self) -> str:
        """Returns the client's Last-Event-ID: the last id, or the number of complete lines."""
        if self.end == b"\n":
            return str(self.events.count(b"\n"))
        return self.events.rpartition(b"id: ")[2].partition(b"\n")[0].decode()


def values(data: bytes) -> list[Event]:
    """Returns the values of server-sent events or JSON lines; event ids must be consecutive."""
    lines = data.decode().splitlines()
    ids = [int(line.removeprefix("id: ")) for line in lines if line.startswith("id: ")]
    assert ids == list(range(1, len(ids) + 1))
    given = [line.removeprefix("data: ") for line in lines if line.startswith(("data: ", "{"))]
    assert len(given) == len(ids) or not ids
    return [json.loads(text) for text in given if text != "[DONE]"]


@pytest.fixture(scope="module")
def url(pool: Pool) -> str:
    return str(pool.gateway(state="ready")["url"])


@pytest.fixture(scope="module")
def gateway(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    """Another gateway of the pool, with keys."""
    with GatewayThread(pool.run_dir, keys=keys_file(tmp_path_factory.mktemp("keys"))) as running:
        yield running


def kill_gateway(pool: Pool) -> None:
    """Kills the pool's gateway, and waits until the broker has counted its restart."""
    row = pool.gateway(state="ready")
    os.kill(row["pid"], signal.SIGKILL)
    pool.gateway(restarts=row["restarts"] + 1)


@pytest.mark.parametrize("name", CASES)
def test_a_stream_goes_on_when_its_gateway_is_killed(pool: Pool, url: str, name: str) -> None:
    path, body, text_in, text = CASES[name]
    key = {"idempotency_key": f"killed {name}"}
    first = Stream(url, path, body, **key)
    first.read(6)
    kill_gateway(pool)
    had = first.read_rest()
    rest = Stream(url, path, body, **key, last_event_id=first.last).read_rest()
    whole = Stream(url, path, body, **key).read_rest()
    assert had + rest == whole
    events = values(whole)
    assert "".join(map(text_in, events)) == text
    if name == "choices":
        second = [
            {"choices": [{**choice, "index": 1 - choice["index"]} for choice in event["choices"]]}
            for event in events
        ]
        other = text_of(expected_ids("user: hi\n", SEED + 1, COUNT))
        assert "".join(map(text_in, second)) == other
    assert not Stream(url, path, body, **key, last_event_id=str(10**6)).read_rest()


def test_the_example_prints_an_answer_over_the_end_of_gateways(pool: Pool, url: str) -> None:
    command = [sys.executable, str(EXAMPLE), "slow", "hi", "--max-tokens", "100", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        said = b""
        for _ in range(2):
            said += program.stdout.read(20)
            kill_gateway(pool)
        said += program.stdout.read()
    numbers = said.decode().split()
    assert program.returncode == 0 and len(numbers) == 100
    row = max(pool_rows(pool), key=lambda row: row["seq"])
    assert numbers == text_of(expected_ids("user: hi\n", row["seed"], 100)).split()


def test_a_stream_goes_on_when_broker_gateway_and_worker_are_killed(tmp_path: Path) -> None:
    key = {"idempotency_key": "all"}
    with Pool(tmp_path, CONFIG, arguments=("--state-dir", str(tmp_path / "jobs"))) as pool:
        first = Stream(pool.gateway(state="ready")["url"], "/v1/messages", CHAT, **key)
        first.read(6)
        kill_gateway(pool)
        pool.kill()
        had = first.read_rest()
        pool.start()
        url = pool.gateway(state="ready")["url"]
        second = Stream(url, "/v1/messages", CHAT, **key, last_event_id=first.last)
        second.read(3)
        pool.kill_worker("slow/0")
        rest = second.read_rest()
        assert had + rest == Stream(url, "/v1/messages", CHAT, **key).read_rest()
    assert "".join(map(CASES["message"][2], values(had + rest))) == AS_CHAT


def pool_rows(pool: Pool) -> list[dict[str, Any]]:
    """Returns the jobs of the pool, with their seeds."""
    with pool.client() as client:
        rows = client.jobs()
        return [{**row, "seed": client.fetch(row["key"]).read().seed} for row in rows[:1]]


def told(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"]["code"])


def test_a_key_belongs_to_the_api_key_and_to_one_request(gateway: GatewayThread) -> None:
    with contextlib.ExitStack() as stack:
        alice, bob = (stack.enter_context(http_client(gateway.url, key)) for key in (ALICE, BOB))
        key = {"idempotency-key": "mine"}
        path, body = "/v1/chat/completions", {**CHAT, "max_tokens": 3, "seed": None}
        first = alice.post(path, json=body, headers=key)
        assert first.status_code == 200
        assert alice.post(path, json=dict(reversed(body.items())), headers=key).text == first.text
        last = {**key, "last-event-id": "2"}
        rest = alice.post(path, json=body, headers=last).text
        assert rest and first.text.endswith(rest) and not first.text.startswith(rest)
        assert told(bob.post(path, json=body, headers=last), 404) == "stream_not_found"
        assert bob.post(path, json=body, headers=key).text != first.text
        for other, more in ((path, {"max_tokens": 4}), ("/v1/messages", {})):
            answer = alice.post(other, json={**body, **more}, headers=key)
            assert answer.status_code == 422 and "make a new key" in answer.text
        whole = {**body, "stream": False}
        assert told(alice.post(path, json=whole, headers=key), 422) == "idempotency_key_reused"


def test_what_last_event_id_may_be(gateway: GatewayThread) -> None:
    with http_client(gateway.url, ALICE) as http:
        path, body = "/v1/chat/completions", {**CHAT, "max_tokens": 2}

        def ask(**headers: str) -> httpx.Response:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return http.post(path, json=body, headers=named)

        assert told(ask(last_event_id="1"), 400) == "bad_request"
        for bad in ("x", "-1", "1.5", "9" * 16):
            assert told(ask(idempotency_key="k", last_event_id=bad), 400) == "bad_request"
        assert told(ask(idempotency_key="unknown", last_event_id="1"), 404) == "stream_not_found"
        whole = ask(idempotency_key="k").text
        assert ask(idempotency_key="k", last_event_id="0").text == whole
        far = ask(idempotency_key="k", last_event_id=str(10**9 + 1))
        assert told(far, 409) == "job_restarted"


def test_a_whole_answer_is_the_same_when_it_is_asked_for_again(gateway: GatewayThread) -> None:
    with http_client(gateway.url, ALICE) as http:
        for path, body in (
            ("/v1/chat/completions", {"messages": HI, "max_tokens": 3}),
            ("/api/chat", {"messages": HI, "stream": False, "options": {"num_predict": 3}}),
        ):
            asked = {"model": "slow", **body}
            key = {"idempotency-key": f"whole {path}"}
            answers = [http.post(path, json=asked, headers=key) for _ in range(2)]
            assert answers[0].status_code == 200 and answers[0].text == answers[1].text


def test_what_jobs_do_not_have_is_answered_as_always(gateway: GatewayThread) -> None:
    with http_client(gateway.url, ALICE) as http:
        body = {"model": "slow", "prompt": "hi", "max_tokens": 2, "echo": True, "stream": True}
        answer = http.post("/v1/completions", json=body, headers={"idempotency-key": "echo"})
        assert "[DONE]" in answer.text and "id: 1\n" not in answer.text


def test_an_answer_that_failed_fails_at_each_reading(gateway: GatewayThread) -> None:
    """The stream's last event is the error, with an id of its own.

    A client that reads the answer again gets the error again, unless its Last-Event-ID is that id.
    """
    body = {**CHAT, "model": "cut"}
    with http_client(gateway.url, ALICE) as http:

        def ask(**headers: str) -> str:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return http.post("/v1/chat/completions", json=body, headers=named).text

        first = ask(idempotency_key="fails")
        count = first.count("id: ")
        assert f"id: {count}\nevent: error\n" in first
        assert ask(idempotency_key="fails") == first
        assert not ask(idempotency_key="fails", last_event_id=str(count))


def test_an_error_of_a_reading_is_no_event_of_the_answer(pool: Pool) -> None:
    with GatewayThread(pool.run_dir, drain_timeout=0) as gateway:
        stream = Stream(gateway.url, "/v1/chat/completions", CHAT, idempotency_key="drained")
        stream.read(3)
        gateway.drain()
        data = stream.read_rest()
    errors = [event for event in data.split(b"\n\n") if b"event: error" in event]
    assert len(errors) == 1 and not errors[0].startswith(b"id: ")
    with GatewayThread(pool.run_dir) as gateway:
        again = {"idempotency_key": "drained", "last_event_id": stream.last}
        rest = Stream(gateway.url, "/v1/chat/completions", CHAT, **again).read_rest()
        whole = Stream(gateway.url, "/v1/chat/completions", CHAT, idempotency_key="drained")
        assert data.replace(errors[0] + b"\n\n", b"") + rest == whole.read_rest()
