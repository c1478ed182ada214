"""The message `deltas`: the new tokens of several streams, and the ends of streams.

Each entry (a row) has the tokens that one step added to one stream. The last row of a stream has
its end. This is the hot path of worker, broker and client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from msgspec import Struct, field

from mlxpool.common.checks import mapping, optional_flag
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import ID_BYTES, MAX_BODY, Content, Message
from mlxpool.common.protocol.token_ids import ID_WIDTH


class Delta(NamedTuple):
    """The tokens that one step adds to one stream: a row of `deltas`.

    It is a tuple, because tuples are fast. In messages to a client, `attempt` counts how often the
    client has sent the request; in messages of a worker it is the number of the run. `ids` has the
    new token ids as bytes (see `token_ids`). `end` is the body of the stream's end; it has the key
    "code" if it is an error.
    """

    id: bytes
    attempt: int
    pos: int
    text: str
    ids: bytes
    logprobs: list[Any] | None = None
    facts: dict[str, Any] | None = None
    end: dict[str, Any] | None = None

    @property
    def n(self) -> int:
        """Number of ids."""
        return len(self.ids) // ID_WIDTH


Fields = tuple[
    bytes, int, int, str, bytes, list[Any] | None, dict[str, Any] | None, dict[str, Any] | None
]
# Makes a delta from its fields in half the time of Delta(...).
new_delta: Callable[[Fields], Delta] = partial(tuple.__new__, Delta)

ROW_BYTES = 512  # bound of the bytes of a row without its text, ids and log-probabilities
LOGPROB_BYTES = 96  # bound of the bytes of one reported token
PROMPT_KEY = "prompt"  # key in the entry of a prompt token: the token's number in the prompt


def size_of_logprobs(logprobs: Iterable[Mapping[str, Any]]) -> int:
    """Returns an upper bound of the encoded bytes of these log-probabilities of tokens."""
    return LOGPROB_BYTES * sum(1 + len(entry.get("top", ())) for entry in logprobs)


def size_of(delta: Delta) -> int:
    """Returns an upper bound of the bytes of a delta, with the longest encoding of its text."""
    size = 4 * len(delta.text) + len(delta.ids)
    if delta.logprobs:
        size += size_of_logprobs(delta.logprobs)
    if delta.end:
        size += 4 * len(delta.end.get("text", ""))
    return size


def count_of_report(delta: Delta) -> int:
    """Returns the number of prompt tokens that a delta reports.

    A delta reports prompt tokens if it has log-probabilities but no ids.
    """
    return 0 if delta.ids or not delta.logprobs else len(delta.logprobs)


def report_begin(delta: Delta) -> int:
    """Returns the position in the prompt of the first prompt token that a delta reports.

    Returns -1 if the delta reports no prompt token.
    """
    entry = delta.logprobs[0] if delta.logprobs else None
    number = entry.get(PROMPT_KEY) if isinstance(entry, Mapping) else None
    return number if type(number) is int else -1


def batches(deltas: Iterable[Delta]) -> Iterator[list[Delta]]:
    """Yields the deltas in groups, each of which fits into one message."""
    group: list[Delta] = []
    size = 0
    for delta in deltas:
        more = ROW_BYTES + size_of(delta)
        if group and size + more > MAX_BODY:
            yield group
            group, size = [], 0
        group.append(delta)
        size += more
    if group:
        yield group


def _pack_rows(deltas: Iterable[Delta]) -> list[list[Any]]:
    """Returns the rows as lists for msgpack. A row has the number of its ids instead of the ids.

    Fields that are None at the end of a row are left out.
    """
    rows: list[list[Any]] = []
    for id, attempt, pos, text, ids, logprobs, facts, end in deltas:
        row = [id, attempt, pos, text, len(ids) // ID_WIDTH]
        if end is not None:
            row += logprobs, facts, end
        elif facts is not None:
            row += logprobs, facts
        elif logprobs is not None:
            row.append(logprobs)
        rows.append(row)
    return rows


def unpack_deltas(message: Message) -> list[Delta]:
    """Returns the rows of a `deltas` message.

    Raises BadRequest if a row is malformed, or if the blob does not fit the rows.
    """
    rows = message.body.get("rows")
    blob = message.blobs[0] if message.blobs else b""
    if not isinstance(rows, list):
        raise BadRequest("deltas: rows must be a list")
    deltas, start = [], 0
    for row in rows:  # the hot path of broker and client: as few calls as possible
        if type(row) is not list or not 5 <= len(row) <= 8:
            raise BadRequest("deltas: a row has 5 to 8 fields")
        if len(row) < 8:
            row = (*row, None, None, None)[:8]
        request_id, attempt, pos, text, count, logprobs, facts, end = row
        if not (
            type(request_id) is bytes
            and len(request_id) == ID_BYTES
            and type(text) is str
            and type(attempt) is type(pos) is type(count) is int
            and attempt >= 0
            and pos >= 0
            and count >= 0
        ):
            raise BadRequest(
                "deltas: a row is [id, attempt, pos, text, n, logprobs?, facts?, end?]"
            )
        after = start + 4 * count
        ids = blob[start:after]
        if len(ids) != after - start:
            raise BadRequest(f"deltas: the blob has only {len(ids) // 4} ids for a row of {count}")
        if not (
            (logprobs is None or type(logprobs) is list)
            and (facts is None or type(facts) is dict)
            and (end is None or type(end) is dict)
        ):
            raise BadRequest("deltas: logprobs must be a list, facts and end maps")
        start = after
        deltas.append(new_delta((request_id, attempt, pos, text, ids, logprobs, facts, end)))
    if start != len(blob):
        raise BadRequest(f"deltas: the rows name {start // 4} ids, the blob has {len(blob) / 4:g}")
    return deltas


class Deltas(Content, Struct, frozen=True):
    """The tokens of one or more steps, with one row for each stream that got tokens.

    A worker sends it to the broker, for runs. The broker sends it to a client, for streams with the
    option `batch`.
    """

    kind: ClassVar[str] = "deltas"
    rows: Sequence[Delta]

    def body(self) -> dict[str, Any]:
        return {"rows": _pack_rows(self.rows)}

    def blobs(self) -> tuple[bytes, ...]:
        """Returns the token ids of all rows, in the order of the rows, as one blob."""
        return (b"".join([delta.ids for delta in self.rows]),)


# ---- the end of a run ----------------------------------------------------------------------------


class Usage(Struct, frozen=True):
    """Counts of tokens of the whole completion, including the ids from before a resume."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """The number of tokens of prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }


class RunEnd(Struct, frozen=True):
    """The end of a worker's run of a request, sent in the request's last row of `deltas`.

    The broker forwards `usage` and `timings_ms` unchanged. `complete` is True if the answer
    satisfies its `format`; None if it has no format.
    """

    reason: str
    text: str = ""  # text that was not sent yet; "" after a stop string
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings_ms: Mapping[str, Any] = field(default_factory=dict)
    complete: bool | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"text": self.text, "reason": self.reason, "usage": self.usage}
        body |= {} if self.complete is None else {"complete": self.complete}
        return {**body, "timings_ms": self.timings_ms} if self.timings_ms else body

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> RunEnd:
        """Reads a body. An absent reason counts as `stop`, a map of a wrong type as empty."""
        return cls(
            body.get("reason", "stop"),
            body.get("text", ""),
            mapping(body.get("usage")),
            mapping(body.get("timings_ms")),
            optional_flag(body.get("complete")),
        )
