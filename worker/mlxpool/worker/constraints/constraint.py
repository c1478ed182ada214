"""The constraint of one answer: which tokens may follow its ids.

Its state depends on the grammar and the ids alone, so a resumed answer is constrained as before.
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

MAX_RUN = 64  # forced tokens that are appended at once

Words: TypeAlias = npt.NDArray[np.uint32]


class EndTokens(Struct, frozen=True, eq=False):
    """The tokens of a model that end an answer, and all others.

    `ends` [ceil(vocabulary / 32)] has the bits of those that end an answer, `others` those of all
    other tokens. `columns`: the numbers of the words in which `others` lacks a bit.
    """

    ends: Words
    others: Words
    columns: npt.NDArray[np.intp]

    @classmethod
    def of(cls, ends: Words, others: Words) -> EndTokens:
        """Returns the tokens of these bits."""
        return cls(ends, others, np.flatnonzero(others != np.uint32(2**WORD_BITS - 1)))


class MaskRecord(Struct, eq=False):
    """What `masks.Masks` notes of a constraint: it alone reads and writes it.

    `quick`: quick masks in a row. `late`: a mask was late since the last quick one. `making`: what
    makes its mask.
    """

    quick: int = 0
    late: bool = False
    making: Any = None


class Constraint:
    """Used by one thread at a time. Tokens that end an answer are allowed where it is complete.

    Where the format leaves no choice of text, the next tokens are forced: they are found together,
    because the library tokenises the whole text for each one that is asked for.
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
        """`tokens`: of the library's vocabulary. `canonical`: the library knows the tokens of a
        forced text. `small`: no text of the format takes long to tokenise. `numbers`: bounds those
        of the answer, which has no token yet; None: they have no bound.
        """
        self.matcher = matcher  # others give it tokens and ask it for masks, see mask_batch.py
        self.end_tokens = ends
        self.ends, self.others = ends.ends, ends.others
        self._canonical = canonical
        self._forced: deque[int] = deque()  # tokens that follow, which the matcher has not taken
        self._sought = False  # whether forced tokens were looked for behind the newest token
        self._accepts: bool | None = None  # at the newest token; None: the matcher was not asked
        self._finished: bool | None = None  # the same
        self._error: Exception | None = None  # that `take` raises
        self._ahead: int | None = None  # a token that the matcher has, and `take` was not told
        self._thoughts: Thoughts | None = None  # None: they have ended
        self._numbers = numbers
        self.digest = digest
        self.tokens = tokens
        self.small = small
        self.ended = False  # set by who ends the answer: no token follows, and no mask is asked for
        self.record = MaskRecord()

    def begin_in_thoughts(self, thoughts: Thoughts) -> None:
        """The answer begins with thoughts: until they end, any token but an end may follow, as far
        as they have no bound. The format holds from the token behind the mark.
        """
        self._thoughts = thoughts

    def mask(self) -> Words:
        """Returns [1, ceil(vocabulary / 32)] with the bits of the tokens that may follow.

        Raises BadRequest where no token may, and where the bounds of the library are exceeded.
        """
        known = self.known_mask()
        if known is not None:
            return known
        found = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint32)
        words = (
            found[: self.others.size] & self.others
        )  # ends are allowed by other rules than there
        if self.accepts:
            words |= self.ends
        self.bound_numbers(words)
        self.require_tokens(words)
        return words[None]

    def bound_numbers(self, words: Words) -> None:
        """Takes digits out of a mask [words] where a number has as many as it may have."""
        if self._numbers is not None:
            self._numbers.limit(words)

    def known_mask(self) -> Words | None:
        """Returns the mask where the library need not be asked for it."""
        if self.allows_all:
            return self.others[None]
        token = self.forced_token()
        return None if token is None else self.mask_of(token)

    @property
    def allows_all(self) -> bool:
        """Whether any token of `others` may follow: inside thoughts, below their bound."""
        return self._thoughts is not None and not self._thoughts.forced

    def forced_token(self) -> int | None:
        """Returns the next token if it is forced."""
        if self._thoughts is not None:
            return next(iter(self._thoughts.forced), None)
        return self._forced[0] if self._forced or self._find_forced() else None

    def require_tokens(self, words: Words) -> None:
        """Raises as `mask` where the mask of these words could not be made or is empty."""
        if self.matcher.is_error():
            raise self._failed()
        if not words.any():
            raise BadRequest("format: no token of this model may follow")

    @property
    def takes_ahead(self) -> bool:
        """Whether the matcher may be given a token before `take` is."""
        return self._thoughts is None and self._ahead is None

    def taken_ahead(self, token: int, *, find: bool) -> None:
        """Notes that the matcher has taken a token, which `take` will be told; the next one.

        Afterwards nothing asks the matcher until `take`, so that a mask can be made meanwhile.
        `find`: forced tokens are found at once.
        """
        matcher, forced = self.matcher, self._forced  # for many rows in every step: few calls
        self._ahead = token
        if self._numbers is not None:
            self._numbers.take(token)
        if forced:
            forced.popleft()
            if forced:  # inside a text that is forced no answer is complete
                self._accepts = self._finished = False
                return
        accepts = self._accepts = matcher.is_accepting()
        self._finished = accepts and matcher.is_stopped()
        self._sought = find
        if find and not accepts and self._canonical:
            forced.extend(matcher.compute_ff_tokens())

    def fail(self, error: Exception) -> None:
        """Has `take` raise: whether the matcher has the next token is not known."""
        self._error = error

    def goes_on(self, token: int, least: int) -> bool:
        """Appends a token that was taken ahead, where the answer goes on with a drawn token.

        Returns False and does nothing where it does not: the answer is complete, `least` or more
        tokens are forced, or the token was not taken ahead. Then `take` appends the token.
        """
        if self._ahead != token or self._error or self._finished or len(self._forced) >= least:
            return False
        self._ahead = None
        return True

    def draws_next(self, least: int) -> bool:
        """Whether the next token is drawn: fewer than `least` are forced, and one may follow."""
        return not self._finished and len(self._forced) < least

    def give_back(self) -> None:
        """Takes back a token that was taken ahead, if one was: it will not be appended."""
        if self._ahead is None:
            return
        self._ahead = None
        self._forced.clear()
        self._forget()
        if self._numbers is not None:
            self._numbers.give_back()
        self.matcher.rollback(1)  # where it fails, so does the next mask
        self._finished = self.finished  # `accepts` as well: asked before another mask is begun

    def forced(self, *, find: bool) -> list[int]:
        """Returns the next tokens as far as the format forces them, at most MAX_RUN.

        Without `find`, only those that `mask` has found.
        """
        if self._thoughts is not None:
            return [*islice(self._thoughts.forced, MAX_RUN)]
        if find:
            self._find_forced()
        return [*islice(self._forced, MAX_RUN)]

    def take(self, token: int) -> None:
        """Appends a token. Raises BadRequest for one that may not follow, or see `fail`."""
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
        """Forgets what was known before the token that the matcher has taken."""
        self._forget()
        if self._forced:
            self._forced.popleft()  # it is the token: no other one may follow

    def _forget(self) -> None:
        self._accepts, self._finished, self._sought = None, None, False

    def copy(self) -> Constraint:
        """Returns a constraint with the same state, which takes tokens by itself."""
        made = Constraint(
            self.matcher.deep_copy(),
            self.end_tokens,
            self.digest,
            tokens=self.tokens,
            canonical=self._canonical,
            small=self.small,
            numbers=None if self._numbers is None else self._numbers.copy(),
        )
        made._forced.extend(self._forced)
        made._sought = self._sought
        made._thoughts = None if self._thoughts is None else self._thoughts.copy()
        return made

    def masks_behind(self, mask: Words, drafts: Sequence[int]) -> Words:
        """Returns [1 + drafts, words]: `mask`, which is that of the next token, and one behind
        each draft.

        It allows no token where the drafts before it cannot be the answer's, and behind an error,
        which the mask of the answer itself will raise.
        """
        lines = np.zeros((1 + len(drafts), mask.size), dtype=np.uint32)
        lines[0] = mask
        behind: Constraint | None = None
        for number, token in enumerate(drafts):
            word, bit = divmod(token, WORD_BITS)
            if not lines[number, word] >> bit & 1 or self.ends[word] >> bit & 1:
                break  # what follows an end is dropped
            behind = behind or self.copy()
            try:
                behind.take(token)
                lines[number + 1] = behind.mask()
            except BadRequest:
                break
        return lines

    def replay(self, tokens: Sequence[int]) -> None:
        """Appends the ids of a resumed answer. Raises BadRequest naming the first that is wrong."""
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
        """Appends a token of the thoughts, which it may end."""
        assert self._thoughts is not None
        self._forget()
        self._thoughts.take(token)
        if self._thoughts.ended:
            self._thoughts = None

    @property
    def accepts(self) -> bool:
        """Whether the answer is complete, though it may go on.

        After it was asked once behind a token, any thread may ask, also while a mask is made.
        """
        if self._accepts is None:
            self._accepts = self._thoughts is None and self.matcher.is_accepting()
        return self._accepts

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and no token but the end may follow.

        As `accepts`, it may be asked while a mask is made.
        """
        if self._finished is None:
            self._finished = self.accepts and self.matcher.is_stopped()
        return self._finished

    def _find_forced(self) -> bool:
        """Finds the tokens that are forced, unless some are known. Returns whether there are any.

        An error is found by the next mask.
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
