"""Tests the lower bound of a text's number of tokens: it never exceeds the real number."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from mlxpool.common.errors import BadRequest, ContextExceeded
from mlxpool.worker.prompt.size_bound import (
    NFC_SHRINKS,
    check_bytes,
    check_ids,
    check_tokens,
    max_bytes_per_token,
)
from support import worker_tokenizers as zoo

DEMO = Path(zoo.__file__).parents[2] / "worker/mlxpool/worker/demo/tokenizer.json"


def bound(tokenizer: Tokenizer) -> int | None:
    return max_bytes_per_token(json.loads(tokenizer.to_str()))


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO))


@given(st.data())
def test_no_text_has_fewer_tokens(demo: Tokenizer, data: st.DataObject) -> None:
    words = sorted(demo.get_vocab(), key=len)[-50:]
    text = "".join(data.draw(st.lists(st.sampled_from(words) | st.text(max_size=9), max_size=9)))
    text = text.replace("Ġ", " ")
    most = bound(demo)
    assert most is not None
    ids = demo.encode(text, add_special_tokens=False).ids
    assert len(ids) * most >= len(text.encode())


def test_the_longest_token_is_the_bound(demo: Tokenizer) -> None:
    assert bound(demo) == 37


def test_nfc_shortens_no_text_by_more() -> None:
    for code in range(sys.maxunicode):
        char = chr(code)
        if not 0xD800 <= code < 0xE000:
            apart = unicodedata.normalize("NFD", char)
            assert len(apart.encode()) <= NFC_SHRINKS * len(char.encode())


def changed(demo: Tokenizer, **parts: Any) -> Tokenizer:
    other = Tokenizer.from_str(demo.to_str())
    for name, part in parts.items():
        setattr(other, name, part)
    return other


def test_steps_that_drop_text_have_no_bound(demo: Tokenizer) -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for part in (
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), level]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), level]),
    ):
        assert bound(changed(demo, pre_tokenizer=part)) is None
    for step in (
        normalizers.Strip(),
        normalizers.Lowercase(),
        normalizers.Replace("ab", ""),
        normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()]),
    ):
        assert bound(changed(demo, normalizer=step)) is None


def test_steps_that_keep_text_have_one(demo: Tokenizer) -> None:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(" ", "isolated")
    part = pre_tokenizers.Sequence([split, pre_tokenizers.Digits(), level])
    assert bound(changed(demo, pre_tokenizer=part)) == 37
    assert bound(changed(demo, normalizer=normalizers.Replace(" ", "▁"))) == 37
    assert bound(changed(demo, normalizer=normalizers.NFC())) == 37 * NFC_SHRINKS


def test_vocabularies_without_every_byte_have_no_bound() -> None:
    assert bound(zoo.word_piece()) is None
    assert bound(zoo.unigram()) is None


def test_a_token_that_takes_in_spaces_has_no_bound(demo: Tokenizer) -> None:
    raw = json.loads(demo.to_str())
    raw["added_tokens"] = [{"id": 0, "content": "<x>", "lstrip": True, "rstrip": False}]
    assert max_bytes_per_token(raw) is None


# ---- checks --------------------------------------------------------------------------------------


def test_a_text_that_cannot_fit_is_refused_with_all_numbers() -> None:
    check_bytes(10**9, None, 1)
    check_bytes(310, 10, 32)
    with pytest.raises(ContextExceeded, match=r"311 bytes.* 32 tokens.* 10 bytes.* 32;") as caught:
        check_bytes(311, 10, 32)
    details = {"prompt_bytes": 311, "prompt_tokens_at_least": 32, "context": 32}
    assert caught.value.details == details


def test_a_prompt_needs_a_token_and_leaves_one_free() -> None:
    check_tokens(31, 32)
    with pytest.raises(BadRequest, match="empty"):
        check_tokens(0, 32)
    with pytest.raises(ContextExceeded, match=r"32 tokens.* 32, .* 31 fit"):
        check_tokens(32, 32)


def test_ids_have_rows() -> None:
    check_ids([], 5, "prompt")
    check_ids([4], 5, "prompt")
    with pytest.raises(BadRequest, match="prompt: token id 5 is not below 5"):
        check_ids([1, 5], 5, "prompt")
