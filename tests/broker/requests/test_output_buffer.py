"""Output that waits for a client: merged up to a bound, never split."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker.requests.request import MAX_CHUNK, append_output
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.to_client import StreamDelta
from mlxpool.common.protocol.token_ids import pack_ids, unpack_ids


def delta(pos: int, count: int = 1, text: str = "x", **parts: Any) -> Delta:
    return Delta(bytes(16), 1, pos, text, pack_ids(range(pos, pos + count)), **parts)


def add(chunks: deque[StreamDelta], step: Delta) -> int:
    return append_output(chunks, step.pos, step.text, step.ids, step.logprobs, step.facts)


def test_small_steps_merge() -> None:
    chunks: deque[StreamDelta] = deque()
    sizes = [add(chunks, delta(n, text=f"<{n}>")) for n in range(3)]
    (chunk,) = chunks
    assert (chunk.pos, "".join(chunk.texts), chunk.count) == (0, "<0><1><2>", 3)
    assert chunk.size == sum(sizes)
    assert chunk.body() == {"text": "<0><1><2>", "n": 3}


def test_facts_and_logprobs_are_kept() -> None:
    chunks: deque[StreamDelta] = deque()
    add(chunks, delta(0, facts={"now": 1}, logprobs=[{"logprob": -1.0, "top": [1, 2]}]))
    add(chunks, delta(1, logprobs=[{"logprob": -2.0}]))
    body = chunks[0].body()
    assert body["facts"] == {"now": 1}
    assert [entry["logprob"] for entry in body["logprobs"]] == [-1.0, -2.0]


def test_a_step_that_does_not_fit_begins_a_new_piece() -> None:
    chunks: deque[StreamDelta] = deque()
    add(chunks, delta(0, text="x" * (MAX_CHUNK // 4 - 10)))
    add(chunks, delta(1, text="y" * 20))
    assert [(c.pos, c.count) for c in chunks] == [(0, 1), (1, 1)]


def test_one_huge_step_is_one_piece() -> None:
    chunks: deque[StreamDelta] = deque()
    add(chunks, delta(0, text="x" * MAX_CHUNK))
    assert len(chunks) == 1
    add(chunks, delta(1))
    assert len(chunks) == 2


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9000)), max_size=30))
def test_nothing_is_lost_doubled_or_out_of_order(steps: list[tuple[int, int]]) -> None:
    chunks: deque[StreamDelta] = deque()
    pos, text, total = 0, "", 0
    for number, (count, size) in enumerate(steps):
        part = chr(97 + number % 26) * size
        total += add(chunks, delta(pos, count, part))
        pos, text = pos + count, text + part
    assert "".join(text for c in chunks for text in c.texts) == text
    assert [i for c in chunks for i in unpack_ids(bytes(c.ids))] == list(range(pos))
    assert sum(c.size for c in chunks) == total
    at = 0
    for chunk in chunks:
        assert chunk.pos == at
        at += chunk.count
    for chunk in chunks:
        assert chunk.size <= MAX_CHUNK + 4 * 9000
