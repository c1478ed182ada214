"""Drafts of a model's own head (MTP): the common base, and the drafts of a head without a cache.

prediction_rows.py is for a head whose layer reads earlier tokens.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.prediction_heads.host_head import HostHead
from mlxpool.worker.kernels import device
from mlxpool.worker.kernels.compiled_passes import CompiledPasses, CompileNotice
from mlxpool.worker.layers.model_plan import Prediction
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.scheduling.spans import Span

log = logging.getLogger("mlxpool.worker")

MAX_FAILURES = 3  # consecutive failures of the head's passes, after which the head makes no drafts
MAX_COMPILED = 24  # the most compiled passes: for 1, 2, 4, … rows, on a CPU for each depth
MAX_AHEAD = 8  # the most rows of the passes that are compiled at load on a CPU
HOST_ROWS = 2  # the most rows for which NumPy, row by row, is faster than a compiled pass


class HeadDrafts(ABC):
    """The base of drafts by a model's own head; implements speculation.mtp.Predictor.

    Only the engine and the compute thread use it.
    """

    def __init__(self) -> None:
        self._failures = 0  # consecutive failures of passes
        self.notice = CompileNotice()  # notices the compilation of passes

    @property
    def failed(self) -> bool:
        """True if the head's passes failed too often."""
        return self._failures >= MAX_FAILURES

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes of the stored states, keys and values of sequences."""

    @abstractmethod
    def most_states(self, rows: int, drafts: int) -> int:
        """Returns the most hidden states that are stored for `rows` sequences together.

        `drafts`: the most drafts that one pass checks, in all its sequences together.
        """

    @abstractmethod
    def ready(self, seq: Sequence) -> bool:
        """Returns whether the hidden state of the input before the newest token is available."""

    def drafts(self, depths: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Returns drafts of each ready sequence, `depths[seq]` drafts for `seq`.

        No pass may be in flight. If the head's pass fails, returns no drafts. If the device no
        longer computes, raises the error of the pass instead.
        """
        ready = {seq: depth for seq, depth in depths.items() if depth > 0 and self._prepared(seq)}
        if not ready:
            return {}
        try:
            drafts = self._computed(ready)
        except Exception as error:
            self.clear()
            if not device.device_computes():
                raise
            self._failures += 1
            more = "; it gives no more drafts" if self.failed else ""
            log.warning(f"a pass of the model's head failed{more}", exc_info=error)
            return {}
        self._failures = 0
        return drafts

    def _prepared(self, seq: Sequence) -> bool:
        """Returns True if a sequence is ready for drafts; drops the data of removed tokens."""
        return self.ready(seq)

    @abstractmethod
    def _computed(self, depths: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Computes the drafts of sequences that are ready."""

    @abstractmethod
    def compile_ahead(self, seq: Sequence, rows: int, depth: int) -> None:
        """Compiles the passes for up to `depth` drafts of each of up to `rows` rows.

        The passes compute with the state of `seq`; `ready(seq)` must be true.
        """

    @abstractmethod
    def release(self, seq: Sequence) -> None:
        """Drops the data of a sequence; ignores an unknown sequence."""

    @abstractmethod
    def clear(self) -> None:
        """Drops the data of all sequences."""


class _States(NamedTuple):
    """The states of the inputs [start, end): lines of an array from `line` on."""

    start: int
    end: int
    array: mx.array
    line: int


class StateDrafts(HeadDrafts):
    """Drafts of a head without a cache, from the newest state of a row and the token after it.

    One compiled pass gives the drafts of all rows. It computes the same number of drafts for each
    row, the greatest that a row wants. Its number of rows is a power of two. On a CPU the drafts of
    few rows need no compiled pass, see host_head.py. On a GPU the compilation of a new kind of pass
    takes some 0.15 s. So on a GPU every pass computes the greatest possible number of drafts, and a
    pass for each number of rows is compiled at load.
    """

    def __init__(self, head: Prediction) -> None:
        super().__init__()
        self._head = head
        self._host_head = HostHead.of(head)
        self._states: dict[Sequence, _States] = {}
        # The newest pass's spans and states, if they are not in `_states` yet.
        self._newest: tuple[Many[Span], mx.array] | None = None
        self._depth = 0  # the least depth of all passes
        self.chain = CompiledPasses(self._drafted, self.notice, max_passes=MAX_COMPILED)

    @property
    def nbytes(self) -> int:
        """The bytes of the stored states; an array that rows share counts once."""
        self._settle()
        return sum(
            {id(states.array): states.array.nbytes for states in self._states.values()}.values()
        )

    def most_states(self, rows: int, drafts: int) -> int:
        """Returns the most stored states: one for each token that a pass can draw."""
        return rows + drafts

    def take(self, asking: Many[Span], states: mx.array, *, again: bool = False) -> None:
        """Stores the states [E, d] from which a pass draws its tokens, in the order of its spans.

        `states` may have further lines, which are not used. `again`: the pass has the same
        sequences as the previous pass. The previous states are then dropped without any work for
        each row, so that steps without drafts stay fast.
        """
        if self.failed:
            return
        if not again:
            self._settle()
        self._newest = asking, states

    def _settle(self) -> None:
        """Records for each sequence which lines of the newest pass's states belong to it."""
        if self._newest is None:
            return
        (asking, states), self._newest = self._newest, None
        line, kept = 0, self._states
        for span in asking:
            draws = int(span.draws)
            end = span.start + span.count
            kept[span.sequence] = _States(end - draws, end, states, line)
            line += draws

    def ready(self, seq: Sequence) -> bool:
        """Returns whether the hidden state of the input before the newest token is available."""
        self._settle()
        known = self._states.get(seq)
        newest = seq.length + seq.awaited - 2  # a pass in flight has given this state already
        return known is not None and known.start <= newest < known.end

    def _computed(self, depths: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        if self._host_head is not None and len(depths) <= HOST_ROWS:
            return {
                seq: self._drafted_by_host(self._host_head, seq, depth)
                for seq, depth in depths.items()
            }
        rows, deepest = [*depths], max(self._depth, *depths.values())
        padded = 1 << (len(rows) - 1).bit_length()
        chosen = [rows[min(number, len(rows) - 1)] for number in range(padded)]
        newest = [seq.token_range(seq.length - 1, seq.length)[0] for seq in chosen]
        tokens = mx.array(np.array(newest, np.int32))
        drawn = self.chain((padded, deepest), tokens, self._gathered(chosen), deepest)
        lists: Any = drawn.tolist()
        self.chain.evaluated()
        return {seq: tuple(lists[row][: depths[seq]]) for row, seq in enumerate(rows)}

    def _drafted_by_host(self, head: HostHead, seq: Sequence, depth: int) -> tuple[int, ...]:
        known, length = self._states[seq], seq.length
        state = np.array(known.array, copy=False)[known.line + length - 2 - known.start]
        return head.drafts(seq.token_range(length - 1, length)[0], state, depth)

    def compile_ahead(self, seq: Sequence, rows: int, depth: int) -> None:
        """Compiles the passes for up to `depth` drafts of each of up to `rows` rows.

        The passes compute with the state of `seq`; `ready(seq)` must be true. On a CPU only passes
        of up to MAX_AHEAD rows are compiled. Without this call, the times of the first drafts would
        include compilation.
        """
        state, on_gpu = self._gathered([seq]), device.on_gpu()
        self._depth = depth if on_gpu else 0
        least = 0 if self._host_head is None else HOST_ROWS.bit_length()
        most = (rows - 1).bit_length() if on_gpu else min(rows, MAX_AHEAD).bit_length() - 1
        for bits in range(least, most + 1):
            padded = 1 << bits
            tokens, states = mx.zeros(padded, dtype=mx.int32), mx.repeat(state, padded, axis=0)
            for each in (depth,) if on_gpu else range(1, depth + 1):
                mx.eval(self.chain((padded, each), tokens, states, each))
                self.chain.evaluated()

    def _gathered(self, rows: Many[Sequence]) -> mx.array:
        """Returns the newest known states [R, d] of rows."""
        places: dict[int, tuple[mx.array, list[int]]] = {}
        # For each row: the id of its array, and its index among the rows of this array.
        order: list[tuple[int, int]] = []
        for seq in rows:
            known = self._states[seq]
            _, lines = places.setdefault(id(known.array), (known.array, []))
            order.append((id(known.array), len(lines)))
            lines.append(known.line + seq.length - 2 - known.start)
        parts = [array[mx.array(lines, dtype=mx.int32)] for array, lines in places.values()]
        if len(parts) == 1:
            return parts[0]
        begins = dict(zip(places, np.cumsum([0, *(len(part) for part in parts)]), strict=False))
        numbers = [int(begins[key]) + number for key, number in order]
        return mx.concatenate(parts)[mx.array(numbers, dtype=mx.int32)]

    def _drafted(self, tokens: mx.array, states: mx.array, depth: int) -> mx.array:
        """Returns drafts [R, depth] that follow `tokens` [R].

        `states` [R, d]: the states of the inputs before the tokens.
        """
        drawn: list[mx.array] = []
        for _ in range(depth):
            states = self._head(tokens, states, None)
            tokens = self._head.likeliest(states)
            drawn.append(tokens)
        return mx.stack(drawn, axis=1)

    def release(self, seq: Sequence) -> None:
        """Drops the states of a sequence; ignores an unknown sequence."""
        self._settle()
        self._states.pop(seq, None)

    def clear(self) -> None:
        """Drops the states of all sequences."""
        self._newest = None
        self._states.clear()
        self.chain.failed()  # an unevaluated pass has failed
