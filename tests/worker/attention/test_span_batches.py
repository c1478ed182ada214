"""Compares passes over several KV rows together with passes over one row each.

The rows of a pass read any mixture of single tokens and chunks. In every memory layout the logits
agree. With `deterministic` they have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.worker_checkpoints import GLM, QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.in_slabs.slabs import SlabRow  # noqa: E402
from mlxpool.worker.attention.layout import Layout  # noqa: E402
from mlxpool.worker.attention.layout_choice import choose_layout, make_layout  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.kernels.score_params import ScoreParams  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402

CONTEXT = 1024
ON_GPU = mx.default_device().type == mx.DeviceType.gpu
TOLERANCE = 2e-2 if ON_GPU else 1e-4  # relative to the largest logit, in bfloat16 and in float32
GEMMA = {
    "model_type": "gemma3_text",
    "head_dim": 8,
    "sliding_window": 40,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
    "rope_local_base_freq": 700.0,
    "attn_logit_softcapping": 9.0,
    "num_hidden_layers": 3,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "sliding_window": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({}, ("rows", "slabs", "pool")),
    "windows and softcap, last with a window": (GEMMA, ("rows", "pool")),
    "windows and sinks": (GPT_OSS, ("rows", "pool")),
    "latent": (GLM, ("rows", "pool")),
    "recurrent, last with attention": ({**QWEN3_NEXT, "num_hidden_layers": 2}, ("rows",)),
    "recurrent, last recurrent": ({**QWEN3_NEXT, "num_hidden_layers": 3}, ("rows",)),
}
CASES = [(name, layout) for name, (_, layouts) in MODELS.items() for layout in layouts]
# For each pass: six rows' numbers of tokens, the order of the rows, and the most rows with logits.
PASSES = st.lists(
    st.tuples(
        st.lists(
            st.one_of(st.just(0), st.just(1), st.just(1), st.integers(2, 70), st.just(260)),
            min_size=6,
            max_size=6,
        ).filter(any),
        st.permutations(range(6)),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def one(name: str, deterministic: bool = False) -> LoadedModel:
        changes = {**MODELS[name][0], "max_position_embeddings": CONTEXT}
        folder = write_checkpoint(tmp_path_factory.mktemp("model"), **changes)
        return load(inspect(folder), deterministic=deterministic)

    return one


def layout_of(name: str, model: LoadedModel, chunk: int = 300) -> Layout:
    exact = model.deterministic
    shape = RowShape(model.folder.plan.caches, model.dtype, CONTEXT, chunk)
    name, shape = choose_layout(name, shape, model.model, deterministic=exact, on_gpu=ON_GPU)
    return make_layout(name, shape, model.model, 40, rows=32, deterministic=exact, on_gpu=ON_GPU)


def logits_of(
    layout: Layout, rows: Sequence[Any], counts: Sequence[int], ids: Any, wanted: Sequence[int]
) -> np.ndarray:
    """Computes one pass; returns logits of the rows in `wanted`."""
    spans = [RowSpan(row, count) for row, count in zip(rows, counts, strict=True) if count]
    places = [at for at, count in enumerate(counts) if count]
    logits = layout.forward(
        spans, mx.array(ids, dtype=mx.int32), [places.index(n) for n in wanted]
    ).logits
    mx.eval(logits)
    return np.array(logits.astype(mx.float32)) if wanted else np.zeros((0, 1), np.float32)


def compare(mixed: Layout, alone: Layout, passes: Any, tolerance: float) -> None:
    """Compares passes over several spans in `mixed` with passes over one span in `alone`."""
    rows, others = ([layout.store.new_row() for _ in range(6)] for layout in (mixed, alone))
    draw = np.random.default_rng(5)
    for counts, order, logits in passes:
        counts = [
            n if row.offset + n <= CONTEXT else 0 for n, row in zip(counts, rows, strict=True)
        ]
        wanted = [n for n in order if counts[n]][:logits]
        ids = [draw.integers(0, 264, count).tolist() for count in counts]
        if not any(counts):
            continue
        expected = {
            n: logits_of(alone, [others[n]], [counts[n]], ids[n], [0])
            for n in range(6)
            if counts[n]
        }
        actual = logits_of(mixed, rows, counts, [token for each in ids for token in each], wanted)
        assert [row.offset for row in rows] == [row.offset for row in others]
        for number, got in zip(wanted, actual, strict=True):
            (want,) = expected[number]
            assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
    for row in rows:
        mixed.store.release(row)


@settings(max_examples=12, deadline=None)
@given(passes=PASSES)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_mixed_pass_gives_the_logits_of_one_span_a_pass(
    loaded: Any, name: str, layout: str, passes: Any
) -> None:
    model = loaded(name)
    compare(layout_of(layout, model), layout_of("rows", model), passes, TOLERANCE)


@pytest.mark.skipif(ON_GPU, reason="a GPU refuses `deterministic`")
@settings(max_examples=12, deadline=None)
@given(passes=PASSES)
@pytest.mark.parametrize("layout", ["rows", "slabs"])
def test_a_deterministic_mixed_pass_gives_the_same_bits(
    loaded: Any, layout: str, passes: Any
) -> None:
    model = loaded("llama", deterministic=True)
    compare(layout_of(layout, model), layout_of("rows", model), passes, 0.0)


class Attention:
    """A model of attention only, with random queries, keys and values: logits [E, heads * D]."""

    def __init__(self, layers: int, heads: int, size: int) -> None:
        self.layers, self.heads, self.size = layers, heads, size
        self.asked: list[int] = []  # for each layer, the tokens that the next layer computes
        self.table = mx.random.normal((50, heads * size), key=mx.random.key(1))

    def __call__(self, tokens: Any, batch: Any) -> Any:
        x = self.table[tokens].reshape(-1, self.heads, self.size)
        for layer in range(self.layers):
            out = batch.attend(layer, x, x[:, :2], x[:, -2:], ScoreParams(self.size**-0.5))
            x = batch.lines_after(layer, x) + out
            self.asked.append(x.shape[0])
        return x.reshape(x.shape[0], -1)

    hidden_states = __call__

    def logits_of(self, hidden: Any) -> Any:
        return hidden


@pytest.mark.parametrize("layout", ["rows", "slabs"])
def test_only_the_tokens_with_logits_pass_the_last_layer(layout: str) -> None:
    model = Attention(3, 4, 8)
    shape = RowShape((KeyValueSpec(2, 8, 8),) * 3, mx.float32, CONTEXT)
    rows = make_layout(layout, shape, model, 0, rows=32, deterministic=False, on_gpu=ON_GPU)
    spans = [RowSpan(rows.store.new_row(), count) for count in (1, 9, 1, 30)]
    ids = mx.zeros(41, dtype=mx.int32)
    assert rows.forward(spans, ids, [3, 0, 2]).logits.shape == (3, 32)
    assert model.asked == [41, 41, 3]
    rows.forward(spans, ids, [])
    assert model.asked[3:] == [41, 41, 1]


@pytest.mark.skipif(ON_GPU, reason="slabs are for a CPU")
def test_a_mixed_pass_copies_no_slab() -> None:
    """The peak memory of a pass shows no copy of a slab, an array with the keys of many rows."""
    model = Attention(2, 4, 64)
    shape = RowShape((KeyValueSpec(2, 64, 64),) * 2, mx.float32, CONTEXT)
    slabs = make_layout("slabs", shape, model, 0, rows=32, deterministic=False, on_gpu=False)
    rows = [slabs.store.new_row() for _ in range(8)]
    for row in rows:
        mx.eval(slabs.forward([RowSpan(row, 20)], mx.zeros(20, dtype=mx.int32), ()).logits)
    assert isinstance(rows[0], SlabRow)
    spans = [RowSpan(row, count) for row, count in zip(rows, (1, 1, 1, 1, 1, 9, 8, 1), strict=True)]
    before, cached = mx.get_active_memory(), mx.set_cache_limit(0)
    mx.reset_peak_memory()
    try:
        mx.eval(slabs.forward(spans, mx.zeros(23, dtype=mx.int32), range(8)).logits)
        assert mx.get_peak_memory() - before < rows[0].arrays()[0].nbytes
    finally:
        mx.set_cache_limit(cached)


def test_all_tokens_can_get_logits() -> None:
    model = Attention(2, 4, 8)
    shape = RowShape((KeyValueSpec(2, 8, 8),) * 2, mx.float32, CONTEXT)
    ids = mx.arange(12)
    whole = model(ids, RowBatch([RowSpan(RowCache(shape), 1), RowSpan(RowCache(shape), 11)], None))
    ends = model(ids, RowBatch([RowSpan(RowCache(shape), 1), RowSpan(RowCache(shape), 11)], [1, 0]))
    assert whole.shape[0] == 12
    assert mx.allclose(whole[mx.array([11, 0])], ends, atol=1e-5).item()
