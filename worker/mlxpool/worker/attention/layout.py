"""How an engine keeps its rows in memory and computes passes over them.

`Layout` is the interface, and itself the layout of rows with arrays of their own. Rows that share
memory have the layouts of in_slabs/ and in_pool/; layout_choice.py says which one a model gets.
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
    """Builds forward passes over rows of its own store.

    Here each row has arrays of its own, which supports every kind of layer; in the subclasses rows
    share memory. All allocate it in blocks of KV_BLOCK_TOKENS tokens.
    """

    name = "rows"  # that operators see
    store: Any  # a prefix.store.Store
    spare = 0  # bytes that may be allocated for unused blocks
    batch = RowBatch  # that describes a pass to the model
    shares_arrays = False  # whether a failed pass may have damaged all rows
    _upload: Upload = staticmethod(upload_copy)
    holds_prefixes = False  # whether entries of the prefix cache share its memory
    blocks = 0  # in all, where it holds prefixes
    reads_int8 = False  # whether kernels of a GPU read keys and values as integers
    # Up to so many inputs, passes that check drafts and do nothing else are compiled by themselves.
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
        """`keeps_states`: passes give the states of all their inputs; `keeps_drawn`: those that
        their logits are of. See PassOutput.
        """
        self._model = model
        self._keeps_states, self._keeps_drawn = keeps_states, keeps_drawn
        self._attention = exact_attention if deterministic else causal_attention
        self._fixed = shape.fixed_bytes
        # Bytes of what integers become while a pass reads them; none where kernels read integers.
        self.read_bytes = shape.dequantised_bytes(shape.capacity)
        self._deterministic = deterministic
        self._kinds = ComputedKinds()
        # All that know what is compiled; subclasses add theirs.
        self._compiling: list[ComputedKinds | CompiledPasses[Any, Any]] = [self._kinds]
        self.notice = CompileNotice()  # of passes that are compiled though `is_new` did not say so
        self.store = RowStore(partial(RowCache, shape), cache_kinds(shape))

    @property
    def free_blocks(self) -> int | None:
        """The blocks that no row and no prefix has; None where rows share none."""
        return None

    def blocks_of(self, row: Any) -> int:
        """Returns the blocks of a row that are not free, where rows share blocks; else 0."""
        return 0

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """Returns the bytes that all `rows` leave of a capacity of `whole` bytes."""
        return whole - sum(max(0, row.nbytes - self._fixed) for row in rows)

    def kv_bytes(self, rows: Iterable[CacheRow]) -> tuple[int, int]:
        """Returns the bytes of all `rows`, and those that are allocated for rows and unused."""
        return sum(row.nbytes for row in rows), 0

    def reserve(self, row: Any, tokens: int) -> None:
        """Allocates memory for so many tokens, where writing would not."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of lines for which passes are compiled; none: passes of any number."""
        return ()

    def expect_drafts(self, most: int) -> None:
        """Says that the rows of a pass check `most` drafts together at most; 0: none."""

    def whole_passes(self) -> AbstractContextManager[None]:
        """Passes inside are begun by their evaluation alone: all their memory is used together.

        Elsewhere the device may begin a pass, and free what it has used, while the pass is built.
        """
        return nullcontext()

    def is_new(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """Returns whether a pass over these spans that wants some of them is the first.

        The pass follows. Where it, or one in flight, fails, `invalidate` is called.
        """
        lines = sum(span.count for span in spans)
        decoding = lines if len(spans) == lines else 0
        return self._kinds.is_new((1 << (lines - 1).bit_length(), decoding))

    def evaluated(self) -> None:
        """Notes that all passes that were built are evaluated: what they compile is compiled."""
        for one in self._compiling:
            one.evaluated()

    def step(
        self,
        spans: Sequence[RowSpan],
        ids: Ids,
        drawn: mx.array | None,
        wanted: Sequence[int],
    ) -> PassOutput:
        """Builds one pass over inputs `ids` [T] and advances the rows.

        It computes nothing yet, or begins the pass, see `whole_passes`. A negative id -1 - r stands
        for element r of `drawn`. `wanted` are the numbers of spans that give something, see
        RowSpan: first those of one token's logits, then of several, then those of hidden states.
        """
        inputs = self._upload(np.array(ids, dtype=np.int32))
        if drawn is not None:
            inputs = mx.where(inputs >= 0, inputs, drawn[mx.maximum(-1 - inputs, 0)])
        return self.forward(spans, inputs, wanted)

    def forward(self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]) -> PassOutput:
        """As `step`, with all ids known. The spans are of different rows.

        The evaluation of any array that is returned completes the pass.
        """
        compiled = self._compiled(spans, ids, wanted)
        if compiled is not None:
            return compiled
        given = spans
        spans, ids, wanted = singles_first(spans, ids, wanted)
        step = self.batch(spans, wanted, self._attention, every=self._keeps_states)
        found = self._outputs(ids, step, spans, wanted)
        if found.states is not None and spans is not given:
            found = found._replace(states=found.states[_places(given, spans)])
        step.done()
        made = {name: x for name, x in found._asdict().items() if x is not None}
        done = mx.depends([*made.values()], self._written([span.row for span in spans]))
        return found._replace(**dict(zip(made, done, strict=True)))

    def _outputs(
        self, ids: mx.array, step: RowBatch, spans: Sequence[RowSpan], wanted: Sequence[int]
    ) -> PassOutput:
        """Returns what a pass gives, without what it writes."""
        some = logit_spans(spans, wanted)
        nothing = mx.zeros(1)  # if none is wanted, no more of the last layer than what it writes
        embeds = len(some) < len(wanted)
        if not embeds and not self._keeps_states and not (some and self._keeps_drawn):
            found = self._model(ids, step)
            return PassOutput(found if wanted else nothing)
        every = states = self._model.hidden_states(ids, step)
        if self._keeps_states:
            states = step.logit_rows(every)
        count = wanted_lines(spans, some)
        drawn = states[:count] if embeds else states
        return PassOutput(
            self._model.logits_of(drawn) if some else nothing,
            states[count:].astype(mx.float32) if embeds else None,
            every if self._keeps_states else None,
            drawn if self._keeps_drawn and some else None,
        )

    def _compiled(
        self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]
    ) -> PassOutput | None:
        """As `forward`, by a compiled pass; None where there is none for these spans."""
        return None

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """Returns the arrays whose evaluation completes all writes of a pass over `rows`."""
        every = (array for row in rows for array in row.arrays())
        return list({id(array): array for array in every}.values())  # rows share those of states

    def invalidate(self) -> None:
        """Discards the arrays that a failed pass may have damaged.

        Kinds of passes of which none was evaluated are new again: see ComputedKinds.
        """
        for one in self._compiling:
            one.failed()

    def close(self) -> None:
        """Frees the memory; the layout is not used afterwards."""


def _places(given: Sequence[RowSpan], ordered: Sequence[RowSpan]) -> mx.array:
    """Returns the number of each token of the spans `given` where these are `ordered`."""
    ends = accumulate(span.count for span in ordered)
    first = {id(one): end - one.count for one, end in zip(ordered, ends, strict=True)}
    lines = [first[id(one)] + line for one in given for line in range(one.count)]
    return mx.array(lines, dtype=mx.int32)
