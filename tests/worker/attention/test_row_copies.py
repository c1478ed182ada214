"""Tests copies between rows and the prefix tree, for all kinds of layer caches and a real model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine_steps import decode, enter
from support.prefix_stores import cells_of, chain, check_shape, unique_tokens
from support.worker_checkpoints import config, random_weights, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_copies import LayerStates, RowStore  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.caches.kinds import (  # noqa: E402
    CacheKind,
    FullCache,
    StateCache,
    WindowCache,
)
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.prefix.modes import MODES  # noqa: E402
from mlxpool.worker.prefix.tree_cache import TreeCache  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence as Seq  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

ROOMY = 10**9
SLACK = 3  # tokens beyond its window that a window layer keeps for a chunk
Arrays = tuple[Any, ...]


class KindsRow:
    """A row of synthetic layers, one for each kind of cache.

    A cell is a number computed from all tokens up to a token; layer l stores (l + 1) times the
    cell.
    """

    def __init__(self, kinds: Sequence[CacheKind]) -> None:
        self.kinds = kinds
        self.offset = 0
        self.layers: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.layers.values())

    def advance(self, count: int) -> None:
        self.offset += count

    def trim(self, to: int) -> None:
        for kind in self.kinds:
            if not isinstance(kind, StateCache) and kind.layer in self.layers:
                held = self.layers[kind.layer]
                self.layers[kind.layer] = held[:, :, : held.shape[2] - (self.offset - to)]
        self.offset = to

    def release(self) -> None:
        self.layers, self.offset = {}, 0

    def arrays(self) -> list[Any]:
        return list(self.layers.values())

    def part(self, layer: int, start: int, end: int) -> Arrays:
        held = self.layers[layer]
        first = self.offset - held.shape[2]
        assert first <= start <= end <= self.offset, "the layer does not have these any more"
        view = held[:, :, start - first : end - first]
        return view, -view

    def put(self, layer: int, parts: Sequence[Arrays], capacity: int) -> None:
        assert layer not in self.layers and self.offset == 0
        for keys, values in parts:
            assert mx.array_equal(keys, -values)
        self.layers[layer] = mx.concatenate([keys for keys, _ in parts], axis=2)

    def state(self, layer: int) -> Arrays:
        return (self.layers[layer],)

    def put_state(self, layer: int, state: Arrays) -> None:
        (self.layers[layer],) = state

    def feed(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for kind in self.kinds:
                self._feed(kind, token)
            self.offset += 1

    def _feed(self, kind: CacheKind, token: int) -> None:
        """Appends a cell to a layer: the cell of a token, computed from the layer's newest cell."""
        held, factor = self.layers.get(kind.layer), kind.layer + 1
        before = 0 if held is None else int(held.reshape(-1)[-1].item()) // factor
        cell = mx.array([chain(before, token) * factor], dtype=mx.int64)
        if isinstance(kind, StateCache):
            self.layers[kind.layer] = cell
            return
        line = cell.reshape(1, 1, 1, 1)
        grown = line if held is None else mx.concatenate([held, line], axis=2)
        if isinstance(kind, WindowCache):
            grown = grown[:, :, -(kind.size - 1 + SLACK) :]
        self.layers[kind.layer] = grown

    def content(self, kind: CacheKind) -> list[int]:
        """Returns the tokens that the next token attends to in a layer."""
        if self.offset == 0:
            return []
        if isinstance(kind, StateCache):
            return list(self.layers[kind.layer].tolist())
        first = kind.first(self.offset) if isinstance(kind, WindowCache) else 0
        keys, _ = self.part(kind.layer, first, self.offset)
        return list(keys.reshape(-1).tolist())


COMPANIES: dict[str, tuple[CacheKind, ...]] = {
    "full": (FullCache(0), FullCache(1)),
    "window": (WindowCache(0, 4),),
    "state": (StateCache(0),),
    "full+window": (FullCache(0), WindowCache(1, 4), FullCache(2)),
    "full+state": (StateCache(0), FullCache(1)),
    "all": (WindowCache(0, 6), FullCache(1), StateCache(2)),
}


def cache_of(kinds: Sequence[CacheKind], budget: int = ROOMY) -> TreeCache[Any, Any, Any]:
    return TreeCache(RowStore(lambda: KindsRow(kinds), kinds), budget)


def fresh(kinds: Sequence[CacheKind], tokens: Sequence[int]) -> KindsRow:
    row = KindsRow(kinds)
    row.feed(tokens)
    return row


def serve(cache: TreeCache[Any, Any, Any], kinds: Sequence[CacheKind], request: Any) -> int:
    """Serves a request, which may be cancelled; compares its row with a fresh one."""
    prompt, generated, cut, hint = request
    row, cached = cache.begin(prompt, hint)
    assert row.offset == cached < len(prompt)
    same = fresh(kinds, prompt[:cached])
    assert [row.content(kind) for kind in kinds] == [same.content(kind) for kind in kinds]
    tokens = [*prompt, *generated]
    for token in tokens[cached : max(cached, cut)]:
        row.feed([token])
        if row.offset == cache.next_restore_point(row):
            cache.keep(row, tokens)
    cache.close(row, tokens[: row.offset])
    return int(cached)


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
requests = st.tuples(prompts, prompts, st.integers(0, 24), st.integers(0, 12))


@pytest.mark.parametrize("company", COMPANIES)
@settings(max_examples=15, deadline=None)
@given(st.lists(requests, max_size=8), st.sampled_from((ROOMY, 400)))
def test_a_restored_prefix_equals_a_computed_one(
    company: str, lines: list[Any], budget: int
) -> None:
    kinds = COMPANIES[company]
    cache = cache_of(kinds, budget)
    for request in lines:
        serve(cache, kinds, request)
        assert cache.nbytes <= budget
        check_shape(cache, stateful=any(not isinstance(kind, FullCache) for kind in kinds))
    cache.clear()
    assert cache.nbytes == 0


def test_a_snapshot_is_restored_at_its_own_length_only() -> None:
    """A snapshot of 10 tokens is found if at most 15 tokens may be reused, but not if at most 5.

    Covers three cases of the reference test suite: restores at 5 tokens, at 15 tokens, and after a
    wrap.
    """
    for kind in (StateCache(0), WindowCache(0, 4)):
        cache = cache_of((kind,))
        serve(cache, (kind,), ([*range(10)], [], 10, 0))
        lengths = [cache.probe(tuple(range(16)), most=limit)[1] for limit in (5, 15)]
        assert lengths == [0, 10]


def test_only_layers_that_need_snapshots_have_them() -> None:
    """Only a layer with a window or a state stores a snapshot.

    Covers the cases HasAllSnapshots and MergeSkipsStatelessLayers of the reference test suite.
    """
    kinds = COMPANIES["full+window"]
    cache = cache_of(kinds)
    serve(cache, kinds, ([*range(9)], [], 9, 0))
    (leaf,) = cache.tree.walk()
    assert isinstance(leaf.state, LayerStates) and len(leaf.state.layers) == 1
    assert leaf.state.layers[0][0].shape[2] == 3  # a window of 4 keeps 3


# ---- a model's rows ------------------------------------------------------------------------------

SHAPE = RowShape((KeyValueSpec(2, 8, 8),) * 3, mx.float32, 4096)
TOKEN = 3 * 2 * 2 * 8 * 4  # bytes: layers, keys and values, heads, size, float32


def row_store(shape: RowShape = SHAPE) -> RowStore[RowCache]:
    return RowStore(
        lambda: RowCache(shape), [FullCache(layer) for layer in range(len(shape.caches))]
    )


def write(row: RowCache, tokens: Sequence[int]) -> None:
    """Writes keys and values, which depend on all earlier tokens and differ in each layer."""
    shape = row.shape
    cells = mx.array(cells_of(tokens)[row.offset :]).astype(mx.float32) / 2**31
    for layer, cache in enumerate(shape.caches):
        assert isinstance(cache, KeyValueSpec)
        line = cells[None, None, :, None] * mx.arange(1, cache.key_dim + 1) + layer
        keys = mx.repeat(line, cache.heads, axis=1)
        row.write(layer, keys, -keys)
    row.advance(cells.shape[0])


def active() -> int:
    """Returns the bytes of all live arrays after evaluation."""
    mx.synchronize()
    gc.collect()
    return int(mx.get_active_memory())


def same_rows(one: RowCache, other: RowCache) -> bool:
    return one.offset == other.offset and all(
        bool(mx.array_equal(a, b))
        for layer in range(len(one.shape.caches))
        for a, b in zip(
            one.part(layer, 0, one.offset), other.part(layer, 0, other.offset), strict=True
        )
    )


@pytest.mark.parametrize("cut", [1, 255, 256, 257, 511])
def test_snapshot_free_restore_then_split_and_merge(cut: int) -> None:
    """A prefix that was split and then merged again at `cut` gives the same bits to a new row.

    Covers the case 'KV snapshot, free, restore; split then merge' of the reference test suite.
    """
    cache = TreeCache(row_store(), ROOMY)
    prompt, whole = [*range(512)], RowCache(SHAPE)
    write(whole, prompt)
    row, _ = cache.begin(prompt)
    write(row, prompt)
    cache.close(row, prompt)
    side = [*prompt[:cut], 9999, 9998]
    row, cached = cache.begin(side)  # `close` splits the edge at `cut`
    assert cached == cut
    write(row, side)
    cache.close(row, side)
    row, cached = cache.begin([*prompt, 1])
    assert cached == 512 and same_rows(row, whole)
    cache.close(row, prompt)
    assert cache.shrink(1) == 2 * TOKEN  # evicts the other branch and merges the two parts
    assert len(list(cache.tree.walk())) == 1
    row, _ = cache.begin([*prompt, 1])
    assert same_rows(row, whole)


def test_a_later_write_does_not_change_a_kept_prefix() -> None:
    """The row has its own memory, so an append to it does not change the prefix in the cache."""
    cache = TreeCache(row_store(), ROOMY)
    for prompt in ([*range(300)], [*range(200), 7, 7, 7]):
        row, _ = cache.begin(prompt)
        write(row, prompt)
        cache.keep(row, prompt)
        write(row, [*prompt, 5, 6])
        row.trim(10)
        write(row, [*range(10), *range(900, 1200)])
        cache.close(row, [*range(10), *range(900, 1200)])
    expected = RowCache(SHAPE)
    write(expected, [*range(300)])
    row, cached = cache.begin([*range(300), 0])
    assert cached == 300 and same_rows(row, expected)


def test_a_row_from_the_cache_is_allocated_for_its_whole_prompt() -> None:
    cache = TreeCache(row_store(), ROOMY)
    prompt = [*range(700)]
    row, _ = cache.begin(prompt[:256])
    write(row, prompt[:256])
    cache.close(row, prompt[:256])
    row, cached = cache.begin(prompt)
    before = row.nbytes
    write(row, prompt)
    assert (cached, row.nbytes) == (256, before)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_kept_prefix_keeps_no_row_in_memory(kv_heads: int) -> None:
    """Slices of a row are copied: 64 tokens of a row of 4,096 take the memory of 64 tokens."""
    shape = RowShape((KeyValueSpec(kv_heads, 64, 64),) * 2, mx.float32, 4096)
    cache = TreeCache(row_store(shape), ROOMY)
    prompt = [*range(4000)]
    before = active()
    row, _ = cache.begin(prompt)
    write(row, prompt)
    mx.eval(row.arrays())
    row_bytes = row.nbytes
    cache.close(row, prompt[:64])
    del row
    grown = active() - before
    assert cache.nbytes == 64 * 2 * 2 * kv_heads * 64 * 4
    assert cache.nbytes <= grown < 1.05 * cache.nbytes + row_bytes / 100


def test_stored_bytes_are_those_of_unique_tokens() -> None:
    """MLX allocates at most 5 % more than the unique tokens' bytes.

    On CUDA MLX rounds the size of a small array up to a power of two.
    """
    shape = RowShape((KeyValueSpec(2, 64, 64),) * 2, mx.float32, 4096)
    cache = TreeCache(row_store(shape), ROOMY)
    before = active()
    history = [*range(300)]
    for turn in range(6):
        for branch in range(3):
            prompt = [*history, 5000 + branch, *range(branch, branch + 100)]
            row, _ = cache.begin(prompt)
            write(row, prompt)
            cache.close(row, prompt)
            del row
        history += [5000, *range(100 + turn)]
    expected = unique_tokens(cache) * 2 * 2 * 2 * 64 * 4
    assert cache.nbytes == expected
    assert expected <= active() - before <= (1.3 if mx.cuda.is_available() else 1.05) * expected


# ---- a whole model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    settings = config()
    weights = random_weights(settings)
    return load(inspect(write_checkpoint(tmp_path_factory.mktemp("model"), weights=weights)))


def ask(engine: ModelEngine, prompt: tuple[int, ...], steps: int = 12) -> Seq:
    seq = Seq(b"", 1, prompt, Options(temperature=0.0), 11, steps)
    enter(engine, seq, 64)
    decode(engine, [seq], steps)
    engine.release(seq)
    return seq


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_model_gives_the_same_tokens_in_every_mode(loaded: LoadedModel, lookahead: bool) -> None:
    """Three interleaved conversations give the tokens of an engine without a cache."""
    cached = model_engine(loaded, prefix="tree", lookahead=lookahead)
    plain = model_engine(loaded, prefix="off", lookahead=False)
    draw: Callable[[int, int], tuple[int, ...]] = lambda salt, size: tuple(  # noqa: E731
        np.random.default_rng(salt).integers(0, 256, size).tolist()
    )
    system = draw(99, 30)
    histories = [(*system, *draw(salt, 10 + salt)) for salt in range(3)]
    reused = 0
    for turn in range(4):
        for which, history in enumerate(histories):
            seq = ask(cached, history)
            assert seq.ids == ask(plain, history).ids
            assert seq.cached >= (len(system) if turn or which else 0)
            reused += seq.cached
            histories[which] = (*history, *seq.ids, *draw(100 * turn + which, 7))
    assert cached.prefix.tokens == reused
    assert cached.memory().prefix == cached.prefix.nbytes > 0


def test_the_engine_uses_the_configured_mode(loaded: LoadedModel) -> None:
    cached = {}
    for mode in MODES:
        engine = model_engine(loaded, prefix=mode)
        for prompt in ((1, 2, 3, 4), (7, 8, 9), (1, 2, 3, 4)):
            cached[mode] = ask(engine, prompt, 2).cached
    assert cached == {"tree": 3, "single": 0, "off": 0}
    assert model_engine(loaded, prefix_bytes=12345).prefix.budget == 12345
