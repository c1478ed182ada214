"""The interface between an engine and the layout of its keys and values in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from mlxpool.worker.attention.row_batch import CacheRow, RowSpan


class Layout(Protocol):
    """Builds forward passes over rows of its own store."""

    name: str  # that operators see
    store: Any  # a prefix.store.Store
    spare: int  # bytes that may be allocated for unused blocks
    shares_arrays: bool  # whether a failed pass may have damaged all rows
    holds_prefixes: bool  # whether entries of the prefix cache share its memory
    blocks: int  # in all, where it holds prefixes

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """Returns the bytes that all `rows` leave of a capacity of `whole` bytes."""

    def reserve(self, row: Any, tokens: int) -> None:
        """Allocates memory for so many tokens, where writing would not."""

    def forward(self, spans: Sequence[RowSpan], ids: mx.array, *, logits: bool) -> mx.array:
        """Builds one pass over tokens `ids` [T] and advances the rows; computes nothing yet.

        Returns logits [R, vocabulary] of the last token of each span, or arrays to evaluate.
        """

    def prefill_last(self, row: Any, ids: mx.array) -> mx.array | None:
        """Builds the pass over the last prompt tokens `ids` [T] of a row and advances the row.

        Returns logits [1, vocabulary] of the last token, or None where this is not supported.
        """

    @property
    def max_batch_rows(self) -> int:
        """The most rows that `prefill_rows` takes; 0: it is not supported."""

    def batch_size(self, spans: Sequence[RowSpan]) -> int:
        """Returns how many of these spans, from the first on, fit into one pass."""

    def prefill_rows(
        self, parts: Sequence[tuple[Any, Sequence[int]]], last: Sequence[int]
    ) -> mx.array:
        """Builds one pass over rows with their new tokens and advances the rows.

        Returns logits [E, vocabulary] of the last token of each row whose index is in `last`.
        """

    def decode(self, rows: Sequence[Any], ids: mx.array) -> mx.array:
        """Builds one pass over one token `ids` [R] of each row and advances the rows.

        Returns logits [R, vocabulary].
        """

    def compile_ahead(self, rows: int, context: int, on_progress: Callable[[], None]) -> None:
        """Compiles the passes that up to `rows` rows of up to `context` tokens need."""

    def invalidate(self) -> None:
        """Discards the arrays that a failed pass may have damaged."""

    def close(self) -> None:
        """Frees the memory; the layout is not used afterwards."""
