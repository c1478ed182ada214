"""Tests checks of drafts: one pass gives a row the same tokens as passes of one token each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.engine_steps import decode, decode_spans, enter
from support.worker_checkpoints import QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.config.schema import Counting  # noqa: E402
from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.engine import prompt_logprobs  # noqa: E402
from mlxpool.worker.engine.counting_engine import CountingEngine  # noqa: E402
from mlxpool.worker.engine.flight import Flight  # noqa: E402
from mlxpool.worker.sampling import sampler  # noqa: E402
from mlxpool.worker.sampling.batch import (  # noqa: E402
    ALL_OPTIONS,
    NO_TOKEN,
    SampledNumbers,
    accepted_tokens,
)
from mlxpool.worker.scheduling.sequence import Sequence, SequenceFailed  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "repeat_penalty": 1.6, "repeat_last_n": 4},
    {"temperature": 1.2, "top_k": 0, "frequency_penalty": 0.9, "repeat_last_n": -1},
    {"temperature": 0.0, "presence_penalty": 0.7, "repeat_last_n": 1},
]
TOKENS = 40
LAYOUTS = ("rows", "slabs", "pool")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(inspect(write_checkpoint(tmp_path_factory.mktemp("model"))))


def sequence(number: int, size: int = 250) -> Sequence:
    """Returns a sequence with a random prompt of `size` tokens; `number` is the seed.

    The prompt ends shortly before a block does, so that drafts begin blocks. The row gives back the
    blocks of wrong drafts.
    """
    prompt = tuple(np.random.default_rng(number).integers(0, 256, size).tolist())
    options = Options.parse({**OPTIONS[number % len(OPTIONS)], "ignore_eos": True})
    return Sequence(bytes([number] * 16), 1, prompt, options, number, TOKENS)


def answers(loaded: LoadedModel, layout: str) -> list[list[Any]]:
    """Returns each sequence's tokens, with log-probabilities, from passes of one token each."""
    engine = model_engine(loaded, layout=layout, prefix="off", lookahead=False)
    tokens = []
    for number in range(len(OPTIONS)):
        seq = sequence(number)
        enter(engine, seq)
        tokens.append(decode(engine, [seq], TOKENS))
        engine.release(seq)
    return tokens


def drafts_of(seq: Sequence, answer: list[Any], draw: random.Random) -> tuple[int, ...]:
    """Returns up to five of the next tokens of an answer; half of the time one token is wrong."""
    right = [drawn.token for drawn in answer[len(seq.ids) :][: draw.choice([0, 1, 3, 5])]]
    if right and draw.random() < 0.5:
        right[draw.randrange(len(right))] ^= 1
    return tuple(right)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checked_drafts_give_the_tokens_of_single_draws(loaded: LoadedModel, layout: str) -> None:
    """Tests right and wrong drafts beside a decode row and a prompt, in any order of the spans."""
    draw = random.Random(layout)
    expected = answers(loaded, layout)
    engine = model_engine(loaded, layout=layout, prefix="off", lookahead=False)
    rows = [sequence(number) for number in range(len(OPTIONS))]
    for seq in rows:
        enter(engine, seq)
    late, passes, most = sequence(1, 90), 0, 0
    engine.admit(late)
    while any(len(seq.ids) < TOKENS - 6 for seq in rows):
        spans = []
        for seq, answer in zip(rows, expected, strict=True):
            if len(seq.ids) >= TOKENS - 6:
                continue
            spans.append(Span.check(seq, drafts_of(seq, answer, draw)))
        if late.submitted < 80:
            spans.append(Span(late, late.submitted, 20, 0))
        draw.shuffle(spans)
        engine.submit(spans)
        before = {seq: len(seq.ids) for seq in rows}
        for drawn in engine.collect().drawn:
            want = expected[rows.index(drawn.sequence)][len(drawn.sequence.ids)]
            assert drawn.token == want.token
            assert (drawn.logprob is None) == (want.logprob is None)
            if drawn.logprob is not None:
                assert drawn.logprob.logprob == pytest.approx(want.logprob.logprob, abs=1e-3)
                assert [token for token, _ in drawn.logprob.top] == [t for t, _ in want.logprob.top]
            drawn.sequence.ids.append(drawn.token)
        for seq in rows:
            most = max(most, len(seq.ids) - before[seq])
            assert seq.awaited == 0 and seq.submitted == seq.length - 1
            assert engine.inspect().rows[seq].offset == seq.submitted and not engine.lost(seq)
        passes += 1
    assert most == 6 and passes < TOKENS - 6
    assert late.submitted == 80
    for seq, answer in zip(rows, expected, strict=True):  # the rows go on as if they had drawn each
        decode(engine, [seq], TOKENS - len(seq.ids))
        assert seq.ids == [sampled.token for sampled in answer]
        engine.release(seq)
    engine.release(late)
    assert engine.memory().kv == 0


def test_draws_of_many_lines_are_divided(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are computed for at most seven inputs at a time, so that their memory is bounded.

    The tokens are the same as in passes of one token each.
    """
    most, taken = 7, []
    sample = sampler.sample_batch

    def noted(logits: Any, *others: Any) -> Any:
        taken.append(logits.shape[0])
        return sample(logits, *others)

    monkeypatch.setattr(prompt_logprobs, "LOGIT_BYTES", 4 * loaded.folder.plan.vocab_size * most)
    monkeypatch.setattr(sampler, "sample_batch", noted)
    expected = answers(loaded, "slabs")
    engine = model_engine(loaded, layout="slabs", prefix="off", lookahead=False)
    rows = [sequence(number) for number in range(len(OPTIONS))]
    for seq in rows:
        enter(engine, seq)
    taken.clear()
    right = [tuple(drawn.token for drawn in answer[:5]) for answer in expected]
    engine.submit([Span.check(seq, drafts) for seq, drafts in zip(rows, right, strict=True)])
    result = engine.collect()
    assert len(taken) >= 4 and max(taken) <= most and sum(taken) == 6 * len(rows)
    for seq, answer in zip(rows, expected, strict=True):
        got = [drawn for drawn in result.drawn if drawn.sequence is seq]
        assert [drawn.token for drawn in got] == [drawn.token for drawn in answer[:6]]
        for actual, want in zip(got, answer, strict=False):
            assert (actual.logprob is None) == (want.logprob is None)
            if actual.logprob is not None:
                assert actual.logprob.logprob == pytest.approx(want.logprob.logprob, abs=1e-3)
                assert [token for token, _ in actual.logprob.top] == [
                    t for t, _ in want.logprob.top
                ]


def test_the_memory_of_draws_with_drafts_is_counted(tmp_path: Any) -> None:
    """If all rows check drafts with every option, a pass stays within the measured memory."""
    size, most, depth = 30_000, 60, 15
    large = load(inspect(write_checkpoint(tmp_path, vocab_size=size)))
    settings: dict[str, Any] = {"layout": "slabs", "prefix": "off", "max_sequences": 4, "batch": 16}
    plain, engine = (model_engine(large, **settings) for _ in range(2))
    plain.warm_up()
    engine.expect_drafts(most)
    engine.warm_up()
    more = engine.inspect().budget.step - plain.inspect().budget.step
    assert (
        plain.blocks.capacity - engine.blocks.capacity >= more // engine.inspect().budget.block - 1
    )
    rows = []
    for number in range(4):
        options = replace(ALL_OPTIONS, temperature=1.0, ignore_eos=True)
        seq = Sequence(bytes([number] * 16), 1, (1, 2, 3, 4), options, number, 60)
        enter(engine, seq)
        rows.append(seq)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    engine.submit([Span.check(seq, (5,) * depth) for seq in rows])
    engine.collect()
    taken = mx.get_peak_memory() - before
    assert plain.inspect().budget.step < taken <= engine.inspect().budget.step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_leaves_during_a_check_keeps_no_draft(loaded: LoadedModel, layout: str) -> None:
    """The prefix cache keeps none of the drafts, and the other row gets its tokens."""
    engine = model_engine(loaded, layout=layout, lookahead=False)
    leaving, beside = sequence(0, 60), sequence(1, 60)
    for seq in (leaving, beside):
        enter(engine, seq)
    engine.submit([Span.check(leaving, (1, 2, 3)), Span.check(beside, (4,))])
    engine.release(leaving)
    leaving.return_to_waiting()
    result = engine.collect()
    assert {token.sequence for token in result.drawn} == {beside} and not result.failed
    assert (leaving.awaited, beside.awaited, beside.submitted) == (0, 0, 59 + len(result.drawn))
    again = Sequence(b"", 1, (*leaving.prompt, 1, 2, 3, 4), leaving.options, 0, 4)
    engine.admit(again)
    assert again.cached == 60


def test_passes_ahead_take_tokens_beside_a_check(loaded: LoadedModel) -> None:
    """A pass submitted during a check takes its input tokens from the pass in flight."""
    expected = answers(loaded, "pool")
    engine = model_engine(loaded, layout="pool", prefix="off", lookahead=True)
    rows = [sequence(number) for number in (0, 1, 3)]
    for seq in rows:
        enter(engine, seq)
    drafts = tuple(sampled.token for sampled in expected[0][:2])
    engine.submit([Span.check(rows[0], drafts), *decode_spans(rows[1:])])
    assert [seq.awaited for seq in rows] == [3, 1, 1]
    engine.submit(decode_spans(rows[:0:-1]))
    for _ in range(2):
        for drawn in engine.collect().drawn:
            drawn.sequence.ids.append(drawn.token)
    for seq, number, count in zip(rows, (0, 1, 3), (3, 2, 2), strict=True):
        assert seq.ids == [sampled.token for sampled in expected[number][:count]]
        assert seq.awaited == 0


def test_the_first_wrong_draft_ends_what_is_accepted() -> None:
    seq = sequence(1)
    numbers = SampledNumbers([9, 5, 6, 7, 8])

    def accepted(*drafts: int) -> list[int]:
        return [drawn.token for drawn in accepted_tokens(numbers, seq, 1, drafts)]

    assert (accepted(), accepted(5), accepted(5, 6, 7)) == ([5], [5, 6], [5, 6, 7, 8])
    assert (accepted(0, 6, 7), accepted(5, 0, 7), accepted(5, 6, 0)) == ([5], [5, 6], [5, 6, 7])
    broken = SampledNumbers([9, 5, NO_TOKEN, 7, 8])
    assert [drawn.token for drawn in accepted_tokens(broken, seq, 1, (0, 6, 7))] == [5]
    # A token that could not be drawn fails as the first token of the next pass.
    assert [drawn.token for drawn in accepted_tokens(broken, seq, 1, (5, 6, 7))] == [5]
    with pytest.raises(SequenceFailed, match="are no numbers"):
        accepted_tokens(broken, seq, 2, (6, 7))


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (lambda seq: Span(seq, 59, 2, 1, drafts=(1,)), "1 drafts draws 1 tokens"),
        (lambda seq: Span(seq, 58, 3, 2, drafts=(1,)), "1 drafts have 3 inputs"),
        (lambda seq: Span(seq, 0, 9, 9), "0 drafts draws 9 tokens"),
        (lambda seq: Span(seq, 0, 9, 1, hidden=True), "not both"),
    ],
)
def test_spans_that_cannot_be_computed_are_refused(
    loaded: LoadedModel, span: Any, words: str
) -> None:
    """After a refused span every running sequence still has its row."""
    engine, seq, beside = model_engine(loaded, lookahead=True), sequence(0, 60), sequence(1, 60)
    for row in (seq, beside):
        enter(engine, row)
    engine.submit(decode_spans([beside]))
    with pytest.raises(ValueError, match=words):
        engine.submit([span(seq)])
    with pytest.raises(ValueError, match="1 tokens in flight"):
        engine.submit([Span.check(beside, (1,))])
    assert len(engine.collect().drawn) == 1 and not engine.lost(seq) and not engine.lost(beside)


def test_engines_that_check_no_drafts_say_so(tmp_path: Any) -> None:
    folder = write_checkpoint(tmp_path, **{**QWEN3_NEXT, "num_hidden_layers": 2})
    engine, seq = model_engine(load(inspect(folder)), lookahead=False), sequence(0, 60)
    enter(engine, seq)
    with pytest.raises(ValueError, match="windows and states cannot go back"):
        engine.submit([Span.check(seq, (1,))])
    counting = CountingEngine(Counting(), 1000)
    counting.admit(seq)
    with pytest.raises(ValueError, match="the counting model cannot check drafts"):
        counting.submit([Span.check(seq, (1,))])
    with pytest.raises(ValueError, match="the counting model cannot give hidden states"):
        counting.submit([Span(seq, 0, 4, 0, hidden=True)])
    with pytest.raises(NotImplementedError, match="draws tokens in the pass itself"):
        counting.forward(decode_spans([seq]))


def test_the_time_of_a_pass_that_is_compiled_says_nothing_of_others(loaded: LoadedModel) -> None:
    """Every 64 tokens, a row on a CPU needs a newly compiled pass.

    The time of this pass must not be used as a measurement.
    """
    engine = model_engine(loaded, layout="slabs", prefix="off", lookahead=False)
    rows = [sequence(0, 62), sequence(1, 62)]
    for seq in rows:
        enter(engine, seq)

    def fresh(spans: list[Span]) -> bool:
        is_fresh = engine.submit(spans)
        for drawn in engine.collect().drawn:
            drawn.sequence.ids.append(drawn.token)
        return is_fresh

    fresh(decode_spans(rows))
    assert [fresh(decode_spans(rows)) for _ in range(4)] == [False, False, True, False]
    for seq in rows:
        engine.release(seq)


def test_what_compiles_in_a_pass_is_told_before_it_is_built(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of a new kind, and passes of a known kind with new constants, are reported."""
    engine = model_engine(loaded, layout="slabs", prefix="off", lookahead=False)
    rows = [sequence(0, 62), sequence(1, 62)]
    seen: list[str] = []
    for seq in rows:
        enter(engine, seq)
    engine.report_compiles(lambda: seen.append("told"))
    build, compile = engine.inspect().layout.step, mx.compile

    def built(*args: Any) -> Any:
        seen.append("built")
        return build(*args)

    def compiled(function: Any) -> Any:
        seen.append("compiled")
        return compile(function)

    monkeypatch.setattr(engine.inspect().layout, "step", built)
    monkeypatch.setattr(mx, "compile", compiled)

    def step(spans: list[Span]) -> tuple[bool, list[str]]:
        seen.clear()
        fresh = engine.submit(spans)
        events = [*dict.fromkeys(seen)]
        for drawn in engine.collect().drawn:
            drawn.sequence.ids.append(drawn.token)
        return fresh, events

    new, known = (True, ["told", "built", "compiled"]), (False, ["built"])
    longer = (True, ["built", "told", "compiled"])  # the rows enter another 64 tokens
    assert [step(decode_spans(rows)) for _ in range(5)] == [new, known, known, longer, known]
    for seq in rows:
        engine.release(seq)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_compiles_in_a_pass_that_was_not_told(
    loaded: LoadedModel, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model_engine(loaded, layout=layout, prefix="off", lookahead=False)
    rows, seen = [sequence(0, 60), sequence(1, 250)], list[str]()
    for seq in rows:
        engine.admit(seq)
    compile = mx.compile

    def compiled(function: Any) -> Any:
        seen.append("compiled")
        return compile(function)

    engine.report_compiles(lambda: seen.append("told"))
    monkeypatch.setattr(mx, "compile", compiled)
    fresh_flags = []
    for number in range(12):
        seen.clear()
        if number < 2:
            spans = [Span(seq, 0, seq.length, 1) for seq in rows[number : number + 1]]
        else:
            spans = decode_spans(rows)
        fresh = engine.submit(spans)
        assert fresh == ("told" in seen) and seen[:1] != ["compiled"]
        fresh_flags.append(fresh)
        for drawn in engine.collect().drawn:
            drawn.sequence.ids.append(drawn.token)
    assert fresh_flags[:3] == [True, True, True] and fresh_flags.count(True) < 6
    for seq in rows:
        engine.release(seq)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fails_in", ["submit", "collect"])
def test_a_pass_that_failed_has_compiled_nothing(
    loaded: LoadedModel, layout: str, fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure the next pass of the same kind is reported as compiling.

    A pass of a kind that was evaluated before is not reported.
    """
    engine = model_engine(loaded, layout=layout, prefix="off", lookahead=False)
    known, new = sequence(0, 40), sequence(1, 40)
    reports: list[str] = []
    engine.report_compiles(lambda: reports.append("told"))

    def decodes(*rows: Sequence) -> bool:
        reports.clear()
        fresh = engine.submit(decode_spans(list(rows)))
        for drawn in engine.collect().drawn:
            drawn.sequence.ids.append(drawn.token)
        assert fresh == bool(reports)
        return fresh

    def again(*rows: Sequence) -> None:
        for seq in rows:
            engine.release(seq)
            seq.return_to_waiting()
            enter(engine, seq)

    for seq in (known, new):
        enter(engine, seq)
    assert [decodes(known), decodes(known)] == [True, False]

    def fails(*_: Any) -> Any:
        raise RuntimeError("no memory is left")

    with monkeypatch.context() as patch:
        if fails_in == "submit":
            patch.setattr(engine.pipeline, "_results", fails)
        else:
            patch.setattr(Flight, "wait", fails)
        with pytest.raises(RuntimeError):
            decodes(known, new)
    again(known, new)
    assert [decodes(known, new), decodes(known, new), decodes(known)] == [True, False, False]
    for seq in (known, new):
        engine.release(seq)


def test_the_pass_in_flight_waits_for_one_that_compiles(loaded: LoadedModel) -> None:
    """A pass that compiles delays the end of the pass in flight, so neither time is typical.

    Both passes are marked `fresh`, and their times are not used as measurements.
    """
    engine = model_engine(loaded, layout="slabs", prefix="off", lookahead=True)
    rows = [sequence(0, 30), sequence(1, 40)]
    for seq in rows:
        enter(engine, seq)
    for fresh in (True, False):
        assert engine.submit(decode_spans(rows)) == fresh
        for drawn in engine.collect().drawn:
            drawn.sequence.ids.append(drawn.token)
    assert not engine.submit(decode_spans(rows))
    assert [flight.fresh for flight in engine.inspect().flights] == [False]
    assert engine.submit([Span(rows[0], rows[0].submitted, 1, 1)])
    assert [flight.fresh for flight in engine.inspect().flights] == [True, True]
    while engine.in_flight:
        engine.collect()
    for seq in rows:
        engine.release(seq)
