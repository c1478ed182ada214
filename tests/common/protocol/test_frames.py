"""The protocol's bytes: an encoded message is decoded again; all other bytes raise Garbage."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.common.errors import BadRequest, PoolError, TooLarge
from mlxpool.common.protocol import deltas, frames, from_client, token_ids
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Garbage, Header, Message
from mlxpool.common.protocol.images import MAX_IMAGE
from support import kinds

ID = bytes(range(16))
counts = st.integers(0, frames.MAX_NUMBER)
id_values = st.integers(0, 2**32 - 1)
idents = st.binary(min_size=16, max_size=16)
headers = st.builds(
    Header, st.text("abcdefgh_", max_size=20), st.none() | idents, counts, counts, counts
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | texts | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(texts, values, max_size=4)


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))


def head(*fields: Any) -> bytes:
    return packed([*fields] or [1, "ping", None, 0, 0, 0])


def garbage(*parts: bytes) -> Garbage:
    with pytest.raises(Garbage) as caught:
        frames.decode(parts)
    assert caught.value.error.code
    return caught.value


# ---- round trips ---------------------------------------------------------------------------------


@given(headers, bodies, st.lists(st.binary(max_size=20), max_size=2))
def test_a_message_is_decoded_as_it_was_encoded(
    header: Header, body: dict[str, Any], blobs: list[bytes]
) -> None:
    parts = frames.encode(header, body, blobs)
    assert frames.decode(parts) == Message(header, body, tuple(blobs))


def test_a_header_alone_is_one_part() -> None:
    parts = frames.encode(Header("ping"))
    assert len(parts) == 1
    assert frames.decode(parts) == Message(Header("ping"))


def test_blobs_bring_a_body_with_them() -> None:
    assert len(frames.encode(Header("x"), None, [b"a"])) == 3


def test_every_kind_fits_the_header() -> None:
    big = frames.MAX_NUMBER
    kind_names = [v for k, v in vars(kinds).items() if k.isupper() and isinstance(v, str)]
    assert {"generate", "deltas", "welcome"} <= set(kind_names)
    for kind in kind_names:
        assert len(frames.encode(Header(kind, ID, big, big, big))[0]) <= frames.MAX_HEADER


@given(st.lists(id_values, max_size=50))
def test_ids_are_unpacked_as_they_were_packed(ids: list[int]) -> None:
    blob = token_ids.pack_ids(ids)
    assert token_ids.unpack_ids(blob) == ids
    assert blob == b"".join(i.to_bytes(4, "little") for i in ids)


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["a"], [None], 3, "abc"])
def test_values_that_are_no_u32_are_refused(ids: Any) -> None:
    with pytest.raises(BadRequest, match="token ids must be integers"):
        token_ids.pack_ids(ids)


def test_a_blob_with_a_part_of_an_id_is_refused() -> None:
    with pytest.raises(BadRequest, match="5 bytes"):
        token_ids.unpack_ids(bytes(5))


# ---- garbage -------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_random_bytes_are_garbage_at_worst(parts: list[bytes]) -> None:
    try:
        frames.decode(parts)
    except Garbage:
        pass


@given(st.binary(max_size=80))
def test_random_bodies_are_garbage_at_worst(body: bytes) -> None:
    try:
        message = frames.decode([head(), body])
    except Garbage:
        return
    assert all(isinstance(key, str) for key in message.body)


@given(values)
def test_random_headers_are_garbage_at_worst(value: Any) -> None:
    try:
        frames.decode([packed(value)])
    except Garbage:
        pass


@given(headers, bodies, st.integers(0, 200), st.integers(0, 255))
def test_one_wrong_byte_is_garbage_at_worst(
    header: Header, body: dict[str, Any], place: int, value: int
) -> None:
    parts = frames.encode(header, body)
    part = bytearray(parts[place % 2])
    part[place % len(part)] = value
    parts[place % 2] = bytes(part)
    try:
        frames.decode(parts)
    except Garbage:
        pass


@pytest.mark.parametrize("number", [0, 5, 50])
def test_messages_with_too_few_or_too_many_parts_are_refused(number: int) -> None:
    error = garbage(*[head()] * number).error
    assert f"got {number}" in error.message


def test_only_messages_with_prompts_have_parts_for_images() -> None:
    for kind in ("generate", "work"):
        frames.decode(frames.encode(Header(kind, ID), {}, [b"x"] * 18))
        with pytest.raises(BadRequest, match="1 to 20 parts, got 21"):
            frames.encode(Header(kind, ID), {}, [b"x"] * 19)
    refusal = garbage(head(1, "generate", ID, 0, 1, 0), *[packed({})] * 101)
    assert (refusal.about, refusal.error.message) == (ID, "a message has 1 to 20 parts, got 102")
    with pytest.raises(BadRequest, match="'ack' has 1 to 4 parts, got 5"):
        frames.encode(Header("ack"), {}, [b"x"] * 3)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_refused(version: int) -> None:
    error = garbage(head(version, "ping", None, 0, 0, 0)).error
    assert error.code == "version_mismatch"
    assert str(version) in error.message
    assert error.details == {"version": 1}


def test_another_version_is_refused_whatever_its_header() -> None:
    assert garbage(head(2)).error.code == "version_mismatch"


def test_elements_of_a_later_minor_version_are_ignored() -> None:
    message = frames.decode([head(1, "ping", ID, 1, 2, 3, "new", {})])
    assert message.header == Header("ping", ID, 1, 2, 3)


@pytest.mark.parametrize(
    "fields",
    [
        (),
        (True, "ping", None, 0, 0, 0),
        ("1", "ping", None, 0, 0, 0),
        (1,),
        (1, "ping", None, 0, 0),
        (1, 5, None, 0, 0, 0),
        (1, b"ping", None, 0, 0, 0),
        (1, "ping", b"short", 0, 0, 0),
        (1, "ping", "x" * 16, 0, 0, 0),
        (1, "ping", None, True, 0, 0),
        (1, "ping", None, 0, -1, 0),
        (1, "ping", None, 0, 0, 1.0),
        (1, "ping", None, 0, 0, 2**63),
    ],
)
def test_malformed_headers_are_refused(fields: tuple[Any, ...]) -> None:
    refusal = garbage(packed(list(fields)))
    assert refusal.error.code == "bad_request"
    assert refusal.about is None


@pytest.mark.parametrize("part", [b"", packed({}), packed("ping"), packed(None), b"\xc1"])
def test_headers_that_are_no_list_are_refused(part: bytes) -> None:
    assert garbage(part).error.code == "bad_request"


def test_the_size_of_a_header_is_bounded() -> None:
    assert garbage(head(1, "x" * 200, None, 0, 0, 0)).error.code == "too_large"


@pytest.mark.parametrize(
    "body",
    [
        packed([]),
        packed(1),
        packed({1: 2}),
        packed({b"a": 1}),
        packed({"a": {1: 2}}),
        packed({None: 1}),
        packed({}) + b"\x00",
        b"",
        b"\x81",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xd9",
        b"\x81\xa1\xff\x01",
        b"\x81\xa1a" + b"\x91" * 5000 + b"\x00",
        packed({"a": msgpack.ExtType(5, b"x")}),
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    refusal = garbage(head(1, "generate", ID, 0, 1, 0), body)
    assert refusal.error.code == "bad_request"
    assert refusal.about == ID, "whom the answer is about is known"
    assert len(refusal.error.message) < 300


def test_a_time_stamp_is_refused_as_an_extension() -> None:
    body = packed({"a": msgpack.Timestamp(1)})
    assert garbage(head(1, "generate", ID, 0, 1, 0), body).error.code == "bad_request"


def nested(depth: int) -> list[bytes]:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return [head(1, "generate", ID, 0, 1, 0), packed({"a": value})]


def test_the_depth_of_a_body_is_bounded() -> None:
    assert frames.decode(nested(frames.MAX_DEPTH - 1)).body, "the body itself is the first"
    refusal = garbage(*nested(frames.MAX_DEPTH))
    assert refusal.about == ID
    assert f"deeper than {frames.MAX_DEPTH}" in refusal.error.message


# ---- sizes ---------------------------------------------------------------------------------------


def body_of(size: int) -> dict[str, str]:
    return {"p": "x" * (size - 8)}  # a map with one key: 1 + 2 + 5 bytes around the text


def test_the_size_of_a_body_is_bounded() -> None:
    assert len(frames.encode(Header("x"), body_of(frames.MAX_BODY))[1]) == frames.MAX_BODY
    with pytest.raises(TooLarge, match=str(frames.MAX_BODY + 1)):
        frames.encode(Header("x"), body_of(frames.MAX_BODY + 1))
    big = [head(1, "generate", ID, 0, 1, 0), packed(body_of(frames.MAX_BODY + 1))]
    refusal = garbage(*big)
    assert (refusal.error.code, refusal.about) == ("too_large", ID)
    assert "blob" in refusal.error.message
    assert frames.decode(big, max_body=frames.MAX_BACK_BODY).body


def test_the_size_of_a_blob_is_bounded() -> None:
    frames.decode(frames.encode(Header("x"), {}, [bytes(frames.MAX_BLOB)]))
    with pytest.raises(TooLarge, match="a blob"):
        frames.encode(Header("x"), {}, [bytes(frames.MAX_BLOB + 1)])
    assert garbage(head(), packed({}), bytes(frames.MAX_BLOB + 1)).error.code == "too_large"


def test_the_size_of_a_message_is_bounded() -> None:
    full = bytes(frames.MAX_BLOB)
    refusal = garbage(head(), packed({}), full, full)
    assert refusal.error.code == "too_large"
    assert str(frames.MAX_TOTAL) in refusal.error.message


def test_the_bytes_of_images_are_added_to_those_of_a_message() -> None:
    part = bytes(MAX_IMAGE)
    header = Header("generate", ID)
    frames.decode(frames.encode(header, {}, [part] * 4))
    with pytest.raises(TooLarge, match=f"the message has .* at most {40 * 2**20}"):
        frames.encode(header, {}, [part] * 5)
    with pytest.raises(TooLarge, match=f"a blob has {MAX_IMAGE + 1} bytes"):
        frames.encode(header, {}, [part + b"x"])


def test_what_is_somewhat_too_large_still_arrives_to_be_answered() -> None:
    largest = (MAX_IMAGE, frames.MAX_BLOB, frames.MAX_BODY, frames.MAX_BACK_BODY)
    assert max(largest) < frames.MAX_FRAME


# ---- deltas --------------------------------------------------------------------------------------

maps = st.none() | st.dictionaries(texts, st.integers(0, 9), max_size=2)
rows = st.builds(
    Delta,
    idents,
    counts,
    counts,
    texts,
    st.lists(id_values, max_size=4).map(token_ids.pack_ids),
    st.none() | st.lists(st.dictionaries(texts, st.integers(0, 9), max_size=2), max_size=2),
    maps,
    maps,
)


@given(st.lists(rows, max_size=5))
def test_deltas_are_unpacked_as_they_were_sent(sent: list[Delta]) -> None:
    assert deltas.unpack_deltas(frames.decode(frames.encoded(deltas.Deltas(sent)))) == sent


def test_absent_fields_of_a_row_are_left_out() -> None:
    plain = Delta(ID, 1, 0, "a", b"")
    message = deltas.Deltas([plain, Delta(ID, 1, 0, "a", b"", facts={"now": 1})])
    assert [len(row) for row in message.body()["rows"]] == [5, 7]


ROW = [ID, 1, 0, "a", 1]


@pytest.mark.parametrize(
    ("rows", "blob"),
    [
        (None, b""),
        ({}, b""),
        ([1], b""),
        ([ROW[:4]], b""),
        ([[*ROW, None, None, None, None]], bytes(4)),
        ([[b"x", 1, 0, "a", 1]], bytes(4)),
        ([[ID, True, 0, "a", 1]], bytes(4)),
        ([[ID, 1, -1, "a", 1]], bytes(4)),
        ([[ID, 1, 0, b"a", 1]], bytes(4)),
        ([[ID, 1, 0, "a", -1]], bytes(4)),
        ([[ID, 1, 0, "a", 2**62]], bytes(4)),
        ([ROW], b""),
        ([ROW], bytes(3)),
        ([ROW], bytes(8)),
        ([ROW, ROW], bytes(4)),
        ([], bytes(4)),
    ],
)
def test_malformed_deltas_are_refused(rows: Any, blob: bytes) -> None:
    with pytest.raises(BadRequest, match="deltas:"):
        deltas.unpack_deltas(Message(Header(kinds.DELTAS), {"rows": rows}, (blob,)))


@given(values, st.lists(st.binary(max_size=9), max_size=2))
def test_random_rows_are_bad_requests_at_worst(rows: Any, blobs: list[bytes]) -> None:
    try:
        deltas.unpack_deltas(Message(Header(kinds.DELTAS), {"rows": rows}, tuple(blobs)))
    except PoolError:
        pass


@given(st.lists(st.integers(0, 40_000), max_size=30))
def test_batches_keep_the_order_and_fit(sizes: list[int]) -> None:
    sent = [Delta(ID, 1, n, "x" * size, b"") for n, size in enumerate(sizes)]
    groups = list(deltas.batches(sent))
    assert [d for group in groups for d in group] == sent
    for group in groups:
        frames.encoded(deltas.Deltas(group))


# ---- the digest ----------------------------------------------------------------------------------

BASE = {"model": "m", "prompt": "a", "options": {"seed": 1}}


def test_a_digest_is_of_the_request_not_of_the_sending() -> None:
    first = from_client.request_digest(BASE, [])
    again = {**BASE, "deadline_ms": 5, "queue_ms": 1, "window": 3, "batch": True}
    assert from_client.request_digest(again, []) == first
    assert from_client.request_digest(dict(reversed(BASE.items())), []) == first
    assert len(first) == 16


def test_the_ids_of_a_resume_are_no_part_of_the_digest() -> None:
    blob = {**BASE, "prompt": True}
    resumed = {**blob, "resume": {"count": 1}}
    assert from_client.request_digest(resumed, [b"text", b"1234"]) == from_client.request_digest(
        blob, [b"text"]
    )
    assert from_client.request_digest(
        {**BASE, "resume": {"count": 1}}, [b"1234"]
    ) == from_client.request_digest(BASE, [])


@pytest.mark.parametrize(
    "other", [{"model": "n"}, {"prompt": "b"}, {"options": {}}, {"priority": 1}, {"session": "s"}]
)
def test_different_requests_have_different_digests(other: dict[str, Any]) -> None:
    assert from_client.request_digest({**BASE, **other}, []) != from_client.request_digest(BASE, [])


def test_a_prompt_in_a_blob_is_part_of_the_digest() -> None:
    body = {**BASE, "prompt": True}
    assert from_client.request_digest(body, [b"a"]) != from_client.request_digest(body, [b"b"])


def test_images_are_part_of_the_digest_and_the_ids_behind_them_are_not() -> None:
    body = {**BASE, "images": 2}
    first = from_client.request_digest(body, [b"a", b"b"])
    assert from_client.request_digest({**body, "resume": {}}, [b"a", b"b", b"1234"]) == first
    for others in ([b"a", b"c"], [b"b", b"a"], [b"ab", b""]):
        assert from_client.request_digest(body, others) != first
    packed_prompt = {**body, "prompt": True}
    assert from_client.request_digest(packed_prompt, [b"p", b"a", b"b"]) != (
        from_client.request_digest(packed_prompt, [b"p", b"a", b"c"])
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"options": {"seed": 2**64}}, "options.seed is 18446744073709551616, .* at most 64 bits"),
        ({"options": {"seed": -(2**63) - 1}}, "options.seed is -9223372036854775809, .* 64 bits"),
        ({"options": {"stop": ["a", "\ud800"]}}, r"options.stop\[1\] is not Unicode text"),
        ({"messages": [{"content": {1}}]}, r"messages\[0\].content is of the type set"),
    ],
)
def test_an_error_names_the_value_that_msgpack_cannot_hold(
    body: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        frames.encode(Header("generate", bytes(16)), body)
