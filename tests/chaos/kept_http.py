"""A client that uses the pool's stored jobs, responses and batches over HTTP.

Meanwhile processes die.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx

from chaos.kept_readings import (
    ALL,
    LATER,
    LONG,
    PAUSE,
    JobReading,
    ResponseReading,
    end_of_response,
    events,
)
from chaos.kept_truth import SEED, Known, Truth, count_of, ids_of
from support.counting_checker import text_of
from support.pool import PATIENCE

SHORT_DEADLINE = 60  # milliseconds: such a job ends expired, or done
COMPLETIONS = "/v1/completions"
TOO_OFTEN = 20  # repetitions of a key that exceed the context of the model `small`


class HttpOwner:
    """A thread that uses the HTTP API for one owner; each `act` performs one random action.

    The keys of all its jobs, responses and batches begin with `name`.
    """

    def __init__(
        self, owner: str, name: str, url: str, bearer: str, truth: Truth, seed: int, lines: int
    ) -> None:
        """`lines`: the number of lines of a batch."""
        self.owner, self.name = owner, name
        self.truth, self.lines = truth, lines
        self.random = random.Random(f"{seed} {name}")
        self.http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {bearer}"}, timeout=PATIENCE
        )
        self.mine: list[Known] = []  # jobs of this thread, which no other thread looks up
        self.batches: dict[str, bool] = {}  # id -> whether it was cancelled
        self.number = 0
        self._first = [self.respond, self.submit, self.batch]
        self._actions: dict[Callable[[], None], int] = {
            self.submit: 30,
            self.respond: 15,
            self.read: 25,
            self.look: 10,
            self.cancel: 6,
            self.retry: 6,
            self.release: 6,
            self.batch: 2,
            self.cancel_batch: 2,
            self.list_jobs: 2,
        }

    def act(self) -> None:
        """Does one random action; the first calls submit one batch, one job and one response."""
        if self._first:
            return self._first.pop()()
        actions, weights = [*self._actions], [*self._actions.values()]
        self.random.choices(actions, weights)[0]()

    def close(self) -> None:
        self.http.close()

    # ---- requests --------------------------------------------------------------------------------

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Sends a request until it is answered."""
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            self.truth.check()
            with suppress(httpx.TransportError):
                response = self.http.request(method, path, **more)
                if response.status_code not in LATER:
                    return response
                self.truth.count(f"answered {response.status_code}")
            time.sleep(PAUSE)
        raise AssertionError(f"{method} {path} was not answered in {LONG:.0f} s")

    def fine(self, method: str, path: str, **more: Any) -> Any:
        """Returns the answer to a request that must be accepted."""
        response = self.call(method, path, **more)
        assert response.status_code == 200, f"{method} {path}: {response.text[:500]}"
        return response.json()

    def _key(self) -> str:
        self.number += 1
        return f"{self.name}-{self.number}"

    def _one(self, last: int = 60, *, live: bool = True) -> Known | None:
        """Returns a random job among the last `last` jobs of this thread; None if there is no job.

        With `live` only jobs that are not released are considered.
        """
        jobs = [job for job in self.mine if not (live and job.released)][-last:]
        return self.random.choice(jobs) if jobs else None

    # ---- submissions -----------------------------------------------------------------------------

    def submit(self) -> None:
        """Submits a job; sometimes twice.

        Some jobs expire or cannot succeed.
        """
        key, chance = self._key(), self.random.random()
        count, model, fates = count_of(key), "m", frozenset({"done"})
        more: dict[str, Any] = {}
        if chance < 0.15:
            more, fates = {"deadline_ms": SHORT_DEADLINE}, frozenset({"done", "expired"})
        elif chance < 0.2:
            model, fates = "small", frozenset({"dead"})
        options = {"max_tokens": count, "seed": SEED}
        prompt = key if model == "m" else key * TOO_OFTEN
        body = {"model": model, "prompt": prompt, "key": key, "options": options, **more}
        if self.random.random() < 0.3:
            del body["key"]
            sent: dict[str, Any] = {"json": body, "headers": {"idempotency-key": key}}
        else:
            sent = {"json": body}
        for _ in range(2 if self.random.random() < 0.3 else 1):
            row = self.fine("POST", "/v1/jobs", **sent)
            known = self.truth.accepted(Known(self.owner, key, row["id"], fates=fates))
            self.truth.row(known, row)
        self.mine.append(known)

    def respond(self) -> None:
        """Makes a response in the background.

        Its id is derived from its idempotency key, so a repeated request gets the same response.
        """
        key = self._key()
        body = {
            "model": "m", "input": key, "max_output_tokens": count_of(key), "seed": SEED,
            "background": True,
        }  # fmt: skip
        headers = {"idempotency-key": key}
        if self.random.random() < 0.4:
            with (
                suppress(httpx.TransportError),
                self.http.stream(
                    "POST", "/v1/responses", json={**body, "stream": True}, headers=headers
                ) as response,
            ):
                if response.status_code == 200:
                    next(events(response), None)  # this connection ends too
        answer = self.fine("POST", "/v1/responses", json=body, headers=headers)
        known = Known(self.owner, key, answer["id"], "response")
        self.mine.append(self.truth.accepted(known))

    # ---- readings --------------------------------------------------------------------------------

    def read(self) -> None:
        """Reads a job from a random id on: some events, or all events up to the end."""
        known = self._one()
        if known is None:
            return
        stop = self.random.choice((1, 3, 10, ALL))
        if known.kind == "response":
            self.read_response(known, self.random.choice((-1, 0, 2, 5)), stop)
        else:
            self.read_job(known, self.random.choice((0, 0, 1, count_of(known.key) // 2)), stop)

    def read_job(self, known: Known, start: int = 0, stop: int = ALL) -> int:
        """Reads up to `stop` events of a job, from the id at position `start` on.

        Returns the position after the last id that was read.
        """
        reading = JobReading(self.http, self.truth, known, start)
        reading.run(stop)
        return reading.had

    def read_response(self, known: Known, after: int = -1, stop: int = ALL) -> None:
        """Reads up to `stop` events of a response that follow event number `after`."""
        ResponseReading(self.http, self.truth, known, after).run(stop)

    def _gone(self, known: Known) -> None:
        if not known.released:
            self.truth.error(f"{known.key}: is gone, and nobody has released it")

    def look(self) -> None:
        """Looks up a random job or response, and checks what the gateway returns."""
        known = self._one(live=False)
        if known is None:
            return
        if known.kind == "job":
            response = self.call("GET", f"/v1/jobs/{known.id}")
            if response.status_code == 404:
                self.truth.error(f"{known.key}: is not known any more")
            else:
                self.truth.row(known, response.json())
            return
        response = self.call("GET", f"/v1/responses/{known.id}")
        if response.status_code == 404:
            self._gone(known)
        elif response.json()["status"] not in ("queued", "in_progress"):
            end_of_response(self.truth, known, response.json())

    # ---- changes ---------------------------------------------------------------------------------

    def cancel(self) -> None:
        known = self._one(3)
        if known is None:
            return
        known.fates |= {"cancelled"}
        if known.kind == "response":
            response = self.call("POST", f"/v1/responses/{known.id}/cancel")
            if response.status_code == 200:
                end_of_response(self.truth, known, response.json())
            else:
                self._gone(known)
        else:
            response = self.call("POST", f"/v1/jobs/{known.id}/cancel")
            self.truth.row(known, response.json())
            if response.json()["state"] not in ("done", "cancelled", "dead", "expired", "gone"):
                self.truth.error(f"{known.key}: cancelled, and is {response.json()['state']}")

    def retry(self) -> None:
        """Retries an expired job, which then has no deadline."""
        jobs = [job for job in self.mine if job.state in ("expired", "dead")]
        if not jobs:
            return
        known = self.random.choice(jobs)
        known.retried += 1
        known.state = ""
        response = self.call("POST", f"/v1/jobs/{known.id}/retry")
        if response.status_code == 200:
            self.truth.count("retried")
        elif response.status_code not in (400, 410):
            self.truth.error(f"{known.key}: retry: {response.status_code} {response.text[:200]}")

    def release(self) -> None:
        known = self._one()
        if known is None:
            return
        if known.kind == "response":
            known.fates |= {"cancelled"}
            known.released = True  # counts as deleted even if the answer is lost
            response = self.call("DELETE", f"/v1/responses/{known.id}")
            if response.status_code not in (200, 404):
                self.truth.error(f"{known.key}: delete: {response.text[:200]}")
            return
        if known.state:
            response = self.call("POST", f"/v1/jobs/{known.id}/release")
            if response.status_code == 200:
                self.truth.row(known, response.json())
            elif not known.retried:  # a retried job may run
                self.truth.error(f"{known.key}: release: {response.text[:200]}")

    # ---- other owners' jobs ----------------------------------------------------------------------

    def list_jobs(self) -> None:
        """Checks that lists have only this owner's jobs, and that others' jobs are unknown."""
        for row in self.fine("GET", "/v1/jobs", params={"limit": 50})["data"]:
            if not row["key"].startswith((self.owner, "resp_")):
                self.truth.error(f"{self.owner} sees {row['key']}")
        for other in self.truth.jobs.copy().values():
            if other.id and other.owner != self.owner and self.random.random() < 0.02:
                self._foreign(other)
                return

    def _foreign(self, other: Known) -> None:
        if other.kind == "response":
            paths = [("GET", f"/v1/responses/{other.id}"), ("DELETE", f"/v1/responses/{other.id}")]
        else:
            paths = [
                ("GET", f"/v1/jobs/{other.id}"),
                ("GET", f"/v1/jobs/{other.id}/events"),
                ("POST", f"/v1/jobs/{other.id}/cancel"),
                ("POST", f"/v1/jobs/{other.id}/release"),
            ]
        for method, path in paths:
            response = self.call(method, path)
            self.truth.count("foreign")
            if response.status_code != 404:
                self.truth.error(f"{self.owner}: {method} {path}: {response.status_code}")

    # ---- batches ---------------------------------------------------------------------------------

    def batch(self) -> None:
        """Makes a file and a batch of its lines, one of which cannot succeed."""
        name = self._key()
        data = "\n".join(
            json.dumps(self._line(name, number)) for number in range(self.lines)
        ).encode()
        file = self.fine(
            "POST", "/v1/files", data={"purpose": "batch"}, files={"file": (name, data)}
        )
        body = {
            "input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "7d",
            "metadata": {"name": name},
        }  # fmt: skip
        ids = set()
        for _ in range(self.random.choice((1, 2))):
            headers = {"idempotency-key": name}
            ids.add(self.fine("POST", "/v1/batches", json=body, headers=headers)["id"])
        if len(ids) > 1:
            self.truth.error(f"{name}: one key, the batches {sorted(ids)}")
        self.batches[ids.pop()] = False
        self.truth.count("batches")

    def cancel_batch(self) -> None:
        if self.batches:
            id = [*self.batches][-1]
            status = self.fine("POST", f"/v1/batches/{id}/cancel")["status"]
            self.batches[id] |= status in ("cancelling", "cancelled")
            self.truth.count("batches cancelled", int(self.batches[id]))

    def check_batch(self, id: str) -> None:
        """Waits for the end of a batch; checks its counts, and that each line has one result."""
        end = time.monotonic() + LONG
        while (batch := self.fine("GET", f"/v1/batches/{id}"))["status"] not in (
            "completed", "failed", "expired", "cancelled",
        ):  # fmt: skip
            assert time.monotonic() < end, f"the batch {id} does not end: {batch}"
            time.sleep(PAUSE)
        counts, name = batch["request_counts"], batch["metadata"]["name"]
        good, bad = (self._results(batch[f"{kind}_file_id"]) for kind in ("output", "error"))
        labels = [line["custom_id"] for line in (*good, *bad)]
        wanted = [f"{name}/{number}" for number in range(self.lines)]
        reported = (counts["completed"], counts["failed"])
        if reported != (len(good), len(bad)) or len(set(labels)) != len(labels):
            self.truth.error(f"{name}: counts {counts}, has {len(good)} and {len(bad)} lines")
        if self.batches[id] != (batch["status"] == "cancelled"):
            self.truth.error(f"{name}: was cancelled: {self.batches[id]}, is {batch['status']}")
        if batch["status"] == "completed" and sorted(labels) != sorted(wanted):
            self.truth.error(f"{name}: the lines {sorted(set(wanted) ^ set(labels))} are not there")
        for line in good:
            key = line["custom_id"]
            text = line["response"]["body"]["choices"][0]["text"]
            if key not in wanted or text != text_of(ids_of(key, count_of(key))):
                self.truth.error(f"{key}: another answer: {text[-40:]!r}")
        for line in bad:
            if batch["status"] == "completed" and line["custom_id"] != wanted[-1]:
                self.truth.error(f"{line['custom_id']}: failed: {line}")
        self.truth.count(f"batch {batch['status']}")

    def _results(self, file: str | None) -> list[dict[str, Any]]:
        if file is None:
            return []
        text = self.call("GET", f"/v1/files/{file}/content").text
        return [json.loads(line) for line in text.splitlines()]

    def _line(self, name: str, number: int) -> dict[str, Any]:
        """Returns a line of a batch; the last one is too long for its model."""
        key = f"{name}/{number}"
        bad = number == self.lines - 1
        model, prompt = ("small", key * TOO_OFTEN) if bad else ("m", key)
        body = {"model": model, "prompt": prompt, "max_tokens": count_of(key), "seed": SEED}
        return {"custom_id": key, "method": "POST", "url": COMPLETIONS, "body": body}
