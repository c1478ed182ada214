"""Compares log-probabilities of prompts with those of one forward pass over the whole prompt.

The tested engines read the prompts in chunks of various sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from support.engine_steps import ScheduledSteps
from support.numpy_llama import DEMO, Numbers, demo_logprobs
from support.worker_checkpoints import GLM, QWEN3_NEXT, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.engine import prompt_logprobs  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence, TokenLogprob  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

LAYOUTS = ("rows", "slabs", "pool")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(inspect(DEMO), dtype=mx.float32)


@pytest.fixture(scope="module")
def expected() -> Numbers:
    return demo_logprobs(prompt_of(300))


def prompt_of(size: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(5).integers(1, 4096, 300)[:size].tolist())


def sequence(prompt: tuple[int, ...], reported: int = 1, top: int = 3, **more: Any) -> Sequence:
    options = Options.parse({"temperature": 0.0, "ignore_eos": True, "prompt_logprobs": top})
    return Sequence(b"0" * 16, 1, prompt, options, 0, 5, reported=reported, **more)


def plain(prompt: tuple[int, ...], **more: Any) -> Sequence:
    options = Options.parse({"temperature": 0.0, "ignore_eos": True})
    return Sequence(b"1" * 16, 1, prompt, options, 0, 5, **more)


class Reports(ScheduledSteps):
    """Runs scheduled steps, and collects the log-probabilities of prompts by sequence."""

    def __init__(self, engine: ModelEngine) -> None:
        super().__init__(engine)
        self.found: dict[Sequence, list[TokenLogprob]] = {}
        collect = engine.collect

        def noted() -> Any:
            got = collect()
            for report in got.prompts:
                assert report.first == report.sequence.reported, (
                    "no token is reported twice, none lost"
                )
                self.found.setdefault(report.sequence, []).extend(report.logprobs)
                report.sequence.reported += len(report.logprobs)
            return got

        engine.collect = noted  # type: ignore[method-assign]

    def run(self, seq: Sequence, tokens: int = 1) -> list[TokenLogprob]:
        while len(seq.ids) < tokens:
            self.step()
        return self.found.get(seq, [])


@pytest.fixture
def engines(demo: LoadedModel) -> Iterator[Any]:
    """Yields a function that makes engines of the demo model; closes them afterwards."""
    open_engines: list[ModelEngine] = []

    def make(**settings: Any) -> ModelEngine:
        open_engines.append(model_engine(demo, **{"lookahead": False, "blocks": 24, **settings}))
        return open_engines[-1]

    yield make
    for engine in open_engines:
        engine.close()


@pytest.fixture(scope="module")
def plain_ids(demo: LoadedModel) -> Callable[[str, int], list[int]]:
    """Returns the first three ids after some prompt tokens, without prompt log-probabilities."""

    @functools.cache
    def found(layout: str, size: int) -> list[int]:
        engine = model_engine(demo, lookahead=False, blocks=24, layout=layout, prefix="off")
        seq, steps = plain(prompt_of(size)), ScheduledSteps(engine)
        steps.admit(seq)
        while len(seq.ids) < 3:
            steps.step()
        engine.close()
        return seq.ids[:3]

    return found


def check(found: list[TokenLogprob], prompt: tuple[int, ...], expected: Numbers) -> None:
    """Checks that `found` are the log-probabilities of the prompt's last tokens."""
    begin = len(prompt) - len(found)
    for number, entry in enumerate(found, begin):
        row = expected[number - 1]
        assert entry.logprob == pytest.approx(row[prompt[number]], abs=TOLERANCE)
        best = np.sort(row)[::-1][: len(entry.top)]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=TOLERANCE)
        for token, value in entry.top:
            assert value == pytest.approx(row[token], abs=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [2, 7, 64, 255, 256, 257, 2048])
def test_equal_to_a_whole_pass_at_every_size_of_chunks(
    engines: Any,
    expected: Numbers,
    plain_ids: Callable[[str, int], list[int]],
    layout: str,
    chunk: int,
) -> None:
    engine = engines(layout=layout, batch=chunk)
    steps, seq = Reports(engine), sequence(prompt_of(60 if chunk < 64 else 300))
    steps.admit(seq)
    logprobs = steps.run(seq, 3)
    assert len(logprobs) == len(seq.prompt) - 1
    check(logprobs, seq.prompt, expected)
    assert seq.ids[:3] == plain_ids(layout, len(seq.prompt))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lookahead", [False, True])
def test_beside_streams_and_other_reports(
    engines: Any, expected: Numbers, layout: str, lookahead: bool
) -> None:
    steps = Reports(engines(layout=layout, batch=64, lookahead=lookahead))
    stream, twin = plain(prompt_of(40)), sequence(prompt_of(120), top=0)
    whole = sequence(prompt_of(300))
    for seq in (stream, twin, whole):
        steps.admit(seq)
    steps.run(whole)
    check(steps.found[whole], whole.prompt, expected)
    check(steps.found[twin], twin.prompt, expected)
    assert {len(entry.top) for entry in steps.found[twin]} == {0}
    assert stream not in steps.found and len(steps.found[whole]) == 299


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cached_prefix_is_read_again_as_far_as_it_is_reported(
    engines: Any, expected: Numbers, layout: str
) -> None:
    steps = Reports(engines(layout=layout))
    first = plain(prompt_of(280))
    steps.admit(first)
    while len(first.ids) < 2:
        steps.step()
    steps.leave(first)
    for reported, cached in ((1, 0), (2, 1), (100, 99), (271, 270), (300, 299)):
        seq = sequence(prompt_of(300), reported)
        steps.admit(seq)
        assert seq.cached == cached, "what was reported may come from the cache, and no more"
        logprobs = steps.run(seq)
        assert len(logprobs) == 300 - reported
        check(logprobs, seq.prompt, expected)
        steps.leave(seq)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_preemption_nothing_is_reported_twice(
    engines: Any, expected: Numbers, layout: str
) -> None:
    engine = engines(layout=layout, batch=64, prefix="off")
    steps, seq = Reports(engine), sequence(prompt_of(300))
    steps.admit(seq)
    for _ in range(3):
        steps.step()
    assert 1 < seq.reported < 300
    steps.preempt(seq)
    steps.admit(seq)
    check(steps.run(seq), seq.prompt, expected)
    assert len(steps.found[seq]) == 299


def test_logits_are_made_of_few_lines_at_a_time(
    demo: LoadedModel, engines: Any, expected: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are computed for 13 tokens at a time; the last group may have fewer tokens."""
    monkeypatch.setattr(prompt_logprobs, "LOGIT_BYTES", 4 * 4096 * 13)
    sizes: list[int] = []
    logits_of = demo.model.logits_of

    def noted(states: Any) -> Any:
        sizes.append(states.shape[0])
        return logits_of(states)

    monkeypatch.setattr(demo.model, "logits_of", noted)
    steps, seq = Reports(engines()), sequence(prompt_of(300))
    steps.admit(seq)
    check(steps.run(seq), seq.prompt, expected)
    # 299 reported tokens, and the line that draws the first token.
    assert max(sizes) == 13 and sum(sizes) == 299 + 1
    assert prompt_logprobs.logit_bytes(4096, 2048) == 3 * 4 * 4096 * 13


@pytest.mark.parametrize("changes", [GLM, {**QWEN3_NEXT, "num_hidden_layers": 2}])
def test_models_with_latents_and_states(tmp_path: Any, changes: dict[str, Any]) -> None:
    """Chunks give the log-probabilities of a pass over the whole prompt."""
    loaded = load(inspect(write_checkpoint(tmp_path / "model", **changes)))
    prompt = tuple(np.random.default_rng(1).integers(0, 256, 90).tolist())
    reports = []
    for batch in (16, 1024):
        engine = model_engine(loaded, lookahead=False, batch=batch, blocks=24)
        steps, seq = Reports(engine), sequence(prompt)
        steps.admit(seq)
        reports.append(steps.run(seq))
        steps.leave(seq)
        engine.close()
    assert [len(report) for report in reports] == [89, 89]
    for left, right in zip(*reports, strict=True):
        assert left.logprob == pytest.approx(right.logprob, abs=TOLERANCE)


def test_a_prompt_whose_logits_are_no_numbers_fails_alone(
    demo: LoadedModel, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        demo.model, "logits_of", lambda states: mx.full((len(states), 4096), float("nan"))
    )
    engine = engines()
    engine.admit(seq := sequence(prompt_of(40)))
    steps = ScheduledSteps(engine)
    steps.admit(seq)
    with pytest.raises(Exception, match="the logits after 1 tokens of the prompt are no numbers"):
        steps.step()
