"""The vocabulary of a model for llguidance: the bytes of its tokens, and its own tokenizer.

If a grammar leaves no choice of bytes, llguidance allows only the tokenizer's ids of these bytes,
because a model has learnt to write these ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer

from mlxpool.worker.constraints.constraint import Words
from mlxpool.worker.prompt.added_tokens import add as add_tokens
from mlxpool.worker.prompt.text_model import TextSource
from mlxpool.worker.prompt.tokenizer import read_tokenizer

Encode = Callable[[str], Sequence[int]]

KEPT_TEXTS = 4096  # forced texts with cached ids: answers repeat their keys
KEPT_LENGTH = 64  # the most characters of a forced text with cached ids

# The library keeps a set of tokens for each of these patterns. A state that allows the whole
# pattern uses the set and does not try its tokens. So a JSON string with room for eight more
# characters tries only tokens of more than eight characters. Each pattern needs a few MB.
_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 30)
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{most}}}" for most in _LENGTHS),
    f"{_CHARACTER}+",
]


def load_vocabulary(
    source: TextSource, pieces: Sequence[bytes], eos: Collection[int]
) -> LLTokenizer:
    """Reads a model's tokenizer file again and makes llguidance's tokenizer from it.

    The worker itself keeps only the bytes of the tokens.
    """
    tokenizer, _ = read_tokenizer(Path(source.tokenizer))
    add_tokens(tokenizer, source.added)
    added = tokenizer.get_added_tokens_decoder()
    special = [token for token, entry in added.items() if entry.special and token < len(pieces)]

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return make_vocabulary(pieces, eos, special, encode)


def make_vocabulary(
    pieces: Sequence[bytes], eos: Collection[int], special: Collection[int], encode: Encode
) -> LLTokenizer:
    """Makes llguidance's tokenizer from the bytes of tokens. `special` tokens are not text."""
    ends = sorted(token for token in eos if token < len(pieces))
    marked = sorted({*special, *ends})
    wrapper = _Wrapper(list(pieces), ends[0] if ends else None, marked, encode)
    tokenizer = LLTokenizer(wrapper, eos_token=ends or None, slices=SLICES)  # type: ignore[arg-type]
    wrapper.greedy = tokenizer.greedy_tokenize
    return tokenizer


def words_of(tokens: Iterable[int], vocab_size: int) -> Words:
    """Returns words [ceil(vocabulary / 32)] with the bits of the tokens below `vocab_size`."""
    words = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
    for token in tokens:
        if token < vocab_size:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words


class _Wrapper:
    """A tokenizer with the attributes that LLTokenizer reads; a call returns the ids of a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: list[bytes], eos: int | None, special: Sequence[int], encode: Encode
    ) -> None:
        self.eos_token_id = eos
        self.tokens = tokens
        self.special_token_ids = list(special)
        self._special = frozenset(special)
        self.greedy: Encode = lambda text: ()
        self._encode = encode
        self._kept = lru_cache(KEPT_TEXTS)(self._ids_of)

    def __call__(self, text: str) -> list[int]:
        return self._kept(text) if len(text) <= KEPT_LENGTH else self._ids_of(text)

    def _ids_of(self, text: str) -> list[int]:
        """Returns the tokenizer's ids of a text if they decode to the text.

        Otherwise returns the ids of the longest tokens that make up the text. This happens with
        tokenizers that begin each text with a space, and if the text has the name of a special
        token: the name must not become that token.
        """
        ids = list(self._encode(text))
        if all(token < len(self.tokens) and token not in self._special for token in ids):
            text_of_ids = b"".join([self.tokens[token] for token in ids])
            if text_of_ids == text.encode("utf-8", "replace"):
                return ids
        return list(self.greedy(text))
