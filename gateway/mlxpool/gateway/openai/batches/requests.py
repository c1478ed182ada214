"""Requests to make a batch, checked, and the lines of its file. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from mlxpool.common.options import MAX_DEADLINE_MS
from mlxpool.common.protocol.kept.job_messages import Notify
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.openai.batches.bodies import MAX_FAULTS, BatchRequest
from mlxpool.gateway.openai.batches.fields import BATCH, ENDPOINTS, MAX_LINES, WINDOW
from mlxpool.gateway.openai.batches.lines import LineFault, fault_of, parsed_line, pool_line
from mlxpool.gateway.openai.batches.upload import expiry
from mlxpool.gateway.openai.responses_api.requests import metadata_of

HOURS = {"h": 1, "d": 24}


class NewBatch(Struct, frozen=True):
    """A checked request for a batch. `seconds`: the completion window.

    `keep`: seconds that the results are kept; None means the time in the pool's settings.
    """

    file: str
    endpoint: str
    window: str
    seconds: int
    metadata: Mapping[str, str]
    keep: float | None
    notify: Notify | None

    @property
    def digest(self) -> bytes:
        """The SHA-256 digest of input file, endpoint, window and metadata, to compare requests."""
        meaning = [self.file, self.endpoint, self.window, dict(self.metadata)]
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).digest()

    def is_of(self, request: BatchRequest) -> bool:
        """Whether a batch was made by an equal request."""
        mine = (self.file, self.endpoint, self.window, dict(self.metadata))
        return mine == (request.input, request.endpoint, request.window, dict(request.metadata))


def new_batch(body: Mapping[str, Any]) -> NewBatch:
    """Checks the body of POST /v1/batches. Raises HttpError naming the field."""
    body = BATCH.check(body)
    endpoint = fields.text(body, "endpoint")
    if endpoint not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        message = f"'endpoint' is {endpoint!r:.60}; batches are for {known}"
        raise bad_request(message, "endpoint", "unsupported_parameter")
    window = fields.text(body, "completion_window")
    if not re.fullmatch(WINDOW, window):
        message = f"'completion_window' is {window!r:.60}, must be hours or days, as 24h or 7d"
        raise bad_request(message, "completion_window")
    seconds = int(window[:-1]) * HOURS[window[-1]] * 3600
    if seconds > MAX_DEADLINE_MS // 1000:
        hours = MAX_DEADLINE_MS // 3_600_000
        message = f"'completion_window' is {window!r}, at most {hours}h are supported"
        raise bad_request(message, "completion_window")
    keep = expiry(body, "output_expires_after")
    file = fields.text(body, "input_file_id")
    metadata = metadata_of(body)
    return NewBatch(file, endpoint, window, seconds, metadata, keep, _notify(body))


def _notify(body: Mapping[str, Any]) -> Notify | None:
    if body.get("notify") is None:
        return None
    notify: Notify = fields.checked("notify", Notify.parse, {"url": fields.text(body, "notify")})
    return notify


class LineReader(Struct, eq=False):
    """Converts the lines of an input file into the pool's lines until a line has a fault."""

    endpoint: str
    total: int = 0  # number of lines that are not empty
    empty: int = 0
    faults: list[LineFault] = field(default_factory=list)
    _number: int = 0  # number of the last line, from 1
    _labels: set[str] = field(default_factory=set)

    def parse(self, lines: Sequence[bytes]) -> list[tuple[int, dict[str, Any]]]:
        """Returns the next lines as JSON, with their numbers."""
        parsed: list[tuple[int, dict[str, Any]]] = []
        for data in lines:
            self._number += 1
            empty = not data.strip()
            self.total += not empty
            self.empty += empty
            if max(self.total, self.empty) > MAX_LINES:
                kind = "lines: divide it" if self.total > MAX_LINES else "empty lines: delete them"
                message = f"the file has more than {MAX_LINES} {kind}"
                self._fault(LineFault(self._number, "too_many_lines", message))
                return parsed
            if empty:
                continue
            try:
                line = parsed_line(data, self.endpoint)
                self._check_label(line["custom_id"])
            except HttpError as error:
                self._fault(fault_of(self._number, error))
            else:
                parsed.append((self._number, line))
        return parsed

    def _check_label(self, label: str) -> None:
        if label in self._labels:
            message = f"custom_id is {label!r:.80}, which an earlier line has"
            raise bad_request(message, "custom_id", "duplicate_custom_id")
        self._labels.add(label)

    def pool_lines(
        self,
        parsed: Sequence[tuple[int, Mapping[str, Any]]],
        model_of: Callable[[str], ModelInfo | HttpError],
    ) -> bytes:
        """Returns the lines in the pool's form, or b"" after a fault of any line so far.

        `model_of`: finds a model by its name.
        """
        converted = []
        for number, line in parsed:
            model = model_of(line["body"]["model"])
            try:
                if isinstance(model, HttpError):
                    raise model
                converted.append(pool_line(line, self.endpoint, model))
            except HttpError as error:
                self._fault(fault_of(number, error))
        return b"" if self.faults else b"".join(converted)

    def _fault(self, fault: LineFault) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(fault)

    @property
    def given_up(self) -> bool:
        """Whether reading stops: too many lines have faults, or the file has too many lines."""
        return len(self.faults) >= MAX_FAULTS or max(self.total, self.empty) > MAX_LINES
