"""Tests prompts with a gap (fill in the middle), as ids of several families of tokenizers."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlxpool.common.errors import BadRequest
from mlxpool.worker.prompt.infill import infill_ids

LETTERS = "abcdefgh\n▁"


def tokenizer(*special: str, metaspace: bool = False) -> Tokenizer:
    """A tokenizer of single letters with these special tokens."""
    vocab = {letter: number for number, letter in enumerate(LETTERS)}
    letter_tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=None, fuse_unk=False))
    if metaspace:
        letter_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        letter_tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    letter_tokenizer.add_special_tokens(list(special))
    return letter_tokenizer


def filled(made: Tokenizer) -> list[str]:
    """Returns the tokens of a prompt with a gap between "ab" and "cd"."""

    def encode(text: str) -> list[int]:
        ids: list[int] = made.encode(text, add_special_tokens=False).ids
        return ids

    return [
        str(made.id_to_token(token)) for token in infill_ids("ab", "cd", made.token_to_id, encode)
    ]


@pytest.mark.parametrize(
    "tokens",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
        ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ],
)
def test_the_text_in_front_comes_first(tokens: tuple[str, str, str]) -> None:
    front, behind, end = tokens
    assert filled(tokenizer(*tokens)) == [front, *"ab", behind, *"cd", end]


def test_a_text_behind_a_gap_does_not_begin_with_a_space() -> None:
    tokens = filled(tokenizer("▁<PRE>", "▁<SUF>", "▁<MID>", metaspace=True))
    assert tokens == ["▁<PRE>", *"▁ab", "▁<SUF>", *"cd", "▁<MID>"]


def test_the_suffix_may_come_first() -> None:
    assert filled(tokenizer("[SUFFIX]", "[PREFIX]")) == ["[SUFFIX]", *"cd", "[PREFIX]", *"ab"]


@pytest.mark.parametrize("tokens", [(), ("<|fim_prefix|>", "<|fim_middle|>")])
def test_a_tokenizer_without_such_tokens_is_named(tokens: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest, match="suffix is not supported"):
        filled(tokenizer(*tokens))
