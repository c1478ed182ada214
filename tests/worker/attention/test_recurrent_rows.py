"""Rows with recurrent states in the engine: restore points, splits, preemption, lookahead.

A state cannot be divided by tokens, so the prefix cache can only restore positions with a snapshot.
Each answer is compared with the answer of an engine that computes it from the start.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.engine_steps import decode, enter, read, read_chunk
from support.worker_checkpoints import QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.prefix import tree_cache  # noqa: E402
from mlxpool.worker.prefix.modes import MODES  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.sampling import sampler  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence, SequenceFailed  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402
from support.recurrent_rows import (  # noqa: E402
    MIXTURE,
    STEPS,
    RandomWorkload,
    prompt_of,
    sequence,
)

CONFIG: dict[str, Any] = {**QWEN3_NEXT, "num_hidden_layers": 3}
AHEAD = pytest.mark.parametrize("lookahead", [False, True])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(inspect(write_checkpoint(tmp_path_factory.mktemp("model"), **CONFIG)))


@pytest.fixture(scope="module")
def text(loaded: LoadedModel) -> ChatTokenizer:
    return ChatTokenizer.from_folder(loaded.folder)


def engine_of(loaded: LoadedModel, text: ChatTokenizer, **settings: Any) -> ModelEngine:
    return model_engine(loaded, text, **{"lookahead": False, **settings})


def ids_of(engine: ModelEngine, seq: Sequence, steps: int = STEPS) -> list[int]:
    enter(engine, seq)
    decode(engine, [seq], steps - len(seq.ids))
    engine.release(seq)
    return seq.ids


_answers: dict[tuple[tuple[int, ...], str], list[int]] = {}


def computed_afresh(loaded: LoadedModel, text: ChatTokenizer, seq: Sequence) -> list[int]:
    """Returns the answer of a new engine."""
    key = seq.prompt, str(seq.options)
    if key not in _answers:
        again = Sequence(b"", 1, seq.prompt, seq.options, seq.seed, seq.max_tokens)
        _answers[key] = ids_of(engine_of(loaded, text, prefix="off"), again)
    return _answers[key]


@AHEAD
def test_a_prompt_continues_from_a_restore_point(
    loaded: LoadedModel, text: ChatTokenizer, lookahead: bool
) -> None:
    engine, prompt = engine_of(loaded, text, lookahead=lookahead), prompt_of(40)
    ids_of(engine, sequence(prompt, restore_at=25))
    other = sequence((*prompt[:33], 1, 2, 3))
    assert ids_of(engine, other) == computed_afresh(loaded, text, other)
    assert other.cached == 25


@AHEAD
def test_a_restore_point_is_made_where_prompts_diverge(
    loaded: LoadedModel, text: ChatTokenizer, lookahead: bool
) -> None:
    engine, prompt = engine_of(loaded, text, lookahead=lookahead), prompt_of(40)
    cached = []
    for salt in range(3):
        seq = sequence((*prompt[:30], *prompt_of(10, salt + 1)))
        assert ids_of(engine, seq) == computed_afresh(loaded, text, seq)
        cached.append(seq.cached)
    assert cached == [0, 0, 30]


def test_long_prompts_have_restore_points_at_intervals(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_cache, "RESTORE_POINT_INTERVAL", 16)
    engine, prompt = engine_of(loaded, text), prompt_of(75)
    enter(engine, first := sequence(prompt), 10)
    engine.release(first)
    for end, cached in ((75, 74), (65, 64), (64, 48), (50, 48), (17, 16)):
        seq = sequence(prompt[:end])
        assert ids_of(engine, seq) == computed_afresh(loaded, text, seq)
        assert seq.cached == cached


@AHEAD
def test_the_computed_part_of_a_cancelled_prefill_is_kept(
    loaded: LoadedModel, text: ChatTokenizer, lookahead: bool
) -> None:
    engine, cancelled = engine_of(loaded, text, lookahead=lookahead), sequence(prompt_of(47))
    engine.admit(cancelled)
    read_chunk(engine, cancelled, 18)
    engine.release(cancelled)
    again = sequence(prompt_of(47))
    assert ids_of(engine, again) == computed_afresh(loaded, text, again)
    assert again.cached == 18


@AHEAD
def test_the_next_turn_continues_from_the_answer(
    loaded: LoadedModel, text: ChatTokenizer, lookahead: bool
) -> None:
    engine, seq = engine_of(loaded, text, lookahead=lookahead), sequence(prompt_of(20))
    enter(engine, seq)
    decode(engine, [seq], 7)
    engine.release(seq)
    turn = sequence((*seq.prompt, *seq.ids, 1, 2, 3))
    assert ids_of(engine, turn) == computed_afresh(loaded, text, turn)
    assert turn.cached == 26  # the last sampled token was not computed, or was removed again


@AHEAD
@pytest.mark.parametrize("raw", MIXTURE, ids=str)
@pytest.mark.parametrize("prefix", MODES)
def test_preemption_changes_no_token(
    loaded: LoadedModel, text: ChatTokenizer, prefix: str, raw: dict[str, Any], lookahead: bool
) -> None:
    engine = engine_of(loaded, text, prefix=prefix, lookahead=lookahead)
    seq = sequence(prompt_of(21), **raw)
    enter(engine, seq)
    for steps in (1, 5):
        decode(engine, [seq], steps)
        engine.release(seq)
        seq.preempt()
        engine.admit(seq)
        assert (seq.submitted > 0) == (prefix != "off")
        read(engine, seq, 4)
    decode(engine, [seq], STEPS - 6)
    assert seq.ids == computed_afresh(loaded, text, seq)


@AHEAD
@pytest.mark.parametrize("had", [1, 5])
def test_a_resume_gives_the_same_tokens(
    loaded: LoadedModel, text: ChatTokenizer, had: int, lookahead: bool
) -> None:
    seq = sequence(prompt_of(21), **MIXTURE[1])
    expected = computed_afresh(loaded, text, seq)
    seq.ids += expected[:had]
    assert ids_of(engine_of(loaded, text, lookahead=lookahead), seq) == expected


@AHEAD
def test_a_failed_row_does_not_change_other_rows(
    loaded: LoadedModel, text: ChatTokenizer, lookahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(loaded, text, lookahead=lookahead)
    rows = [sequence(prompt_of(9 + salt, salt)) for salt in range(3)]
    for seq in rows:
        enter(engine, seq)
    decode(engine, rows, 3)
    draw = sampler.sample_batch

    def damaged(logits: Any, *others: Any) -> Any:
        return draw(mx.where(mx.arange(3)[:, None] == 1, mx.nan, logits), *others)

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "sample_batch", damaged)
        with pytest.raises(SequenceFailed) as failed:
            decode(engine, rows, 3)
    assert failed.value.sequence is rows[1]
    engine.release(rows.pop(1))
    decode(engine, rows, STEPS - len(rows[0].ids))
    assert [seq.ids for seq in rows] == [computed_afresh(loaded, text, seq) for seq in rows]


def test_a_failed_step_leaves_nothing_behind(
    loaded: LoadedModel, text: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, hit, beside = engine_of(loaded, text), sequence(prompt_of(20)), sequence(prompt_of(30))
    for seq in (hit, beside):
        enter(engine, seq)
    decode(engine, [hit, beside], 3)

    def fails(*arrays: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="malloc"):
        patch.setattr(mx, "eval", fails)
        decode(engine, [hit])
    assert engine.lost(hit) and not engine.lost(beside)
    engine.release(hit)
    assert engine.memory().prefix == 0
    decode(engine, [beside], STEPS - 3)
    assert beside.ids == computed_afresh(loaded, text, beside)
    again = sequence(prompt_of(20))
    assert ids_of(engine, again) == computed_afresh(loaded, text, again)


def one_state(loaded: LoadedModel) -> int:
    """Returns the bytes of one snapshot of all layers."""
    return sum(
        4 * int(np.prod(shape))
        for cache in loaded.folder.plan.caches
        for shape in getattr(cache, "shapes", ())
    )


def test_a_budget_smaller_than_a_snapshot_keeps_nothing(
    loaded: LoadedModel, text: ChatTokenizer
) -> None:
    state = one_state(loaded)
    token = sum(cache.token_bytes(4) for cache in loaded.folder.plan.caches)
    for budget, cached in ((state, 0), (state + 19 * token, 0), (state + 40 * token, 19)):
        engine = engine_of(loaded, text, prefix_bytes=budget)
        enter(engine, seq := sequence(prompt_of(20)))
        engine.release(seq)
        again = sequence(prompt_of(20))
        assert ids_of(engine, again) == computed_afresh(loaded, text, again)
        assert again.cached == (19 if budget >= state + 19 * token else cached)
        assert engine.memory().prefix <= budget


def test_a_row_stays_within_its_reserved_bytes(loaded: LoadedModel, text: ChatTokenizer) -> None:
    engine, seq = engine_of(loaded, text), sequence(prompt_of(20))
    enter(engine, seq)
    decode(engine, [seq], 4)
    shape = engine.inspect().layout.store.new_row().shape
    (row,) = engine.inspect().rows.values()
    assert row.nbytes <= shape.fixed_bytes + 256 * shape.token_bytes
    assert shape.fixed_bytes == 3 * one_state(loaded)
    engine.release(seq)
    engine.prefix.clear()
    assert (engine.memory().kv, engine.memory().prefix) == (0, 0)


def test_warm_up_leaves_nothing_behind(loaded: LoadedModel, text: ChatTokenizer) -> None:
    engine = engine_of(loaded, text)
    engine.warm_up()
    assert (engine.memory().kv, engine.memory().prefix) == (0, 0)
    assert engine.blocks.capacity > 0


def test_deterministic_is_refused(loaded: LoadedModel) -> None:
    exact = load(loaded.folder, deterministic=True)
    with pytest.raises(ModelLoadFailed, match="deterministic = true is not built"):
        model_engine(exact)


@AHEAD
@pytest.mark.parametrize(("seed", "prefix"), [(1, "tree"), (2, "tree"), (3, "single")])
def test_requests_in_random_order_get_the_right_tokens(
    loaded: LoadedModel, text: ChatTokenizer, seed: int, prefix: str, lookahead: bool
) -> None:
    budget = 6 * one_state(loaded) if seed == 2 else 0
    engine = engine_of(loaded, text, prefix=prefix, lookahead=lookahead, prefix_bytes=budget)
    workload = RandomWorkload(engine, seed)
    for _ in range(2000):
        workload.step()
        if not (workload.waiting or workload.prefilling or workload.decoding):
            break
    for seq in workload.every:
        assert seq.ids == computed_afresh(loaded, text, seq)
    engine.prefix.clear()
    assert (engine.memory().kv, engine.memory().prefix) == (0, 0)
    if prefix == "tree":
        assert engine.prefix.hits > 3
