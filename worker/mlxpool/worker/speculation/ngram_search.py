"""The tokens of one stream, and where the newest of them stood before. Pure.

The tokens are the characters of a text, so that CPython's search of texts finds runs of them:
13,000 tokens take it 3 us, 20 us if they were chosen to make it slow, which is less than a model
takes to attend to them. There is no index to build, so the first search of a stream costs hardly
more than later ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from sys import byteorder, maxunicode

MIN_MATCH = 3  # tokens that must be the same before a draft is proposed
LONGEST_RUN = 8  # tokens that are searched for: among places with so many the newest is taken
MAX_MATCH = 32  # tokens up to which a match is measured
MAX_TOKENS = maxunicode + 1  # of a vocabulary
NOWHERE = -1
_UTF_32 = "utf-32-le" if byteorder == "little" else "utf-32-be"


class StreamTokens:
    """The tokens of one stream, in order, each below MAX_TOKENS.

    A place is the number of the token that follows a run.
    """

    def __init__(self) -> None:
        self._text = ""

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, place: int) -> int:
        return ord(self._text[place])

    def append(self, token: int) -> None:
        """Appends one token."""
        self._append(chr(token))

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends many tokens: 10,000 in some 0.07 ms."""
        self._append(array("I", tokens).tobytes().decode(_UTF_32, "surrogatepass"))

    def _append(self, more: str) -> None:
        text, self._text = self._text, ""
        text += more  # in place, for nothing else refers to it: CPython copies it otherwise
        self._text = text

    def longest_match(self) -> tuple[int, int]:
        """Returns the place behind the longest earlier run that ends as the stream does.

        With it the length of the match, from MIN_MATCH to MAX_MATCH; (NOWHERE, 0) if there is none.
        Of matches of the same length, and of those from LONGEST_RUN on, it is the newest. After a
        match, only places before it are searched, for a longer run: each place is seen once.
        """
        text = self._text
        size = len(text)
        best, length = NOWHERE, 0
        run, end = MIN_MATCH, size - 1  # the run has to end before
        while run <= LONGEST_RUN and run < size:
            found = text.rfind(text[size - run :], 0, end)
            if found < 0:
                break
            best, end = found + run, found + run - 1
            length = self._match(best, run)
            run = length + 1
        return best, length

    def _match(self, place: int, known: int) -> int:
        """Returns how many tokens before a place equal the newest ones, at most MAX_MATCH.

        `known`: so many of them do.
        """
        text = self._text
        most = min(place, MAX_MATCH)
        for length in range(known + 1, most + 1):
            if text[place - length] != text[-length]:
                return length - 1
        return most

    def copied(self, place: int, count: int) -> tuple[int, ...]:
        """Returns the `count` tokens from a place on, as if the stream went on with them."""
        found = [ord(one) for one in self._text[place : place + count]]
        period = len(self) - place
        while len(found) < count:
            found.append(found[len(found) - period])
        return tuple(found)
