"""Rows of `deltas`: what one step adds to one stream. The hot path of worker, broker and client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import ID_BYTES, MAX_BODY, Message
from mlxpool.common.protocol.token_ids import ID_WIDTH


class Delta(NamedTuple):
    """What one step adds to one stream: an entry of `deltas`. A tuple, for there are many.

    `ids` holds the new token ids as bytes (see `token_ids`). `end` is the body of the terminal that
    comes with them; `end["code"]` is set when it is an error.
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


def pack_deltas(deltas: Sequence[Delta]) -> tuple[dict[str, Any], bytes]:
    """Body and blob of a `deltas` message: trailing absent fields of an entry are left out."""
    return {"rows": pack_rows(deltas)}, join_ids(deltas)


def pack_rows(deltas: Iterable[Delta]) -> list[list[Any]]:
    """The entries of a `deltas` message without their ids."""
    return [_pack_row(delta) for delta in deltas]


def join_ids(deltas: Iterable[Delta]) -> bytes:
    """The blob of a `deltas` message: all ids in the order of the rows."""
    return b"".join([delta.ids for delta in deltas])


ROW_BYTES = 512  # an entry without its text, ids, log-probabilities
LOGPROB_BYTES = 96  # one reported token


def size_of_logprobs(logprobs: Iterable[Mapping[str, Any]]) -> int:
    """Bytes that reported tokens take at most."""
    return LOGPROB_BYTES * sum(1 + len(entry.get("top", ())) for entry in logprobs)


def size_of(delta: Delta) -> int:
    """Bytes that a delta takes at most, its text counted as its longest encoding."""
    size = 4 * len(delta.text) + len(delta.ids)
    if delta.logprobs:
        size += size_of_logprobs(delta.logprobs)
    if delta.end:
        size += 4 * len(delta.end.get("text", ""))
    return size


def batches(deltas: Iterable[Delta]) -> Iterator[list[Delta]]:
    """The deltas in groups that each fit one message."""
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


def _pack_row(delta: Delta) -> list[Any]:
    row = [delta.id, delta.attempt, delta.pos, delta.text, len(delta.ids) // 4]
    if delta.logprobs is None and delta.facts is None and delta.end is None:
        return row
    rest = [delta.logprobs, delta.facts, delta.end]
    while rest[-1] is None:
        rest.pop()
    return [*row, *rest]


def unpack_deltas(message: Message) -> list[Delta]:
    """Undo `pack_deltas`. Raises BadRequest for a malformed entry or a blob that does not fit."""
    rows = message.body.get("rows")
    blob = message.blobs[0] if message.blobs else b""
    if not isinstance(rows, list):
        raise BadRequest("deltas: rows must be a list")
    deltas, start = [], 0
    for row in rows:  # the hot path of broker and client: as few calls as can be
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
            raise BadRequest(f"deltas: a row of {count} ids finds only {len(ids) // 4} in the blob")
        if not (
            (logprobs is None or type(logprobs) is list)
            and (facts is None or type(facts) is dict)
            and (end is None or type(end) is dict)
        ):
            raise BadRequest("deltas: logprobs must be a list, facts and end maps")
        start = after
        deltas.append(_tuple(Delta, (request_id, attempt, pos, text, ids, logprobs, facts, end)))
    if start != len(blob):
        raise BadRequest(f"deltas: the rows name {start // 4} ids, the blob has {len(blob) / 4:g}")
    return deltas


_tuple = tuple.__new__  # half the time of Delta's own
