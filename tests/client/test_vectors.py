"""The messages of a client's `embed`, `rerank` and `classify`, and rankings by scores."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from mlxpool.client import vectors
from mlxpool.client.vectors import Ranked, Vectors, ranked
from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol.encoder_calls import EncoderCall


def sent(inputs: Any, **settings: Any) -> EncoderCall:
    """Returns the only call for these inputs, as a worker reads it."""
    (question,) = vectors.embed("m", inputs, **settings)
    return EncoderCall.parse("embed", question.content.body() or {}, question.content.blobs())


@pytest.mark.parametrize(
    "inputs",
    [
        [1, 2, 3],
        (1, 2, 3),
        [[1, 2, 3]],
        np.array([1, 2, 3]),
        np.array([[1, 2, 3]]),
        iter([1, 2, 3]),
    ],
    ids=["list", "tuple", "lists", "array", "matrix", "iterator"],
)
def test_token_ids_in_every_form(inputs: Any) -> None:
    assert sent(inputs).ids == ((1, 2, 3),)


def test_texts_in_every_form() -> None:
    assert sent("a").texts == ("a",)
    for inputs in (["a", "b"], ("a", "b"), iter(["a", "b"]), np.array(["a", "b"])):
        assert sent(inputs).texts == ("a", "b")


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([None], r"^inputs\[0\] must be a str, a pair of them or a list of token ids, got None"),
        (["a", 1], r"^inputs\[1\] must be a str, a pair of them or a list of token ids, got 1"),
        ([1, "a"], r"^inputs\[0\] must be a str, .* got 1"),
        ([b"abc"], r"^inputs\[0\] must be a str, .* got b'abc'"),
        ([1.5], r"^inputs\[0\] must be a str, .* got 1.5"),
        ([True], r"^inputs\[0\] must be a str, .* got True"),
        (["a", [1]], r"^inputs\[0\] must be a list of token ids, as others are; got 'a'"),
        ([[1], "a"], r"^inputs\[1\] must be a list of token ids, as others are; got 'a'"),
        ([[]], r"^inputs\[0\] has no token ids, must have at least 1"),
        ([[1], [True]], r"^inputs\[1\] must have token ids, integers from 0 to .*, got True"),
        ([[1.5]], r"^inputs\[0\] must have token ids, .* got 1.5"),
        ([[-1]], r"^inputs\[0\] must have token ids, .* got -1"),
        ([[2**32]], r"^inputs\[0\] must have token ids, .* got 4294967296"),
        ([[[1]]], r"^inputs\[0\] must have token ids, .* got \[1\]"),
        ([{"text": "a"}], r"^inputs\[0\] must be a str"),
        ({"a": 1}, "^inputs must be a list of texts"),
        (b"abc", "^inputs must be a list of texts"),
        (5, "^inputs must be a list of texts, got 5"),
        (None, "^inputs must be a list of texts, got None"),
        ([], "^inputs is empty"),
    ],
)
def test_what_cannot_be_sent_is_named(inputs: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        vectors.embed("m", inputs)


def test_long_texts_beside_the_inputs_are_named() -> None:
    long, said = "x" * 100_000, "has 100000 bytes, at most 65536 are taken; make it shorter"
    with pytest.raises(TooLarge, match=f"^prompt {said}"):
        vectors.embed("m", ["a"], prompt=long)
    with pytest.raises(TooLarge, match=f"^prompt_name {said}"):
        vectors.embed("m", ["a"], prompt_name=long)
    with pytest.raises(TooLarge, match=f"^prompt {said}"):
        vectors.rerank("m", "q", ["a"], prompt=long)
    with pytest.raises(TooLarge, match=f"^query {said}"):
        vectors.rerank("m", long, ["a"])


def scores(*numbers: float) -> Vectors:
    return Vectors(array("f", numbers).tobytes(), len(numbers), 1)


def test_equal_documents_have_equal_scores_in_the_order_of_the_request() -> None:
    ranking = ranked(scores(0.25, 0.5, 0.250001, 0.5), ["a", "b", "a", "c"])
    assert ranking == [Ranked(1, 0.5), Ranked(3, 0.5), Ranked(0, 0.25), Ranked(2, 0.25)]
    assert ranked(scores(0.25, 0.5), ["a", "b"], 1) == [Ranked(1, 0.5)]
