"""Dummy passes that an engine computes while it is loaded, to compile and to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np
from msgspec import Struct

from mlxpool.common.options import Options
from mlxpool.worker.attention.prediction_heads.head_drafts import HeadDrafts
from mlxpool.worker.constraints.mask_table import MaskTable, new_table, words_of_mask
from mlxpool.worker.engine.engine import StepResult
from mlxpool.worker.engine.mask_tables import MaskTables
from mlxpool.worker.engine.opening import Parts, bounds_of
from mlxpool.worker.engine.pipeline import Pipeline
from mlxpool.worker.kernels import device, kernel_cache
from mlxpool.worker.sampling.batch import ALL_OPTIONS
from mlxpool.worker.sampling.row_masks import Mask, RowMasks
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS
from mlxpool.worker.scheduling.sequence import Phase, Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.scheduling.step_cost import StepCost
from mlxpool.worker.speculation.mtp import FIRST_CHANCES
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.transfers.shared_array import SETS

WARM_UP_PASSES = 2  # passes of each size; the first pass compiles
UNLIMITED_TOKENS = 10**9
MASK_TABLES = 2  # a table for the next draw, and one for rows that first read forced tokens


class LoadedEngine(Protocol):
    """The part of an Engine that its warm-up uses; model_engine.ModelEngine implements it."""

    parts: Parts
    pipeline: Pipeline
    masks: MaskTables
    most_drafts: int
    context: int
    vocab_size: int
    digest: str
    cost: StepCost

    @property
    def in_flight(self) -> int:
        """The number of passes that were submitted and not collected."""

    def submit(self, spans: Many[Span], /) -> bool:
        """Starts one pass over the spans; returns True if the pass compiles something."""

    def forward(self, spans: Many[Span], /) -> bool:
        """Starts a pass that draws no tokens until `draw` is called.

        Returns True if the pass compiles something.
        """

    def draw(self, masks: RowMasks, /) -> None:
        """Draws the tokens of the newest pass, which `forward` started, restricted by `masks`."""

    def mask_memory(self, lines: int, /) -> MaskTable | None:
        """Returns host memory for `lines` masks, which the device reads directly.

        None: the device cannot read the host's memory.
        """

    def collect(self) -> StepResult:
        """Waits for the oldest pass in flight, and returns its results."""


class PassKind(Struct, frozen=True):
    """The spans of a pass that is computed at load.

    `counts`: the number of inputs of each new row that draws a token. `drafts`: the number of
    drafts that one more row checks. `unread`: the number of inputs of a further row that draws no
    token, because its prompt has more tokens after these inputs; 0: no such row.
    """

    counts: tuple[int, ...] = ()
    drafts: int = 0
    unread: int = 0


def compiled_kinds(
    sizes: Many[int], rows: int, longest: int, drafts: int, alone: int = 0
) -> Iterator[PassKind]:
    """Yields the kinds of compiled passes, except passes in which each row decodes one token.

    Passes are compiled for `sizes` of lines; kinds with more than `longest` lines are left out. A
    pass has at most `rows` rows, which check at most `drafts` drafts together. A pass that only
    checks drafts is compiled separately if it has at most `alone` lines.
    """
    before = 0
    for size in sizes:
        if size > longest:
            return
        if size > 1:
            yield PassKind((1, size - 1) if size > 2 else (size,))
        # Passes that check drafts are compiled separately if more lines draw than rows exist.
        drawing = min(size, rows + drafts)
        beside = drawing - 1 if drawing == size <= alone else drawing
        for checked in sorted({1, max(1, beside - 1)}) if size > rows else (1,):
            if drafts and size > 1:
                yield PassKind(drafts=checked, unread=size - 1 - checked)
        if drafts and max(2, before) < drawing and size <= alone:
            yield PassKind(drafts=drawing - 1)
        before = size


def kinds_of_passes(engine: LoadedEngine) -> Iterator[PassKind]:
    """Yields the kinds of passes that are computed at load."""
    layout, rows = engine.parts.memory.layout, engine.parts.memory.most_rows()
    for count in decode_sizes(engine, rows):
        yield PassKind((1,) * count)
    longest = min(engine.context - 1, bounds_of(engine.parts)[0])
    if layout.sizes:  # each row in a pool may leave a part of a block unused
        longest = min(longest, (layout.blocks - 1) * KV_BLOCK_TOKENS)
    drafts, alone = engine.most_drafts, layout.follow_lines
    yield from compiled_kinds(layout.sizes, rows, longest, drafts, alone)


def decode_sizes(engine: LoadedEngine, rows: int) -> list[int]:
    """Returns the numbers of rows of the decode passes that are warmed up."""
    layout = engine.parts.memory.layout
    sizes = [size for size in layout.sizes if size <= rows]
    return sizes or _first_and_last(list(range(1, rows + 1)), on_gpu=device.on_gpu())


def compile_kernels(
    engine: LoadedEngine, kinds: Iterable[PassKind], on_progress: Callable[[], None]
) -> None:
    """Compiles together our kernels for passes of these kinds; computes no pass.

    Built passes stay compiled, so that the warm-up does not build them again.
    """
    layout = engine.parts.memory.layout
    LOAD.enter("passes")
    with kernel_cache.collecting() as jobs:
        if engine.parts.uploads is not None:
            engine.parts.uploads.begin()
        # In other layouts a pass replaces the arrays of rows, which must not be computed here.
        in_place = layout.holds_prefixes and not layout.shares_arrays
        for kind in kinds if in_place else ():
            spans = dummy_spans(engine, kind)
            engine.pipeline.rehearse(spans, whole_mask(engine.vocab_size, 1 + kind.drafts))
            drop_rows(engine, [span.sequence for span in spans])
            on_progress()
    LOAD.enter("kernels")
    kernel_cache.compile_together(jobs, on_progress)


def warm_passes(engine: LoadedEngine, on_progress: Callable[[], None]) -> None:
    """Computes a pass of each compiled kind, and a pass with every sampling option.

    The second pass of a kind gives its time to the cost model.
    """
    held = hold_rows(engine)
    warm(engine, PassKind((1,)), on_progress, ALL_OPTIONS)
    if engine.parts.uploads is not None:
        warm_masks(engine, 1, ALL_OPTIONS)
        warm_masks(engine, engine.parts.memory.most_rows())
    for kind in kinds_of_passes(engine):
        warm(engine, kind, on_progress)
    drop_rows(engine, held)


def hold_rows(engine: LoadedEngine) -> list[Sequence]:
    """Returns a dummy row that keeps the rows' arrays allocated during the warm-up.

    Returns no row if rows are in a pool of blocks. Without a pool, arrays are freed with their last
    row, and each pass would write hundreds of MB of zeros into new arrays.
    """
    layout = engine.parts.memory.layout
    if layout.holds_prefixes:
        return []
    held = dummy_rows(engine, 1, 1)
    layout.reserve(engine.parts.memory.rows[held[0]], 1)
    return held


def warm_masks(engine: LoadedEngine, count: int, options: Options | None = None) -> None:
    """Draws tokens of `count` rows with masks, and allocates the memory of the masks."""
    rows = dummy_rows(engine, count, 1, options)
    tables = [engine.mask_memory(count) for _ in range(MASK_TABLES)]
    table = tables[0] or new_table(count, words_of_mask(engine.vocab_size))
    table.masks[:] = whole_mask(engine.vocab_size)
    masks = RowMasks(table, count, {seq: line for line, seq in enumerate(rows)})
    for _ in range(SETS):
        engine.forward([Span(seq, 0, 1, draws=1) for seq in rows])
        engine.draw(masks)
        engine.collect()
        for seq in rows:
            seq.submitted = 0
            engine.parts.memory.rows[seq].trim(0)
    engine.masks.give_back(memory for memory in tables if memory is not None)
    drop_rows(engine, rows)


def warm_head(engine: LoadedEngine, head: HeadDrafts) -> None:
    """Drafts with the model's own head for one row, and computes passes that check the drafts."""
    (seq,) = dummy_rows(engine, 1, 1)
    for _ in range(min(WARM_UP_PASSES, engine.context // 4)):  # up to four inputs each
        seq.ids += [drawn.token for drawn in step(engine, [Span(seq, seq.submitted, 1, 1)]).drawn]
        drafts = head.drafts({seq: 1})
        result = step(engine, [Span.check(seq, drafts.get(seq, (0,)))])
        seq.ids += [drawn.token for drawn in result.drawn]
        if engine.most_drafts and head.ready(seq):
            most = min(engine.parts.memory.most_rows(), engine.most_drafts)
            head.compile_ahead(seq, most, len(FIRST_CHANCES))
    drop_rows(engine, [seq])


def whole_mask(vocab_size: int, draws: int = 1) -> Mask:
    """Returns a mask [draws, words] that allows every token."""
    return np.full((draws, -(-vocab_size // 32)), 2**32 - 1, dtype=np.uint32)


def warm(
    engine: LoadedEngine,
    kind: PassKind,
    on_progress: Callable[[], None],
    options: Options | None = None,
    times: int = WARM_UP_PASSES,
) -> None:
    """Computes passes over the first inputs of new rows, then frees the rows."""
    spans = dummy_spans(engine, kind, options)
    rows = [span.sequence for span in spans]
    LOAD.count("warm_up_passes", times)
    for _ in range(times):
        step(engine, spans)
        for seq in rows:
            seq.submitted = 0
            engine.parts.memory.rows[seq].trim(0)
        on_progress()
    drop_rows(engine, rows)


def dummy_spans(engine: LoadedEngine, kind: PassKind, options: Options | None = None) -> list[Span]:
    """Returns the spans of a pass over new rows."""
    rows = [seq for count in kind.counts for seq in dummy_rows(engine, 1, count, options)]
    spans = [Span(seq, 0, seq.length, draws=1) for seq in rows]
    if kind.drafts:
        (seq,) = dummy_rows(engine, 1, 1, options)
        spans.append(Span.check(seq, (0,) * kind.drafts))
    if kind.unread:
        (seq,) = dummy_rows(engine, 1, kind.unread + 1, options)
        spans.append(Span(seq, 0, kind.unread, draws=0))
    return spans


def dummy_rows(
    engine: LoadedEngine, count: int, tokens: int, options: Options | None = None
) -> list[Sequence]:
    """Returns sequences of `tokens` tokens, each with an empty row."""
    memory = engine.parts.memory
    sequences = [_dummy_sequence(tokens, options) for _ in range(count)]
    for seq in sequences:
        memory.rows[seq] = memory.layout.store.new_row()
    return sequences


def drop_rows(engine: LoadedEngine, rows: Many[Sequence]) -> None:
    """Frees the rows of sequences."""
    for seq in rows:
        engine.parts.memory.layout.store.release(engine.parts.memory.rows.pop(seq))
        if engine.parts.predictions is not None:
            engine.parts.predictions.release(seq)


def step(engine: LoadedEngine, spans: Many[Span]) -> StepResult:
    """Computes one pass, while no other pass is in flight."""
    engine.submit(spans)
    return engine.collect()


def _first_and_last(counts: list[int], *, on_gpu: bool) -> list[int]:
    """Returns the numbers of rows for which a load computes decode passes, a selection of `counts`.

    On a GPU these are all `counts`; on a CPU the first two and the last. On a CPU a C++ compiler
    compiles fused functions, which are the same for two rows and more. The last pass, which has the
    most rows, shows the longest time of a decode step.
    """
    return counts if on_gpu or len(counts) < 4 else [*counts[:2], counts[-1]]


def _dummy_sequence(tokens: int, options: Options | None = None) -> Sequence:
    """Returns a running sequence for warm-up and measurement."""
    return Sequence(
        b"", 0, (0,) * tokens, options or Options(), 0, UNLIMITED_TOKENS, phase=Phase.RUNNING
    )
