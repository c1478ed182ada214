"""Spans that request hidden states get the inputs that the model's head has in a plain pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.engine_steps import decode, decode_spans, enter, step
from support.worker_checkpoints import GLM, QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.sampling.row_masks import NO_MASKS  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402
from support.model_head import noted_head  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "full attention": {},
    "latent": GLM,
    "states": {**QWEN3_NEXT, "num_hidden_layers": 2},
}
LAYOUTS = {"full attention": ("rows", "slabs", "pool"), "latent": ("rows", "pool")}
CASES = [(name, layout) for name in MODELS for layout in LAYOUTS.get(name, ("rows",))]


def sequence(number: int, size: int) -> Sequence:
    prompt = tuple(np.random.default_rng(number).integers(0, 256, size).tolist())
    options = Options.parse({"temperature": 0.0, "ignore_eos": True})
    return Sequence(bytes([number] * 16), 1, prompt, options, number, 20)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: load(inspect(write_checkpoint(folder / name.replace(" ", "_"), **changes)))
        for name, changes in MODELS.items()
    }


def states_of(loaded: LoadedModel, seq: Sequence) -> np.ndarray:
    """Returns the head's inputs while the tokens of a prompt are read one by one."""
    engine = model_engine(loaded, layout="rows", prefix="off", lookahead=False)
    twin = Sequence(b"", 1, seq.prompt, seq.options, 1, 1)
    engine.admit(twin)
    with noted_head(loaded.model) as taken:
        for at in range(len(seq.prompt)):
            step(engine, [Span(twin, at, 1, 1)])
    return np.array(mx.concatenate(taken).astype(mx.float32))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_hidden_states_are_what_the_head_takes(
    models: dict[str, LoadedModel], name: str, layout: str
) -> None:
    """Prompts are read in chunks, several in one pass; a stream beside them keeps its tokens."""
    loaded = models[name]
    texts = [sequence(1, 37), sequence(2, 1), sequence(3, 12)]
    expected = [states_of(loaded, seq) for seq in texts]
    alone = model_engine(loaded, layout=layout, prefix="off", lookahead=False)
    stream, twin = sequence(4, 30), sequence(4, 30)
    enter(alone, twin)
    decode(alone, [twin], 3)
    engine = model_engine(loaded, layout=layout, prefix="off", lookahead=False)
    enter(engine, stream)
    for seq in texts:
        engine.admit(seq)
    state_parts: dict[Sequence, list[np.ndarray]] = {seq: [] for seq in texts}
    chunks = [[(0, 20), (1, 1)], [(0, 17), (2, 12)]]
    for chunk in chunks:
        spans = [Span(texts[n], texts[n].submitted, count, 0, hidden=True) for n, count in chunk]
        engine.submit([spans[0], *decode_spans([stream]), *spans[1:]])
        got = engine.collect()
        (token,) = got.drawn
        stream.ids.append(token.token)
        assert [entry.span for entry in got.hidden] == spans
        for hidden in got.hidden:
            state_parts[hidden.span.sequence].append(hidden.states)
    for seq, want in zip(texts, expected, strict=True):
        states = np.concatenate(state_parts[seq])
        assert states.dtype == np.float32 and states.shape == (len(seq.prompt), 32)
        assert np.abs(states - want).max() < 1e-4 * np.abs(want).max()
        assert seq.awaited == 0 and seq.submitted == len(seq.prompt)
    decode(engine, [stream])
    assert stream.ids == twin.ids


def test_a_pass_of_hidden_states_alone_and_one_that_leaves(
    models: dict[str, LoadedModel],
) -> None:
    loaded, rows = models["full attention"], [sequence(1, 9), sequence(2, 7), sequence(3, 5)]
    engine = model_engine(loaded, lookahead=True)
    for seq in rows:
        engine.admit(seq)
    engine.submit([Span(seq, 0, len(seq.prompt), 0, hidden=True) for seq in rows])
    engine.release(rows[1])
    result = engine.collect()
    assert [entry.span.sequence for entry in result.hidden] == [rows[0], rows[2]]
    assert not result.drawn and not result.failed
    for hidden in result.hidden:
        want = states_of(loaded, hidden.span.sequence)
        assert np.abs(hidden.states - want).max() < 1e-4 * np.abs(want).max()


def test_a_late_draw_beside_hidden_states(models: dict[str, LoadedModel]) -> None:
    loaded, text, stream = models["full attention"], sequence(1, 9), sequence(4, 30)
    engine = model_engine(loaded, lookahead=False)
    enter(engine, stream)
    engine.admit(text)
    engine.forward([*decode_spans([stream]), Span(text, 0, 9, 0, hidden=True)])
    engine.draw(NO_MASKS)
    result = engine.collect()
    want = states_of(loaded, text)
    assert len(result.drawn) == 1
    assert np.abs(result.hidden[0].states - want).max() < 1e-4 * np.abs(want).max()
