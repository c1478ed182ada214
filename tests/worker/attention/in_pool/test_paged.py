"""The block pool: rows and the prefix tree share blocks, without an effect on drawn tokens.

Tested with MLX's operations and with our kernels, which simt.py simulates without a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from support.engine_steps import (
    ScheduledSteps,
    decode,
    decode_spans,
    drain,
    enter,
)
from support.worker_checkpoints import GLM, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import OutOfMemory  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.attention.in_pool.kv_pool import KVPool, PagedStore  # noqa: E402
from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout  # noqa: E402
from mlxpool.worker.attention.layout_choice import make_layout  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.stored_arrays import host_arrays  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec, LatentSpec  # noqa: E402
from mlxpool.worker.engine import devices  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.engine.token_draws import TokenDraws  # noqa: E402
from mlxpool.worker.prefix.paths import Part  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support import simt  # noqa: E402
from support.disk_records import record_from  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

ON_GPU = mx.cuda.is_available()
SHAPE = RowShape((KeyValueSpec(2, 8, 4), LatentSpec(6, 4)), mx.float32, 3000, keeps_all=True)
BLOCKS = 30


@pytest.fixture(params=["kernels"] if ON_GPU else ["operations", "kernels"])
def kernels(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Yields True if our kernels write and read the pool, False if MLX's operations do."""
    if request.param == "operations" or ON_GPU:
        yield ON_GPU
        return
    with simt.simulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "make_layout", _as_on_a_gpu)
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
    """Writes the same tokens into each row and compares the arrays that the rows return."""
    for layer, arrays in enumerate(new):
        outputs = [row.write(layer, *arrays) for row in rows]
        for other in outputs[1:]:
            for array, other_array in zip(outputs[0], other, strict=True):
                assert mx.array_equal(array, other_array).item()
    for row in rows:
        row.advance(new[0][0].shape[2])
        mx.eval(row.arrays())


def test_a_paged_row_returns_what_a_row_cache_returns(kernels: bool) -> None:
    store = pool_of(kernels)
    row, other = store.new_row(), RowCache(SHAPE)
    for tokens in (1, 200, 55, 1, 300, KV_BLOCK_TOKENS, 1):
        append((row, other), some(tokens))
    for to in (700, 513, 512, 511, 3):
        for cache in (row, other):
            cache.trim(to)
        append((row, other), some(9))
    row.release()
    assert store.free_blocks == BLOCKS


def test_a_row_copies_a_shared_block_before_it_writes(kernels: bool) -> None:
    store = pool_of(kernels)
    row, first, second = store.new_row(), RowCache(SHAPE), RowCache(SHAPE)
    new = some(KV_BLOCK_TOKENS + 100)
    append((row, first, second), new)
    kept = store.keep(row, 0, KV_BLOCK_TOKENS + 100)
    twin = store.new_row()
    store.fill(twin, [(kept, KV_BLOCK_TOKENS + 100)], None, KV_BLOCK_TOKENS + 100, 0)
    assert store.free_blocks == BLOCKS - 2
    append((row, first), some(3))
    append((twin, second), some(3))
    assert store.free_blocks == BLOCKS - 4  # each row has a copy of the partly filled block
    store.free(kept)
    assert store.free_blocks == BLOCKS - 3


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
    assert other.nbytes == 2 * other.block_bytes and other.free_blocks == BLOCKS - 2
    back = other.new_row()
    other.fill(back, pieces, None, size, size)
    append((back, same), some(3))
    other.release(back)
    for piece, _ in pieces:
        other.free(piece)
    assert other.free_blocks == BLOCKS


def test_a_full_pool_raises_and_the_row_is_unchanged(kernels: bool) -> None:
    store = pool_of(kernels, blocks=2)
    row, other = store.new_row(), RowCache(SHAPE)
    append((row, other), some(400))
    with pytest.raises(OutOfMemory, match="all 2 blocks"):
        row.write(0, *some(200)[0])
    append((row, other), some(5))


def test_a_pool_keeps_all_tokens_of_window_layers() -> None:
    shape = RowShape((KeyValueSpec(2, 8, 4, window=40), KeyValueSpec(1, 16, 16)), mx.float32, 3000)
    pool = KVPool(shape, BLOCKS, in_place=False)
    store = PagedStore(pool)
    assert store.block_bytes == KV_BLOCK_TOKENS * 4 * (2 * 12 + 32)
    assert pool.nbytes == BLOCKS * store.block_bytes


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
    return model_engine(loaded, layout=layout, prefix=prefix, blocks=blocks, lookahead=ON_GPU)


def greedy(prompt: tuple[int, ...], count: int = 20) -> Sequence:
    return Sequence(b"", 1, prompt, Options(temperature=0.0), 1, count)


def answer(slow: ModelEngine, seq: Sequence) -> list[int]:
    """Returns all tokens of the sequence from an engine that computes it alone."""
    alone = greedy(seq.prompt, len(seq.ids))
    enter(slow, alone, 300)
    decode(slow, [alone], len(seq.ids))
    slow.release(alone)
    return alone.ids


def test_prompts_read_in_one_pass_decode_beside_others(loaded: LoadedModel) -> None:
    """Some prompts are released before their first token, or fail and are read again."""
    engine, slow = engine_of(loaded, "pool"), engine_of(loaded, "rows", "off")
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
        assert [sampled.sequence for sampled in drain(engine)] == rows
        enter(engine, seq)
        assert seq.cached == len(prompt) - 1
        rows.append(seq)
        decode(engine, rows)
    drain(engine)
    with pytest.raises(RuntimeError, match="spoilt"), pytest.MonkeyPatch.context() as patch:
        seq = greedy((1, 2, 3))
        engine.admit(seq)
        patch.setattr(TokenDraws, "draw", _spoilt)
        engine.submit([*decode_spans(rows[:1]), Span(seq, 0, 3, draws=1)])
    assert seq.submitted == 0 and not engine.in_flight
    lost = rows if engine.inspect().layout.shares_arrays else rows[:1]
    assert [engine.lost(row) for row in rows] == [row in lost for row in rows]
    for row in (seq, *lost):
        engine.release(row)
        row.return_to_waiting()
        enter(engine, row)
    decode(engine, [*rows, seq], 5)
    for row in (*rows, seq):
        assert row.ids == answer(slow, row)
    engine.close()
    engine.warm_up()
    assert not engine.in_flight and engine.memory().kv == 0


def _spoilt(*args: Any, **others: Any) -> Any:
    raise RuntimeError("spoilt")


def test_admissions_releases_hits_and_evictions_change_no_token(
    loaded: LoadedModel, kernels: bool
) -> None:
    """Compares the tokens with those of rows with their own arrays; on a GPU for 10,000 steps."""
    draw = random.Random(5)
    heads = [tuple(draw.randrange(256) for _ in range(700)) for _ in range(4)]
    engine, slow = engine_of(loaded, "pool", blocks=36), engine_of(loaded, "rows", "off")
    layout = engine.inspect().layout
    assert isinstance(layout, PagedLayout)
    store = layout.store
    steps = ScheduledSteps(engine)
    done = drawn = mixed = 0
    longest, last = (300, 20) if kernels and not ON_GPU else (700, 60)
    assert layout.pool.in_place == kernels
    most = 10_000 if ON_GPU else 60 if kernels else 150  # the simulator is slow
    while drawn < most:
        while store.free_blocks < 5 * (4 - len(steps.live)) + 3 and engine.inspect().memory.shrink(
            4
        ):  # evicts prefixes, as the compute thread does
            pass
        if len(steps.live) < 4 and draw.random() < 0.1:
            for _ in range(draw.randrange(1, 5 - len(steps.live))):
                tail = tuple(draw.randrange(256) for _ in range(draw.randrange(1, 200)))
                prompt = draw.choice(heads)[: draw.randrange(1, longest)] + tail
                steps.admit(greedy(prompt, draw.randrange(1, last)))
        reading = sum(seq.reads_prompt for seq in steps.live)
        mixed += 0 < reading < len(steps.live)
        drawn += bool(steps.step())
        for seq in [seq for seq in steps.live if len(seq.ids) >= seq.max_tokens]:
            steps.leave(seq)
            done += 1
            if not ON_GPU or done % 50 == 0:
                assert seq.ids == answer(slow, seq)
    assert engine.prefix.hits > 1 and done > 3 and mixed > 3
    for seq in list(steps.live):
        steps.leave(seq)
    engine.inspect().memory.shrink(1000)
    assert store.free_blocks == 36
