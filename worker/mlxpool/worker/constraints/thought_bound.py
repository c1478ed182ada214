"""The constraint that bounds the thoughts of an answer without a response format.

It allows any token until the bound, and then forces the tokens that end the thoughts. A request has
this constraint only near the bound. Earlier, and after the thoughts, the steps of the request are
unconstrained.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np

from mlxpool.worker.constraints.constraint import Constraint, EndTokens
from mlxpool.worker.constraints.mask_table import WORD_BITS, words_of_mask
from mlxpool.worker.constraints.masks import QUICK_MASKS
from mlxpool.worker.prompt.thoughts import Thoughts

if TYPE_CHECKING:
    from llguidance import LLMatcher

NEAR = 32  # tokens; a step and the step in flight check fewer tokens together for a request


class ThoughtBound(Constraint):
    """The constraint of an answer whose thoughts are bounded; not used after the thoughts."""

    def __init__(self, thoughts: Thoughts, vocab_size: int) -> None:
        matcher = cast("LLMatcher", _AnyToken(vocab_size))
        super().__init__(matcher, _all_tokens(vocab_size), "", tokens=vocab_size)
        self.begin_in_thoughts(thoughts)
        self.record.quick = QUICK_MASKS
        self._vocab_size = vocab_size
        self._bounded = thoughts

    @property
    def is_over(self) -> bool:
        """Whether the thoughts have ended: from now on, any token may follow."""
        return self._bounded.ended

    @property
    def is_near(self) -> bool:
        """Whether a token may be forced in one of the next steps."""
        left = self._bounded.left
        return left is not None and left <= NEAR

    def copy(self) -> ThoughtBound:
        """Returns an independent constraint with the same state; see Constraint."""
        return ThoughtBound(self._bounded.copy(), self._vocab_size)

    @property
    def accepts(self) -> bool:
        """Always False: without a format, no answer is complete."""
        return False

    @property
    def finished(self) -> bool:
        """Always False: no format ends the answer."""
        return False


class _AnyToken:
    """A matcher that allows all tokens: the matcher of a ThoughtBound."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def consume_token(self, token: int) -> bool:
        return True

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return len(tokens)

    def compute_bitmask(self) -> bytes:
        return _all_tokens(self._vocab_size).others.tobytes()

    def compute_ff_tokens(self) -> list[int]:
        return []

    def is_error(self) -> bool:
        return False


@cache
def _all_tokens(vocab_size: int) -> EndTokens:
    words = np.full(words_of_mask(vocab_size), 2**WORD_BITS - 1, dtype=np.uint32)
    if vocab_size % WORD_BITS:
        words[-1] = 2 ** (vocab_size % WORD_BITS) - 1
    return EndTokens.of(np.zeros_like(words), words)
