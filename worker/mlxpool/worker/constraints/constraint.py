"""The constraint of one answer: the tokens that may follow its ids.

Its state depends only on the grammar and the ids, so a resumed answer is constrained as before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.common.errors import BadRequest
from mlxpool.worker.constraints.mask_table import WORD_BITS
from mlxpool.worker.constraints.numbers import NumberBound
from mlxpool.worker.constraints.refusals import reason
from mlxpool.worker.prompt.thoughts import Thoughts

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_RUN = 64  # forced tokens that are appended together

Words: TypeAlias = npt.NDArray[np.uint32]


class EndTokens(Struct, frozen=True, eq=False):
    """The tokens of a model that end an answer, and all other tokens.

    `ends` [ceil(vocabulary / 32)] has the bits of the tokens that end an answer, `others` the bits
    of all other tokens. `columns`: the indices of the words in which `others` lacks a bit.
    """

    ends: Words
    others: Words
    columns: npt.NDArray[np.intp]

    @classmethod
    def of(cls, ends: Words, others: Words) -> EndTokens:
        """Returns the EndTokens of two bit masks, and computes `columns`."""
        return cls(ends, others, np.flatnonzero(others != np.uint32(2**WORD_BITS - 1)))


class MaskRecord(Struct, eq=False):
    """The state of a constraint that `masks.Masks` keeps between steps.

    A mask is quick if it took little processor time, and late if it was not made when a step needed
    it. `quick`: the number of consecutive quick masks. `late`: a mask was late since the last quick
    mask. `making`: the job (Batch or SingleMask) that makes the next mask; None: no job.
    """

    quick: int = 0
    late: bool = False
    making: Any = None


class Constraint:
    """The constraint of one answer, used by one thread at a time.

    Tokens that end an answer are allowed if the answer is complete. If the format leaves no choice
    of text, the next tokens are forced. Forced tokens are found together, because the library
    tokenises the whole text at each call.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        ends: EndTokens,
        digest: str,
        *,
        tokens: int,
        canonical: bool = False,
        small: bool = True,
        numbers: NumberBound | None = None,
    ) -> None:
        """`tokens`: the size of llguidance's vocabulary.

        `canonical`: llguidance was given the tokenizer, so it knows the ids of a forced text.
        `small`: the grammar is short, so texts are tokenised quickly. `numbers`: a new bound of the
        answer's JSON numbers; None: no bound.
        """
        self.matcher = matcher  # mask_batch.py also gives tokens to it and reads its masks
        self.end_tokens = ends
        self.ends, self.others = ends.ends, ends.others
        self._canonical = canonical
        self._forced: deque[int] = deque()  # the next tokens, which the matcher does not have yet
        self._sought = False  # whether forced tokens were looked for after the newest token
        # `accepts` and `finished` after the newest token; None: not yet read from the matcher.
        self._accepts: bool | None = None
        self._finished: bool | None = None
        self._error: Exception | None = None  # the error that `take` raises
        self._ahead: int | None = None  # a token that the matcher has, and `take` did not get yet
        self._thoughts: Thoughts | None = None  # None: the thoughts have ended
        self._numbers = numbers
        self.digest = digest
        self.tokens = tokens
        self.small = small
        self.ended = False  # whether the answer has ended, so that it needs no token and no mask
        self.record = MaskRecord()

    def begin_in_thoughts(self, thoughts: Thoughts) -> None:
        """Begins the answer with thoughts. Until these end, any token but an end token may follow.

        If the thoughts have a bound, the tokens of their end mark are forced at the bound. The
        format applies after the end mark.
        """
        self._thoughts = thoughts

    def mask(self) -> Words:
        """Returns the mask [1, ceil(vocabulary / 32)]: the bits of the tokens that may follow.

        Raises BadRequest if no token may follow, or if the bounds of llguidance are exceeded.
        """
        known = self.known_mask()
        if known is not None:
            return known
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint32)
        words = bits[: self.others.size] & self.others  # ends are allowed by our own rule, below
        if self.accepts:
            words |= self.ends
        self.bound_numbers(words)
        self.require_tokens(words)
        return words[None]

    def bound_numbers(self, words: Words) -> None:
        """Removes tokens from a mask [words] that would make a JSON number too long.

        See numbers.py.
        """
        if self._numbers is not None:
            self._numbers.limit(words)

    def known_mask(self) -> Words | None:
        """Returns the next token's mask if it is known without the library, else None."""
        if self.allows_all:
            return self.others[None]
        token = self.forced_token()
        return None if token is None else self.mask_of(token)

    @property
    def allows_all(self) -> bool:
        """Whether all tokens of `others` may follow: in the thoughts, while no token is forced."""
        return self._thoughts is not None and not self._thoughts.forced

    def forced_token(self) -> int | None:
        """Returns the next token if it is forced, else None."""
        if self._thoughts is not None:
            return next(iter(self._thoughts.forced), None)
        return self._forced[0] if self._forced or self._find_forced() else None

    def require_tokens(self, words: Words) -> None:
        """Raises BadRequest if the mask `words` could not be made, or if it allows no token."""
        if self.matcher.is_error():
            raise self._failed()
        if not words.any():
            raise BadRequest("format: no token of this model may follow")

    @property
    def takes_ahead(self) -> bool:
        """Whether the matcher may get the next token before `take` is called with this token."""
        return self._thoughts is None and self._ahead is None

    def taken_ahead(self, token: int, *, find: bool) -> None:
        """Records that the matcher got a token ahead: `take` will be called with the token later.

        Until that call nothing else reads the matcher, so another thread may make the next mask.
        `find`: also finds the tokens that the format forces after this token.
        """
        matcher, forced = self.matcher, self._forced  # few calls: runs for many rows in every step
        self._ahead = token
        if self._numbers is not None:
            self._numbers.take(token)
        if forced:
            forced.popleft()
            if forced:  # an answer is not complete inside a forced text
                self._accepts = self._finished = False
                return
        accepts = self._accepts = matcher.is_accepting()
        self._finished = accepts and matcher.is_stopped()
        self._sought = find
        if find and not accepts and self._canonical:
            forced.extend(matcher.compute_ff_tokens())

    def fail(self, error: Exception) -> None:
        """Stores an error that the next call of `take` raises: the matcher's state is unknown."""
        self._error = error

    def goes_on(self, token: int, least: int) -> bool:
        """Commits a token that the matcher got ahead, if the next token has to be sampled.

        Returns False and does nothing if the answer is complete, if `least` or more tokens are
        forced, or if the matcher did not get this token ahead, see `taken_ahead`. Then the caller
        appends the token by `take`.
        """
        if self._ahead != token or self._error or self._finished or len(self._forced) >= least:
            return False
        self._ahead = None
        return True

    def draws_next(self, least: int) -> bool:
        """Returns whether the next token is sampled: the answer can continue, and no run is forced.

        A run consists of `least` or more forced tokens.
        """
        return not self._finished and len(self._forced) < least

    def give_back(self) -> None:
        """Removes the token of `taken_ahead`, if any, from the matcher: it is not committed."""
        if self._ahead is None:
            return
        self._ahead = None
        self._forced.clear()
        self._forget()
        if self._numbers is not None:
            self._numbers.give_back()
        self.matcher.rollback(1)  # after an error here, the next mask fails, too
        self._finished = self.finished  # stored, as is `accepts`, before another mask is begun

    def forced(self, *, find: bool) -> list[int]:
        """Returns the next tokens that the format forces, at most MAX_RUN tokens.

        Without `find`, returns only forced tokens that were found before.
        """
        if self._thoughts is not None:
            return [*islice(self._thoughts.forced, MAX_RUN)]
        if find:
            self._find_forced()
        return [*islice(self._forced, MAX_RUN)]

    def take(self, token: int) -> None:
        """Appends a token. Raises BadRequest if it may not follow, or the error from `fail`."""
        if self._error is not None:
            raise self._error
        if self._ahead is not None:
            assert token == self._ahead, "the token that was taken ahead is the next one"
            self._ahead = None
            return
        if self._thoughts is not None:
            self._think(token)
            return
        if not self.matcher.consume_token(token):
            raise self._failed()
        if self._numbers is not None:
            self._numbers.take(token)
        self._behind_token()

    def take_forced(self, count: int) -> None:
        """Appends the next `count` tokens of `forced`."""
        if self._thoughts is not None:
            for token in [*islice(self._thoughts.forced, count)]:
                self._think(token)
            return
        run = [self._forced.popleft() for _ in range(count)]
        self._forget()
        if not self.matcher.consume_tokens(run):
            raise self._failed()
        if self._numbers is not None:
            self._numbers.take_all(run)

    def _behind_token(self) -> None:
        """Clears the values that were stored before the matcher got its newest token.

        If tokens were forced, the newest token was the first of these; it is removed from them.
        """
        self._forget()
        if self._forced:
            self._forced.popleft()  # the newest token: the mask allowed no other token

    def _forget(self) -> None:
        self._accepts, self._finished, self._sought = None, None, False

    def copy(self) -> Constraint:
        """Returns an independent constraint with the same state."""
        copy = Constraint(
            self.matcher.deep_copy(),
            self.end_tokens,
            self.digest,
            tokens=self.tokens,
            canonical=self._canonical,
            small=self.small,
            numbers=None if self._numbers is None else self._numbers.copy(),
        )
        copy._forced.extend(self._forced)
        copy._sought = self._sought
        copy._thoughts = None if self._thoughts is None else self._thoughts.copy()
        return copy

    def masks_behind(self, mask: Words, drafts: Sequence[int]) -> Words:
        """Returns masks [1 + drafts, words]: `mask` for the next token, then one after each draft.

        A mask allows no token if the drafts before it cannot follow in the answer, or if an error
        occurred. If the answer reaches that position, its own next mask raises the error.
        """
        lines = np.zeros((1 + len(drafts), mask.size), dtype=np.uint32)
        lines[0] = mask
        copy: Constraint | None = None
        for number, token in enumerate(drafts):
            word, bit = divmod(token, WORD_BITS)
            if not lines[number, word] >> bit & 1 or self.ends[word] >> bit & 1:
                break  # tokens after an end token are dropped
            copy = copy or self.copy()
            try:
                copy.take(token)
                lines[number + 1] = copy.mask()
            except BadRequest:
                break
        return lines

    def replay(self, tokens: Sequence[int]) -> None:
        """Appends the ids of a resumed answer. Raises BadRequest with the first wrong id."""
        begin = 0
        while self._thoughts is not None and begin < len(tokens):
            self._think(tokens[begin])
            begin += 1
        self._forget()
        at = begin + self.matcher.try_consume_tokens(list(tokens[begin:]))
        if at < len(tokens):
            raise BadRequest(
                f"resume: id {tokens[at]} at position {at} may not follow in the format"
            )
        if self._numbers is not None:
            self._numbers.take_all(tokens[begin:])

    def _think(self, token: int) -> None:
        """Appends a token of the thoughts. The token may end the thoughts."""
        assert self._thoughts is not None
        self._forget()
        self._thoughts.take(token)
        if self._thoughts.ended:
            self._thoughts = None

    @property
    def accepts(self) -> bool:
        """Whether the answer is complete, even if more text may follow.

        The first read after a token asks the matcher. Later reads return the stored value, so any
        thread may read it, also while a mask is made.
        """
        if self._accepts is None:
            self._accepts = self._thoughts is None and self.matcher.is_accepting()
        return self._accepts

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and only an end token may follow.

        Any thread may read it while a mask is made, see `accepts`.
        """
        if self._finished is None:
            self._finished = self.accepts and self.matcher.is_stopped()
        return self._finished

    def _find_forced(self) -> bool:
        """Finds the forced tokens, unless some are known. Returns whether a token is forced.

        If llguidance fails, the next call of `mask` raises the error.
        """
        if not self._forced and not self._sought and self._canonical and not self.accepts:
            self._sought = True
            self._forced.extend(self.matcher.compute_ff_tokens())
        return bool(self._forced)

    def mask_of(self, token: int) -> Words:
        """Returns the mask that allows one token."""
        words = np.zeros((1, self.others.size), dtype=np.uint32)
        words[0, token // WORD_BITS] = 1 << token % WORD_BITS
        return words

    def _failed(self) -> BadRequest:
        return BadRequest(f"format: {reason(self.matcher.get_error())}")
