"""Compares drafts of a model's own head (MTP) with drafts computed from the whole history."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from support.engine_steps import decode, decode_spans, enter, read, step
from support.predicting_models import FAMILIES, TOKENS, sequence, write_predicting

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.prediction_heads.head_drafts import MAX_FAILURES  # noqa: E402
from mlxpool.worker.attention.prediction_heads.prediction_rows import MAX_WAITING, Predictions  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache, StateLayer  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.caches.specs import ROLLBACK_STEPS  # noqa: E402
from mlxpool.worker.caches.stored import AUTO, INT8  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.layers.model_plan import PredictingModel  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

LAYOUTS = [(family, "rows") for family in FAMILIES] + [("glm4_moe_lite", "pool")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: load(inspect(write_predicting(root / family, family), predicts=True))
        for family in FAMILIES
    }


def engine_of(loaded: LoadedModel, layout: str = "rows", **settings: Any) -> ModelEngine:
    given = {"prefix": "off", "lookahead": False, **settings}
    return model_engine(loaded, layout=layout, **given)


def head_of(engine: ModelEngine) -> Predictions:
    assert isinstance(engine.predictor, Predictions)
    return engine.predictor


def kind_of_head(loaded: LoadedModel) -> type:
    """Returns the class of a model's own head, which makes drafts."""
    return type(cast(PredictingModel, loaded.model).prediction)


def wanted(
    loaded: LoadedModel, seq: Sequence, count: int, first: int = 0, kv: str = AUTO
) -> tuple[int, ...]:
    """Returns the drafts of a head that reads the sequence again, beginning at input `first`."""
    shape = RowShape(loaded.folder.plan.caches, loaded.dtype, 512, 512, kv=kv)
    own = RowShape((loaded.folder.plan.prediction_cache,), loaded.dtype, 512, 512)  # type: ignore[arg-type]
    model = cast(PredictingModel, loaded.model)
    tokens = seq.tokens
    batch = RowBatch([RowSpan(RowCache(shape), len(tokens) - 1)], None)
    states = model.hidden_states(mx.array(tokens[:-1]), batch)[first:]
    row, given, drafts = RowCache(own), mx.array(tokens[first + 1 :]), []
    for _ in range(count):
        batch = RowBatch([RowSpan(row, given.shape[0])], [0])
        states = model.prediction(given, states, batch)
        batch.done()
        given = mx.argmax(model.prediction.logits_of(states), axis=-1)
        drafts.append(int(given.item()))
    return tuple(drafts)


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_drafts_are_those_of_the_whole_history(
    models: dict[str, LoadedModel], family: str, layout: str
) -> None:
    """Four streams get right drafts, wrong ones or none, while a late prompt is read in chunks."""
    draw, loaded = random.Random(family), models[family]
    engine = engine_of(loaded, layout)
    head, limit = head_of(engine), engine.limits.drafts or 4
    rows = [sequence(number, size) for number, size in enumerate((2, 33, 70, 150))]
    answers = answers_of(loaded, rows)
    for seq in rows:
        enter(engine, seq, 40)
    late = sequence(9, 90)
    engine.admit(late)
    for number in range(12):
        depths = {seq: draw.randint(0, 3) for seq in rows}
        if number:
            assert all(map(head.ready, rows))
        proposals = head.drafts(depths)
        spans = []
        for seq in rows:
            drafts = proposals.get(seq, ())
            if number:
                assert drafts == wanted(loaded, seq, depths[seq])
            right = draw.random() < 0.6
            known = answers[seq][len(seq.ids) :]
            following = known[: draw.randint(0, limit)] if right else drafts[:limit]
            spans.append(Span.check(seq, following) if following else decode_spans([seq])[0])
        if late.submitted < 80:
            spans.insert(draw.randrange(len(spans)), Span(late, late.submitted, 20, 0))
        for drawn in step(engine, spans):
            drawn.sequence.ids.append(drawn.token)
    read(engine, late)
    decode(engine, [late], 1)
    assert head.drafts({late: 2})[late] == wanted(loaded, late, 2)
    for seq in (*rows, late):
        engine.release(seq)
    assert head.nbytes == 0 and engine.memory().kv == 0


def answers_of(loaded: LoadedModel, rows: list[Sequence]) -> dict[Sequence, tuple[int, ...]]:
    """Returns all tokens of the sequences, computed without drafts."""
    engine = engine_of(loaded)
    copies = [replace(seq, ids=[]) for seq in rows]
    for copy in copies:
        enter(engine, copy)
    decode(engine, copies, TOKENS)
    return {seq: tuple(copy.ids) for seq, copy in zip(rows, copies, strict=True)}


@pytest.mark.parametrize("family", ["glm4_moe_lite", "qwen3_next"])
def test_states_that_wait_are_read_when_they_are_many(
    models: dict[str, LoadedModel], family: str
) -> None:
    """The head keeps few hidden states of a row without drafts; its next drafts are still right."""
    loaded = models[family]
    engine = engine_of(loaded)
    head, seq = head_of(engine), sequence(3, 5)
    enter(engine, seq)
    most = 0
    for _ in range(MAX_WAITING + 9):
        decode(engine, [seq], 1)
        row = head.rows[seq]
        most = max(most, sum(some.count for some in row.waiting))
        assert all(some.array.shape[0] <= 4 for some in row.waiting)
    assert most <= MAX_WAITING + 1
    assert head.drafts({seq: 3})[seq] == wanted(loaded, seq, 3)


@pytest.mark.parametrize("family", ["glm4_moe_lite", "qwen3_5_moe"])
def test_a_row_begins_anew_behind_a_cached_prefix(
    models: dict[str, LoadedModel], family: str
) -> None:
    """The head gets no states for a cached prefix, because the prefix cache does not keep them.

    So its drafts depend only on the inputs after the prefix.
    """
    loaded = models[family]
    engine = engine_of(loaded, prefix="tree")
    head, first = head_of(engine), sequence(4, 300)
    first.restore_at = 256
    enter(engine, first)
    decode(engine, [first], 2)
    engine.release(first)
    assert not head.ready(first)
    again = Sequence(b"", 1, (*first.tokens, 7, 8, 9), first.options, 4, TOKENS)
    enter(engine, again)
    assert again.cached > 200
    decode(engine, [again], 1)
    assert head.ready(again)
    assert head.drafts({again: 3})[again] == wanted(loaded, again, 3, again.cached)


def test_a_row_that_goes_back_forgets_what_was_behind(models: dict[str, LoadedModel]) -> None:
    loaded = models["glm4_moe_lite"]
    engine = engine_of(loaded)
    head, seq = head_of(engine), sequence(5, 90)
    enter(engine, seq)
    decode(engine, [seq], 20)
    assert head.drafts({seq: 2})[seq] == wanted(loaded, seq, 2)
    assert not head.ready(seq) and head.drafts({seq: 2}) == {}  # no token has come since
    for kept in (100, 60):
        assert engine.rewind(seq, kept)
        del seq.ids[max(0, kept + 1 - 90) :]
        if seq.unread > 1:
            step(engine, [Span(seq, kept, seq.unread - 1, 0)])
        decode(engine, [seq], 2)
        assert head.drafts({seq: 3})[seq] == wanted(loaded, seq, 3)


def test_a_failed_pass_costs_drafts_and_nothing_else(models: dict[str, LoadedModel]) -> None:
    """After some failed passes the head gives no more drafts."""
    engine = engine_of(models["glm4_moe_lite"])
    head, seq = head_of(engine), sequence(6)
    enter(engine, seq)
    decode(engine, [seq], 2)

    def fails(*inputs: Any) -> Any:
        raise RuntimeError("the device has no memory left")

    for failures in range(1, MAX_FAILURES + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind_of_head(models["glm4_moe_lite"]), "__call__", fails)
            assert head.drafts({seq: 2}) == {} and head.nbytes == 0
        decode(engine, [seq], 1)
        assert head.ready(seq) == (failures < MAX_FAILURES)
    assert len(seq.ids) == 2 + MAX_FAILURES


def test_a_failed_pass_on_a_lost_device_is_no_failed_draft(
    models: dict[str, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(models["glm4_moe_lite"])
    head, seq = head_of(engine), sequence(6)
    enter(engine, seq)
    decode(engine, [seq], 2)

    def fails(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(kind_of_head(models["glm4_moe_lite"]), "__call__", fails)
    monkeypatch.setattr("mlxpool.worker.kernels.device.device_computes", lambda: False)
    with pytest.raises(RuntimeError, match="the device is gone"):
        head.drafts({seq: 2})


def test_memory_of_the_head_is_counted(models: dict[str, LoadedModel], tmp_path: Path) -> None:
    """With an MTP head fewer KV blocks fit; `kv_use` includes the head's keys and values."""
    path = write_predicting(tmp_path, "glm4_moe_lite")
    with_head, without = models["glm4_moe_lite"], load(inspect(path))
    assert with_head.weight_bytes > without.weight_bytes
    engine, plain = engine_of(with_head, limit=2**34), engine_of(without, limit=2**34)
    assert engine.inspect().budget.head_block > 0 == plain.inspect().budget.head_block
    assert plain.predictor is None
    assert engine.inspect().budget.free_blocks < plain.inspect().budget.free_blocks
    seq = sequence(7, 200)
    enter(engine, seq)
    assert head_of(engine).nbytes > 0
    assert engine.kv_use()[1] == engine.inspect().rows[seq].nbytes + head_of(engine).nbytes


def test_a_head_drafts_beside_8_bit_keys_and_values(models: dict[str, LoadedModel]) -> None:
    """The model's KV cache has 8 bits; the MTP head's own KV cache is not quantised."""
    loaded = models["qwen3_next"]
    engine, seq = engine_of(loaded, kv=INT8), sequence(5)
    head = head_of(engine)
    enter(engine, seq)
    decode(engine, [seq], 1)
    for _ in range(4):
        drafts = head.drafts({seq: 2})[seq]
        assert drafts == wanted(loaded, seq, 2, kv=INT8)
        for drawn in step(engine, [Span.check(seq, drafts)]):
            seq.ids.append(drawn.token)
    own = head.rows[seq].row
    assert own.arrays() and {array.dtype for array in own.arrays()} == {loaded.dtype}
    assert mx.int8 in {array.dtype for array in cast(RowCache, engine.inspect().rows[seq]).arrays()}


def test_recurrent_rows_count_the_states_behind_drafts(models: dict[str, LoadedModel]) -> None:
    loaded = models["qwen3_next"]
    engine = engine_of(loaded)
    shape = RowShape(loaded.folder.plan.caches, loaded.dtype, 512, engine.limits.lines)
    most = engine.limits.drafts
    # Kernels write the states of a pass into one array; the states of the pass before remain.
    count = 2 * (1 + most) if device.on_gpu() else 1 + ROLLBACK_STEPS + most
    kept = shape.fixed_bytes - (1 + ROLLBACK_STEPS) * shape.state_bytes
    assert engine.inspect().budget.row == kept + count * shape.state_bytes
    seq = sequence(8, 20)
    enter(engine, seq)
    drafts = (1,) * engine.limits.drafts
    for _ in range(4):
        engine.submit([Span.check(seq, drafts)])
        mx.eval(engine.inspect().rows[seq].arrays())
        layers = cast(RowCache, engine.inspect().rows[seq]).layers
        states = [layer for layer in layers if isinstance(layer, StateLayer)]
        held = sum(array.nbytes for layer in states for array in layer.held())
        assert held <= engine.inspect().budget.row
        for drawn in engine.collect().drawn:
            seq.ids.append(drawn.token)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_warm_up_has_the_head_draft(models: dict[str, LoadedModel], family: str) -> None:
    """The warm-up leaves no rows, and works with the smallest context."""
    for context in (4, 512):
        engine = engine_of(models[family], context=context, blocks=8, max_sequences=2)
        engine.warm_up(lambda: None)
        assert head_of(engine).nbytes == 0 and not head_of(engine).rows
