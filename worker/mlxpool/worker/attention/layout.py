"""The layout of an engine's rows in memory, and the passes over rows.

`Layout` is the interface, and also the layout of rows with their own arrays. Rows that share memory
have the layouts of in_slabs/ and in_pool/; layout_choice.py chooses the layout of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.deterministic import exact_attention
from mlxpool.worker.attention.dot_product import causal_attention
from mlxpool.worker.attention.row_batch import RowBatch
from mlxpool.worker.attention.row_cache import RowCache
from mlxpool.worker.attention.row_copies import RowStore
from mlxpool.worker.attention.row_shape import RowShape, cache_kinds
from mlxpool.worker.attention.row_spans import (
    CacheRow,
    Ids,
    PassOutput,
    RowSpan,
    logit_spans,
    singles_first,
    wanted_lines,
)
from mlxpool.worker.kernels.compiled_passes import CompiledPasses, CompileNotice, ComputedKinds
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.transfers.uploads import Upload, upload_copy


class Layout:
    """A memory layout of rows, which builds forward passes over its rows.

    In this class each row has its own arrays, so that every kind of layer is supported. In the
    subclasses rows share memory. All layouts allocate memory in blocks of KV_BLOCK_TOKENS tokens.
    """

    name = "rows"  # the layout's name for operators
    store: Any  # a prefix.store.Store
    spare = 0  # bytes that may be allocated for unused blocks
    batch = RowBatch  # the class that describes a pass to the model
    shares_arrays = False  # a failed pass may have damaged all rows
    _upload: Upload = staticmethod(upload_copy)
    holds_prefixes = False  # prefix cache entries share the memory of rows
    blocks = 0  # the number of all blocks, if prefix cache entries share them
    reads_int8 = False  # kernels of a GPU read keys and values as integers
    # The most inputs of passes that only check drafts and are compiled separately; 0: no such
    # passes.
    follow_lines = 0

    def __init__(
        self,
        shape: RowShape,
        model: Model,
        *,
        deterministic: bool,
        keeps_states: bool = False,
        keeps_drawn: bool = False,
    ) -> None:
        """`model`: the model of the passes. `keeps_states`: passes return the states of all inputs.

        `keeps_drawn`: passes return the states from which logits are computed. States are hidden
        states after the last norm.
        """
        self.model = model
        self.keeps_states, self.keeps_drawn = keeps_states, keeps_drawn
        self._attention = exact_attention if deterministic else causal_attention
        self._fixed = shape.fixed_bytes
        # Bytes of dequantised integers while a pass reads them; 0 if kernels read integers.
        self.read_bytes = shape.dequantised_bytes(shape.capacity)
        self._deterministic = deterministic
        self._kinds = ComputedKinds()
        # The records of compiled passes; subclasses add further records.
        self._compiling: list[ComputedKinds | CompiledPasses[Any, Any]] = [self._kinds]
        self.notice = CompileNotice()  # notices compilation after `is_new` returned False
        self.store = RowStore(partial(RowCache, shape), cache_kinds(shape))

    @property
    def free_blocks(self) -> int | None:
        """The number of unused blocks; None: the layout has no common pool of blocks."""
        return None

    def blocks_of(self, row: Any) -> int:
        """Returns the number of a row's blocks; 0 if the layout has no common pool of blocks.

        A shared block that the row's next write will replace by a copy is not counted.
        """
        return 0

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """Returns the bytes that `rows` do not use, of a capacity of `whole` bytes."""
        return whole - sum(max(0, row.nbytes - self._fixed) for row in rows)

    def kv_bytes(self, rows: Iterable[CacheRow]) -> tuple[int, int]:
        """Returns the bytes that `rows` use, and the allocated bytes that no row uses."""
        return sum(row.nbytes for row in rows), 0

    def reserve(self, row: Any, tokens: int) -> None:
        """Allocates a row's memory for `tokens` tokens; does nothing if writes allocate memory."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of lines of compiled passes; empty: passes may have any number of lines."""
        return ()

    def expect_drafts(self, most: int) -> None:
        """Sets the most drafts that the rows of a pass check together; 0: no drafts."""

    def whole_passes(self) -> AbstractContextManager[None]:
        """Returns a context in which the device begins a pass only when the pass is evaluated.

        Outside of the context the device may begin a pass, and free a part of its memory, while the
        host builds the pass.
        """
        return nullcontext()

    def is_new(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """Returns True if a pass over `spans` with results of `wanted` is a new kind of pass.

        The caller submits the pass. If this pass or a pass in flight fails, the caller calls
        `invalidate`.
        """
        lines = sum(span.count for span in spans)
        decoding = lines if len(spans) == lines else 0
        return self._kinds.is_new((1 << (lines - 1).bit_length(), decoding))

    def evaluated(self) -> None:
        """Records that all built passes were evaluated.

        Later passes of the same kinds compile nothing.
        """
        for compiling in self._compiling:
            compiling.evaluated()

    def step(
        self,
        spans: Sequence[RowSpan],
        ids: Ids,
        drawn: mx.array | None,
        wanted: Sequence[int],
    ) -> PassOutput:
        """Builds one pass over inputs `ids` [T] and advances the rows.

        The pass is computed later; outside of `whole_passes` the device may begin it now. A
        negative id -1 - r means element r of `drawn`. `wanted`: the indices of the spans with
        results, which are logits or hidden states. In `wanted`, spans with logits of one token come
        first, then spans with logits of several tokens, then spans with hidden states.
        """
        inputs = self._upload(np.array(ids, dtype=np.int32))
        if drawn is not None:
            inputs = mx.where(inputs >= 0, inputs, drawn[mx.maximum(-1 - inputs, 0)])
        return self.forward(spans, inputs, wanted)

    def forward(self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]) -> PassOutput:
        """Builds one pass over inputs `ids` [T], of which none is in flight, and advances the rows.

        The spans have different rows. `wanted`: the indices of the spans with results, in the order
        that `step` describes. The evaluation of any returned array completes the pass.
        """
        compiled = self._compiled(spans, ids, wanted)
        if compiled is not None:
            return compiled
        unordered = spans
        spans, ids, wanted = singles_first(spans, ids, wanted)
        step = self.batch(spans, wanted, self._attention, every=self.keeps_states)
        output = self._outputs(ids, step, spans, wanted)
        if output.states is not None and spans is not unordered:
            output = output._replace(states=output.states[_places(unordered, spans)])
        step.done()
        arrays = {name: x for name, x in output._asdict().items() if x is not None}
        done = mx.depends([*arrays.values()], self._written([span.row for span in spans]))
        return output._replace(**dict(zip(arrays, done, strict=True)))

    def _outputs(
        self, ids: mx.array, step: RowBatch, spans: Sequence[RowSpan], wanted: Sequence[int]
    ) -> PassOutput:
        """Returns the results of a pass, without the arrays that it writes."""
        some = logit_spans(spans, wanted)
        nothing = mx.zeros(1)  # if no span is wanted, the last layer computes only its writes
        embeds = len(some) < len(wanted)
        if not embeds and not self.keeps_states and not (some and self.keeps_drawn):
            logits = self.model(ids, step)
            return PassOutput(logits if wanted else nothing)
        all_states = states = self.model.hidden_states(ids, step)
        if self.keeps_states:
            states = step.logit_rows(all_states)
        count = wanted_lines(spans, some)
        drawn = states[:count] if embeds else states
        return PassOutput(
            self.model.logits_of(drawn) if some else nothing,
            states[count:].astype(mx.float32) if embeds else None,
            all_states if self.keeps_states else None,
            drawn if self.keeps_drawn and some else None,
        )

    def _compiled(
        self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]
    ) -> PassOutput | None:
        """Builds the pass of `forward` as a compiled pass; None if it cannot be compiled."""
        return None

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """Returns arrays whose evaluation completes all writes of a pass over `rows`."""
        arrays = (array for row in rows for array in row.arrays())
        return list({id(array): array for array in arrays}.values())  # rows share arrays of states

    def invalidate(self) -> None:
        """Discards the arrays that a failed pass may have damaged.

        If no pass of a kind was evaluated before the failure, `is_new` is true for the next pass of
        this kind.
        """
        for compiling in self._compiling:
            compiling.failed()

    def close(self) -> None:
        """Frees the memory; the layout must not be used afterwards."""


def _places(given: Sequence[RowSpan], ordered: Sequence[RowSpan]) -> mx.array:
    """Returns, for each token of the spans `given`, its index among the tokens of `ordered`."""
    ends = accumulate(span.count for span in ordered)
    first = {id(span): end - span.count for span, end in zip(ordered, ends, strict=True)}
    lines = [first[id(span)] + line for span in given for line in range(span.count)]
    return mx.array(lines, dtype=mx.int32)
