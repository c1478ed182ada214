"""Compares engines that compute recurrent layers by our kernel with engines without the kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from support.engine_steps import decode, decode_spans, enter, step
from support.predicting_models import write_predicting
from support.worker_checkpoints import QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.attention import row_states  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache, StateLayer  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_states import sources_of  # noqa: E402
from mlxpool.worker.caches.specs import ROLLBACK_STEPS, RecurrentSpec  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.kernels.recurrent.span_states import (  # noqa: E402
    MAX_SOURCES,
    NO_SOURCE,
    StateSlice,
)
from mlxpool.worker.layers import delta_net  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support import simt  # noqa: E402
from support.model_engines import model_engine  # noqa: E402
from support.recurrent_rows import RandomWorkload, prompt_of, sequence  # noqa: E402

ON_GPU = mx.cuda.is_available()
# Sizes of tests/worker/kernels/test_gated_delta.py, so that the kernel is built once.
SIZES: dict[str, Any] = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    changes = {**QWEN3_NEXT, **SIZES, "num_hidden_layers": 3}
    return load(inspect(write_checkpoint(tmp_path_factory.mktemp("model"), **changes)))


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = write_predicting(tmp_path_factory.mktemp("predicting"), "qwen3_next", **SIZES)
    return load(inspect(path, predicts=True))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Runs the recurrent kernel, simulated if there is no GPU.

    Yields a list that gets the number of spans of each launch.
    """
    launches: list[int] = []
    recur = row_states.PassStates.recur

    def noted(states: Any, *given: Any) -> Any:
        launches.append(len(states.spans))
        return recur(states, *given)

    monkeypatch.setattr(row_states.PassStates, "recur", noted)
    if ON_GPU:
        yield launches
        return
    with simt.simulated():
        yield launches


def engine_of(loaded: LoadedModel, **settings: Any) -> ModelEngine:
    return model_engine(loaded, **{"lookahead": False, **settings})


def plain_answer(loaded: LoadedModel, seq: Sequence) -> list[int]:
    """Returns the answer of an engine without the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_net.GatedDeltaNetLayer, "_serves", lambda net, dtype: False)
        engine = engine_of(loaded, prefix="off")
        again = Sequence(b"", 1, seq.prompt, seq.options, seq.seed, seq.max_tokens)
        enter(engine, again)
        decode(engine, [again], seq.max_tokens)
        engine.release(again)
    return again.ids


def test_requests_in_random_order_get_the_tokens_of_mlx_operations(
    loaded: LoadedModel, kernel: list[int]
) -> None:
    """Serves requests with prefix hits, preemptions, cancels and resumes, in random order.

    Chunks of prompts share passes with decoding rows. Some passes are submitted ahead and
    discarded.
    """
    engine = engine_of(loaded, lookahead=True)
    workload = RandomWorkload(engine, seed=2)
    for _ in range(2000):
        workload.step()
        if not (workload.waiting or workload.prefilling or workload.decoding):
            break
    assert max(kernel) > 1 and engine.prefix.hits > 3
    launches = len(kernel)
    for seq in workload.every:
        assert seq.ids == plain_answer(loaded, seq)
    assert len(kernel) == launches
    engine.prefix.clear()
    assert (engine.memory().kv, engine.memory().prefix) == (0, 0)


def test_chunks_and_single_tokens_of_a_pass_are_one_launch_a_layer(
    loaded: LoadedModel, kernel: list[int]
) -> None:
    engine = engine_of(loaded)
    rows = [sequence(prompt_of(9 + salt, salt)) for salt in range(3)]
    for seq in rows:
        enter(engine, seq)
    late = sequence(prompt_of(30, 7))
    engine.admit(late)
    kernel.clear()
    for sampled in step(engine, [*decode_spans(rows), Span(late, 0, 12, 0)]):
        sampled.sequence.ids.append(sampled.token)
    assert kernel == [4, 4]  # one entry for each layer
    kernel.clear()
    step(engine, [*decode_spans(rows), Span(late, 12, 10, 0)])
    assert kernel == [4, 4]
    # The states of rows that decode are in one array, so no state is copied for the next pass. A
    # prompt that waits keeps only its own state.
    layers = [cast(RowCache, engine.inspect().rows[seq]).layers[0] for seq in (*rows, late)]
    states = [cast(StateLayer, layer) for layer in layers]
    *decoding, (waiting,) = [state.arrays for state in states]
    assert len({id(whole) for (whole,) in decoding}) == 1 and decoding[0][0].shape[0] == 4
    assert waiting.shape[0] == 1 and waiting.nbytes == states[-1].nbytes


def test_checked_drafts_right_and_wrong_give_the_tokens_without_drafts(
    predicting: LoadedModel, kernel: list[int]
) -> None:
    options = Options.parse({"temperature": 0.0, "ignore_eos": True})
    rows = [
        Sequence(bytes([n] * 16), 1, prompt_of(size, n), options, n, 16)
        for n, size in enumerate((5, 20, 37))
    ]
    answers = {seq: plain_answer(predicting, seq) for seq in rows}
    engine = engine_of(predicting, prefix="off")
    for seq in rows:
        enter(engine, seq)
    draw = np.random.default_rng(3)
    for number in range(9):
        spans = []
        for seq in rows:
            count = int(draw.integers(0, engine.limits.drafts + 1))
            known = answers[seq][len(seq.ids) : len(seq.ids) + count]
            wrong = int(draw.integers(0, 2 * len(known) + 1))
            drafts = tuple(token ^ (place == wrong and 1) for place, token in enumerate(known))
            spans.append(Span.check(seq, drafts) if drafts else decode_spans([seq])[0])
        for sampled in step(engine, spans):
            sampled.sequence.ids.append(sampled.token)
        for seq in rows:
            del seq.ids[12:]
            assert seq.ids == answers[seq][: len(seq.ids)], number
            layers = cast(RowCache, engine.inspect().rows[seq]).layers
            states = [layer for layer in layers if isinstance(layer, StateLayer)]
            written = sum(array.nbytes for layer in states for array in layer.held())
            shape = engine.inspect().layout.store.new_row().shape
            most = 2 * (1 + engine.limits.drafts) * shape.state_bytes
            assert written <= len(rows) * most
        rows = [seq for seq in rows if len(seq.ids) < 12]
        if not rows:
            break


def held_bytes(engine: ModelEngine, rows: Iterable[Sequence]) -> int:
    """Returns the bytes of all arrays with states of these rows; each array counts once."""
    layers = [layer for seq in rows for layer in cast(RowCache, engine.inspect().rows[seq]).layers]
    arrays = [state for layer in layers if isinstance(layer, StateLayer) for state in layer.held()]
    return sum(array.nbytes for array in {id(array): array for array in arrays}.values())


def test_a_row_that_sits_out_keeps_its_own_states_alone(
    loaded: LoadedModel, kernel: list[int]
) -> None:
    """A row outside a pass shares no array with the pass; a prompt read alone copies no state."""
    engine = engine_of(loaded, prefix="off")
    rows = [sequence(prompt_of(9 + salt, salt)) for salt in range(3)]
    for seq in rows:
        enter(engine, seq)
    decode(engine, rows, 3)
    before = held_bytes(engine, rows[:1])
    late = sequence(prompt_of(5, 7))
    enter(engine, late)
    assert held_bytes(engine, rows[:1]) == before
    decode(engine, [*rows[1:], late], 3)
    state = cast(RowCache, engine.inspect().rows[rows[0]]).shape.state_bytes
    assert before == 3 * (1 + ROLLBACK_STEPS) * state
    assert held_bytes(engine, rows[:1]) == (1 + ROLLBACK_STEPS) * state
    assert held_bytes(engine, [*rows, late]) <= 4 * (1 + ROLLBACK_STEPS) * state
    for seq in rows:
        decode(engine, [seq], 6 - len(seq.ids))
        assert seq.ids == plain_answer(loaded, seq)[:6]


def test_a_row_that_is_kept_for_the_next_prompt_keeps_its_newest_states_alone(
    loaded: LoadedModel, kernel: list[int]
) -> None:
    """The prefix cache holds the row, with the bytes of one state.

    The next prompt continues from this row.
    """
    engine = engine_of(loaded, prefix="single")
    rows = [sequence(prompt_of(9 + salt, salt)) for salt in range(3)]
    for seq in rows:
        enter(engine, seq)
    decode(engine, rows, 3)
    row = cast(RowCache, engine.inspect().rows[rows[0]])
    engine.release(rows[0])
    held = [state for layer in row.state_layers() for state in layer.held()]
    assert sum(array.nbytes for array in held) == row.shape.state_bytes
    decode(engine, rows[1:], 2)
    again = sequence((*rows[0].prompt, *rows[0].ids, 5))
    enter(engine, again)
    assert engine.inspect().rows[again] is row and again.cached == len(rows[0].prompt) + 2
    decode(engine, [again], 3)
    assert again.ids == plain_answer(loaded, again)[:3]


def test_a_row_without_drafts_keeps_no_states_behind_those_of_others(
    predicting: LoadedModel, kernel: list[int]
) -> None:
    """The rows hold at most 2 * (1 + d) states per row: the states of two steps.

    d is the most drafts of a step. Three rows check drafts while one row only decodes.
    """
    options = Options.parse({"temperature": 0.0, "ignore_eos": True})
    rows = [Sequence(bytes([n] * 16), 1, prompt_of(9, n), options, n, 24) for n in range(4)]
    answers = {seq: plain_answer(predicting, seq) for seq in rows}
    engine = engine_of(predicting, prefix="off")
    for seq in rows:
        enter(engine, seq)
    most = len(rows) * 2 * (1 + engine.limits.drafts)
    for number in range(5):
        checks = [
            Span.check(seq, tuple(answers[seq][len(seq.ids) :][: engine.limits.drafts]))
            for seq in rows[1:]
        ]
        for sampled in step(engine, [*decode_spans(rows[:1]), *checks]):
            sampled.sequence.ids.append(sampled.token)
        state = cast(RowCache, engine.inspect().rows[rows[0]]).shape.state_bytes
        assert held_bytes(engine, rows) <= most * state, number
    assert all(seq.ids == answers[seq][: len(seq.ids)] for seq in rows)


def test_states_of_many_arrays_are_copied_into_one() -> None:
    """A kernel reads at most MAX_SOURCES arrays of states; a row without a state reads none."""
    wholes = [mx.full((2, 3), n) for n in range(MAX_SOURCES + 2)]
    few = [StateSlice(wholes[n], 1) for n in (1, 0, 1, 2, 3)]
    sources, places = sources_of([*few, None])
    assert list(map(id, sources)) == [id(wholes[n]) for n in (1, 0, 2, 3)]
    assert places == [(0, 1), (1, 1), (0, 1), (2, 1), (3, 1), (NO_SOURCE, 0)]
    many = [StateSlice(whole, n % 2) for n, whole in enumerate(wholes)] + [few[1]]
    sources, places = sources_of(many)
    assert len(sources) == MAX_SOURCES
    assert places[-1] == (0, 1) and {source for source, _ in places} == set(range(MAX_SOURCES))
    for state_slice, (source, index) in zip(many, places, strict=True):
        assert sources[source][index].tolist() == state_slice.whole[state_slice.index].tolist()
    assert sources_of([None, None]) == ((), [(NO_SOURCE, 0)] * 2)


def test_a_row_goes_back_to_the_state_before_a_pass() -> None:
    spec = RecurrentSpec(((1, 2), (3,)))
    row = RowCache(RowShape((spec,), mx.float32, 100))
    assert row.state_slice(0) is None and row.nbytes == 0
    whole = mx.arange(20).reshape(4, 5).astype(mx.float32)
    for begin in (0, 1):  # states of a step of one token, then of a check of three
        slices = [StateSlice(whole, begin + n) for n in range(1 + 2 * begin)]
        row.put_states(0, *slices)
        row.advance(len(slices))
    assert row.nbytes == spec.state_bytes
    for to, line in ((4, 3), (3, 2), (2, 1), (1, 0)):
        row.trim(to)
        assert [x.reshape(-1).tolist() for x in row.state(0)] == [
            whole[line, :2].tolist(),
            whole[line, 2:].tolist(),
        ]
    copy = tuple(mx.array(x) for x in row.state(0))  # as the prefix cache puts a state into a row
    other = RowCache(row.shape)
    other.put_state(0, copy)
    state_slice = other.state_slice(0)
    assert (
        state_slice is not None
        and state_slice.whole[state_slice.index].tolist() == whole[0].tolist()
    )
    row.trim(0)
    assert row.state_slice(0) is None and row.nbytes == 0


def test_in_bfloat16_it_works_beside_the_other_kernels(
    tmp_path: Path, kernel: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused products compute the norm before a gated delta net and the addition after it."""
    changes = {**QWEN3_NEXT, **SIZES, "num_hidden_layers": 2, "hidden_size": 128}
    folder = inspect(write_checkpoint(tmp_path, **changes))
    options = Options.parse({"temperature": 0.0, "logprobs": True, "top_logprobs": 4})
    runs = []
    for serves in (True, False):
        if not serves:
            monkeypatch.setattr(delta_net.GatedDeltaNetLayer, "_serves", lambda net, dtype: False)
        kernel.clear()
        engine = engine_of(load(folder, dtype=mx.bfloat16), prefix="off")
        rows = [Sequence(b"", 1, prompt_of(9 + n, n), options, 11, 4) for n in range(2)]
        for seq in rows:
            enter(engine, seq)
        runs.append([sampled for _ in range(3) for sampled in decode(engine, rows)])
        assert bool(kernel) == serves
    for ours, theirs in zip(*runs, strict=True):
        assert ours.logprob is not None and theirs.logprob is not None
        near, exact = dict(ours.logprob.top), dict(theirs.logprob.top)
        both = near.keys() & exact.keys()
        assert both and all(abs(near[token] - exact[token]) < 0.05 for token in both)
        if ours.token != theirs.token:
            break
