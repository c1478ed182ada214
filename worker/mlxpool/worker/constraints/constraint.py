"""The constraint of one answer: which tokens may follow its ids.

Its state depends on the grammar and the ids alone, so a resumed answer is constrained as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from mlxpool.common.errors import BadRequest
from mlxpool.worker.constraints.grammar import reason

THOUGHTS_END = (b"</think>", b"[/THINK]")  # see THINKING_OPENERS

Words: TypeAlias = npt.NDArray[np.uint32]


class Constraint:
    """Used by one thread at a time. Tokens that end an answer are allowed where it is complete."""

    def __init__(self, matcher: LLMatcher, ends: Words, others: Words, digest: str) -> None:
        """`ends` [ceil(vocabulary / 32)] has the bits of the tokens that end an answer, `others`
        those of all other tokens.
        """
        self._matcher = matcher
        self._ends = ends
        self._others = others
        self._thoughts: bytes | None = None  # the end of their text; None: they have ended
        self._piece: Callable[[int], bytes] = lambda token: b""
        self.digest = digest

    def begin_in_thoughts(self, piece: Callable[[int], bytes]) -> None:
        """The answer begins inside thoughts: until they end, any token but an end may follow.

        `piece` gives the bytes of a token. The format holds from the token behind the mark.
        """
        self._thoughts = b""
        self._piece = piece

    def mask(self) -> Words:
        """Returns [1, ceil(vocabulary / 32)] with the bits of the tokens that may follow.

        Raises BadRequest where no token may, and where the bounds of the library are exceeded.
        """
        if self._thoughts is not None:
            return self._others[None]
        data = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._failed()
        words = np.frombuffer(data, dtype=np.uint32)[: self._others.size] & self._others
        if self.accepts:
            words |= self._ends
        if not words.any():
            raise BadRequest("format: no token of this model may follow")
        return words[None]

    def take(self, token: int) -> None:
        """Appends a token. Raises BadRequest for one that may not follow."""
        if self._thoughts is not None:
            self._think(token)
        elif not self._matcher.consume_token(token):
            raise self._failed()

    def replay(self, tokens: Sequence[int]) -> None:
        """Appends the ids of a resumed answer. Raises BadRequest naming the first that is wrong."""
        begin = 0
        while self._thoughts is not None and begin < len(tokens):
            self._think(tokens[begin])
            begin += 1
        at = begin + self._matcher.try_consume_tokens(list(tokens[begin:]))
        if at < len(tokens):
            raise BadRequest(
                f"resume: id {tokens[at]} at position {at} may not follow in the format"
            )

    def _think(self, token: int) -> None:
        """Appends a token of the thoughts, which its text may end."""
        assert self._thoughts is not None
        text = self._thoughts + self._piece(token)
        ends = any(mark in text for mark in THOUGHTS_END)
        self._thoughts = None if ends else text[1 - max(map(len, THOUGHTS_END)) :]

    @property
    def accepts(self) -> bool:
        """Whether the answer is complete, though it may go on."""
        return self._thoughts is None and self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and no token but the end may follow."""
        return self.accepts and self._matcher.is_stopped()

    def _failed(self) -> BadRequest:
        return BadRequest(f"format: {reason(self._matcher.get_error())}")
