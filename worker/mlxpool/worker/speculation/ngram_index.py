"""Finds where the newest tokens of a stream stood before. Pure.

Hash chains: a table has the newest place behind each run of NGRAM tokens, by the hash of the run,
and each place refers to the one before it with the same hash. A token takes 12 bytes; to append one
or to search takes some microseconds, whatever the length of the stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

NGRAM = 3  # tokens that must be the same before a draft is proposed
MAX_MATCH = 32  # tokens up to which matches are compared
MAX_CANDIDATES = 8  # places that a search compares, the newest first
MAX_TABLE_BITS = 17  # of the number of entries of the table: 512 KiB
MIN_TABLE_BITS = 10
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # odd, with bits everywhere
_SHIFT = 7  # the lowest bits of a sum of products have few tokens' bits in them
NOWHERE = -1


class NgramIndex:
    """The tokens of one stream, in order, each below 2**32.

    A place is the number of the token that follows a run.
    """

    def __init__(self, tokens: int) -> None:
        """`tokens`: how many the stream may have, about."""
        bits = min(MAX_TABLE_BITS, max(MIN_TABLE_BITS, tokens.bit_length()))
        self.tokens = array("q")
        self._mask = (1 << bits) - 1
        self._newest = array("i", (NOWHERE,)) * (1 << bits)
        self._before = array("i")  # for the run that ends with each token

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Appends one token."""
        tokens = self.tokens
        tokens.append(token)
        size = len(tokens)
        if size < NGRAM:
            self._before.append(NOWHERE)
            return
        first, second, third = _FACTORS
        found = tokens[-3] * first + tokens[-2] * second + token * third >> _SHIFT & self._mask
        self._before.append(self._newest[found])
        self._newest[found] = size

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends many tokens: 4,096 in some 0.3 ms."""
        begin = len(self.tokens)
        self.tokens.extend(tokens)
        unhashed = min(max(0, NGRAM - 1 - begin), len(tokens))  # at the begin of a stream
        self._before.extend([NOWHERE] * unhashed)
        begin += unhashed
        count = len(self.tokens) - begin
        if count <= 0:
            return
        numbers = np.array(self.tokens[begin - NGRAM + 1 :], dtype=np.int64)
        sums = sum(
            numbers[at : at + count] * factor for at, factor in enumerate(_FACTORS)
        )  # wraps around at 2**64, far above the bits that count
        hashes = np.asarray(sums) >> _SHIFT & self._mask
        newest = np.frombuffer(self._newest, dtype=np.int32)
        order = np.argsort(hashes, kind="stable")
        grouped = hashes[order]
        places = (order + begin + 1).astype(np.int32)
        before = np.empty(count, dtype=np.int32)
        before[0] = NOWHERE
        before[1:] = places[:-1]
        firsts = np.flatnonzero(np.diff(grouped, prepend=-1))
        before[firsts] = newest[grouped[firsts]]
        newest[grouped[np.append(firsts[1:] - 1, count - 1)]] = places[
            np.append(firsts[1:] - 1, count - 1)
        ]
        found = np.empty(count, dtype=np.int32)
        found[order] = before
        self._before.frombytes(found.tobytes())

    def longest_match(self) -> tuple[int, int]:
        """Returns the place behind the longest earlier run that ends as the stream does.

        With it the length of the run, from NGRAM to MAX_MATCH; (NOWHERE, 0) if there is none. Of
        runs of the same length it is the newest. Only MAX_CANDIDATES of them are compared.
        """
        before = self._before
        if not before:
            return NOWHERE, 0
        best, longest = NOWHERE, NGRAM - 1
        place = before[-1]
        for _ in range(MAX_CANDIDATES):
            if place == NOWHERE:
                break
            length = self._match(place)
            if length > longest:
                best, longest = place, length
                if length == MAX_MATCH:
                    break
            place = before[place - 1]
        return (NOWHERE, 0) if best == NOWHERE else (best, longest)

    def _match(self, place: int) -> int:
        """Returns how many tokens before a place equal the newest ones, at most MAX_MATCH."""
        tokens = self.tokens
        size = len(tokens)
        most = min(place, MAX_MATCH)
        for length in range(most):
            if tokens[place - 1 - length] != tokens[size - 1 - length]:
                return length
        return most

    def copied(self, place: int, count: int) -> tuple[int, ...]:
        """Returns the `count` tokens from a place on, as if the stream went on with them."""
        found = self.tokens[place : place + count].tolist()
        period = len(self.tokens) - place
        while len(found) < count:
            found.append(found[len(found) - period])
        return tuple(found)
