"""Reads stored jobs, over as many connections as needed, and checks every id and end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx

from chaos.kept_truth import Known, Truth
from mlxpool.client import Client, Delta
from mlxpool.common.errors import BadRequest, Gone, PoolError, UnknownJob
from support.pool import PATIENCE

PAUSE = 0.1  # seconds before a retry of a request that was not answered
LATER = (429, 502, 503, 504)  # answers after which a request is sent again
LONG = 10 * PATIENCE  # seconds in which a request is repeated
ALL = 1_000_000  # events; more than any reading has, so it goes on to the end
GONE = (404, 410)
TOO_LONG = "context_length_exceeded"  # code of the only error of a dead job
FIRST_TEXT = 5  # the number of the first event with text
ENDS = ("response.completed", "response.incomplete", "response.failed")


def events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the id and the data of each complete event. Raises httpx.TransportError."""
    lines: dict[str, str] = {}
    for line in response.iter_lines():
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            lines[name] = value
        elif not line and "data" in lines:
            yield lines.get("id", ""), {**json.loads(lines["data"]), "kind": lines.get("event")}
            lines = {}


class HttpReading:
    """Reads the output of one job over HTTP; connects again after each loss, until it is `over`."""

    def __init__(self, http: httpx.Client, truth: Truth, known: Known) -> None:
        self.http, self.truth, self.known = http, truth, known
        self.over = False
        self._left = ALL  # events still to read

    def run(self, stop: int = ALL) -> None:
        """Reads up to `stop` events."""
        self._left = stop
        end = time.monotonic() + LONG
        while not self.over:
            assert time.monotonic() < end, f"{self.known.key}: cannot be read to its end"
            self.truth.check()
            with suppress(httpx.TransportError), self._begin() as response:
                if response.status_code == 200:
                    if self._copy(response) or self._left <= 0:
                        return
                elif response.status_code not in LATER:
                    self.over = True
                    self.refused(response)
            if not self.over:
                time.sleep(PAUSE)

    def _copy(self, response: httpx.Response) -> bool:
        """Checks the events of one connection; returns whether all wanted events were read."""
        for ident, event in events(response):
            self._left -= 1
            if not self._take(ident, event):
                return False
            if self.over or self._left <= 0:
                return True
        if not self._is_behind_end():
            self.truth.error(f"{self.known.key}: a reading ended without an event that says so")
        return True

    def _begin(self) -> Any:
        raise NotImplementedError

    def _is_behind_end(self) -> bool:
        """Returns whether the first wanted event lies after the last event of the answer.

        If so, the gateway sends no end event.
        """
        return False

    def _take(self, ident: str, event: dict[str, Any]) -> bool:
        """Checks one event; returns False if the connection ends with it, but the job continues."""
        raise NotImplementedError

    def refused(self, response: httpx.Response) -> None:
        response.read()
        if response.status_code not in GONE:
            text = f"{response.status_code} {response.text[:300]}"
            self.truth.error(f"{self.known.key}: a reading is answered {text}")
        elif not self.known.released:
            self.truth.error(f"{self.known.key}: is gone, and nobody has released it")


class JobReading(HttpReading):
    """Reads `/v1/jobs/ID/events`.

    Each later connection continues after the last event of the connection before.
    """

    def __init__(self, http: httpx.Client, truth: Truth, known: Known, start: int = 0) -> None:
        super().__init__(http, truth, known)
        self.had = start  # number of ids read, plus the ids before `start`
        self._start = start
        self._last = ""  # the id of the last event with ids

    def _begin(self) -> Any:
        headers = {"last-event-id": self._last} if self._last else {}
        query = {} if self._last else {"from": self.had}
        path = f"/v1/jobs/{self.known.id}/events"
        return self.http.stream("GET", path, params=query, headers=headers)

    def refused(self, response: httpx.Response) -> None:
        if response.status_code == 400 and self._start and not self._last:
            return  # the job has ended with fewer ids than `start`
        super().refused(response)

    def _take(self, ident: str, event: dict[str, Any]) -> bool:
        kind = event["kind"]
        if kind == "delta" and event["ids"]:
            if not self._last:
                self.had = min(self.had, event["pos"])  # the broker rounds `from` down to a step
            self.had = self.truth.ids(self.known, event["pos"], event["ids"], self.had)
            self._last = ident
        elif kind == "interrupted":
            self.over = event["code"] == "bad_request" and self._start > 0 and not self._last
        elif kind != "delta":
            self.over = True
            self._end(event)
        return bool(kind != "interrupted")

    def _end(self, event: dict[str, Any]) -> None:
        kind, code = event["kind"], event.get("code")
        if kind == "done":
            if self._last or not self._start or event["reason"] == "cancelled":
                self.truth.read(self.known, self.had, event["reason"])
        elif kind == "failed" and code in ("deadline_exceeded", TOO_LONG):
            self.truth.told(self.known, "dead" if code == TOO_LONG else "expired")
        else:
            self.truth.error(f"{self.known.key}: ended with {event}")


class ResponseReading(HttpReading):
    """Reads the events of a response that follow event number `after`."""

    def __init__(self, http: httpx.Client, truth: Truth, known: Known, after: int = -1) -> None:
        super().__init__(http, truth, known)
        self._start, self._after = after, after
        self._text = ""

    def _begin(self) -> Any:
        query: dict[str, Any] = {"stream": "true"}
        if self._after >= 0:
            query["starting_after"] = self._after
        return self.http.stream("GET", f"/v1/responses/{self.known.id}", params=query)

    def _is_behind_end(self) -> bool:
        return self._after == self._start > FIRST_TEXT - 2  # the response ended without a text

    def _take(self, ident: str, event: dict[str, Any]) -> bool:
        self._after = self.truth.event(self.known, event, self._after)
        kind = event["type"]
        if kind == "response.output_text.delta":
            self._text += event["delta"]
        elif kind in ENDS:
            self.over = True
            whole = end_of_response(self.truth, self.known, event["response"])
            if self._start < FIRST_TEXT and whole != self._text:
                shown = f"{self._text[-40:]!r}, the end has {whole[-40:]!r}"
                self.truth.error(f"{self.known.key}: its events made {shown}")
        return bool(kind != "error")


def end_of_response(truth: Truth, known: Known, body: dict[str, Any]) -> str:
    """Checks the state and the text of an ended response against `known`; returns the text."""
    status = body["status"]
    truth.count(f"response {status}")
    whole = "".join(part["text"] for item in body["output"] for part in item.get("content", ()))
    reason = (body.get("incomplete_details") or {}).get("reason")
    if status == "cancelled":
        truth.told(known, "cancelled")
        if not known.text.startswith(whole):
            truth.error(f"{known.key}: cancelled with another text")
    elif status == "incomplete" and reason == "max_output_tokens":
        truth.told(known, "done")
        if whole != known.text:
            truth.error(f"{known.key}: ended with another text: {whole[-40:]!r}")
    else:
        truth.error(f"{known.key}: ended as {status}: {body.get('error')}")
    return whole


class NativeReading:
    """Reads a job with the Python client, whose stream continues by itself in the next broker."""

    def __init__(self, client: Client, truth: Truth, known: Known, start: int = 0) -> None:
        self._client, self._truth, self._known = client, truth, known
        self._start = start
        self._had: int | None = None  # number of ids read, plus the ids before `start`

    def run(self, stop: int = ALL) -> None:
        """Reads up to `stop` deltas."""
        end = time.monotonic() + LONG
        while time.monotonic() < end:
            self._truth.check()
            try:
                return self._read(stop)
            except (Gone, UnknownJob) as error:
                if isinstance(error, UnknownJob) or not self._known.released:
                    self._truth.error(f"{self._known.key}: {error.message}")
                return
            except BadRequest:
                if not self._start:
                    raise
                return  # the job has ended with fewer ids than `start`
            except PoolError as error:
                if not error.retryable:
                    raise
                self._truth.count(f"a reading ended: {error.code}")
            time.sleep(PAUSE)
        raise AssertionError(f"{self._known.key} cannot be read to its end")

    def _read(self, stop: int) -> None:
        begin = self._start if self._had is None else self._had
        with self._client.fetch(self._known.key, begin) as stream:
            for delta in stream:
                stop -= 1
                if delta.ids:
                    self._take(delta)
                if stop <= 0:
                    return
            reason = stream.result.reason
            if self._had is not None or not self._start or reason == "cancelled":
                self._truth.read(self._known, self._had or 0, reason)

    def _take(self, delta: Delta) -> None:
        had = min(self._start, delta.pos) if self._had is None else self._had
        again = max(0, had - delta.pos)  # ids read twice, because the broker rounds `from` down
        self._had = self._truth.ids(self._known, delta.pos + again, delta.ids[again:], had)
