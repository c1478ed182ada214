"""Warms up an engine at load: measures memory, compiles kernels, computes each kind of pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import pairwise
from time import monotonic

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.row_spans import CacheRow
from mlxpool.worker.engine.measurements import KeptMeasurement, Measurement
from mlxpool.worker.engine.memory import EngineMemory
from mlxpool.worker.engine.opening import Parts, Warmed, bounds_of, kept_rules, remake_layout
from mlxpool.worker.engine.prompt_logprobs import lines_at_a_time, logit_bytes
from mlxpool.worker.engine.trial_passes import (
    LoadedEngine,
    PassKind,
    compile_kernels,
    drop_rows,
    dummy_rows,
    kinds_of_passes,
    step,
    warm,
    warm_head,
    warm_passes,
    whole_mask,
)
from mlxpool.worker.kernels import device, kernel_cache
from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.batch import ALL_OPTIONS, SamplingBatch, TokenMasks
from mlxpool.worker.scheduling.kv_blocks import activation_bytes, blocks_for
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.transfers.uploads import upload_copy, upload_table

CPU_WARM_UP_CHUNKS = (64, 256)  # tokens of the chunks that are measured at load
GPU_WARM_UP_CHUNKS = (256, 1024)  # tokens of these chunks on a GPU
LONG_PASSES_LEAVE = 7 / 8  # the least part of the blocks that long passes must leave
DECODE_STEPS = 12  # measured decode steps of one row; the time target of passes depends on them

log = logging.getLogger("mlxpool.worker")


def warm_up(engine: LoadedEngine, on_progress: Callable[[], None]) -> Warmed:
    """Measures the memory of a prefill chunk and of draws, and computes each kind of pass once.

    Calls `on_progress` after each step, which may take seconds. Makes the layout again, with as
    many blocks as fit beside a step. On a CPU it skips measurements and passes if an earlier load
    has stored its measurements. Raises ModelLoadFailed if too few blocks are left.
    """
    LOAD.enter("memory")
    parts, memory, long_passes = engine.parts, engine.parts.memory, False
    if device.on_gpu():  # above this limit MLX waits for steps in flight
        mx.set_memory_limit(memory.budget.limit)
    kept = kept_measurement(engine)
    known = None if kept is None else kept.find()
    if known is None:
        long_passes = measure_memory(engine, on_progress)
    else:
        log.info("an earlier load has measured the memory and times of passes")
        images = memory.encoded.budget + known.image
        memory.budget = replace(memory.budget, step=known.step, images=images)
    if is_pooled(memory):
        remake_layout(parts, engine.most_drafts, long_passes=long_passes)
        memory.require_min_blocks()
    if device.on_gpu():
        compile_kernels(engine, kinds_of_passes(engine), on_progress)
    LOAD.enter("warm_up")
    if known is None:
        warm_passes(engine, on_progress)
    else:
        for load, seconds in known.passes:
            engine.cost.observe(load, seconds)
        warm(engine, PassKind((1,)), on_progress, times=1)  # to test that the model computes
    memory.layout.evaluated()
    if parts.predictions is not None:
        warm_head(engine, parts.predictions)
        on_progress()
    # The cost model is not used: it predicts such passes from the last passes that it observed.
    seconds = parts.target.most
    if parts.target.least < parts.target.most:
        seconds = parts.target.seconds(decode_seconds(engine))
    memory.finish_warm_up(0 if known is None else known.process)
    parts.devices.warmed_up(memory.budget.buffers)
    budget = memory.budget
    if kept is not None and known is None:
        image = budget.images - memory.encoded.budget
        kept.keep(Measurement(budget.step, image, budget.process, engine.cost.observed))
    kernel_cache.log_mlx_kernels(LOAD.times.total)
    return Warmed(seconds, long_passes)


def is_pooled(memory: EngineMemory[Layout, CacheRow]) -> bool:
    """Returns True if the measurement decides the number of a pool's blocks."""
    return memory.layout.holds_prefixes and memory.fixed_blocks is None


def kept_measurement(engine: LoadedEngine) -> KeptMeasurement | None:
    """Returns the file with this engine's measurements; None: every load measures again."""
    parts, memory = engine.parts, engine.parts.memory
    if not parts.settings.keeps_measurement or device.on_gpu() or memory.draft is not None:
        return None
    chunk, pairs = bounds_of(parts)
    return KeptMeasurement(
        {
            **kept_rules(parts),
            "model": engine.digest,
            "limit": memory.budget.limit,  # the allowed heap growth depends on it
            "weights": memory.budget.weights,
            "context": engine.context,
            "batch": parts.batch,
            "chunk": chunk,
            "pairs": pairs,
            "sequences": memory.budget.rows,
            "blocks": memory.fixed_blocks,
            "block": memory.budget.block,
            "row": memory.budget.row,
            "read": memory.layout.read_bytes,
            "drafts": engine.most_drafts,
            "lookahead": parts.lookahead,
        }
    )


def measure_memory(engine: LoadedEngine, on_progress: Callable[[], None]) -> bool:
    """Measures the bytes of a pass at its peak; returns True if long passes were chosen."""
    parts, memory, drafts = engine.parts, engine.parts.memory, engine.most_drafts
    chunks = GPU_WARM_UP_CHUNKS if device.on_gpu() else CPU_WARM_UP_CHUNKS
    sizes = [min(size, engine.context - 3) for size in chunks]
    if is_pooled(memory):  # a small pool leaves memory for the measurement
        remake_layout(parts, drafts, blocks_for(sizes[-1] + 3), long_passes=False)
    if memory.draft is not None:
        memory.draft.warm_up(on_progress)
        memory.budget = replace(memory.budget, draft_model=memory.draft.held_bytes)
    small, large = measure_chunks(engine, sizes, on_progress)
    on_progress()
    long_passes = choose_long_passes(engine, small, large)
    chunk, pairs = bounds_of(parts)
    one_pass = pass_bytes(engine.vocab_size, small, large, chunk, pairs)
    if drafts:
        one_pass = max(one_pass, draw_bytes(engine, most_logits(engine)))
    taken = (1 + parts.lookahead) * one_pass + memory.layout.read_bytes
    if parts.image_encoder is not None:  # an image may be encoded beside a pass in flight
        encoder, largest = parts.image_encoder.measure()
        taken = max(taken, parts.lookahead * one_pass + memory.layout.read_bytes + encoder)
        memory.budget = replace(memory.budget, images=memory.encoded.budget + largest)
        on_progress()
    memory.budget = replace(memory.budget, step=taken)
    return long_passes


def measure_chunks(
    engine: LoadedEngine, sizes: Many[int], on_progress: Callable[[], None]
) -> list[tuple[int, int]]:
    """Returns the result of `measure_chunk` for each size; compiles their kernels together."""
    if engine.parts.memory.layout.sizes and device.on_gpu():
        kinds = [PassKind(unread=size) for size in sizes]
        compile_kernels(engine, kinds, on_progress)
        LOAD.enter("memory")
    return [measure_chunk(engine, size) for size in sizes]


def measure_chunk(engine: LoadedEngine, size: int) -> tuple[int, int]:
    """Computes a chunk of `size` tokens; returns `size` and the bytes of its activations."""
    (seq,) = dummy_rows(engine, 1, max(size, 1) + 2)  # so that the chunk is not the prompt's last
    memory = engine.parts.memory
    memory.layout.reserve(memory.rows[seq], seq.length)  # the row's memory is not activation memory
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with memory.layout.whole_passes():
        step(engine, [Span(seq, 0, size, draws=0)])
    peak = mx.get_peak_memory() - before
    drop_rows(engine, [seq])
    return size, peak


def pass_bytes(
    vocab_size: int, small: tuple[int, int], large: tuple[int, int], lines: int, pairs: int
) -> int:
    """Returns the bytes of a pass of at most `lines` inputs and `pairs` query-key pairs.

    `small` and `large` are results of `measure_chunk`: the inputs and the bytes of a chunk.
    """
    one_pass = activation_bytes(small, large, lines, pairs)
    # Logits of prompts are computed after a pass has ended, in the memory that it has freed.
    return max(one_pass, logit_bytes(vocab_size, lines))


def choose_long_passes(
    engine: LoadedEngine, small: tuple[int, int], large: tuple[int, int]
) -> bool:
    """Makes a layout of long passes, and returns True, if long passes are allowed.

    Long passes have up to twice the inputs of the `large` chunk. They are faster for small models,
    because the host takes as long to build a pass as the device to compute it. Two conditions must
    hold: long passes end within the step target's upper bound, so that new requests are not
    delayed, and leave at least the share LONG_PASSES_LEAVE of the blocks. Returns False for a model
    with an image encoder, for a configured number of blocks, and if `large` is not the layout's
    longest pass.
    """
    parts, memory, size = engine.parts, engine.parts.memory, large[0]
    most = min(parts.batch, engine.context)
    if memory.layout.sizes[-1:] != (size,) or most <= size or memory.fixed_blocks is not None:
        return False
    if parts.image_encoder is not None:  # passes with images are not compiled, and store scores
        return False
    if 2 * chunk_seconds(engine, size) > parts.target.most:
        return False
    passes = 1 + parts.lookahead
    short, long = (
        blocks_beside(parts, passes * pass_bytes(engine.vocab_size, small, large, n, n * n))
        for n in (size, min(most, 2 * size))
    )
    if not long or long < LONG_PASSES_LEAVE * short:
        return False
    remake_layout(parts, engine.most_drafts, blocks_for(size + 3), long_passes=True)
    return True


def blocks_beside(parts: Parts, step: int) -> int:
    """Returns how many blocks fit into a pool if a step needs `step` bytes beside the pool."""
    memory, before = parts.memory, parts.memory.budget
    memory.budget = replace(before, step=step + memory.layout.read_bytes)
    try:
        return memory.pool_blocks(prefixes=parts.settings.prefix != "off")
    finally:
        memory.budget = before


def chunk_seconds(engine: LoadedEngine, size: int) -> float:
    """Returns the seconds of a chunk of `size` tokens. Its pass is compiled already."""
    (seq,) = dummy_rows(engine, 1, size + 1)
    began = monotonic()
    step(engine, [Span(seq, 0, size, draws=0)])
    taken = monotonic() - began
    drop_rows(engine, [seq])
    return taken


def most_logits(engine: LoadedEngine) -> int:
    """Returns the most logit lines of a pass that checks drafts, padding included."""
    most = engine.parts.memory.budget.rows + engine.most_drafts
    return next((size for size in engine.parts.memory.layout.sizes if size >= most), most)


def draw_bytes(engine: LoadedEngine, lines: int) -> int:
    """Returns the bytes of `lines` lines of logits and of their draws with all options."""
    part = min(lines, lines_at_a_time(engine.vocab_size))
    # Some rows have a top-k. For other rows top-p looks at all tokens.
    options = [ALL_OPTIONS, replace(ALL_OPTIONS, top_k=0)] * part
    batch = SamplingBatch(options[:part], [0] * part, engine.vocab_size)
    words = whole_mask(engine.vocab_size, part).view(np.int32)
    numbers = upload_table(upload_copy, np.arange(part, dtype=np.int32), words)
    logits = mx.zeros((part, engine.vocab_size), dtype=engine.parts.loaded.dtype)
    mx.eval(logits, numbers)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    masks, histories = TokenMasks(numbers, part), [(0,)] * part
    output = sampler.sample_batch(logits, batch, range(part), histories, masks=masks)
    mx.eval(output.arrays())
    taken = mx.get_peak_memory() - before
    return taken + lines * engine.vocab_size * engine.parts.loaded.dtype.size


def decode_seconds(engine: LoadedEngine) -> float:
    """Returns the seconds of a decode step of one row, among steps that follow each other."""
    (seq,) = dummy_rows(engine, 1, 1)
    ends = []
    for _ in range(DECODE_STEPS):
        engine.submit([Span(seq, seq.submitted, 1, draws=1)])
        if engine.in_flight > engine.parts.lookahead:
            seq.ids += [drawn.token for drawn in engine.collect().drawn]
            ends.append(monotonic())
    while engine.in_flight:
        engine.collect()
    drop_rows(engine, [seq])
    return min(end - begin for begin, end in pairwise(ends))
