"""Tests that drafts of a head without a cache depend only on the newest state of a row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from support.engine_steps import decode, decode_spans, drain, enter, step
from support.predicting_models import TOKENS, sequence, write_predicting

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.layout_choice import make_layout  # noqa: E402
from mlxpool.worker.attention.prediction_heads.head_drafts import (  # noqa: E402
    HOST_ROWS,
    MAX_FAILURES,
    StateDrafts,
)
from mlxpool.worker.attention.prediction_heads.host_head import HostHead  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.decode_pass import choice  # noqa: E402
from mlxpool.worker.engine import devices  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.kernels.compiled_passes import CompiledPasses  # noqa: E402
from mlxpool.worker.layers import builder, dense_weights  # noqa: E402
from mlxpool.worker.layers.model_plan import PredictingModel  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from mlxpool.worker.weights.locate import DEMO_FOLDER  # noqa: E402
from support import simt  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

SIZES_OF_KERNELS = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "vocab_size": 288,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = write_predicting(tmp_path_factory.mktemp("model"), "llama")
    return load(inspect(path, predicts=True))


def engine_of(loaded: LoadedModel, layout: str = "slabs", **settings: Any) -> ModelEngine:
    return model_engine(loaded, layout=layout, **{"prefix": "off", "lookahead": False, **settings})


def head_of(engine: ModelEngine) -> StateDrafts:
    assert isinstance(engine.predictor, StateDrafts)
    return engine.predictor


def wanted(loaded: LoadedModel, seq: Sequence, count: int) -> tuple[int, ...]:
    """Returns the expected drafts.

    Computes the state of the whole sequence anew, and the drafts from this state.
    """
    shape = RowShape(loaded.folder.plan.caches, loaded.dtype, 512, 512)
    model = cast(PredictingModel, loaded.model)
    batch = RowBatch([RowSpan(RowCache(shape), seq.length - 1)], None)
    states = model.hidden_states(mx.array(seq.tokens[:-1]), batch)[-1:]
    given, drafts = mx.array(seq.tokens[-1:]), []
    for _ in range(count):
        states = model.prediction(given, states, None)
        given = mx.argmax(model.prediction.logits_of(states), axis=-1)
        drafts.append(int(given.item()))
    return tuple(drafts)


@pytest.mark.parametrize("layout", ["rows", "slabs"])
def test_drafts_are_those_of_the_newest_state(loaded: LoadedModel, layout: str) -> None:
    """Prompts are read in chunks, beside others; right and wrong drafts and plain steps follow."""
    draw = random.Random(layout)
    engine = engine_of(loaded, layout)
    head = head_of(engine)
    rows = [sequence(number, size) for number, size in enumerate((2, 33, 70))]
    for seq in rows:
        enter(engine, seq, 40)
    late = sequence(9, 90)
    engine.admit(late)
    for number in range(12):
        depths = {seq: draw.randint(0, 3) for seq in rows}
        assert not number or all(map(head.ready, rows))
        proposals = head.drafts(depths)
        spans = []
        for seq in rows:
            drafts = proposals.get(seq, ())
            if number:
                assert drafts == wanted(loaded, seq, depths[seq])
            following = drafts if draw.random() < 0.6 else (draw.randrange(256),) * len(drafts)
            spans.append(Span.check(seq, following) if following else decode_spans([seq])[0])
        if late.submitted < 80:
            spans.insert(draw.randrange(len(spans)), Span(late, late.submitted, 20, 0))
        for drawn in step(engine, spans):
            drawn.sequence.ids.append(drawn.token)
        assert not head.ready(late)
    for seq in (*rows, late):
        engine.release(seq)
    assert head.nbytes == 0 and engine.memory().kv == 0


def test_one_row_checks_in_compiled_passes(loaded: LoadedModel) -> None:
    """The growing row's drafts are as expected, and its tokens are the same as in plain steps."""
    engine, plain = engine_of(loaded), engine_of(loaded, "rows")
    head, seq, other = head_of(engine), sequence(4, 230), sequence(4, 230)
    enter(engine, seq)
    enter(plain, other)
    decode(plain, [other], TOKENS)
    decode(engine, [seq], 1)
    while len(seq.ids) < TOKENS - 4:
        drafts = head.drafts({seq: 3})[seq]
        assert drafts == wanted(loaded, seq, 3)
        seq.ids += [drawn.token for drawn in step(engine, [Span.check(seq, drafts)])]
    assert seq.ids == other.ids[: len(seq.ids)]


def test_a_chain_of_drafts_is_told_before_it_is_compiled(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seq, seen = engine_of(loaded), sequence(6, 30), list[str]()
    head, compile = head_of(engine), mx.compile
    enter(engine, seq)
    decode(engine, [seq], 1)
    engine.report_compiles(lambda: seen.append("told"))

    def compiled(function: Any) -> Any:
        seen.append("compiled")
        return compile(function)

    monkeypatch.setattr(mx, "compile", compiled)
    for depth in (2, 3, 2):
        head.drafts({seq: depth})
    assert seen == ["told", "compiled"] * 2
    engine.release(seq)


@pytest.mark.parametrize("count", [1, 5, 6])
def test_on_a_gpu_all_chains_are_compiled_at_load(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """At load, passes that make drafts are compiled for each number of rows, at the full depth."""
    monkeypatch.setattr(HostHead, "of", lambda head: None)
    engine = engine_of(loaded, max_sequences=6)
    head, rows = head_of(engine), [sequence(number, 20 + number) for number in range(count)]
    for seq in rows:
        enter(engine, seq)
        decode(engine, [seq], 1)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    assert head.ready(rows[0])
    head.compile_ahead(rows[0], 6, 3)
    seen: list[str] = []
    head.notice.tell = lambda: seen.append("told")
    for depths in ({seq: 1 + n % 3 for n, seq in enumerate(rows)}, {rows[-1]: 1}):
        drafts = head.drafts(depths)
        for seq, depth in depths.items():
            assert drafts[seq] == wanted(loaded, seq, depth)
    assert not seen


def test_a_chain_whose_evaluation_failed_is_told_again(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seq, reports = engine_of(loaded), sequence(6, 30), list[str]()
    head, call = head_of(engine), CompiledPasses.__call__
    enter(engine, seq)
    decode(engine, [seq], 1)
    head.notice.tell = lambda: reports.append("told")
    with monkeypatch.context() as patch:  # the head fails: a string has no `tolist`
        patch.setattr(CompiledPasses, "__call__", lambda *given: str(call(*given)))
        assert head.drafts({seq: 2}) == {}
    decode(engine, [seq], 1)  # the states of the head were dropped
    assert [len(head.drafts({seq: 2})[seq]) for _ in range(2)] == [2, 2]
    assert reports == ["told", "told"]
    engine.release(seq)


def test_a_sequence_whose_state_is_not_known_has_no_drafts(loaded: LoadedModel) -> None:
    """The newest state is missing before the first pass, and after forced tokens are appended."""
    engine = engine_of(loaded)
    head, seq = head_of(engine), sequence(5, 9)
    enter(engine, seq)
    assert not head.ready(seq) and head.drafts({seq: 2}) == {}
    decode(engine, [seq], 1)
    assert head.ready(seq)
    seq.ids.append(3)
    assert not head.ready(seq) and head.drafts({seq: 2}) == {}
    step(engine, [Span(seq, seq.submitted, 1, 0)])
    decode(engine, [seq], 1)
    assert head.drafts({seq: 2})[seq] == wanted(loaded, seq, 2)


def test_a_failed_pass_costs_drafts_and_nothing_else(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some failed passes the head gives no more drafts."""
    engine = engine_of(loaded)
    head, seq = head_of(engine), sequence(6)
    enter(engine, seq)
    decode(engine, [seq], 2)

    def fails(*_: Any) -> None:
        raise RuntimeError("the device has no memory left")

    for failures in range(1, MAX_FAILURES + 1):
        with monkeypatch.context() as patch:
            patch.setattr(CompiledPasses, "__call__", fails)
            assert head.drafts({seq: 2}) == {} and head.nbytes == 0
        decode(engine, [seq], 1)
        assert head.ready(seq) == (failures < MAX_FAILURES)
    assert len(seq.ids) == 2 + MAX_FAILURES


def test_the_states_of_the_newest_pass_are_counted(loaded: LoadedModel) -> None:
    """The head keeps one state for each row, and one more for each draft that the row checks."""
    engine = engine_of(loaded, max_sequences=3, limit=2**32)
    head, width = head_of(engine), loaded.folder.plan.shapes["model.norm.weight"][0]
    state = width * loaded.dtype.size
    before = engine.inspect().budget.spare
    assert before == engine.inspect().layout.spare + 3 * state
    engine.expect_drafts(8)
    counted = engine.inspect().budget.spare - engine.inspect().layout.spare
    assert counted == (3 + 8) * state
    rows = [sequence(number, 5) for number in range(3)]
    for seq in rows:
        enter(engine, seq)
    decode(engine, rows, 1)
    assert head.nbytes == 3 * state
    for drafts in ((2, 3, 3), (1, 0, 7), (2, 3, 3)):
        spans = [
            Span.check(seq, (1,) * count) if count else decode_spans([seq])[0]
            for seq, count in zip(rows, drafts, strict=True)
        ]
        for drawn in step(engine, spans):
            drawn.sequence.ids.append(drawn.token)
        assert head.nbytes == counted


@pytest.mark.parametrize("context", [4, 512])
def test_the_warm_up_has_the_head_draft(loaded: LoadedModel, context: int) -> None:
    """The warm-up leaves no rows, and works with the smallest context."""
    engine = engine_of(loaded, context=context, blocks=8, max_sequences=2)
    engine.expect_drafts(16)
    engine.warm_up(lambda: None)
    head = head_of(engine)
    assert head.nbytes == 0
    compiled = {(rows, depth) in head.chain for rows in (1, 2) for depth in (1, 2, 3, 4)}
    assert compiled == {True}
    assert engine.kv_use()[1] == 0


@pytest.fixture(params=["many kernels", "one kernel"])
def pooled(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ModelEngine]:
    """Yields an engine with passes of our kernels over a pool, simulated without a GPU.

    A pass that only decodes or checks drafts is computed by many kernels, or by one.
    """
    path = write_predicting(tmp_path, "llama", right=True, **SIZES_OF_KERNELS)
    with ExitStack() as stack:
        if not mx.cuda.is_available():
            stack.enter_context(simt.simulated())
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(devices, "make_layout", _as_on_a_gpu)
            if request.param == "one kernel":
                for module in (builder, dense_weights):
                    patch.setattr(module, "on_gpu", lambda: True)
                patch.setattr(choice, "MIN_MULTIPROCESSORS", 2)
                patch.setattr(device, "multiprocessors", lambda: 2)
        loaded = load(inspect(path, predicts=True), dtype=mx.bfloat16)
        engine = engine_of(loaded, "pool", lookahead=True, max_sequences=4, blocks=12)
        assert engine.inspect().layout.sizes, "there are no compiled passes"
        if not mx.cuda.is_available():
            assert bool(engine.inspect().layout.follow_lines) == (request.param == "one kernel")
        yield engine
        engine.close()


def _as_on_a_gpu(*args: Any, on_gpu: bool, **others: Any) -> Any:
    return make_layout(*args, on_gpu=True, **others)


def test_passes_over_blocks_of_a_pool_give_the_newest_states(pooled: ModelEngine) -> None:
    """Drafts are mostly right, also while a pass is in flight, and the tokens do not change."""
    head, plain = head_of(pooled), [sequence(number, 30 + number) for number in range(2)]
    for seq in plain:
        enter(pooled, seq)
    decode(pooled, plain, 14)
    drain(pooled)
    for seq in plain:
        pooled.release(seq)
    assert head.nbytes == 0
    rows = [sequence(number, 30 + number) for number in range(2)]
    for seq in rows:
        enter(pooled, seq)
    decode(pooled, rows, 2)
    assert pooled.in_flight and all(seq.awaited for seq in rows) and all(map(head.ready, rows))
    drain(pooled)
    checked = right = 0
    while min(len(seq.ids) for seq in rows) < 14:
        drafts = head.drafts({seq: 2 for seq in rows if len(seq.ids) < 14})
        assert {len(some) for some in drafts.values()} == {2}
        before = {seq: len(seq.ids) for seq in drafts}
        for drawn in step(pooled, [Span.check(seq, some) for seq, some in drafts.items()]):
            drawn.sequence.ids.append(drawn.token)
        checked += len(drafts)
        right += sum(len(seq.ids) - count > 1 for seq, count in before.items())
    assert right > 0.7 * checked
    same = [row.ids[:14] == other.ids[:14] for row, other in zip(rows, plain, strict=True)]
    assert any(same)  # a tie in 16 bits may go the other way


def test_the_host_drafts_as_mlx_does_for_the_demo() -> None:
    """NumPy drafts for few rows, compiled passes for more; both give the same drafts."""
    folder = inspect(DEMO_FOLDER, predicts=True)
    text = ChatTokenizer.from_folder(folder)
    loaded = load(folder)
    assert HostHead.of(cast(PredictingModel, loaded.model).prediction) is not None
    engine = model_engine(loaded, text, layout="slabs", prefix="off", lookahead=False)
    head, rows = head_of(engine), []
    for number, prompt in enumerate(("def add(", "class Stack:\n", "import os\n", "for line in")):
        seq = replace(sequence(number), prompt=tuple(text.encode(prompt)), ids=[])
        enter(engine, seq)
        rows.append(seq)
    assert len(rows) == 2 * HOST_ROWS
    decode(engine, rows, 1)
    same = []
    for _ in range(12):
        compiled = head.drafts(dict.fromkeys(rows, 3))
        alone: dict[Sequence, tuple[int, ...]] = {}
        for seq in rows:
            alone |= head.drafts({seq: 3})
        pairs = head.drafts(dict.fromkeys(rows[:HOST_ROWS], 3))
        assert pairs == {seq: alone[seq] for seq in rows[:HOST_ROWS]}
        assert {len(some) for some in alone.values()} == {3}
        same += [compiled[seq] == alone[seq] for seq in rows]
        decode(engine, rows, 1)
    assert (4, 3) in head.chain and (1, 3) not in head.chain
    assert sum(same) > 0.9 * len(same)  # another order of sums may swap two near-ties


def test_a_head_whose_weights_are_others_is_left_to_mlx(loaded: LoadedModel) -> None:
    """NumPy drafts only with a head like the demo's: in float32, and for a part of the vocabulary.

    All other heads are left to MLX.
    """
    whole = cast(PredictingModel, loaded.model).prediction
    assert HostHead.of(whole) is None
    demo = inspect(DEMO_FOLDER, predicts=True)
    narrow = cast(PredictingModel, load(demo, dtype=mx.bfloat16).model).prediction
    assert HostHead.of(narrow) is None


def test_the_head_of_the_demo_is_right_mostly() -> None:
    """The head is small, and its first draft mostly equals the demo's next greedy token."""
    folder = inspect(DEMO_FOLDER, predicts=True)
    own = sum(tensor.nbytes for name, tensor in folder.tensors.items() if name.startswith("mtp."))
    assert 0 < own < 1_000_000
    text = ChatTokenizer.from_folder(folder)
    engine = model_engine(load(folder), text, layout="slabs", prefix="off", lookahead=False)
    head, right = head_of(engine), []
    for prompt in ("def add(one, two):\n", "class Stack:\n    def __init__(self):\n"):
        seq = replace(sequence(0), prompt=tuple(text.encode(prompt)), ids=[])
        enter(engine, seq)
        decode(engine, [seq], 1)
        while len(seq.ids) < TOKENS - 1:
            (draft,) = head.drafts({seq: 1})[seq]
            (drawn,) = decode(engine, [seq], 1)
            right.append(draft == drawn.token)
        engine.release(seq)
    assert sum(right) > 0.5 * len(right)
