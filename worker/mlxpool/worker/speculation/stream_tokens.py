"""The tokens of one stream, and where the newest of them stood before. Pure.

The tokens are bytes, four each, so that CPython's search for bytes finds runs of them: 20,000
tokens take it some 5 us, which is less than a model takes to attend to them. There is no index to
build, so the first search of a stream costs hardly more than later ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from sys import byteorder

NGRAM = 3  # tokens that must be the same before a draft is proposed
MAX_MATCH = 32  # tokens up to which matches are compared
# Places that a search looks at. Each aligned one has a longer match than those before it, so only
# bytes that look like tokens, and begin within one, can be more.
MAX_PLACES = 2 * MAX_MATCH
NOWHERE = -1
_WIDTH = array("I").itemsize  # bytes of a token


class StreamTokens:
    """The tokens of one stream, in order, each below 2**32.

    A place is the number of the token that follows a run.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes) // _WIDTH

    def __getitem__(self, place: int) -> int:
        return int.from_bytes(self._bytes[place * _WIDTH : (place + 1) * _WIDTH], byteorder)

    def append(self, token: int) -> None:
        """Appends one token."""
        self._bytes += token.to_bytes(_WIDTH, byteorder)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends many tokens: 4,096 in some 0.07 ms."""
        self._bytes += array("I", tokens)

    def longest_match(self) -> tuple[int, int]:
        """Returns the place behind the longest earlier run that ends as the stream does.

        With it the length of the run, from NGRAM to MAX_MATCH; (NOWHERE, 0) if there is none. Of
        runs of the same length it is the newest. All places are searched once at most: behind one
        that matches, only those before it that match longer.
        """
        stream = self._bytes
        size = len(stream)
        best, longest = NOWHERE, 0
        run, end = NGRAM, size - 1  # in tokens; in bytes, the run has to end before
        for _ in range(MAX_PLACES):
            if run > MAX_MATCH or run * _WIDTH >= size:
                break
            found = stream.rfind(stream[size - run * _WIDTH :], 0, end)
            if found < 0:
                break
            end = found + run * _WIDTH - 1
            if found % _WIDTH == 0:
                best = found // _WIDTH + run
                longest = self._match(best, run)
                run = longest + 1
        return best, longest

    def _match(self, place: int, known: int) -> int:
        """Returns how many tokens before a place equal the newest ones, at most MAX_MATCH.

        `known`: so many of them do.
        """
        most = min(place, MAX_MATCH)
        newest = self._bytes[-most * _WIDTH :]
        earlier = self._bytes[(place - most) * _WIDTH : place * _WIDTH]
        for length in range(known, most):
            token = slice((most - length - 1) * _WIDTH, (most - length) * _WIDTH)
            if newest[token] != earlier[token]:
                return length
        return most

    def copied(self, place: int, count: int) -> tuple[int, ...]:
        """Returns the `count` tokens from a place on, as if the stream went on with them."""
        part = self._bytes[place * _WIDTH : (place + count) * _WIDTH]
        found = array("I", bytes(part)).tolist()
        period = len(self) - place
        while len(found) < count:
            found.append(found[len(found) - period])
        return tuple(found)
