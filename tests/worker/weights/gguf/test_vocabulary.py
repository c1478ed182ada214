"""Tokenizers that are made from a GGUF file's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.prompt.token_bytes import TokenBytes
from mlxpool.worker.weights.gguf.fields import Fields
from mlxpool.worker.weights.gguf.vocabulary import PATTERNS, as_json, tokenizer_files

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KEY = "tokenizer.ggml."
TEXT = (
    "The year 2024's 1st word: it's DON'T or don't, naïve café. \n\n  def f(x):\n\treturn x+1  \r\n"
    " 日本語 한국어 \U0001f600 ... don't   stop!"
)
# The patterns of the released tokenizers, written down a second time.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT_4O = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


RELEASED: dict[str, Any] = {
    "qwen2": split(QWEN2),
    "llama-bpe": split(LLAMA3),
    "glm4": split(LLAMA3),
    "gpt-4o": split(GPT_4O),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


def made(metadata: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, dict[str, Any]]]:
    fields = Fields(Path("m.gguf"), {"general.architecture": "llama", **metadata})
    files = tokenizer_files(fields)
    return Tokenizer.from_buffer(as_json(files["tokenizer.json"])), files


def trained(before: Any) -> Tokenizer:
    """Returns a byte-level BPE tokenizer trained with the pre-tokenizer `before`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = before
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    extra = ["<|im_start|>", "<tool>", "[PAD1]"]
    kinds = [NORMAL] * len(tokens) + [CONTROL, USER_DEFINED, UNUSED]
    return {
        f"{KEY}model": "gpt2",
        f"{KEY}pre": pre,
        f"{KEY}tokens": tokens + extra,
        f"{KEY}token_type": kinds,
        f"{KEY}merges": [" ".join(pair) for pair in model["merges"]],
    }


@pytest.mark.parametrize("pre", RELEASED)
def test_byte_level_ids_are_those_of_the_released_tokenizer(pre: str) -> None:
    released = trained(RELEASED[pre])
    ours, _ = made(metadata_of(released, pre))
    ids = ours.encode(TEXT).ids
    assert ids == released.encode(TEXT).ids
    assert ours.decode(ids) == TEXT == TokenBytes(ours).whole(ids)


def test_tokens_of_all_types() -> None:
    metadata = metadata_of(trained(RELEASED["gpt-2"]), "gpt-2")
    ours, _ = made(metadata)
    size = len(metadata[f"{KEY}tokens"])
    ids = ours.encode("a<|im_start|><tool>[PAD1]", add_special_tokens=False).ids
    assert ids[1:3] == [size - 3, size - 2]
    assert size - 1 not in ids  # [PAD1] has the type UNUSED
    added = ours.get_added_tokens_decoder()
    assert {id: token.special for id, token in added.items()} == {size - 3: True, size - 2: False}


@pytest.mark.parametrize("pre", sorted(PATTERNS))
def test_every_pre_tokenizer_divides_and_joins_again(pre: str) -> None:
    ours, _ = made(metadata_of(trained(RELEASED["gpt-2"]), pre))
    assert ours.decode(ours.encode(TEXT).ids) == TEXT


PIECES = ["<unk>", "<s>", "</s>", "<start>", "  "]
WORDS = ["▁", "t", "h", "e", "c", "a", "▁t", "he", "▁the", "▁c", "at", "▁cat", "th"]


def sentence_piece(**more: Any) -> dict[str, Any]:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*PIECES[:4], "▁▁", *bytes_, *WORDS]
    kinds = [UNKNOWN, CONTROL, CONTROL, CONTROL, USER_DEFINED]
    kinds += [BYTE] * 256 + [NORMAL] * len(WORDS)
    best = ("▁t", "he", "▁the", "at", "▁c", "▁cat", "th")
    scores = {token: -1.0 - at for at, token in enumerate(best)}
    return {
        f"{KEY}model": "llama",
        f"{KEY}tokens": tokens,
        f"{KEY}token_type": kinds,
        f"{KEY}scores": [scores.get(token, -100.0) for token in tokens],
        f"{KEY}bos_token_id": 1,
        f"{KEY}eos_token_id": 2,
        f"{KEY}unknown_token_id": 0,
        **{f"{KEY}{key}": value for key, value in more.items()},
    }


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [str(token) for token in tokenizer.encode(text, add_special_tokens=False).tokens]


def test_merges_follow_from_scores() -> None:
    ours, files = made(sentence_piece())
    assert pieces(ours, "the cat") == ["▁the", "▁cat"]
    assert pieces(ours, "hé") == ["▁", "h", "<0xC3>", "<0xA9>"]
    assert TokenBytes(ours).whole(ours.encode("thé cat").ids) == "thé cat"
    assert files["tokenizer_config.json"]["add_bos_token"] is True
    assert files["generation_config.json"] == {"eos_token_id": [2]}


def test_without_a_space_in_front() -> None:
    ours, files = made(sentence_piece(add_space_prefix=False, add_bos_token=False))
    assert pieces(ours, "the cat") == ["t", "he", "▁cat"]
    assert pieces(ours, "  the<start>the") == ["  ", "t", "he", "<start>", "t", "he"]
    assert TokenBytes(ours).whole(ours.encode("  the cat").ids) == "  the cat"
    assert files["tokenizer_config.json"]["add_bos_token"] is False


MERGES = ("▁ t", "h e", "▁t he", "a t", "▁ c", "▁c at", "t h")


def test_it_divides_as_sentencepieces_own_conversion() -> None:
    """Compares tokens with transformers' conversion of the same SentencePiece model."""
    released = Tokenizer(
        BPE(
            {token: id for id, token in enumerate(sentence_piece()[f"{KEY}tokens"])},
            [(left, right) for left, right in map(str.split, MERGES)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    released.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    ours, _ = made(sentence_piece())
    for text in ("the cat", "cat the that", "a tée", "hehehe"):
        assert ours.encode(text).ids == released.encode(text).ids, text


def test_ends_of_answers() -> None:
    metadata = metadata_of(trained(RELEASED["gpt-2"]), "gpt-2")
    at = len(metadata[f"{KEY}tokens"])
    texts = ["<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|other|>"]
    metadata[f"{KEY}tokens"] += texts
    metadata[f"{KEY}token_type"] += [CONTROL] * len(texts)
    metadata[f"{KEY}eos_token_id"] = at + 4
    _, files = made(metadata)
    # If <|return|> ends an answer, <|end|> only ends a part of it.
    ends = [at, at + 2, at + 3, at + 4]
    assert files["generation_config.json"]["eos_token_id"] == ends
    assert files["tokenizer_config.json"]["eos_token"] == "<|other|>"


def test_templates() -> None:
    metadata = metadata_of(trained(RELEASED["gpt-2"]), "gpt-2")
    metadata["tokenizer.chat_template"] = "plain"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    metadata["tokenizer.chat_template.tool_use"] = "with tools"
    _, files = made(metadata)
    assert files["tokenizer_config.json"]["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": "bert"}, "the vocabulary 'bert', which is not read"),
        ({"model": None}, "no 'tokenizer.ggml.model'"),
        ({"pre": "unheard-of"}, "the pre-tokenizer 'unheard-of', which is not read"),
        ({"merges": None}, "no 'tokenizer.ggml.merges'"),
        ({"tokens": [1]}, "must have a list of texts"),
        ({"token_type": [1]}, "1 values in 'tokenizer.ggml.token_type', must have one for each"),
        ({"model": "llama"}, "no 'tokenizer.ggml.scores'"),
    ],
)
def test_what_is_not_read_is_named(changes: dict[str, Any], words: str) -> None:
    metadata = metadata_of(trained(RELEASED["gpt-2"]), "gpt-2")
    metadata |= {f"{KEY}{key}": value for key, value in changes.items()}
    with pytest.raises(ModelLoadFailed) as caught:
        made({key: value for key, value in metadata.items() if value is not None})
    assert words in str(caught.value) and "m.gguf" in str(caught.value)
