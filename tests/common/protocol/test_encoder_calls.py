"""A worker's view of `embed`, `rerank` and `classify`."""

from __future__ import annotations

import os
from typing import Any

import msgpack
import pytest

from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol.encoder_calls import MAX_INPUTS, EncoderCall, Task, pack_texts
from mlxpool.common.protocol.token_ids import pack_ids


def parse(task: Task, *blobs: bytes, **body: Any) -> EncoderCall:
    return EncoderCall.parse(task, {"model": "m", **body}, blobs)


def test_texts_come_in_the_body_or_as_a_blob() -> None:
    assert parse("embed", inputs=["a", ""]).texts == ("a", "")
    assert parse("embed", pack_texts(["a", "b"]), inputs=True).texts == ("a", "b")
    assert parse("embed", inputs=["é"] * MAX_INPUTS).count == MAX_INPUTS
    assert parse("embed", inputs=["ab", "c"]).size == 3


def test_all_keys_of_embed() -> None:
    call = parse(
        "embed",
        inputs=["a"],
        truncate=True,
        dimensions=8,
        normalise=False,
        prompt_name="query",
        first=256,
        alone=True,
        owner="bob",
    )
    assert call == EncoderCall(
        "embed",
        ("a",),
        truncate=True,
        prompt_name="query",
        dimensions=8,
        normalise=False,
        first=256,
        alone=True,
        owner="bob",
    )
    assert parse("embed", inputs=["a"], prompt="").prompt == ""
    assert parse("embed", inputs=["a"], dimensions=2**40).dimensions == 2**40, "the model's bound"
    assert parse("embed", inputs=["a"], dimensions=None, normalise=None) == parse(
        "embed", inputs=["a"]
    )


def test_pairs_are_for_classify_and_made_of_query_and_documents() -> None:
    assert parse("classify", inputs=[["a", "b"]]).pairs == (("a", "b"),)
    assert parse("classify", pack_texts([("a", "b")]), inputs=True).pairs == (("a", "b"),)
    call = parse("rerank", query="q", documents=["a", "b"])
    assert call.pairs == (("q", "a"), ("q", "b")) and call.count == 2 and call.size == 4


def test_ids_are_divided_by_their_lengths() -> None:
    assert parse("embed", pack_ids([1, 2, 3]), tokens=[2, 1]).ids == ((1, 2), (3,))


WRONG: dict[str, tuple[Task, dict[str, Any], tuple[bytes, ...], str]] = {
    "nothing": ("embed", {}, (), "inputs must be a list of 1 to 256 texts"),
    "a number": ("embed", {"inputs": 5}, (), "got 5"),
    "no text": ("embed", {"inputs": []}, (), "got 0"),
    "too many": ("embed", {"inputs": ["a"] * 257}, (), "got 257"),
    "nil": ("embed", {"inputs": [None]}, (), r"inputs\[0\] must be a text, got None"),
    "no blob": ("embed", {"inputs": True}, (), "the message has no blob"),
    "garbage": ("embed", {"inputs": True}, (os.urandom(64) + b"\xc1",), "no msgpack array"),
    "deep": ("embed", {"inputs": True}, (b"\x91" * 5000,), "no msgpack array"),
    "a map": ("embed", {"inputs": True}, (msgpack.packb({"a": 1}),), "no msgpack array"),
    "many in a blob": ("embed", {"inputs": True}, (msgpack.packb(["a"] * 257),), "no msgpack"),
    "bytes": ("embed", {"inputs": True}, (msgpack.packb([b"a"]),), "must be a text"),
    "no UTF-8": ("embed", {"inputs": True}, (b"\x91\xa2\xff\xfe",), "no msgpack array"),
    "a pair": ("embed", {"inputs": [["a", "b"]]}, (), "must be a text"),
    "mixed": ("classify", {"inputs": [["a", "b"], "c"]}, (), r"inputs\[1\] must be a pair"),
    "three": ("classify", {"inputs": [["a", "b", "c"]]}, (), "must be a pair"),
    "no query": ("rerank", {"documents": ["a"]}, (), "query must be a text, got None"),
    "no documents": ("rerank", {"query": "q"}, (), "documents must be a list"),
    "lengths": ("embed", {"tokens": [2]}, (b"1234",), "2 ids in all, the blob has 4 bytes"),
    "no length": ("embed", {"tokens": [0]}, (b"",), "at least 1"),
    "a huge length": ("embed", {"tokens": [2**62]}, (b"1234",), "the blob has 4 bytes"),
    "half an id": ("embed", {"tokens": [1]}, (b"12345",), "the blob has 5 bytes"),
    "both": ("embed", {"inputs": ["a"], "tokens": [1]}, (b"1234",), "one of inputs and tokens"),
    "dimensions": ("embed", {"inputs": ["a"], "dimensions": 0}, (), "of at least 1, got 0"),
    "half a dimension": ("embed", {"inputs": ["a"], "dimensions": 1.5}, (), "an integer .* 1.5"),
    "prompts": (
        "embed",
        {"inputs": ["a"], "prompt": "x", "prompt_name": "y"},
        (),
        "embed takes one of prompt and prompt_name, got both",
    ),
    "normalise": ("embed", {"inputs": ["a"], "normalise": "x"}, (), "must be true or false"),
    "prompt": ("embed", {"inputs": ["a"], "prompt": 3}, (), "prompt must be a text, got 3"),
    "misspelt": ("embed", {"inputs": ["a"], "dimension": 3}, (), "did you mean 'dimensions'"),
    "of embed": ("rerank", {"query": "q", "documents": ["a"], "dimensions": 3}, (), "no key"),
    "unknown": ("classify", {"inputs": ["a"], "top_k": 3}, (), "classify has no key 'top_k'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    task, body, blobs, said = WRONG[name]
    with pytest.raises(BadRequest, match=said):
        parse(task, *blobs, **body)


def test_texts_over_a_blob_are_too_large() -> None:
    with pytest.raises(TooLarge, match="a call takes 4194304"):
        pack_texts(["x" * 2**22])
