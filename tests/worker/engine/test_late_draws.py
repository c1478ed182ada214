"""Tests draws that are submitted later than their forward pass, with masks made meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from support.engine_steps import decode, decode_spans, enter
from support.worker_checkpoints import QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.sampling import sampler  # noqa: E402
from mlxpool.worker.sampling.row_masks import NO_MASKS, Mask, RowMasks  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": True},
    {"temperature": 0.7, "repeat_penalty": 1.6, "repeat_last_n": 4},
    # Two tokens alternate if the penalties count the newest token.
    {
        "temperature": 0.0,
        "logit_bias": {"5": 20.0, "6": 19.0},
        "presence_penalty": 2.0,
        "repeat_last_n": 1,
    },
]
TOKENS = 12
VOCABULARY = 264
MODELS: dict[str, dict[str, Any]] = {
    "full attention": {},
    "states": {**QWEN3_NEXT, "num_hidden_layers": 2},
}


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(
        inspect(write_checkpoint(tmp_path_factory.mktemp("model"), **MODELS[request.param]))
    )


def sequence(number: int, size: int = 50) -> Sequence:
    prompt = tuple(np.random.default_rng(number).integers(0, 256, size).tolist())
    options = Options.parse({**OPTIONS[number % len(OPTIONS)], "ignore_eos": True})
    return Sequence(bytes([number] * 16), 1, prompt, options, number, TOKENS)


def running(engine: ModelEngine) -> list[Sequence]:
    rows = [sequence(number) for number in range(len(OPTIONS))]
    for seq in rows:
        enter(engine, seq)
    return rows


def mask_of(tokens: Any) -> Mask:
    """Returns the mask that allows these tokens."""
    words = np.zeros((1, -(-VOCABULARY // 32)), dtype=np.uint32)
    for token in tokens:
        words[0, token // 32] |= np.uint32(1 << token % 32)
    return words


def commit(engine: ModelEngine) -> None:
    for drawn in engine.collect().drawn:
        drawn.sequence.ids.append(drawn.token)


@pytest.mark.parametrize("order", ["no pass ahead", "collected before", "collected behind"])
def test_a_late_draw_gives_the_tokens_of_an_immediate_one(loaded: LoadedModel, order: str) -> None:
    """The previous pass is collected before the late draw, or is still in flight."""
    plain = model_engine(loaded, prefix="off", lookahead=False)
    expected = running(plain)
    for seq in expected:
        decode(plain, [seq], TOKENS)
    engine = model_engine(loaded, prefix="off", lookahead=order != "no pass ahead")
    rows = running(engine)
    for number in range(TOKENS):
        late = number % 3 != 1  # passes of both kinds follow each other
        (engine.forward if late else engine.submit)(decode_spans(rows))
        if order == "collected before" and engine.in_flight > 1:
            commit(engine)
        if late:
            engine.draw(NO_MASKS)
        if engine.in_flight > 1 or order == "no pass ahead":
            commit(engine)
    while engine.in_flight:
        commit(engine)
    assert [seq.ids for seq in rows] == [seq.ids for seq in expected]


@pytest.mark.parametrize("lookahead", [False, True])
def test_masks_exclude_tokens_before_all_filters(
    loaded: LoadedModel, lookahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 0 draws its likeliest allowed token; rows without a mask draw as before.

    The mask of each draw depends on the previous token, which is collected before the draw.
    """
    plain = model_engine(loaded, prefix="off", lookahead=False)
    free = running(plain)
    decode(plain, free, TOKENS)
    engine = model_engine(loaded, prefix="off", lookahead=lookahead)
    rows, asked = running(engine), []
    draw = sampler.sample_batch

    def noted(logits: Any, *others: Any) -> Any:
        asked.append(logits)
        return draw(logits, *others)

    monkeypatch.setattr(sampler, "sample_batch", noted)
    allowed: list[list[int]] = []
    for _ in range(TOKENS):
        engine.forward(decode_spans(rows))
        if engine.in_flight > 1:
            commit(engine)
        last = rows[0].ids[-1] if rows[0].ids else 0
        allowed.append([(last * 7 + step) % VOCABULARY for step in range(0, 90, 9)])
        masks = {rows[0]: mask_of(allowed[-1]), rows[1]: mask_of(range(100, 164))}
        engine.draw(RowMasks.of(masks))
        if not lookahead:
            commit(engine)
    while engine.in_flight:
        commit(engine)
    for token, tokens, logits in zip(rows[0].ids, allowed, asked, strict=True):
        first = np.array(logits)[0]
        assert token == max(tokens, key=lambda one: first[one])
    assert all(100 <= token < 164 for token in rows[1].ids) and len(set(rows[1].ids)) > 3
    assert rows[0].ids != free[0].ids
    assert [seq.ids for seq in rows[2:]] == [seq.ids for seq in free[2:]]


def test_a_mask_without_tokens_fails_its_sequence_alone(loaded: LoadedModel) -> None:
    engine = model_engine(loaded, prefix="off", lookahead=False)
    rows = running(engine)
    engine.forward(decode_spans(rows))
    engine.draw(RowMasks.of({rows[1]: mask_of([])}))
    result = engine.collect()
    assert [failure.sequence for failure in result.failed] == [rows[1]]
    assert [token.sequence for token in result.drawn] == [rows[0], *rows[2:]]


def test_a_row_may_leave_between_forward_and_draw(loaded: LoadedModel) -> None:
    engine = model_engine(loaded, prefix="off", lookahead=True)
    rows = running(engine)
    engine.forward(decode_spans(rows))
    engine.release(rows[1])
    engine.draw(RowMasks.of({rows[1]: mask_of([5]), rows[0]: mask_of([7])}))
    result = engine.collect()
    assert [token.sequence for token in result.drawn] == [rows[0], *rows[2:]]
    assert result.drawn[0].token == 7


def test_a_draw_comes_before_the_next_pass_and_before_its_results(loaded: LoadedModel) -> None:
    engine = model_engine(loaded, prefix="off", lookahead=True)
    rows = running(engine)
    engine.forward(decode_spans(rows))
    with pytest.raises(AssertionError, match="before the next pass"):
        engine.submit(decode_spans(rows))
    with pytest.raises(AssertionError, match="before `collect`"):
        engine.collect()
    engine.draw(NO_MASKS)
    with pytest.raises(AssertionError, match="has drawn"):
        engine.draw(NO_MASKS)
    assert len(engine.collect().drawn) == len(rows)


def test_a_failed_draw_loses_the_rows_of_its_pass(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model_engine(loaded, prefix="off", lookahead=True, layout="rows")
    rows = running(engine)
    engine.forward(decode_spans(rows[:2]))

    def fails(*arrays: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="malloc"):
        patch.setattr(mx, "async_eval", fails)
        engine.draw(NO_MASKS)
    assert engine.in_flight == 0
    assert [engine.lost(seq) for seq in rows] == [True, True, False, False]


def test_masks_hold_for_each_draft(tmp_path: Any) -> None:
    """A row that checks drafts has a mask for each position; a forbidden draft is rejected."""
    loaded = load(inspect(write_checkpoint(tmp_path)))
    plain = model_engine(loaded, prefix="off", lookahead=False)
    expected = running(plain)[0]
    decode(plain, [expected], 4)
    first, second, third, _ = expected.ids
    wide = mask_of(range(VOCABULARY))
    narrow = mask_of(token for token in range(VOCABULARY) if token != second)
    masks: Mapping[int, list[Mask]] = {3: [wide, wide, wide], 2: [wide, narrow, wide]}
    for count, lines in masks.items():
        engine = model_engine(loaded, prefix="off", lookahead=False)
        row = running(engine)[0]
        engine.forward([Span.check(row, (first, second))])
        engine.draw(RowMasks.of({row: np.concatenate(lines)}))
        tokens = [drawn.token for drawn in engine.collect().drawn]
        assert len(tokens) == count and tokens[0] == first
        assert (tokens == [first, second, third]) == (count == 3)


@pytest.mark.parametrize("again", [True, False])
def test_a_row_that_is_withdrawn_gives_up_its_drafts(tmp_path: Any, again: bool) -> None:
    """A row that is taken out of a pass before its draw gives up its drafts.

    With `again` it also gives up its last input, which the next pass reads again.
    """
    loaded = load(inspect(write_checkpoint(tmp_path)))
    plain = model_engine(loaded, prefix="off", lookahead=False)
    expected = running(plain)
    for seq in expected:
        decode(plain, [seq], 3)
    engine = model_engine(loaded, prefix="off", lookahead=False)
    rows = running(engine)
    read = rows[0].submitted
    drafts = {seq: tuple(other.ids[:2]) for seq, other in zip(rows, expected, strict=True)}
    engine.forward([Span.check(seq, drafts[seq]) for seq in rows])
    engine.withdraw(rows[0], again=again)
    assert (rows[0].awaited, rows[0].submitted) == (0, read + (not again))
    engine.draw(NO_MASKS)
    commit(engine)
    assert [seq.ids for seq in rows[1:]] == [seq.ids for seq in expected[1:]] and not rows[0].ids
    if not again:
        rows[0].ids.append(expected[0].ids[0])
    decode(engine, rows[:1], 3 - len(rows[0].ids))
    assert rows[0].ids == expected[0].ids
