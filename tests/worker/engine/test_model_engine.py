"""Tests the engine: chunks, look-ahead, batches and cancels change no token."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from support import engine_steps
from support.engine_steps import decode_spans, enter, read_chunk
from support.worker_checkpoints import EOS, config, random_weights, write_checkpoint, write_weights

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed, OutOfMemory  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.attention.in_pool.kv_pool import PagedRow  # noqa: E402
from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout  # noqa: E402
from mlxpool.worker.attention.in_slabs.slab_layout import SlabLayout  # noqa: E402
from mlxpool.worker.attention.in_slabs.slabs import Slab, Slabs  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.engine import devices, pipeline, warm_up  # noqa: E402
from mlxpool.worker.engine.engine import Engine, StepResult  # noqa: E402
from mlxpool.worker.engine.flight import Flight  # noqa: E402
from mlxpool.worker.engine.memory import HEAP_GROWTH  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.engine.opening import Warmed, limits_of  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import blocks_for  # noqa: E402
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence, SequenceFailed  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.scheduling.step_cost import StepTarget  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 0, "temperature": 1.5},
    {"repeat_penalty": 1.5, "frequency_penalty": 0.5, "repeat_last_n": 5},
    {"logprobs": True, "top_logprobs": 3, "min_p": 0.05},
]


GROWING = "slabs"  # a layout that allocates as rows grow; a pool allocates all at once


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(inspect(write_checkpoint(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def text(loaded: LoadedModel) -> ChatTokenizer:
    return ChatTokenizer.from_folder(loaded.folder)


@pytest.fixture
def engine(loaded: LoadedModel, text: ChatTokenizer) -> ModelEngine:
    return model_engine(loaded, text)


def prompt_of(size: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(salt).integers(0, 256, size).tolist())


def sequence(prompt: tuple[int, ...], max_tokens: int = 30, **raw: Any) -> Sequence:
    return Sequence(b"", 1, prompt, Options(**{"temperature": 0.0, **raw}), 11, max_tokens)


def mixture(max_tokens: int = 30) -> list[Sequence]:
    return [
        sequence(prompt_of(5 + 17 * salt, salt), max_tokens, **{"temperature": 0.8, **raw})
        for salt, raw in enumerate(MIXTURE)
    ]


def slabs_of(engine: ModelEngine) -> Slabs:
    layout = engine.inspect().layout
    assert isinstance(layout, SlabLayout)
    return layout.slabs


def prefix_blocks(engine: ModelEngine) -> int:
    return engine.inspect().memory.prefix_blocks()


def decode(engine: ModelEngine, rows: list[Sequence], steps: int = 1) -> list[SampledToken]:
    """Decodes rows that begin together."""
    drawn = engine_steps.decode(engine, rows, steps)
    assert [token.sequence for token in drawn] == rows * steps
    return drawn


def ids_of(engine: ModelEngine, seq: Sequence, steps: int = 30) -> list[int]:
    enter(engine, seq)
    decode(engine, [seq], steps)
    engine.release(seq)
    return seq.ids


def test_model_engine_is_an_engine(
    engine: ModelEngine, loaded: LoadedModel, text: ChatTokenizer
) -> None:
    checked: Engine = engine
    assert (checked.context, checked.vocab_size, checked.limits.lines) == (512, 264, 512)
    assert (checked.eos, checked.piece(104)) == (frozenset({EOS}), b"h")
    assert model_engine(loaded, text, context=100).limits.lines == 100
    assert len(checked.digest) == 64 and checked.digest != loaded.folder.digest


def test_batch_bounds_the_tokens_of_a_pass(loaded: LoadedModel, text: ChatTokenizer) -> None:
    engine = model_engine(loaded, text, layout="slabs", batch=64)
    assert engine.limits.lines == 64
    # The second bound is the context, 512 tokens.
    assert model_engine(loaded, text, layout="slabs", batch=4096).limits.lines == 512
    plain = model_engine(loaded, text, layout="slabs")
    prompt = prompt_of(300)
    assert ids_of(engine, sequence(prompt), 5) == ids_of(plain, sequence(prompt), 5)


@pytest.mark.parametrize("budget", [1, 7, 64, 2048])
def test_the_chunk_size_changes_no_token(
    loaded: LoadedModel, text: ChatTokenizer, budget: int
) -> None:
    prompt = prompt_of(100)
    expected = ids_of(model_engine(loaded, text), sequence(prompt))
    engine, seq = model_engine(loaded, text), sequence(prompt)
    chunks = enter(engine, seq, budget)
    assert (sum(chunks), max(chunks)) == (99, min(budget, 99))
    assert seq.submitted == 99
    decode(engine, [seq], 30)
    assert seq.ids == expected


def test_a_prompt_of_one_token_needs_no_prefill(engine: ModelEngine) -> None:
    seq = sequence((5,))
    assert enter(engine, seq) == []
    decode(engine, [seq], 3)
    assert len(seq.ids) == 3


@pytest.mark.parametrize("lookahead", [False, True])
def test_other_rows_of_a_batch_change_no_token(
    loaded: LoadedModel, text: ChatTokenizer, lookahead: bool
) -> None:
    expected = [ids_of(model_engine(loaded, text, lookahead=False), seq) for seq in mixture()]
    engine, rows = model_engine(loaded, text, lookahead=lookahead), mixture()
    for seq in rows:
        enter(engine, seq)
    decode(engine, rows, 30)
    assert [seq.ids for seq in rows] == expected


def test_lookahead_gives_the_same_log_probabilities(
    loaded: LoadedModel, text: ChatTokenizer
) -> None:
    def logprobs(lookahead: bool) -> list[Any]:
        engine, rows = model_engine(loaded, text, lookahead=lookahead), mixture()[3:]
        for seq in rows:
            enter(engine, seq)
        return [drawn.logprob for drawn in decode(engine, rows, 10)]

    ahead, plain = logprobs(True), logprobs(False)
    assert (
        [logprob is None for logprob in ahead]
        == [logprob is None for logprob in plain]
        == [True, False] * 10
    )
    for entry, other in zip(ahead[1::2], plain[1::2], strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(entry.top) == 3
        assert [token for token, _ in entry.top] == [token for token, _ in other.top]


def staggered(engine: ModelEngine) -> list[list[int]]:
    """Returns the tokens of rows that enter, pause, are preempted and end at different steps."""
    rows = mixture(max_tokens=14)
    running: list[Sequence] = []
    for step in range(40):
        if step % 3 == 0 and step // 3 < len(rows):
            enter(engine, rows[step // 3])
            running.append(rows[step // 3])
        paused = running[1:2] if step % 5 == 4 else []
        unended = [seq for seq in running if seq not in paused and len(seq.ids) < 14]
        engine_steps.decode(engine, unended)
        for seq in [seq for seq in running if len(seq.ids) == 14]:
            engine.release(seq)
            running.remove(seq)
    assert not running
    return [seq.ids for seq in rows]


def test_rows_that_join_and_leave_get_the_right_tokens(
    loaded: LoadedModel, text: ChatTokenizer
) -> None:
    expected = [ids_of(model_engine(loaded, text, lookahead=False), seq, 14) for seq in mixture()]
    for lookahead in (False, True):
        assert staggered(model_engine(loaded, text, lookahead=lookahead)) == expected


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_resume_gives_the_same_tokens(
    loaded: LoadedModel, text: ChatTokenizer, lookahead: bool
) -> None:
    for salt in range(len(MIXTURE)):
        expected = ids_of(model_engine(loaded, text), mixture()[salt])
        engine, seq = model_engine(loaded, text, lookahead=lookahead), mixture()[salt]
        seq.ids += expected[:12]
        enter(engine, seq)
        decode(engine, [seq], 18)
        assert seq.ids == expected


@pytest.mark.parametrize("lookahead", [False, True])
def test_the_computed_part_of_a_cancelled_prefill_is_kept(
    loaded: LoadedModel, text: ChatTokenizer, lookahead: bool
) -> None:
    expected = ids_of(model_engine(loaded, text), sequence(prompt_of(47)))
    engine, cancelled = model_engine(loaded, text, lookahead=lookahead), sequence(prompt_of(47))
    engine.admit(cancelled)
    read_chunk(engine, cancelled, 18)
    engine.release(cancelled)
    again = sequence(prompt_of(47))
    assert ids_of(engine, again) == expected
    assert again.cached == 18


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_cancelled_completion_is_a_prefix_for_the_next_turn(
    loaded: LoadedModel, text: ChatTokenizer, lookahead: bool
) -> None:
    engine, seq = model_engine(loaded, text, lookahead=lookahead), sequence(prompt_of(20))
    enter(engine, seq)
    decode(engine, [seq], 10)
    engine.release(seq)
    turn = (*prompt_of(20), *seq.ids, 1, 2, 3)
    follow_up = sequence(turn)
    ids = ids_of(engine, follow_up)
    # With lookahead the last token is the input of a pass in flight.
    assert follow_up.cached == (30 if lookahead else 29)
    assert ids == ids_of(model_engine(loaded, text, prefix="off"), sequence(turn))


@pytest.mark.parametrize("lookahead", [False, True])
def test_an_end_of_sequence_that_is_not_appended(
    loaded: LoadedModel, text: ChatTokenizer, lookahead: bool
) -> None:
    """The host drops the sampled end token.

    With look-ahead the token is already the input of a pass in flight.
    """
    engine, seq = model_engine(loaded, text, lookahead=lookahead), sequence(prompt_of(20))
    enter(engine, seq)
    decode(engine, [seq], 5)
    while engine.in_flight <= lookahead:
        engine.submit(decode_spans([seq]))
    engine.collect()  # as if this was the end-of-sequence token
    engine.release(seq)
    while engine.in_flight:
        assert engine.collect() == StepResult([], [])
    follow_up = sequence((*prompt_of(20), *seq.ids, 9, 9))
    ids = ids_of(engine, follow_up)
    assert follow_up.cached == 25
    assert ids == ids_of(model_engine(loaded, text), sequence(follow_up.prompt))


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_context_of_16(loaded: LoadedModel, text: ChatTokenizer, lookahead: bool) -> None:
    engine = model_engine(loaded, text, context=16, lookahead=lookahead)
    seq = sequence(prompt_of(10), max_tokens=6)
    assert enter(engine, seq) == [9]
    decode(engine, [seq], 6)
    assert seq.length == 16
    assert seq.ids == ids_of(model_engine(loaded, text), sequence(prompt_of(10)), 6)
    full = sequence(prompt_of(15), max_tokens=1)
    enter(engine, full)
    decode(engine, [full])


def test_release_works_in_every_phase(engine: ModelEngine) -> None:
    waiting, admitted = sequence((1, 2)), sequence((1, 2, 3))
    engine.release(waiting)
    engine.admit(admitted)
    engine.release(admitted)
    engine.release(admitted)
    assert engine.memory().kv == 0


@pytest.mark.parametrize("layout", ["slabs", "pool"])
def test_memory_counts_all_that_is_allocated_for_rows_and_prefixes(
    loaded: LoadedModel, text: ChatTokenizer, layout: str
) -> None:
    engine = model_engine(loaded, text, layout=layout, blocks=20)
    first, second = sequence(prompt_of(300)), sequence(prompt_of(300))
    enter(engine, first)
    engine.release(first)
    enter(engine, second)  # in a pool the row shares blocks with the prefix
    used, kept = engine.memory(), engine.inspect().layout
    assert used.kv_free > 0 and used.prefix > 0
    if isinstance(kept, SlabLayout):
        assert used.kv > 0 and used.kv + used.kv_free == kept.slabs.nbytes
    else:
        assert isinstance(kept, PagedLayout)
        assert used.kv + used.kv_free + used.prefix == kept.pool.nbytes
    engine.release(second)
    assert engine.memory().kv == 0
    engine.close()


def test_the_peak_of_the_memory_begins_with_each_reading(
    loaded: LoadedModel, text: ChatTokenizer
) -> None:
    engine = model_engine(loaded, text, layout="slabs", blocks=200)
    engine.memory()
    enter(engine, sequence(prompt_of(300)))
    used = engine.memory()
    assert used.peak > used.active
    resting = engine.memory()
    assert resting.peak == resting.active
    engine.close()


def test_memory_counts_rows_and_prefixes_apart(loaded: LoadedModel, text: ChatTokenizer) -> None:
    engine = model_engine(loaded, text, layout="slabs", blocks=200)
    seq = sequence(prompt_of(300))
    enter(engine, seq)
    token = 2 * 2 * 8 * 4 * 2  # layers, heads, size, bytes, keys and values
    used = engine.memory()
    assert (used.weights, used.kv, used.prefix) == (loaded.weight_bytes, 512 * token, 0)
    assert used.active >= used.weights
    assert used.limit > used.active and used.device_free > 0
    engine.release(seq)
    kept = 299 * token  # the last token of the prompt was never computed
    assert (engine.memory().kv, engine.memory().prefix) == (0, kept)
    assert prefix_blocks(engine) == engine.inspect().memory.shrink(1) == 2
    assert engine.memory().prefix == prefix_blocks(engine) == 0
    engine.close()


def transient(engine: ModelEngine, seq: Sequence) -> int:
    """Returns the bytes that a decode step takes at its peak, beyond the bytes in use before it."""
    decode(engine, [seq], 2)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    decode(engine, [seq])
    return int(mx.get_peak_memory() - before)


def test_no_step_copies_the_cache(loaded: LoadedModel, text: ChatTokenizer) -> None:
    """The activation memory of a decode step does not grow with the allocated cache."""
    needs, sizes = [], []
    for blocks in (4, 256):
        engine = model_engine(loaded, text, lookahead=False, layout="slabs")
        slabs = slabs_of(engine)
        slabs._blocks = blocks
        seq = sequence(prompt_of(10), max_tokens=60)
        enter(engine, seq)
        needs.append(transient(engine, seq))
        sizes.append(slabs.nbytes)
    assert sizes[1] == 64 * sizes[0]
    assert needs[1] <= needs[0] + sizes[1] / 16  # a copy of one layer's keys would be an eighth


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("layout", ["rows", "slabs", "pool"])
def test_a_preempted_sequence_gets_the_same_tokens(
    loaded: LoadedModel, text: ChatTokenizer, layout: str, lookahead: bool
) -> None:
    """With look-ahead the released row still has a token in flight."""
    for prefix in ("tree", "off"):
        for salt in range(len(MIXTURE)):
            expected = ids_of(model_engine(loaded, text), mixture()[salt])
            engine = model_engine(
                loaded, text, prefix=prefix, lookahead=lookahead, layout=layout, blocks=200
            )
            seq = mixture()[salt]
            enter(engine, seq)
            cached = seq.cached
            for steps in (1, 11):
                decode(engine, [seq], steps)
                engine.release(seq)
                seq.preempt()
                enter(engine, seq)
                assert (engine.prefix.hits > 0) == (prefix == "tree")
            decode(engine, [seq], 18)
            assert (seq.ids, seq.cached) == (expected, cached)


def test_capacity_is_what_the_limit_leaves(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The memory that other tests leave in the heap varies.
    monkeypatch.setattr(device, "non_mlx_bytes", lambda: 0)
    block = 256 * 2 * 2 * 8 * 4 * 2
    small, large = (
        model_engine(loaded, text, limit=size * 2**30, layout=GROWING) for size in (2, 4)
    )
    for engine in (small, large):
        engine.warm_up()
    left = 2 * 2**30 * 15 / 16  # a sixteenth is for freed buffers
    assert large.blocks.capacity - small.blocks.capacity == pytest.approx(left / block, rel=0.01)
    assert 0 < small.blocks.capacity < 2 * 2**30 // block
    with pytest.raises(ModelLoadFailed, match=r"limit is 1000 bytes.*leaves 0 blocks of 256"):
        model_engine(loaded, text, limit=1000, layout=GROWING).warm_up()
    assert model_engine(loaded, text, blocks=7).blocks.capacity == 7


@pytest.mark.parametrize(
    ("seconds", "mebibytes", "prefill"),
    [(0.019, 10, 2048), (0.021, 10, 0), (0.019, 110, 0), (0.019, 300, 0)],
)
def test_passes_of_a_small_model_in_which_nothing_decodes_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, mebibytes: int, prefill: int
) -> None:
    """A pass that only reads prompts may be longer if its time and memory permit.

    `seconds`: the time of a pass of the usual length; a longer pass takes twice as long, and new
    requests must not wait for more than 40 ms. `mebibytes`: the memory of a usual pass; a longer
    pass needs twice as much, out of 256 MiB, and must leave most of the blocks. `prefill`: the
    expected longest pass in tokens; 0: the usual length.
    """
    long_flags: list[bool] = []

    def new_layout(
        name: str, shape: RowShape, model: Any, blocks: int, *, long_passes: bool, **settings: Any
    ) -> PagedLayout:
        long_flags.append(long_passes)
        return ShortContexts(shape, model, blocks, long=long_passes)

    class ShortContexts(PagedLayout):
        """A pool layout on the CPU that claims to compile passes of the sizes `sizes_compiled`."""

        def __init__(self, shape: RowShape, model: Any, blocks: int, *, long: bool) -> None:
            super().__init__(shape, model, blocks, rows=4, deterministic=False, in_place=False)
            self.sizes_compiled = (64, 2048 if long else 1024)

        @property
        def sizes(self) -> tuple[int, ...]:
            return self.sizes_compiled

    monkeypatch.setattr(devices, "make_layout", new_layout)
    monkeypatch.setattr(warm_up, "chunk_seconds", lambda engine, size: seconds)
    # Leaves out the memory of other tests in this process.
    monkeypatch.setattr(device, "non_mlx_bytes", lambda: 0)
    monkeypatch.setattr(StepTarget, "of_device", lambda **_: StepTarget(0.008, 0.040))
    loaded = load(inspect(write_checkpoint(tmp_path, max_position_embeddings=4096)))
    engine = model_engine(loaded, layout="pool", batch=2048, max_sequences=4, limit=2**28)
    assert (engine.limits.lines, engine.limits.prefill_lines) == (1024, 0)
    measured = (256, mebibytes * 2**18), (1024, mebibytes * 2**20)
    long = warm_up.choose_long_passes(engine, *measured)
    limits = limits_of(engine.parts, Warmed(0.04, long))
    assert (limits.lines, limits.prefill_lines) == (1024, prefill)
    assert limits.of_prefill.pairs == (2 if prefill else 1) * limits.pairs
    assert long_flags == ([False, True] if prefill else [False])
    engine.close()


@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_passes_that_are_longer_than_a_small_pool_are_not_computed_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """In the warm-up no pass has more tokens than the pool.

    All sizes are tried that leave at least one block free.
    """
    sizes, lines = (1, 2, 4, 255, 256, 512, 1024), set[int]()
    monkeypatch.setattr(PagedLayout, "sizes", property(lambda _: sizes))
    loaded = load(inspect(write_checkpoint(tmp_path, max_position_embeddings=4096)))
    engine = model_engine(loaded, layout="pool", batch=1024, max_sequences=4, blocks=blocks)
    engine.expect_drafts(2)
    step = PagedLayout.step

    def noting(self: PagedLayout, spans: Any, *given: Any) -> Any:
        lines.add(sum(span.count for span in spans))
        return step(self, spans, *given)

    monkeypatch.setattr(PagedLayout, "step", noting)
    engine.warm_up()
    assert {size for size in sizes if size <= (blocks - 1) * 256} <= lines
    assert max(lines) <= blocks * 256
    engine.close()


def test_a_pool_leaves_the_activation_memory_of_a_step(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool is allocated at once, and again when the activation memory is known."""
    monkeypatch.setattr(device, "non_mlx_bytes", lambda: 0)
    limit = 2**26
    engine = model_engine(
        loaded, text, layout="pool", max_sequences=2, prefix_bytes=2**30, limit=limit
    )
    before = engine.inspect().layout.blocks
    outside = mx.get_active_memory() - before * engine.inspect().budget.block
    engine.warm_up()
    assert isinstance(engine.inspect().layout, PagedLayout)
    now = mx.get_active_memory() - outside
    assert now == pytest.approx(
        engine.inspect().layout.pool.nbytes, rel=0.05
    )  # the first pool was freed
    assert engine.blocks.capacity == engine.inspect().layout.blocks < before
    taken = loaded.weight_bytes + engine.inspect().layout.pool.nbytes + engine.inspect().budget.step
    assert limit * 0.9 < taken <= limit
    assert engine.memory().prefix == engine.memory().kv == 0


def test_memory_outside_mlx_reduces_the_capacity(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, freed = 2**26, 2**25

    def trim() -> None:
        nonlocal freed
        freed = 0

    monkeypatch.setattr(device, "non_mlx_bytes", lambda: live + freed)
    monkeypatch.setattr(device, "trim_heap", trim)
    engine = model_engine(loaded, text, limit=2**30, layout=GROWING)
    engine.warm_up()
    blocks = engine.blocks.capacity
    free = (
        2**30 * 15 // 16
        - loaded.weight_bytes
        - engine.inspect().budget.step
        - engine.inspect().layout.spare
    )
    assert (
        blocks == (free - live - HEAP_GROWTH) // engine.inspect().budget.block
    )  # freed memory does not count
    live, freed = live + HEAP_GROWTH, HEAP_GROWTH
    engine.memory()
    assert (engine.blocks.capacity, freed) == (blocks, 0)
    live += 10 * engine.inspect().budget.block
    engine.memory()
    assert engine.blocks.capacity == blocks - 10
    live -= HEAP_GROWTH
    engine.memory()
    assert engine.blocks.capacity == blocks


def test_what_is_reserved_for_other_processes_is_part_of_the_limit(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "non_mlx_bytes", lambda: 0)
    engine = model_engine(loaded, text, limit=2**30, layout=GROWING)
    for salt in range(3):
        ids_of(engine, sequence(prompt_of(300, salt)), 3)
    blocks = engine.blocks.capacity
    whole = blocks_for(engine.context)
    engine.reserve((blocks - whole - 3) * engine.inspect().budget.block)
    assert engine.blocks.capacity == whole + 3 and prefix_blocks(engine) == 4
    engine.reserve((blocks - whole + 1) * engine.inspect().budget.block)
    assert engine.blocks.capacity == whole, "one sequence may have them"
    assert prefix_blocks(engine) < whole, "prefixes leave them to the processes"
    engine.reserve(2**31)
    assert engine.blocks.capacity == whole and prefix_blocks(engine) == 0
    engine.reserve(0)
    assert engine.blocks.capacity == blocks
    monkeypatch.setattr(device, "has_own_memory", lambda: True)
    engine.reserve(2**31)
    assert engine.blocks.capacity == blocks


def test_prefixes_then_images_make_room(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "non_mlx_bytes", lambda: 0)
    engine = model_engine(loaded, text, limit=2**30, layout=GROWING)
    for salt in range(3):
        ids_of(engine, sequence(prompt_of(300, salt)), 3)
    engine.encoded.put(b"a", np.zeros(1000, np.uint8))
    mx.clear_cache()
    before = engine.memory().prefix
    engine.make_room(1)
    assert 0 < engine.memory().prefix < before and b"a" in engine.encoded
    engine.make_room(2**30)
    assert engine.memory().prefix == 0 and b"a" not in engine.encoded


@pytest.mark.parametrize(("on_gpu", "trims"), [(False, 3), (True, 0)])
def test_the_heap_is_trimmed_at_intervals_on_a_cpu(
    engine: ModelEngine, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, trims: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(pipeline, "CLEAR_INTERVAL", 3)
    monkeypatch.setattr(device, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(device, "trim_heap", lambda: calls.append(None))
    seq = sequence(prompt_of(10))
    enter(engine, seq)
    decode(engine, [seq], 8)
    assert len(calls) == trims
    engine.release(seq)


def test_a_capacity_that_shrinks_evicts_cached_prefixes(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = 0
    monkeypatch.setattr(device, "non_mlx_bytes", lambda: outside)
    engine = model_engine(loaded, text, limit=2**30, layout=GROWING)
    for salt in range(3):
        ids_of(engine, sequence(prompt_of(300, salt)), 3)
    assert prefix_blocks(engine) == 4
    outside = (engine.blocks.capacity - 2) * engine.inspect().budget.block
    engine.memory()
    assert engine.blocks.capacity == 2 and 0 < prefix_blocks(engine) <= 2


def test_a_limit_that_is_too_small_is_refused_with_all_parts(
    loaded: LoadedModel, text: ChatTokenizer
) -> None:
    engine = model_engine(loaded, text, limit=1000, layout="slabs")
    with pytest.raises(ModelLoadFailed) as caught:
        engine.warm_up()
    limit, *parts, blocks = (
        int(number)
        for number in re.findall(r" (\d+)(?= bytes;|,| besides| blocks)", str(caught.value))
    )
    assert (limit, len(parts), blocks) == (1000, 5, 0)
    assert parts[-1] == engine.inspect().layout.spare > 0


def test_the_prefix_cache_uses_only_what_rows_leave(
    loaded: LoadedModel, text: ChatTokenizer
) -> None:
    engine = model_engine(loaded, text, blocks=18, layout="slabs")
    slabs = slabs_of(engine)
    for salt in range(30):
        ids_of(engine, sequence(prompt_of(300, salt)), 3)
        used = slabs.nbytes + engine.memory().prefix
        assert used <= 18 * engine.inspect().budget.block
    assert prefix_blocks(engine) > 0


def test_the_prefix_of_a_running_row_is_evicted_last(
    loaded: LoadedModel, text: ChatTokenizer
) -> None:
    engine = model_engine(loaded, text)
    ids_of(engine, sequence(prompt_of(300)), 3)
    expected = ids_of(model_engine(loaded, text), sequence(prompt_of(300)))
    row = sequence(prompt_of(300))
    enter(engine, row)
    assert row.cached == 299
    assert engine.inspect().memory.shrink(2) == 0
    assert engine.inspect().memory.shrink(2, in_use=True) == 2
    decode(engine, [row], 30)
    engine.release(row)
    assert row.ids == expected and engine.memory().prefix > 0


def test_the_prefix_cache_gets_blocks_when_there_are_few(
    loaded: LoadedModel, text: ChatTokenizer
) -> None:
    engine = model_engine(loaded, text, blocks=4)  # fewer blocks than a slab has
    first, beside = sequence(prompt_of(300)), sequence(prompt_of(10))
    enter(engine, beside)
    ids_of(engine, first, 3)
    assert (
        prefix_blocks(engine) == 2
        and engine.inspect().memory.bytes_left() == 3 * engine.inspect().budget.block
    )


def test_warm_up_leaves_nothing_behind(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes of a warm-up allocate at most four slabs; no keys, values or prefixes are left."""
    empty, allocated = Slab.empty, list[int]()

    def counted(shape: RowShape, blocks: int) -> Slab:
        allocated[-1] += 1
        return empty(shape, blocks)

    monkeypatch.setattr(device, "on_gpu", lambda: False)
    monkeypatch.setattr(Slab, "empty", counted)
    for context in (4, 16, None):
        engine = model_engine(loaded, text, context=context, layout="slabs")
        moves: list[int] = []
        allocated.append(0)
        engine.warm_up(lambda moves=moves: moves.append(1))  # type: ignore[misc]
        # One move for chunks, and two moves for each of four steps: a step with every option, and
        # steps of one, two and eight rows.
        assert len(moves) == 1 + 2 * (1 + 3)
        assert allocated[-1] <= 4
        assert (engine.memory().kv, engine.memory().prefix) == (0, 0)
        assert slabs_of(engine).nbytes == 0
        assert engine.prefix.hits + engine.prefix.misses == 0


def test_the_time_of_a_step_is_chosen_once(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target time of a step is measured from decode steps, within bounds, or is a setting."""
    assert model_engine(loaded, text, step_target=0.033).limits.seconds == 0.033
    monkeypatch.setattr(StepTarget, "of_device", lambda **_: StepTarget(1e-9, 1e9))
    for lookahead in (False, True):
        engine = model_engine(loaded, text, lookahead=lookahead)
        engine.warm_up()
        chosen = engine.limits.seconds
        assert 1e-9 < chosen < 1e9
        ids_of(engine, sequence((1, 2, 3)), 5)
        assert engine.limits.seconds == chosen


def test_damaged_weights_are_an_error(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    weights = random_weights(config())
    weights["model.norm.weight"][0] = np.nan
    write_weights(path, weights)
    engine, seq = model_engine(load(inspect(path))), sequence((1, 2))
    enter(engine, seq)
    with pytest.raises(SequenceFailed, match="after 2 tokens are no numbers"):
        decode(engine, [seq])


def test_a_failed_step_leaves_nothing_behind(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, hit, beside = (
        model_engine(loaded, text, layout="slabs"),
        sequence(prompt_of(20)),
        sequence(prompt_of(90)),
    )
    enter(engine, hit)
    decode(engine, [hit], 3)
    engine.admit(beside)
    read_chunk(engine, beside, 50)

    def fails(*arrays: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="malloc"):
        patch.setattr(mx, "eval", fails)
        decode(engine, [hit])
    assert engine.lost(hit) and engine.lost(beside)
    engine.release(hit)
    engine.release(beside)
    assert engine.memory().prefix == engine.memory().kv == 0
    again = sequence(prompt_of(20))
    assert ids_of(engine, again) == ids_of(model_engine(loaded, text), sequence(prompt_of(20)))


def test_with_separate_rows_a_failed_step_damages_its_own_rows_only(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model_engine(loaded, text, layout="rows", lookahead=False)
    hit, beside = sequence(prompt_of(20)), sequence(prompt_of(90))
    for seq in (hit, beside):
        enter(engine, seq)
        decode(engine, [seq], 3)

    def fails(*arrays: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="malloc"):
        patch.setattr(mx, "eval", fails)
        decode(engine, [hit])
    assert engine.lost(hit) and not engine.lost(beside)
    decode(engine, [beside], 27)
    assert beside.ids == ids_of(model_engine(loaded, text), sequence(prompt_of(90)))


@pytest.mark.parametrize(
    ("error", "waits"), [(OutOfMemory("no block is left"), 1), (RuntimeError("no device"), 0)]
)
def test_a_pass_without_blocks_waits_for_those_that_it_discards(
    loaded: LoadedModel,
    text: ChatTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    waits: int,
) -> None:
    """The new pass writes into memory that the discarded passes still read, so it waits for them.

    If the device is lost, it does not wait: discarded passes never end.
    """
    engine = model_engine(loaded, text, layout="pool", lookahead=True)
    seq, waited = sequence(prompt_of(20)), list[Flight]()
    enter(engine, seq)
    engine.submit([Span(seq, seq.submitted, 1, draws=1)])

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Flight, "wait", lambda flight: waited.append(flight))
    monkeypatch.setattr(engine.inspect().layout, "step", fails)
    with pytest.raises(type(error)):
        engine.submit([Span(seq, seq.submitted, 1, draws=1)])
    assert (len(waited), engine.in_flight, engine.lost(seq)) == (waits, 0, True)


def test_a_row_refuses_more_than_its_capacity() -> None:
    row = RowCache(RowShape((KeyValueSpec(1, 2, 2),), mx.float32, 10))
    keys: Callable[[int], Any] = lambda count: mx.zeros((1, 1, count, 2))  # noqa: E731
    row.write(0, keys(10), keys(10))
    row.advance(10)
    assert (row.nbytes, row.offset) == (10 * 2 * 4 * 2, 10)
    with pytest.raises(ValueError, match="11 tokens do not fit into a row of 10"):
        row.write(0, keys(1), keys(1))
    row.trim(4)
    row.trim(7)
    assert row.offset == 4


def test_blocks_that_streams_share_count_once(loaded: LoadedModel, text: ChatTokenizer) -> None:
    engine = model_engine(loaded, text, blocks=100, layout="pool", max_sequences=16)
    shared = prompt_of(256)
    ids_of(engine, sequence(shared), 3)
    rows = [sequence((*shared, *prompt_of(20, salt))) for salt in range(1, 17)]
    for row in rows:
        enter(engine, row)
        engine.blocks.give(row, 2)
    held = {block for row in rows for block in cast(PagedRow, engine.inspect().rows[row]).table}
    assert len(held) == 16 + 1  # the block after the shared block is each stream's own
    assert (
        100 - engine.blocks.available == len(held) + 1
    )  # the tree has a block with the end of the first stream
    for row in rows:
        engine.release(row)
