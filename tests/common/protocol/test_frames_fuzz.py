"""Decoding any bytes ends in a message or in a PoolError."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.common.errors import PoolError, TooLarge
from mlxpool.common.protocol import deltas, frames, from_client, token_ids
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Garbage, Header, Message
from mlxpool.common.protocol.from_client import Generate
from support import kinds

ID = bytes(range(16))
MUTATIONS = 20_000

# ---- legal messages ------------------------------------------------------------------------------

GENERATES: tuple[tuple[dict[str, Any], tuple[bytes, ...]], ...] = (
    ({"model": "m", "prompt": "hello", "options": {"max_tokens": 5, "seed": 7}}, ()),
    ({"model": "m", "prompt": True, "window": 3, "batch": True}, (b"text" * 20,)),
    (
        {"model": "m", "tokens": True, "deadline_ms": 5, "priority": 2},
        (token_ids.pack_ids(range(9)),),
    ),
    (
        {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}, {"role": "system", "content": ""}],
            "options": {"stop": ["a", "b"], "logit_bias": {"5": -1.5}, "temperature": 0.5},
            "session": "s",
            "durable": False,
        },
        (),
    ),
    (
        {
            "model": "m",
            "prompt": "p",
            "resume": {
                "count": 3,
                "seed": 9,
                "resumes": 1,
                "facts": {"digest": "d", "context": 9, "max_tokens": 8, "now": 1.5},
            },
        },
        (token_ids.pack_ids([1, 2, 3]),),
    ),
)
DELTAS = (
    Delta(ID, 1, 0, "text", token_ids.pack_ids([1, 2]), facts={"prompt_tokens": 3}),
    Delta(ID, 1, 2, "", b"", end={"reason": "stop", "text": "rest"}),
    Delta(ID, 2, 5, "x", token_ids.pack_ids([7]), logprobs=[{"id": 7, "top": []}]),
)


def corpus() -> list[list[bytes]]:
    """Returns legal messages of every shape that a decoder distinguishes."""
    messages = [
        frames.encode(Header(kinds.GENERATE, ID, 0, 1), body, blobs) for body, blobs in GENERATES
    ]
    messages.append(frames.encoded(deltas.Deltas(DELTAS), epoch=5))
    messages.append(frames.encode(Header(kinds.PING)))
    messages.append(frames.encode(Header(kinds.ACK), {"have": [[ID, 5], [ID, 2**40]]}))
    messages.append(frames.encode(Header(kinds.CANCEL, ID)))
    return messages


def digest(parts: Sequence[bytes]) -> str:
    """Runs the parts through every decoder that they reach. Returns the outcome as a word."""
    try:
        message = frames.decode(parts)
    except Garbage as garbage:
        assert isinstance(garbage.error, PoolError)
        assert garbage.about is None or len(garbage.about) == frames.ID_BYTES
        frames.encode(Header(kinds.ERROR), {**garbage.error.body(), "about": garbage.about})
        return "garbage"
    again = frames.encode(message.header, message.body, message.blobs)
    back = frames.decode(again)
    assert frames.encode(back.header, back.body, back.blobs) == again  # NaN is not equal to itself
    return f"{_deltas(message)} {_payload(message)}"


def _deltas(message: Message) -> str:
    try:
        rows = deltas.unpack_deltas(message)
    except PoolError as error:
        frames.encode(Header(kinds.ERROR), error.body())
        return "no deltas"
    blob = message.blobs[0] if message.blobs else b""
    assert b"".join(delta.ids for delta in rows) == blob
    return "deltas"


def _payload(message: Message) -> str:
    from_client.request_digest(message.body, message.blobs)  # the broker does so before its checks
    try:
        payload = Generate.parse(message.body, message.blobs)
    except PoolError as error:
        frames.encode(Header(kinds.ERROR), error.body())
        return "no payload"
    assert payload.size >= 0 and payload.window >= 1 and len(payload.resume_ids) % 4 == 0
    return "payload"


def test_the_corpus_is_legal() -> None:
    outcomes = [digest(parts) for parts in corpus()]
    assert outcomes[: len(GENERATES)] == ["no deltas payload"] * len(GENERATES)
    assert outcomes[len(GENERATES)] == "deltas no payload"


# ---- mutations of legal messages -----------------------------------------------------------------

# Bytes that begin special values in msgpack: containers, lengths, extensions, floats, large counts.
TELLING = bytes([0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, *range(0xC0, 0xE0), 0x00, 0x7F, 0xFF])


def bend(parts: list[bytes], rng: random.Random) -> list[bytes]:
    """Returns the parts with one to four small random changes."""
    parts = list(parts)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(parts))
        part = bytearray(parts[at])
        where = rng.randrange(len(part) + 1)
        deed = rng.randrange(8)
        if deed == 0:
            part[where:where] = bytes([rng.choice(TELLING)])
        elif deed == 1:
            del part[where : where + rng.randint(1, 4)]
        elif deed == 2 and part:
            part[where % len(part)] = rng.choice(TELLING)
        elif deed == 3 and part:
            part[where % len(part)] ^= 1 << rng.randrange(8)
        elif deed == 4:
            del part[where:]
        elif deed == 5:
            part[where:where] = rng.randbytes(rng.randint(1, 9))
        elif deed == 6:
            part += part[:where]
        parts[at] = bytes(part)
        if deed == 7:
            parts.insert(at, parts[rng.randrange(len(parts))])
    return parts


@pytest.mark.parametrize("seed", range(4))
def test_mutated_messages_raise_pool_errors_alone(seed: int) -> None:
    """Each mutated message is decoded or raises PoolError; both occur in the test."""
    rng, legal = random.Random(seed), corpus()
    seen = {"garbage": 0}
    for number in range(MUTATIONS // 4):
        parts = bend(legal[number % len(legal)], rng)
        try:
            outcome = digest(parts)
        except Exception as error:
            raise AssertionError(f"seed {seed}, number {number}: {parts!r}") from error
        seen[outcome] = seen.get(outcome, 0) + 1
    assert seen["garbage"] > 500
    assert seen["no deltas payload"] > 100
    assert seen["no deltas no payload"] > 100


# ---- Hypothesis ----------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=20)
)
KEYS = st.sampled_from([*Generate.__struct_fields__, "messages", "tokens", "rows", "have"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)
OPTION_NAMES = st.sampled_from(
    ["max_tokens", "stop", "logit_bias", "seed", "temperature", "top_k", "logprobs", "none such"]
)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=6))
def test_random_bytes_raise_pool_errors_alone(parts: list[bytes]) -> None:
    digest(parts)


@settings(max_examples=120, deadline=None)
@given(st.lists(VALUES, max_size=8), st.binary(max_size=60))
def test_random_headers_raise_pool_errors_alone(fields: list[Any], body: bytes) -> None:
    digest([msgpack.packb(fields), body])


@settings(max_examples=120, deadline=None)
@given(
    st.dictionaries(KEYS, VALUES),
    st.dictionaries(OPTION_NAMES, VALUES),
    st.lists(st.binary(max_size=40), max_size=2),
)
def test_random_bodies_raise_pool_errors_alone(
    body: dict[str, Any], options: dict[str, Any], blobs: list[bytes]
) -> None:
    whole = {"model": "m", "prompt": "x", **body, "options": options}
    head = msgpack.packb([1, kinds.GENERATE, ID, 0, 1, 0])
    digest([head, msgpack.packb(whole), *blobs])


@settings(max_examples=120, deadline=None)
@given(st.lists(st.lists(VALUES, max_size=9), max_size=4), st.binary(max_size=40))
def test_random_rows_raise_pool_errors_alone(rows: list[Any], blob: bytes) -> None:
    digest([msgpack.packb([1, kinds.DELTAS, None, 5, 0, 0]), msgpack.packb({"rows": rows}), blob])


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1k", b"\xdd\x00\x00\x00\x01"])
def test_nesting_is_refused_before_it_hurts(opener: bytes) -> None:
    head = frames.encode(Header(kinds.PING))[0]
    for depth in (40, 600, 5000, 80_000):
        body = (b"\x81\xa1k" + opener * depth + b"\xc0")[: frames.MAX_BODY]
        with pytest.raises(Garbage):
            frames.decode([head, body])


def test_sizes_are_checked_before_anything_is_read() -> None:
    """The body is both too large and invalid msgpack; the error must be about its size."""
    head = frames.encode(Header(kinds.PING))[0]
    with pytest.raises(Garbage) as caught:
        frames.decode([head, b"\xc1" * (frames.MAX_BODY + 1)])
    assert isinstance(caught.value.error, TooLarge)
