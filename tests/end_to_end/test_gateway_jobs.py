"""The pool's own jobs over HTTP: any number of readers, late readers, and readers that return."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.http_owners import ALICE, BOB, http_client, keys_file
from support.openapi_answers import faults, unknown_members
from support.pool import PATIENCE, Pool, until

CONFIG = """
[pool]
restart_delay = 0.05
[models.m]
path = "builtin:counting"
counting.step_us = 5000
[models.stuck]
path = "builtin:counting"
counting.step_us = 60000000
[models.bad]
path = "builtin:counting"
counting.fault = "segfault"
"""
KEEPS_JOBS = True


def submit(http: httpx.Client, key: str, count: int, model: str = "m", **more: Any) -> Any:
    options = {"max_tokens": count, "seed": 7}
    body = {"model": model, "prompt": key, "key": key, "options": options, **more}
    return http.post("/v1/jobs", json=body).raise_for_status().json()


class Event:
    """A server-sent event."""

    def __init__(self, lines: list[str]) -> None:
        self.fields = dict(line.split(": ", 1) for line in lines)
        self.data = json.loads(self.fields["data"])

    @property
    def kind(self) -> str:
        return self.fields["event"]

    @property
    def id(self) -> str:
        return self.fields["id"]


@contextmanager
def reading(http: httpx.Client, id: str, last: str = "", **query: Any) -> Iterator[Iterator[Event]]:
    """Reads the events of a job; the connection ends with the context."""
    headers = {"last-event-id": last} if last else {}

    def events(answer: httpx.Response) -> Iterator[Event]:
        lines: list[str] = []
        for line in answer.iter_lines():
            if line.startswith(":"):
                continue
            if line:
                lines.append(line)
            elif lines:
                yield Event(lines)
                lines = []

    path = f"/v1/jobs/{id}/events"
    with http.stream("GET", path, params=query, headers=headers) as answer:
        answer.raise_for_status()
        yield events(answer)


def ids_of(events: list[Event]) -> list[int]:
    """Returns the ids of the events, and asserts that there is no gap between them."""
    ids: list[int] = []
    start = -1
    for event in events:
        if event.kind == "delta" and event.data["ids"]:
            start = event.data["pos"] if start < 0 else start
            assert event.data["pos"] == start + len(ids)
            ids += event.data["ids"]
    return ids


def test_submitted_listed_read_and_released(http: httpx.Client) -> None:
    job = submit(http, "tale", 20, keep=600)
    assert not faults(job, "Job")
    assert not [*unknown_members(job, {"$ref": "#/components/schemas/Job"})]
    with reading(http, "tale") as events:
        received = list(events)
    assert ids_of(received) == expected_ids("tale", 7, 20)
    assert "".join(e.data.get("text", "") for e in received) == text_of(expected_ids("tale", 7, 20))
    assert (received[-1].kind, received[-1].data["reason"]) == ("done", "length")
    by_id = http.get(f"/v1/jobs/{job['id']}").json()
    assert (by_id["key"], by_id["state"], by_id["ids"]) == ("tale", "done", 20)
    assert by_id == http.get("/v1/jobs/tale").json()
    listed = http.get("/v1/jobs", params={"state": "done"}).json()
    assert not faults(listed, "JobList") and "tale" in [row["key"] for row in listed["data"]]
    after = http.get("/v1/jobs", params={"after": by_id["end_seq"] - 1, "limit": 1}).json()
    assert after["data"][0]["key"] == "tale" and after["next"] == by_id["end_seq"]
    assert http.post("/v1/jobs/tale/release").json()["state"] == "gone"
    assert http.get("/v1/jobs/tale/events").status_code == 410


def test_many_readers_and_late_ones(http: httpx.Client) -> None:
    submit(http, "many", 150)
    received: list[list[int]] = []

    def read() -> None:
        with reading(http, "many") as events:
            received.append(ids_of(list(events)))

    threads = [threading.Thread(target=read) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    read()  # reads after the job's end
    assert received == [expected_ids("many", 7, 150)] * 13


def test_a_reader_comes_again_from_each_event(http: httpx.Client) -> None:
    submit(http, "again", 60)
    head = http.head("/v1/jobs/again/events")
    assert head.headers["content-type"].startswith("text/event-stream") and not head.content
    with reading(http, "again") as events:
        whole = list(events)
    wanted = expected_ids("again", 7, 60)
    # A late reader gets all ids in one event, then the end.
    for number in {0, (len(whole) - 1) // 2, len(whole) - 2}:
        with reading(http, "again", whole[number].id) as events:
            rest = list(events)
        assert ids_of(rest) == wanted[len(ids_of(whole[: number + 1])) :]
        assert rest[-1].kind == "done"
    path = "/v1/jobs/again/events"
    over = http.get(path, headers={"last-event-id": whole[-1].id})
    assert (over.status_code, over.content) == (204, b"")
    with reading(http, "again", "3.17") as events:  # an event of a generation that no longer exists
        again = list(events)
    assert (again[0].kind, again[0].data) == ("restarted", {"gen": 0})
    assert ids_of(again) == wanted
    query: Any = {"from": 50}
    with reading(http, "again", **query) as events:
        late = ids_of(list(events))
    assert len(late) >= 10 and late == wanted[-len(late) :]


def test_cancelled_and_dead_jobs_say_so(http: httpx.Client) -> None:
    submit(http, "stop", 5, model="stuck")
    assert http.post("/v1/jobs/stop/cancel").json()["state"] == "cancelled"
    assert http.post("/v1/jobs/stop/cancel").json()["state"] == "cancelled"
    with reading(http, "stop") as events:
        (last,) = events
    assert (last.kind, last.data["reason"]) == ("done", "cancelled")
    submit(http, "late", 5, model="stuck", deadline_ms=300)
    with reading(http, "late") as events:
        (last,) = events
    assert (last.kind, last.data["code"]) == ("failed", "deadline_exceeded")
    over = http.get("/v1/jobs/late/events", headers={"last-event-id": last.id})
    assert over.status_code == 204
    assert http.post("/v1/jobs/late/retry").json()["state"] in ("waiting", "running")
    with reading(http, "late", last.id) as events:
        http.post("/v1/jobs/late/cancel")
        (last,) = events
    assert (last.kind, last.data["reason"]) == ("done", "cancelled")
    over = http.get("/v1/jobs/late/events", headers={"last-event-id": last.id})
    assert over.status_code == 204


def test_a_reader_of_a_failed_job_comes_again_after_a_retry(http: httpx.Client) -> None:
    submit(http, "cut", 600, deadline_ms=1000)
    with reading(http, "cut") as events:
        first = list(events)
    assert (first[-1].kind, first[-1].data["code"]) == ("failed", "deadline_exceeded")
    http.post("/v1/jobs/cut/retry").raise_for_status()
    until(lambda: http.get("/v1/jobs/cut").json()["state"] == "done", "it is done")
    with reading(http, "cut", first[-1].id) as events:
        rest = list(events)
    assert ids_of([*first, *rest]) == expected_ids("cut", 7, 600)
    assert rest[-1].kind == "done"


def test_a_job_that_fails_twice_at_one_place_has_two_errors(http: httpx.Client) -> None:
    submit(http, "twice", 5, model="bad")
    received: list[Event] = []
    for number in range(2):
        with reading(http, "twice", received[-1].id if received else "") as events:
            received += list(events)
        assert len(received) == number + 1
        over = http.get("/v1/jobs/twice/events", headers={"last-event-id": received[-1].id})
        assert over.status_code == 204
        if number == 0:
            http.post("/v1/jobs/twice/retry").raise_for_status()
    assert [(event.kind, event.id) for event in received] == [
        ("failed", "0.0.failed"),
        ("failed", "0.0.failed.2"),
    ]
    assert http.get("/v1/jobs/twice").json()["retried"] == [[0, 1]]


def test_sent_twice_it_is_one_job(http: httpx.Client) -> None:
    body = {"model": "m", "prompt": "x", "options": {"max_tokens": 2, "seed": 1}}
    headers = {"idempotency-key": "order/7"}
    first, second = (http.post("/v1/jobs", json=body, headers=headers).json() for _ in range(2))
    assert first["id"] == second["id"] and first["key"] == "order/7"
    other = http.post("/v1/jobs", json={**body, "prompt": "y"}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "duplicate_id")


def test_the_place_of_an_option_is_named(http: httpx.Client) -> None:
    answer = http.post("/v1/jobs", json={"model": "m", "prompt": "x", "max_tokens": 3})
    assert answer.status_code == 400
    assert "did you mean 'options.max_tokens'?" in answer.json()["error"]["message"]


def test_unknown_jobs_and_queries(http: httpx.Client) -> None:
    for path in ("", "/events"):
        answer = http.get(f"/v1/jobs/nobody{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_job")
    for query in ("state=lost", "after=-1", "limit=0", "bogus=1", "after=1&state=done"):
        assert http.get(f"/v1/jobs?{query}").status_code == 400, query
    assert http.get("/v1/jobs/x/events", headers={"last-event-id": "x"}).status_code in (400, 404)


def test_keys_are_owners(pool: Pool, tmp_path: Path) -> None:
    keys = keys_file(tmp_path)
    with (
        GatewayThread(pool.run_dir, keys=keys) as gateway,
        http_client(gateway.url, ALICE) as alice,
        http_client(gateway.url, BOB) as bob,
    ):
        job = submit(alice, "own", 3)
        # The same key of another owner is another job.
        other = submit(bob, "own", 5)
        assert job["id"] != other["id"]
        for path in ("", "/events"):
            assert bob.get(f"/v1/jobs/{job['id']}{path}").status_code == 404
        for verb in ("cancel", "retry", "release"):
            assert bob.post(f"/v1/jobs/{job['id']}/{verb}").status_code == 404
        assert [row["id"] for row in alice.get("/v1/jobs").json()["data"]] == [job["id"]]
        until(lambda: alice.get("/v1/jobs/own").json()["state"] == "done", "it is done")


def test_readers_outlive_broker_worker_and_gateway(tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path / "jobs"))
    with Pool(tmp_path, CONFIG, arguments=flags) as pool:
        with GatewayThread(pool.run_dir) as gateway, http_client(gateway.url) as http:
            submit(http, "kill", 300)
            with reading(http, "kill") as events:
                received = list(islice(events, 2))
                pool.kill()
                pool.start()
                received += islice(events, 2)
        with pool.client() as client:
            pool.kill_worker("m/0", over=lambda: client.job("kill")["state"] == "done")
        with (
            GatewayThread(pool.run_dir) as gateway,
            http_client(gateway.url) as http,
            reading(http, "kill", received[-1].id) as events,
        ):
            received += list(events)
        assert ids_of(received) == expected_ids("kill", 7, 300)
        assert received[-1].kind == "done"
