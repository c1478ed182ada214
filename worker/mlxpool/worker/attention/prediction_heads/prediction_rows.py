"""Drafts of an MTP head whose layer has a KV cache, and the head's keys and values.

The head has a row for each sequence. Entry i of the row belongs to input `first` + i of the
sequence. The head computes an entry from the input's state, which a pass of the model gave, and the
token after the input. A few states wait until drafts are wanted; the pass that gives the first
draft reads these states. If the states of some inputs are missing, for example of a prefix from the
cache, the head's row begins again after these inputs. Drafts may then be worse, but tokens never
change. The head's row is released with the sequence's row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec import Struct, field

from mlxpool.worker.attention.prediction_heads.head_drafts import HeadDrafts
from mlxpool.worker.attention.row_batch import RowBatch
from mlxpool.worker.attention.row_cache import RowCache
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import RowSpan
from mlxpool.worker.layers.model_plan import Prediction
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.scheduling.spans import Span

MAX_WAITING = 32  # the most waiting states of a row; the head immediately reads further states


class _States(Struct):
    """The states of the inputs [start, start + count): lines of an array from `line` on."""

    start: int
    count: int
    array: mx.array
    line: int

    @property
    def end(self) -> int:
        return self.start + self.count


class _Row(Struct):
    """The head's data of a sequence: entries in `row`, and the waiting states of later inputs."""

    row: RowCache
    first: int
    waiting: list[_States] = field(default_factory=list)

    @property
    def read(self) -> int:
        """The first input without an entry."""
        return self.first + self.row.offset

    @property
    def end(self) -> int:
        """The first input whose state is not known."""
        return self.waiting[-1].end if self.waiting else self.read

    def cut(self, to: int) -> None:
        """Drops the entries and states of the inputs from `to` on."""
        while self.waiting and self.waiting[-1].start >= to:
            self.waiting.pop()
        if self.waiting and self.waiting[-1].end > to:
            self.waiting[-1].count = to - self.waiting[-1].start
        if self.read > to:
            self.row.trim(max(0, to - self.first))

    def take(self, count: int) -> list[mx.array]:
        """Removes the first `count` waiting states, and returns their arrays."""
        taken_states = []
        while count:
            some = self.waiting[0]
            taken = min(count, some.count)
            taken_states.append(some.array[some.line : some.line + taken])
            some.start, some.line = some.start + taken, some.line + taken
            some.count, count = some.count - taken, count - taken
            if not some.count:
                self.waiting.pop(0)
        return taken_states


class Predictions(HeadDrafts):
    """Drafts of a head whose layer keeps keys and values of each token."""

    def __init__(self, head: Prediction, shape: RowShape) -> None:
        """`shape`: the shape of the head's rows, which have one layer."""
        super().__init__()
        self._head = head
        self._shape = shape
        self.rows: dict[Sequence, _Row] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the keys and values in the head's rows."""
        return sum(row.row.nbytes for row in self.rows.values())

    def most_states(self, rows: int, drafts: int) -> int:
        """Returns the most stored states: up to MAX_WAITING of each row wait for the head."""
        return rows * MAX_WAITING

    def take(self, spans: Many[Span], states: mx.array) -> list[mx.array]:
        """Stores the states [T, d] of all inputs of a pass over spans, in the spans' order.

        If many states of a row wait, the head reads them. Returns the arrays to evaluate with the
        pass.
        """
        if self.failed:
            return []
        line, inside = 0, []
        for span in spans:
            self._append(span, states, line)
            line += span.count
            inside.append(self.rows[span.sequence])
        due = {}
        for span, row in zip(spans, inside, strict=True):
            if row.end - row.read > MAX_WAITING:
                known = min(row.end, span.sequence.length - 1)
                if known > row.read:
                    due[span.sequence] = known - row.read
        written = self._read(due) if due else []
        return [*written, *self._compact(inside, states, line)]

    def _append(self, span: Span, states: mx.array, line: int) -> None:
        row = self.rows.get(span.sequence)
        if row is not None:
            row.cut(span.start)
            if row.end < span.start or row.first > span.start:
                row.row.release()
                row = None
        if row is None:
            row = self.rows[span.sequence] = _Row(RowCache(self._shape), span.start)
        row.waiting.append(_States(span.start, span.count, states, line))

    def _read(self, counts: Mapping[Sequence, int]) -> list[mx.array]:
        """Computes the head's keys and values from the first `counts` waiting states.

        `counts`: the number of states of each sequence. Returns the arrays of the head's rows,
        which the caller has to evaluate.
        """
        spans = self._spans(counts)
        tokens, states = self._inputs(counts)
        batch = RowBatch(spans, [])
        self._head(tokens, states, batch)
        batch.done()
        return [array for span in spans for array in span.row.arrays()]

    def _compact(self, rows: Iterable[_Row], states: mx.array, lines: int) -> list[mx.array]:
        """Copies the states of a pass that still wait for the head into a smaller array.

        Returns the array to evaluate: the copy, `states` itself if all its `lines` lines wait, or
        no array if none waits.
        """
        left = [some for row in rows for some in row.waiting if some.array is states]
        kept = [line for some in left for line in range(some.line, some.line + some.count)]
        if not kept:
            return []
        if len(kept) == lines:
            return [states]
        array, line = states[mx.array(kept, dtype=mx.int32)], 0
        for some in left:
            some.array, some.line = array, line
            line += some.count
        return [array]

    def _spans(self, counts: Mapping[Sequence, int]) -> list[RowSpan]:
        return [RowSpan(self.rows[seq].row, count) for seq, count in counts.items()]

    def _inputs(self, counts: Mapping[Sequence, int]) -> tuple[mx.array, mx.array]:
        """Removes the first `counts` waiting states; returns tokens [T] and these states [T, d].

        `counts`: the number of states of each sequence. Each token follows the input of its state.
        """
        tokens: list[int] = []
        states: list[mx.array] = []
        for seq, count in counts.items():
            row = self.rows[seq]
            tokens += seq.token_range(row.read + 1, row.read + 1 + count)
            states += row.take(count)
        return mx.array(np.array(tokens, np.int32)), mx.concatenate(states)

    def ready(self, seq: Sequence) -> bool:
        """Returns whether the hidden state of the input before the newest token is available."""
        row = self.rows.get(seq)
        return row is not None and row.read < seq.length - 1 <= row.end

    def _prepared(self, seq: Sequence) -> bool:
        """Returns whether a sequence is ready for drafts; drops entries of removed tokens."""
        row = self.rows.get(seq)
        if row is not None:
            row.cut(seq.length - 1)
        return self.ready(seq)

    def _computed(self, depths: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Computes one pass for each depth, over the rows that want at least this many drafts."""
        rows = sorted(depths, key=lambda seq: -depths[seq])
        counts = {seq: seq.length - 1 - self.rows[seq].read for seq in rows}
        spans, (tokens, states) = self._spans(counts), self._inputs(counts)
        read = [self.rows[seq].row.offset + count for seq, count in counts.items()]
        drawn: list[mx.array] = []
        for depth in range(depths[rows[0]]):
            live = sum(depths[seq] > depth for seq in rows)
            if depth:
                spans = [RowSpan(span.row, 1) for span in spans[:live]]
                tokens, states = drawn[-1][:live], states[:live]
            batch = RowBatch(spans, range(live))
            states = self._head(tokens, states, batch)
            batch.done()
            drawn.append(self._head.likeliest(states))
        for seq, offset in zip(rows, read, strict=True):
            self.rows[seq].row.trim(offset)
        written = [array for seq in rows for array in self.rows[seq].row.arrays()]
        mx.eval(*drawn, *written)
        tokens_of: list[Any] = [tokens_drawn.tolist() for tokens_drawn in drawn]
        return {
            seq: tuple(tokens_of[depth][number] for depth in range(depths[seq]))
            for number, seq in enumerate(rows)
        }

    def compile_ahead(self, seq: Sequence, rows: int, depth: int) -> None:
        """Does nothing: the passes of this head are not compiled."""

    def release(self, seq: Sequence) -> None:
        """Drops the head's row of a sequence; ignores an unknown sequence."""
        self.rows.pop(seq, None)

    def clear(self) -> None:
        """Drops the head's rows of all sequences."""
        self.rows.clear()
