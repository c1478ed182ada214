"""Texts and pairs as inputs of an encoder model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from mlxpool.common.errors import BadRequest, ContextExceeded, ModelLoadFailed
from mlxpool.worker.encoders.inputs import EncoderInput
from mlxpool.worker.encoders.text import EncoderText, EncoderTextSource, check_ids

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "query", ":")
CLS, SEP, A, B, C, QUERY, COLON = 2, 3, 4, 5, 6, 7, 8


@pytest.fixture
def source(tmp_path: Path) -> EncoderTextSource:
    vocab = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    tokenizer.enable_truncation(3)  # as in released files; only the model's bound has an effect
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    prompts = {"query": "query: ", "none": ""}
    return EncoderTextSource(str(file), digest, 6, len(WORDS), prompts)


def test_special_tokens_are_those_of_the_post_processor(source: EncoderTextSource) -> None:
    assert EncoderText(source).encode_texts(["a b", ""]) == [
        EncoderInput((CLS, A, B, SEP)),
        EncoderInput((CLS, SEP)),
    ]


def test_the_second_text_of_a_pair_has_another_type(source: EncoderTextSource) -> None:
    (pair,) = EncoderText(source).encode_pairs([("a", "b c")])
    assert pair == EncoderInput((CLS, A, SEP, B, C, SEP), (0, 0, 0, 1, 1, 1))


def test_a_prompt_is_put_in_front(source: EncoderTextSource) -> None:
    text = EncoderText(source)
    wanted = [EncoderInput((CLS, QUERY, COLON, A, SEP))]
    assert text.encode_texts(["a"], prompt_name="query") == wanted
    assert text.encode_texts(["a"], prompt="query: ") == wanted
    assert text.encode_texts(["a"], prompt_name="query", prompt="") == text.encode_texts(["a"])


def test_a_name_of_no_prompt_is_refused_with_those_that_there_are(
    source: EncoderTextSource,
) -> None:
    with pytest.raises(BadRequest, match="no prompt 'passage'; this model has: query, none"):
        EncoderText(source).encode_texts(["a"], prompt_name="passage")


def test_a_text_that_is_too_long_is_named(source: EncoderTextSource) -> None:
    with pytest.raises(ContextExceeded, match="input 1 has 7 tokens, the model reads at most 6"):
        EncoderText(source).encode_texts(["a", "a b c a b"])


def test_truncation_keeps_the_special_tokens(source: EncoderTextSource) -> None:
    text = EncoderText(source)
    assert text.encode_texts(["a b c a b"], truncate=True) == [EncoderInput((CLS, A, B, C, A, SEP))]
    (pair,) = text.encode_pairs([("a", "b c a b")], truncate=True)
    assert pair == EncoderInput((CLS, A, SEP, B, C, SEP), (0, 0, 0, 1, 1, 1))
    with pytest.raises(ContextExceeded):  # the next text is not truncated
        text.encode_texts(["a b c a b"])


def test_text_that_is_not_unicode_is_refused(source: EncoderTextSource) -> None:
    with pytest.raises(BadRequest, match="not valid Unicode"):
        EncoderText(source).encode_texts(["\ud800"])


def test_a_file_that_has_changed_is_refused(source: EncoderTextSource) -> None:
    with Path(source.tokenizer).open("a") as file:
        file.write(" ")
    with pytest.raises(ModelLoadFailed, match="has changed since"):
        EncoderText(source)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([], "input 1 is empty"),
        ([9], "token ids from 9 to 9, must be below 9"),
        ([-1, 3], "token ids from -1 to 3"),
        ([1] * 7, "input 1 has 7 tokens"),
    ],
)
def test_token_ids_are_checked(ids: list[int], problem: str) -> None:
    with pytest.raises((BadRequest, ContextExceeded), match=problem):
        check_ids([[1, 2], ids], 6, 9)
