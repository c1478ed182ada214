"""Bounds the length of JSON numbers in answers.

Grammars allow any number of digits, and a model may never stop. So after a number of the longest
length, no token that begins with another digit may follow, unless the grammar allows nothing else.
The allowed tokens depend only on the ids of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Words: TypeAlias = npt.NDArray[np.uint32]

MAX_DIGITS = 40  # consecutive digits: a number of 128 bits has 39
MAX_EXPONENT = 2  # digits of an exponent, so that a number is finite as a double
_OF_NUMBERS = b"0123456789+-.eE"
_KEPT = 64  # bytes at the end of a number that are examined
_FULL = re.compile(rb"(?:[0-9]{%d,}|[0-9.][eE][+-]?[0-9]{%d,})$" % (MAX_DIGITS, MAX_EXPONENT))
_EXPONENT = re.compile(rb"[0-9.][eE][+-]?[0-9]?$")  # an exponent with room for one or two digits
# Outside of strings, only the letters e and E follow a JSON number: before other letters the number
# is in a string.
_LETTERS = frozenset(b"abcdfghijklmnopqrstuvwxyzABCDFGHIJKLMNOPQRSTUVWXYZ")
_DIGITS = frozenset(b"0123456789")


class NumberTokens(Struct, frozen=True, eq=False):
    """The tokens of a vocabulary that may be parts of numbers.

    `tails`: the bytes at the end of a token that may belong to a number, by token id. `whole`: the
    tokens that have only such bytes. `digits`, `letters` and `runs` are bit sets of token ids:
    the tokens that begin with a digit, with a letter, and with several digits.
    """

    tails: Mapping[int, bytes]
    whole: frozenset[int]
    digits: Words
    runs: Words
    letters: Words

    @classmethod
    def of(cls, pieces: Sequence[bytes], words: int) -> NumberTokens:
        """Returns the NumberTokens of a vocabulary; `words`: the 32-bit words in a mask."""
        tails: dict[int, bytes] = {}
        whole: list[int] = []
        digits, runs, letters = (np.zeros(words, np.uint32) for _ in range(3))
        for token, piece in enumerate(pieces[: 32 * words]):
            if not piece:
                continue
            rest = len(piece.rstrip(_OF_NUMBERS))
            if rest < len(piece):
                tails[token] = piece[rest:]
            if not rest:
                whole.append(token)
            bit = np.uint32(1 << token % 32)
            if piece[0] in _DIGITS:
                digits[token // 32] |= bit
                if piece[1:2].isdigit():
                    runs[token // 32] |= bit
            elif piece[0] in _LETTERS:
                letters[token // 32] |= bit
        return cls(tails, frozenset(whole), digits, runs, letters)


class NumberBound:
    """The bound of the JSON numbers in one answer: keeps the last bytes that may be a number."""

    def __init__(self, tokens: NumberTokens) -> None:
        self._tokens = tokens
        self._tail = self._before = b""  # the last bytes now, and before the newest token

    def take(self, token: int) -> None:
        """Appends a token of the answer."""
        self._before = self._tail
        tail = self._tokens.tails.get(token, b"")
        self._tail = (self._tail + tail)[-_KEPT:] if token in self._tokens.whole else tail

    def take_all(self, tokens: Iterable[int]) -> None:
        """Appends several tokens."""
        for token in tokens:
            self.take(token)

    def give_back(self) -> None:
        """Removes the newest token; only one token can be removed."""
        self._tail = self._before

    def copy(self) -> NumberBound:
        """Returns an independent copy."""
        copy = NumberBound(self._tokens)
        copy._tail, copy._before = self._tail, self._before
        return copy

    def limit(self, words: npt.NDArray[Any]) -> None:
        """Removes tokens from a mask [words] that would make the answer's last number too long.

        These are tokens that begin with a digit or, in an exponent, with several digits. Changes
        nothing inside of strings, or if the grammar allows no other tokens.
        """
        if len(self._tail) < 2:
            return
        if _FULL.search(self._tail):
            refused = self._tokens.digits
        elif _EXPONENT.search(self._tail):
            refused = self._tokens.runs
        else:
            return
        mask = words[: refused.size]
        if not (mask & self._tokens.letters).any():
            allowed = mask & ~refused
            if allowed.any():
                mask[:] = allowed
