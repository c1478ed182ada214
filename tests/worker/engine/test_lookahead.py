"""Tests that passes in flight change no token while sequences end, or are cancelled or preempted.

Each answer is compared with the answer of an engine without look-ahead that serves it alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.engine_steps import ScheduledSteps, decode, decode_spans, enter
from support.worker_checkpoints import QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.engine.engine import StepResult  # noqa: E402
from mlxpool.worker.engine.flight import Flight  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.sampling import sampler  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence, SequenceFailed  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.5, "top_k": 0, "min_p": 0.02},
    {"temperature": 0.0, "repeat_penalty": 1.6, "repeat_last_n": 4},
    {"temperature": 0.7, "presence_penalty": 0.7, "repeat_last_n": -1},
    {"temperature": 0.0, "frequency_penalty": 0.9, "repeat_last_n": 1},
]
ROWS = 5
REQUESTS = 24
MODELS: dict[str, dict[str, Any]] = {
    "full attention": {},
    "states": {**QWEN3_NEXT, "num_hidden_layers": 2},
}


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), **MODELS[request.param])
    return load(inspect(folder))


@pytest.fixture(scope="module")
def text(loaded: LoadedModel) -> ChatTokenizer:
    return ChatTokenizer.from_folder(loaded.folder)


def prompt_of(size: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(salt).integers(0, 256, size).tolist())


def sequence(number: int, size: int, count: int) -> Sequence:
    options = Options.parse({**OPTIONS[number % len(OPTIONS)], "ignore_eos": True})
    shared = prompt_of(60)[: size // 2]
    prompt = (*shared, *prompt_of(size - len(shared), number + 1))
    return Sequence(bytes([number] * 16), 1, prompt, options, number, count)


def alone(loaded: LoadedModel, text: ChatTokenizer, seq: Sequence) -> list[int]:
    """Returns the answer of an engine without look-ahead that serves no other request."""
    again = Sequence(b"", 1, seq.prompt, seq.options, seq.seed, seq.max_tokens)
    steps = ScheduledSteps(model_engine(loaded, text, prefix="off", lookahead=False))
    steps.admit(again)
    while len(again.ids) < again.max_tokens:
        steps.step()
    return again.ids


@pytest.mark.parametrize("prefix", ["tree", "off"])
@pytest.mark.parametrize("seed", range(3))
def test_ends_cancels_and_preemptions_beside_passes_in_flight_change_no_token(
    loaded: LoadedModel, text: ChatTokenizer, seed: int, prefix: str
) -> None:
    draw = random.Random(f"{seed} {prefix}")
    engine = model_engine(loaded, text, prefix=prefix, lookahead=True, max_sequences=ROWS)
    steps = ScheduledSteps(engine)
    waiting = [sequence(n, draw.randrange(1, 90), draw.randrange(1, 25)) for n in range(REQUESTS)]
    stops = {seq: draw.randrange(1, 25) for seq in waiting if draw.random() < 0.4}
    sequences, ahead = list(waiting), 0
    while waiting or steps.live:
        while waiting and len(steps.live) < ROWS and draw.random() < 0.7:
            steps.admit(waiting.pop(draw.randrange(len(waiting))))
        steps.step()
        assert engine.in_flight <= 1
        ahead += engine.in_flight
        for seq in list(steps.live):
            assert len(seq.ids) <= seq.max_tokens
            # Leaves as at an end-of-sequence token.
            if len(seq.ids) in (seq.max_tokens, stops.get(seq)):
                steps.leave(seq)
            elif (chance := draw.random()) < 0.03:
                steps.preempt(seq)
                steps.live.remove(seq)
                waiting.append(seq)
            elif chance < 0.04:
                steps.leave(seq)
                stops[seq] = len(seq.ids)
    assert ahead > 20
    for seq in sequences:
        answer = alone(loaded, text, seq)
        assert seq.ids == answer[: len(seq.ids)]
        assert len(seq.ids) == min(seq.max_tokens, stops.get(seq, seq.max_tokens))
    while engine.in_flight:
        assert engine.collect() == StepResult([], [])
    assert engine.memory().kv == 0


def test_the_last_chunk_of_a_prompt_draws_its_first_token(
    loaded: LoadedModel, text: ChatTokenizer
) -> None:
    """If the model has recurrent states, the last input of the prompt is read in a step of its own.

    Otherwise the whole prompt is read in one step.
    """
    engine, seq = model_engine(loaded, text, lookahead=False), sequence(0, 70, 3)
    steps = ScheduledSteps(engine)
    steps.admit(seq)
    needed = 2 if engine.inspect().layout.store.stateful else 1
    for number in range(needed):
        assert len(steps.step()) == (number == needed - 1)
    assert (seq.submitted, len(seq.ids)) == (70, 1)


def test_a_pass_takes_its_inputs_from_the_pass_in_flight(
    loaded: LoadedModel, text: ChatTokenizer
) -> None:
    """The rows of the second pass have another order, and one row was not in the first pass."""
    engine = model_engine(loaded, text, lookahead=True)
    rows = [sequence(number, 9 + number, 8) for number in range(4)]
    for seq in rows:
        enter(engine, seq)
    engine.submit(decode_spans(rows[:3]))
    assert [seq.awaited for seq in rows] == [1, 1, 1, 0]
    engine.submit(decode_spans([rows[3], rows[2], rows[0]]))
    assert [seq.awaited for seq in rows] == [2, 1, 2, 1]
    assert [seq.submitted - seq.length for seq in rows] == [1, 0, 1, 0]
    for _ in range(2):
        for drawn in engine.collect().drawn:
            drawn.sequence.ids.append(drawn.token)
    assert [len(seq.ids) for seq in rows] == [2, 1, 2, 1]
    for seq in rows:
        assert seq.ids == alone(loaded, text, seq)[: len(seq.ids)]


@pytest.mark.parametrize("at", ["submit", "collect", "read"])
def test_a_failed_pass_loses_all_rows_in_flight(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The rows are also lost if the pass ended well, but the host lacks memory for its tokens."""
    engine = model_engine(loaded, text, lookahead=True, layout="rows")
    rows = [sequence(number, 20, 8) for number in range(3)]
    for seq in rows:
        enter(engine, seq)
    engine.submit(decode_spans(rows[:1]))

    def fails(*arrays: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: engine.submit(decode_spans(rows[1:2])),
        "collect": lambda: engine.collect(),
        "read": lambda: engine.collect(),
    }
    if at != "submit":
        engine.submit(decode_spans(rows[1:2]))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="malloc"):
        if at == "read":
            patch.setattr(Flight, "result", fails)
        else:
            patch.setattr(mx, "eval", fails)
            patch.setattr(mx, "async_eval", fails)
        calls[at]()
    assert engine.in_flight == 0
    assert [engine.lost(seq) for seq in rows] == [True, True, False]
    for seq in rows[:2]:
        engine.release(seq)
        seq.return_to_waiting()
        assert (seq.submitted, seq.awaited, engine.blocks.given(seq)) == (0, 0, 0)
        assert not engine.lost(seq)
    steps = ScheduledSteps(engine)
    for seq in rows[:2]:
        steps.admit(seq)
    while any(len(seq.ids) < 8 for seq in rows[:2]):
        steps.step()
    for seq in rows[:2]:
        assert seq.ids == alone(loaded, text, seq)


def test_a_row_without_numbers_fails_alone_beside_a_pass_in_flight(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model_engine(loaded, text, lookahead=True)
    rows = [sequence(number, 20, 8) for number in range(3)]
    for seq in rows:
        enter(engine, seq)
    draw = sampler.sample_batch
    with monkeypatch.context() as patch:
        hit = mx.arange(3)[:, None] == 1
        patch.setattr(
            sampler,
            "sample_batch",
            lambda logits, *others: draw(mx.where(hit, mx.nan, logits), *others),
        )
        engine.submit(decode_spans(rows))
    engine.submit(decode_spans(rows))
    result = engine.collect()
    assert [token.sequence for token in result.drawn] == [rows[0], rows[2]]
    (failure,) = result.failed
    assert isinstance(failure, SequenceFailed) and failure.sequence is rows[1]
    for drawn in result.drawn:
        drawn.sequence.ids.append(drawn.token)
    engine.release(rows[1])
    again = engine.collect()
    assert [token.sequence for token in again.drawn] == [rows[0], rows[2]] and not again.failed
    for drawn in again.drawn:
        assert alone(loaded, text, drawn.sequence)[:2] == [*drawn.sequence.ids, drawn.token]


def test_a_chunk_in_flight_is_read_on(loaded: LoadedModel, text: ChatTokenizer) -> None:
    """A chunk may be submitted while the one before it is computed."""
    engine, seq = model_engine(loaded, text, lookahead=True), sequence(0, 70, 4)
    engine.admit(seq)
    engine.submit([Span(seq, 0, 30, draws=0)])
    engine.submit([Span(seq, 30, 39, draws=0)])
    assert seq.submitted == 69 and engine.in_flight == 2
    assert engine.collect() == engine.collect() == StepResult([], [])
    decode(engine, [seq], 4)
    assert seq.ids == alone(loaded, text, seq)
