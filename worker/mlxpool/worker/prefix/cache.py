"""The prefix cache: its interface, and the modes `off` and `single`; tree_cache.py is `tree`.

Used by the compute thread. A KV row is the KV cache of one sequence, from `begin` to `close`.
Imports no MLX: only the store knows the contents of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from mlxpool.worker.media.spans import Spans, prefix_end
from mlxpool.worker.prefix.store import PrefixRow, Store
from mlxpool.worker.prefix.tree import common_prefix

E = TypeVar("E")
S = TypeVar("S")
R = TypeVar("R", bound=PrefixRow)

# Reasons for the number of tokens that a prompt got from the cache.
OFF = "the cache is off"
EMPTY = "nothing is cached"
ONE_TOKEN = "the prompt has one token, which is always computed"
DIFFERENT = "no cached prompt begins alike"
NO_STATE = "no state is kept where the tokens begin to differ"
EARLIER_STATE = "the last state is kept before the tokens begin to differ"
PART = "the rest differs from what is cached"
WHOLE = "all but the last token is cached"


def reason_of(cached: int, matched: int, length: int) -> str:
    """Returns the reason why a prompt got `cached` tokens from a cache that is not empty.

    `matched`: the number of the prompt's first tokens in the cache. `length`: the tokens of the
    prompt.
    """
    if cached:
        if cached < matched:
            return EARLIER_STATE
        return WHOLE if cached == length - 1 else PART
    if length == 1:
        return ONE_TOKEN
    return NO_STATE if matched else DIFFERENT


def usable(prompt: Sequence[int], most: int | None) -> int:
    """Returns how many first tokens of a prompt may come from the cache, at most `most`.

    The last token is always computed, because its logits are needed.
    """
    return len(prompt) - 1 if most is None else min(most, len(prompt) - 1)


class PrefixCache(Generic[R]):
    """The base class of the three modes. It is also the mode `off`, which keeps nothing.

    Counters since the start: `hits` and `misses` of `begin`; `tokens`, the cached tokens that
    `begin` has found; `evictions`; `evicted_tokens`, the tokens that are no longer in any entry.
    `reason` explains the result of the newest `begin`.

    `shares`: a sequence can use cached tokens of a KV row that is still in use. `whole`: layers
    have snapshots, so a sequence can use cached tokens only up to a position with a snapshot.
    `exclusive`: an entry is used by at most one row. `by_owner`: a sequence finds only entries of
    sequences with the same owner.
    """

    shares = False
    whole = False
    exclusive = False

    def __init__(self, store: Store[R, E, S], budget: int) -> None:
        if budget < 0:
            raise ValueError(f"the prefix cache's budget is {budget} bytes, must not be negative")
        self._new_row = store.new_row
        self._release = store.release
        self._budget = budget
        self.hits = 0
        self.misses = 0
        self.tokens = 0
        self.evictions = 0
        self.evicted_tokens = 0
        self.reason = ""
        self.by_owner = False

    @property
    def budget(self) -> int:
        """The most bytes of all entries; setting a lower value evicts entries immediately."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget
        self.shrink(self.nbytes - budget)

    @property
    def nbytes(self) -> int:
        """The bytes of all entries."""
        return 0

    def begin(
        self,
        prompt: Sequence[int],
        restore_at: int = 0,
        media: Spans = (),
        most: int | None = None,
        owner: str = "",
    ) -> tuple[R, int]:
        """Returns a KV row for a non-empty `prompt`, and the number of prompt tokens in the row.

        The row never has the last token, because the caller computes its logits. `restore_at`: a
        position where a later prompt is likely to branch off, such as the end of the conversation
        before the generation prompt; 0: no such position. `media`: the images of the prompt;
        neither the cached tokens nor a restore point end inside an image group. `most` bounds the
        tokens in the row. `owner`: the owner of the sequence, see `by_owner`.
        """
        self._count(0, OFF)
        return self._new_row(), 0

    def next_restore_point(self, row: R) -> int | None:
        """Returns the position where the next prefill chunk must end, so that `keep` can cache it.

        None: the chunk may end anywhere.
        """
        return None

    def keep(self, row: R, tokens: Sequence[int], *, restore_point: bool = False) -> None:
        """Caches the tokens that the KV row has so far; the row stays in use.

        `restore_point`: makes the end of these tokens a restore point, because other sequences will
        begin there. Otherwise the end becomes a restore point only at a position from
        `next_restore_point`.
        """

    def close(self, row: R, tokens: Sequence[int]) -> None:
        """Ends the use of a KV row, and caches its tokens for later prompts.

        `tokens`: prompt and completion; the row may have only some of the first tokens, for example
        if its prefill has not ended. A row's tokens beyond `tokens`, such as a token in flight, are
        dropped.
        """
        self._release(row)

    def shrink(self, needed: int) -> int:
        """Evicts entries until `needed` bytes are freed, if possible; returns the freed bytes."""
        return 0

    def clear(self) -> int:
        """Frees all entries and returns their bytes. Does not change KV rows in use."""
        return 0

    def _scope(self, owner: str) -> str:
        """Returns the scope of an owner; sequences find only entries of their own scope."""
        return owner if self.by_owner else ""

    def _count(self, cached: int, reason: str) -> None:
        self.reason = reason
        self.hits += cached > 0
        self.misses += cached == 0
        self.tokens += cached


class _Entry(Struct, Generic[R], frozen=True):
    row: R
    tokens: tuple[int, ...]  # the row.offset tokens in the KV row
    scope: str


class SingleCache(PrefixCache[R]):
    """The mode `single`: one entry, the last sequence's KV row. The next prompt reuses the row."""

    exclusive = True

    def __init__(self, store: Store[R, E, S], budget: int) -> None:
        super().__init__(store, budget)
        self._rewind = store.rewind
        self._entry: _Entry[R] | None = None
        self._scopes: dict[int, str] = {}  # scopes of KV rows in use, by id() of the row

    @property
    def nbytes(self) -> int:
        """The allocated bytes of the cached KV row; 0 without a row."""
        return self._entry.row.nbytes if self._entry else 0

    def begin(
        self,
        prompt: Sequence[int],
        restore_at: int = 0,
        media: Spans = (),
        most: int | None = None,
        owner: str = "",
    ) -> tuple[R, int]:
        """Returns the cached KV row, trimmed to the tokens that match, or an empty KV row.

        Frees the cached row if the prompt cannot use it. See PrefixCache.
        """
        entry, self._entry = self._entry, None
        scope = self._scope(owner)
        alike = entry is not None and entry.scope == scope
        cached = common_prefix(entry.tokens, tuple(prompt)) if entry and alike else 0
        cached = prefix_end(media, min(cached, usable(prompt, most)))
        if entry is not None and cached > 0 and self._rewind(entry.row, cached):
            self._count(cached, reason_of(cached, cached, len(prompt)))
            self._scopes[id(entry.row)] = scope
            return entry.row, cached
        self._count(0, EMPTY if entry is None else reason_of(0, cached, len(prompt)))
        if entry is not None:
            self._release(entry.row)
        row = self._new_row()
        self._scopes[id(row)] = scope
        return row, 0

    def close(self, row: R, tokens: Sequence[int]) -> None:
        """Makes a KV row the only entry, or frees an empty or too large row; see PrefixCache."""
        end = min(row.offset, len(tokens))
        scope = self._scopes.pop(id(row), "")
        if end > 0 and row.nbytes <= self._budget and self._rewind(row, end):
            self.clear()
            self._entry = _Entry(row, tuple(tokens[:end]), scope)
        else:
            self._release(row)

    def shrink(self, needed: int) -> int:
        """Frees the entry if `needed` is above 0; returns the freed bytes."""
        if needed <= 0 or self._entry is None:
            return 0
        self.evictions += 1
        self.evicted_tokens += len(self._entry.tokens)
        return self.clear()

    def clear(self) -> int:
        """Frees the entry and returns its bytes."""
        freed, entry = self.nbytes, self._entry
        self._entry = None
        if entry is not None:
            self._release(entry.row)
        return freed
