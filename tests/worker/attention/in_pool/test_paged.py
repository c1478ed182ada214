"""The block pool: rows and tree share memory, and tokens are those of rows with own arrays.

Tested with MLX's operations and with our kernels, which simt.py simulates without a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.engine_steps import (
    ScheduledSteps,
    decode,
    decode_spans,
    drain,
    enter,
    read_chunk,
)
from support.worker_checkpoints import GLM, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import OutOfMemory  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.attention.in_pool import kernel_trials, paged_layout  # noqa: E402
from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedStore  # noqa: E402
from mlxpool.worker.attention.in_pool.paged_batch import PagedBatch  # noqa: E402
from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout  # noqa: E402
from mlxpool.worker.attention.in_pool.paged_runner import (  # noqa: E402
    CHUNK,
    CHUNK_WIDTHS,
    CHUNK_WITH_LOGITS,
    MAX_PREFILL_ROWS,
    PagedRunner,
    padded_tokens,
    padded_width,
)
from mlxpool.worker.attention.layout import Layout  # noqa: E402
from mlxpool.worker.attention.layout_choice import make_layout  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.attention.stored_arrays import host_arrays  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec, LatentSpec  # noqa: E402
from mlxpool.worker.engine import layout_engine  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.kernels.score_params import ScoreParams  # noqa: E402
from mlxpool.worker.prefix.paths import Part  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support import simt  # noqa: E402
from support.disk_records import record_from  # noqa: E402

ON_GPU = mx.cuda.is_available()
SHAPE = RowShape((KeyValueSpec(2, 8, 4), LatentSpec(6, 4)), mx.float32, 3000, keeps_all=True)
BLOCKS = 30


@pytest.fixture(params=["kernels"] if ON_GPU else ["operations", "kernels"])
def kernels(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether our kernels write and read the pool."""
    if request.param == "operations" or ON_GPU:
        yield ON_GPU
        return
    with simt.simulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_engine, "make_layout", _as_on_a_gpu)
        yield True


def _as_on_a_gpu(*args: Any, on_gpu: bool, **others: Any) -> Any:
    return make_layout(*args, on_gpu=True, **others)


def pool_of(in_place: bool, blocks: int = BLOCKS) -> PagedStore:
    return PagedStore(KVPool(SHAPE, blocks, in_place=in_place))


def some(tokens: int) -> list[tuple[Any, ...]]:
    """Returns new keys, values and latent vectors of a chunk."""
    return [
        (mx.random.normal((1, 2, tokens, 8)), mx.random.normal((1, 2, tokens, 4))),
        (mx.random.normal((1, 1, tokens, 6)),),
    ]


def append(rows: tuple[Any, ...], new: list[tuple[Any, ...]]) -> None:
    """Writes the same tokens into each row and compares what they return."""
    for layer, arrays in enumerate(new):
        found = [row.write(layer, *arrays) for row in rows]
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                assert mx.array_equal(one, two).item()
    for row in rows:
        row.advance(new[0][0].shape[2])
        mx.eval(row.arrays())


def test_a_paged_row_returns_what_a_row_cache_returns(kernels: bool) -> None:
    store = pool_of(kernels)
    row, other = store.new_row(), RowCache(SHAPE)
    for tokens in (1, 200, 55, 1, 300, KV_BLOCK_TOKENS, 1):
        append((row, other), some(tokens))
    for to in (700, 513, 512, 511, 3):
        for one in (row, other):
            one.trim(to)
        append((row, other), some(9))
    row.release()
    assert store._pool.free == BLOCKS


def test_a_row_copies_a_shared_block_before_it_writes(kernels: bool) -> None:
    store = pool_of(kernels)
    row, first, second = store.new_row(), RowCache(SHAPE), RowCache(SHAPE)
    new = some(KV_BLOCK_TOKENS + 100)
    append((row, first, second), new)
    kept = store.keep(row, 0, KV_BLOCK_TOKENS + 100)
    twin = store.new_row()
    store.fill(twin, [(kept, KV_BLOCK_TOKENS + 100)], None, KV_BLOCK_TOKENS + 100, 0)
    assert store._pool.free == BLOCKS - 2
    append((row, first), some(3))
    append((twin, second), some(3))
    assert store._pool.free == BLOCKS - 4  # each has a copy of the partly filled one
    store.free(kept)
    assert store._pool.free == BLOCKS - 3


def test_a_block_from_the_disk_equals_the_one_that_was_stored(kernels: bool) -> None:
    store, other = pool_of(kernels), pool_of(kernels)
    row, same = store.new_row(), RowCache(SHAPE)
    size = KV_BLOCK_TOKENS + 100
    append((row, same), some(size))
    run = store.keep(row, 0, size)
    pieces, at = [], 0
    for end in (KV_BLOCK_TOKENS, size):
        arrays = host_arrays(store.stored([Part(run, 0, at, end)]))
        pieces.append((other.restored(record_from(arrays, at, end - at), at, end), end - at))
        at = end
    assert other.nbytes == 2 * other.block_bytes and other._pool.free == BLOCKS - 2
    back = other.new_row()
    other.fill(back, pieces, None, size, size)
    append((back, same), some(3))
    other.release(back)
    for piece, _ in pieces:
        other.free(piece)
    assert other._pool.free == BLOCKS


def test_a_full_pool_raises_and_the_row_is_unchanged(kernels: bool) -> None:
    store = pool_of(kernels, blocks=2)
    row, other = store.new_row(), RowCache(SHAPE)
    append((row, other), some(400))
    with pytest.raises(OutOfMemory, match="all 2 blocks"):
        row.write(0, *some(200)[0])
    append((row, other), some(5))


def test_a_pool_keeps_all_tokens_of_window_layers() -> None:
    shape = RowShape((KeyValueSpec(2, 8, 4, window=40), KeyValueSpec(1, 16, 16)), mx.float32, 3000)
    store = PagedStore(KVPool(shape, BLOCKS, in_place=False))
    assert store.block_bytes == KV_BLOCK_TOKENS * 4 * (2 * 12 + 32)
    assert store._memory.nbytes == (BLOCKS + 1) * store.block_bytes


def test_decode_passes_have_few_widths() -> None:
    widths = {rows: padded_width(rows) for rows in range(1, 129)}
    assert all(rows <= lines <= 1.5 * rows for rows, lines in widths.items())
    assert sorted(set(widths.values())) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]


MODELS: dict[str, dict[str, Any]] = {
    "keys and values": {"hidden_size": 256, "head_dim": 64},
    "windows": {"model_type": "mistral", "sliding_window": 300, "hidden_size": 256, "head_dim": 64},
    "windows, sinks and all tokens": {
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 150000,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
    "latent lines": GLM,
}


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    changes: dict[str, Any] = {**MODELS[request.param], "max_position_embeddings": 2048}
    return load(inspect(write_checkpoint(tmp_path_factory.mktemp("model"), **changes)))


def engine_of(
    loaded: LoadedModel, layout: str, prefix: str = "tree", blocks: int = 60
) -> ModelEngine:
    return ModelEngine(loaded, layout=layout, prefix=prefix, blocks=blocks, lookahead=ON_GPU)


@pytest.mark.parametrize("chunk", [1, 127, 128])
def test_a_short_chunk_is_one_compiled_pass(
    loaded: LoadedModel, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens see each other and earlier ones, as in an uncompiled chunk.

    The last chunk draws the first token; one of 129 inputs has no compiled pass.
    """
    engine, slow = engine_of(loaded, "pool", "off"), engine_of(loaded, "rows", "off")
    assert isinstance(engine.inspect().layout, PagedLayout)
    engine.inspect().layout.compiles_chunks = True
    if chunk == 1:
        engine.inspect().layout.runner.compile_ahead(2, 40, lambda: None)
    kinds = []
    compute = PagedRunner._computed

    def computed(self: PagedRunner, *args: Any) -> Any:
        kinds.append(CHUNK_WITH_LOGITS if args[5] else CHUNK)
        return compute(self, *args)

    monkeypatch.setattr(PagedRunner, "_computed", computed)
    for before in (0, KV_BLOCK_TOKENS - 20, 300):
        prompt = tuple((7 * n + n * n) % 256 for n in range(before + 2 * chunk + 1))
        pair = [Sequence(b"", 1, prompt, Options(temperature=0.0), 1, 12) for _ in range(2)]
        for each, seq in zip((engine, slow), pair, strict=True):
            each.admit(seq)
            if before:
                read_chunk(each, seq, before)
            kinds.clear()
            for span in (
                Span(seq, before, chunk, draws=0),
                Span(seq, before + chunk, chunk + 1, draws=1),
            ):
                each.submit([span])
                drain(each)
            if each is engine and not ON_GPU:  # our kernels do not read float32 chunks
                assert kinds == [CHUNK, CHUNK_WITH_LOGITS][: 1 + (chunk < CHUNK_WIDTHS[-1])]
            decode(each, [seq], 11)
            each.release(seq)
        assert pair[0].ids == pair[1].ids


def test_tokens_of_a_chunk_attend_causally(kernels: bool) -> None:
    """The attention kernel reads what the write kernel has written before."""
    heads, pairs, size, before, count = 4, 2, 64, 30, 40
    kind = mx.bfloat16 if kernels else mx.float32
    shape = RowShape((KeyValueSpec(pairs, size, size),), kind, 1000)
    pool = KVPool(shape, 4, in_place=kernels, reads=kernels)
    q = mx.random.normal((before + count, heads, size)).astype(kind)
    k, v = (mx.random.normal((before + count, pairs, size)).astype(kind) for _ in "kv")
    for start, end in ((0, before), (before, before + count)):
        positions = mx.arange(start, end, dtype=mx.int32)
        table = mx.full((end - start, 1), 2, dtype=mx.int32)
        step = PagedBatch(pool, positions, positions + 2 * KV_BLOCK_TOKENS, table, 128, chunk=True)
        found = step.attend(0, q[start:end], k[start:end], v[start:end], ScoreParams(0.125))
        mx.eval(found)
    asked, keys, values = (np.array(one.astype(mx.float32), dtype=float) for one in (q, k, v))
    for line in range(count):
        seen = before + line + 1
        for head in range(heads):
            scores = keys[:seen, head // 2] @ asked[seen - 1, head] * 0.125
            weights = np.exp(scores - scores.max())
            expected = weights @ values[:seen, head // 2] / weights.sum()
            got = np.array(found[line, head].astype(mx.float32))
            assert np.abs(got - expected).max() < (0.03 if kernels else 1e-4)


@pytest.mark.parametrize("window", [0, 20])
def test_chunks_of_a_pass_attend_to_their_own_rows(kernels: bool, window: int) -> None:
    """The tokens between the chunks are padding."""
    heads, pairs, size = 4, 2, 64
    kind = mx.bfloat16 if kernels else mx.float32
    shape = RowShape((KeyValueSpec(pairs, size, size, window=window),), kind, 1000)
    pool = KVPool(shape, 4, in_place=kernels, reads=kernels)
    q = mx.random.normal((4, 70, heads, size)).astype(kind)
    k, v = (mx.random.normal((4, 70, pairs, size)).astype(kind) for _ in "kv")
    asked, keys, values = (np.array(one.astype(mx.float32), dtype=float) for one in (q, k, v))
    for passes in ([(1, 0, 30), (2, 0, 16), (3, 0, 1)], [(2, 16, 40), (0, 0, 3), (3, 1, 17)]):
        lines: list[tuple[int, int] | None] = []
        for row, start, count in passes:
            lines += [(row, at) for at in range(start, start + count)]
            lines += [None] * (padded_tokens(count) - count)
        rows, at = zip(*[line or (pool.spare, 0) for line in lines], strict=True)
        which = mx.array([min(row, 3) for row in rows]), mx.array(at)
        table, positions = mx.array(rows, dtype=mx.int32)[:, None], mx.array(at, dtype=mx.int32)
        slots = positions + KV_BLOCK_TOKENS * table[:, 0]
        step = PagedBatch(pool, positions, slots, table, 128, chunk=True)
        found = step.attend(0, q[which], k[which], v[which], ScoreParams(0.125))
        got = np.array(found.astype(mx.float32))
        for number, line in enumerate(lines):
            if line is not None:
                row, last = line
                seen = slice(max(0, last + 1 - window) if window else 0, last + 1)
                for head in range(heads):
                    scores = keys[row, seen, head // 2] @ asked[row, last, head] * 0.125
                    weights = np.exp(scores - scores.max())
                    expected = weights @ values[row, seen, head // 2] / weights.sum()
                    assert np.abs(got[number, head] - expected).max() < (0.03 if kernels else 1e-4)


@dataclass(frozen=True)
class Bare:
    """Latent projections that do nothing."""

    rank: int

    def absorb(self, q: Any) -> Any:
        return q

    def to_values(self, read: Any) -> Any:
        return read


def greedy(prompt: tuple[int, ...], count: int = 20) -> Sequence:
    return Sequence(b"", 1, prompt, Options(temperature=0.0), 1, count)


def answer(slow: ModelEngine, seq: Sequence) -> list[int]:
    """Returns the tokens of an engine that computes the sequence alone, as many as it has."""
    alone = greedy(seq.prompt, len(seq.ids))
    enter(slow, alone, 300)
    decode(slow, [alone], len(seq.ids))
    slow.release(alone)
    return alone.ids


def test_prompts_read_in_one_pass_decode_beside_others(loaded: LoadedModel) -> None:
    """They may be released before their first token arrives, or fail and be read again."""
    engine, slow = engine_of(loaded, "pool"), engine_of(loaded, "rows", "off")
    assert isinstance(engine.inspect().layout, PagedLayout)
    engine.inspect().layout.compiles_chunks, engine.inspect().layout.runner.max_width = True, 64
    prompts = [tuple((5 * n + n * n * salt) % 256 for n in range(20 * salt)) for salt in (1, 2, 3)]
    rows = [greedy(prompts[0][::-1])]
    enter(engine, rows[0])
    for prompt in prompts:
        leaving, seq = greedy(prompt), greedy(prompt)
        engine.admit(leaving)
        drain(engine)
        engine.submit(
            [*decode_spans(rows), Span(leaving, leaving.submitted, leaving.unread, draws=1)]
        )
        engine.release(leaving)
        assert [one.sequence for one in drain(engine)] == rows
        enter(engine, seq)
        assert seq.cached == len(prompt) - 1
        rows.append(seq)
        decode(engine, rows)
    drain(engine)
    with pytest.raises(RuntimeError, match="spoilt"), pytest.MonkeyPatch.context() as patch:
        seq = greedy((1, 2, 3))
        engine.admit(seq)
        patch.setattr(engine._draws, "draw", _spoilt)
        engine.submit([*decode_spans(rows[:1]), Span(seq, 0, 3, draws=1)])
    assert seq.submitted == 0 and not engine.in_flight
    lost = rows if engine.inspect().layout.shares_arrays else rows[:1]
    assert [engine.lost(one) for one in rows] == [one in lost for one in rows]
    for one in (seq, *lost):
        engine.release(one)
        one.return_to_waiting()
        enter(engine, one)
    decode(engine, [*rows, seq], 5)
    for one in (*rows, seq):
        assert one.ids == answer(slow, one)
    engine.close()
    engine.warm_up()
    assert not engine.in_flight and engine.memory().kv == 0


def _spoilt(*args: Any, **others: Any) -> Any:
    raise RuntimeError("spoilt")


def test_chunks_of_several_rows_are_computed_in_one_pass(loaded: LoadedModel) -> None:
    """Includes an unfinished prompt, a finished one, new ones and two with a prefix hit."""
    engine, slow = engine_of(loaded, "pool"), engine_of(loaded, "rows", "off")
    layout = engine.inspect().layout
    assert isinstance(layout, PagedLayout)
    layout.compiles_chunks = True
    first = tuple((3 * n + n * n) % 256 for n in range(330))
    before = greedy(first[:300])
    enter(engine, before)
    engine.release(before)
    prompts = [first[5:260], (7,), first[:40], first[::-1][:33], first[:300], first]
    rows = [greedy(prompt) for prompt in prompts]
    for seq in rows:
        engine.admit(seq)
    assert [seq.cached for seq in rows] == [0, 0, 39, 0, 299, 299]
    spans = [
        Span(seq, seq.submitted, min(200, seq.unread), draws=seq.unread <= 200) for seq in rows
    ]
    assert (
        layout._batch_size([RowSpan(engine.inspect().rows[s.sequence], s.count) for s in spans])
        == 6
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout.runner, "chunk", _spoilt)
        patch.setattr(Layout, "forward", _spoilt)
        engine.submit(spans)
    late, running = rows[0], rows[1:]
    assert [one.sequence for one in drain(engine)] == running
    engine.submit([*decode_spans(running), Span(late, 200, 55, draws=1)])
    assert [one.sequence for one in drain(engine)] == [*running, late]
    decode(engine, rows, 3)
    for seq in rows:
        assert seq.ids == answer(slow, seq)


def test_a_pass_is_as_wide_as_its_longest_row(tmp_path: Path) -> None:
    """The longest row is not the last; and a pass that fails empties its rows."""
    loaded = load(inspect(write_checkpoint(tmp_path, max_position_embeddings=8192)))
    engine, slow = engine_of(loaded, "pool", "off"), engine_of(loaded, "rows", "off")
    layout = engine.inspect().layout
    assert isinstance(layout, PagedLayout)
    layout.compiles_chunks = True
    layout.runner.max_width = 128
    layout.runner.compile_ahead(3, 4000, lambda: None)
    warmed = set(layout.runner.passes._passes)
    rows = [greedy(tuple(n * n % 251 for n in range(size))) for size in (30, 3000, 20)]

    def last_chunks() -> list[Span]:
        for seq in rows:
            engine.admit(seq)
        while rows[1].submitted < 2960:
            read_chunk(engine, rows[1], 2960 - rows[1].submitted)
        return [Span(seq, seq.submitted, seq.unread, draws=1) for seq in rows]

    spans = last_chunks()
    assert [span.count for span in spans] == [30, 40, 20]
    with pytest.raises(RuntimeError, match="spoilt"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout.runner, "_computed", _spoilt)
        engine.submit(spans)
    assert [engine.inspect().rows[seq].offset for seq in rows] == [0, 0, 0]
    assert [engine.lost(seq) for seq in rows] == [False, True, False]
    for seq in rows:
        engine.release(seq)
        seq.preempt()
    spans = last_chunks()
    # No kernel reads float32.
    size = layout._batch_size([RowSpan(engine.inspect().rows[s.sequence], s.count) for s in spans])
    assert size == (0 if layout.runner.gathers else 3)
    engine.submit(spans)
    assert [one.sequence for one in drain(engine)] == rows
    assert layout.runner.gathers or set(layout.runner.passes._passes) == warmed
    for seq in rows:
        assert len(seq.ids) == 1 and seq.ids == answer(slow, seq)


def test_the_chunks_of_a_pass_are_bounded(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, "pool", "off", blocks=200)
    layout = engine.inspect().layout
    assert isinstance(layout, PagedLayout)
    paged: PagedLayout = layout

    def together(*sizes: int) -> int:
        """Returns how many chunks of these sizes a pass has; they are the first of their rows."""
        return paged._batch_size([RowSpan(paged.store.new_row(), size) for size in sizes])

    def passes(*spans: tuple[int, bool]) -> list[list[int]]:
        every = [RowSpan(paged.store.new_row(), size) for size, _ in spans]
        return paged._passes(every, {n for n, (_, draws) in enumerate(spans) if draws})

    mixed = (20, True), (1, True), (30, False), (1, False), (1, True)
    assert together(*[20] * 50) == 0  # where chunk passes are not compiled
    assert passes(*mixed) == [[1, 4], [0], [2], [3]]
    layout.compiles_chunks, layout.runner.max_width = True, 2048
    assert passes(*mixed) == [[1, 4], [0, 2, 3]]
    assert passes((1, True), (1, True)) == [[0, 1]] and passes((9, False)) == [[0]]
    assert together(*[15] * 50) == MAX_PREFILL_ROWS
    assert together(*[200] * 50) == 2048 // padded_tokens(200)
    assert (together(512, 512, 512), together(513, 513)) == (2, 1)  # too many query-key pairs
    layout.runner.max_width = 512
    assert together(20, 300, 400, 20) == 2
    assert passes((20, True), (300, True), (400, True), (20, True)) == [[0, 1], [2, 3]]
    with pytest.MonkeyPatch.context() as patch:
        # The blocks of two rows of 32 lines, with one block each.
        patch.setattr(paged_layout, "MAX_TABLE_BLOCKS", 64)
        assert together(20, 20, 20) == 2
        assert together(20, 300, 20) == 1


@pytest.mark.parametrize("kernels", ["kernels"], indirect=True)
def test_the_latent_kernel_equals_mlx_operations(kernels: bool) -> None:
    """For a chunk, then for rows with one token each."""
    size, rank, heads, count, kind = 192, 128, 5, 40, mx.bfloat16
    shape = RowShape((LatentSpec(size, rank),), kind, 1000)
    fast = KVPool(shape, 4, in_place=True, reads=kernel_trials.kernels_read(shape))
    exact = KVPool(replace(shape, dtype=mx.float32), 4, in_place=False)
    bare: Any = Bare(rank)
    assert fast.reads
    for start, chunk in ((0, True), (count, False), (count + 1, False)):
        positions = mx.arange(start, start + (count if chunk else 1), dtype=mx.int32)
        lines = positions.shape[0]
        q = mx.random.normal((lines, heads, size)).astype(kind)
        line = mx.random.normal((lines, size)).astype(kind)
        table = mx.full((lines, 1), 2, dtype=mx.int32)
        found = []
        for pool in (fast, exact):
            slots = positions + 2 * KV_BLOCK_TOKENS
            step = PagedBatch(pool, positions, slots, table, 128, chunk=chunk)
            inputs = [one.astype(pool.shape.dtype) for one in (q, line)]
            found.append(step.attend_latent(0, inputs[0], inputs[1], 0.1, bare).astype(mx.float32))
        assert mx.allclose(*found, 0.02, 0.03).item()
        assert found[0].shape == (lines, heads, rank)


def test_admissions_releases_hits_and_evictions_change_no_token(
    loaded: LoadedModel, kernels: bool
) -> None:
    """Compares with rows with own arrays; on a GPU for 10,000 steps."""
    draw = random.Random(5)
    heads = [tuple(draw.randrange(256) for _ in range(700)) for _ in range(4)]
    engine, slow = engine_of(loaded, "pool", blocks=36), engine_of(loaded, "rows", "off")
    assert isinstance(engine.inspect().layout, PagedLayout)
    pool = engine.inspect().layout.store._pool
    steps = ScheduledSteps(engine)
    done = drawn = mixed = 0
    longest, last = (300, 20) if kernels and not ON_GPU else (700, 60)
    pooled = engine.inspect().layout.pool
    assert pooled.in_place == kernels
    assert pooled.reads == (kernels and getattr(pooled.shape.caches[0], "key_dim", 0) == 64)
    most = 10_000 if ON_GPU else 60 if kernels else 150  # the simulator is slow
    while drawn < most:
        while pool.free < 5 * (4 - len(steps.live)) + 3 and engine.shrink(
            4
        ):  # as the compute thread does
            pass
        if len(steps.live) < 4 and draw.random() < 0.1:
            # Without kernels each token copies its row, which is slow; so is the simulator.
            engine.inspect().layout.compiles_chunks = ON_GPU or (
                not kernels and draw.random() < 0.3
            )
            for _ in range(draw.randrange(1, 5 - len(steps.live))):
                tail = tuple(draw.randrange(256) for _ in range(draw.randrange(1, 200)))
                prompt = draw.choice(heads)[: draw.randrange(1, longest)] + tail
                steps.admit(greedy(prompt, draw.randrange(1, last)))
        reading = sum(seq.reads_prompt for seq in steps.live)
        mixed += 0 < reading < len(steps.live)
        drawn += bool(steps.step())
        for seq in [one for one in steps.live if len(one.ids) >= one.max_tokens]:
            steps.leave(seq)
            done += 1
            if not ON_GPU or done % 50 == 0:
                assert seq.ids == answer(slow, seq)
    assert engine.prefix.hits > 1 and done > 3 and mixed > 3
    for seq in list(steps.live):
        steps.leave(seq)
    engine.shrink(1000)
    assert pool.free == 36
