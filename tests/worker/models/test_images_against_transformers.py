"""Compares three models that read images with stored answers of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from support import seeing_models as seeing  # noqa: E402
from support.engine_steps import decode  # noqa: E402
from worker.models.seeing_cases import CASES, Case  # noqa: E402
from worker.models.seeing_runs import engine_of, run, sequence  # noqa: E402

LOGPROB_TOLERANCE = 1e-4
LAYOUTS = [
    pytest.param(case, layout, id=f"{case.name}-{layout}")
    for case in CASES
    for layout in case.layouts
]


def test_features_are_those_of_transformers(
    case: Case, loaded: Any, text: ChatTokenizer, expected: Any
) -> None:
    engine = engine_of(loaded, text)
    seq = sequence(text, seeing.PROMPTS[1])
    for number in range(2):
        image = seq.images[seq.media[number].image]
        engine.encode(image, ())
        actual = case.features(np.array(engine.encoded.get(image.key)))
        wanted = expected[f"features_{number}"]
        assert actual.shape == wanted.shape
        assert np.abs(actual - wanted).max() < case.feature_tolerance


@pytest.mark.parametrize("number", range(len(seeing.PROMPTS)))
def test_prompts_have_the_inputs_of_transformers(
    case: Case, text: ChatTokenizer, expected: Any, number: int
) -> None:
    seq = sequence(text, seeing.PROMPTS[number])
    assert all(span.crossed == case.crossed for span in seq.media)
    slots = {place for span in seq.media for place in range(span.start, span.end)}
    ids = [case.slot if place in slots else item for place, item in enumerate(seq.prompt)]
    assert ids == expected[f"prompt_{number}"].tolist()


@pytest.mark.parametrize("chunk", [None, 7, 1])
@pytest.mark.parametrize(("case", "layout"), LAYOUTS, indirect=["case"])
@pytest.mark.parametrize("number", range(len(seeing.PROMPTS)))
def test_answers_are_those_of_transformers(
    loaded: Any, text: ChatTokenizer, expected: Any, number: int, layout: str, chunk: int | None
) -> None:
    engine = engine_of(loaded, text, layout=layout)
    seq = sequence(text, seeing.PROMPTS[number])
    logprobs = run(engine, seq, chunk)
    assert seq.ids == expected[f"ids_{number}"].tolist()
    assert np.abs(logprobs - expected[f"logprobs_{number}"]).max() < LOGPROB_TOLERANCE


@pytest.mark.parametrize(("case", "layout"), LAYOUTS, indirect=["case"])
def test_streams_with_and_without_images_share_passes(
    loaded: Any, text: ChatTokenizer, layout: str
) -> None:
    prompts = (seeing.PROMPTS[0], ("no image, only text",), seeing.PROMPTS[1])
    alone = []
    for prompt in prompts:
        seq = sequence(text, prompt)
        run(engine_of(loaded, text, layout=layout), seq)
        alone.append(seq.ids)
    engine = engine_of(loaded, text, layout=layout)
    together = [sequence(text, prompt, bytes([65 + n])) for n, prompt in enumerate(prompts)]
    for seq in together:
        run(engine, seq, steps=1)
    decode(engine, together, seeing.STEPS - 1)
    assert [seq.ids for seq in together] == alone


@pytest.mark.parametrize(("case", "layout"), LAYOUTS, indirect=["case"])
def test_a_second_conversation_finds_the_image_and_the_prefix(
    loaded: Any, text: ChatTokenizer, expected: Any, layout: str
) -> None:
    engine = engine_of(loaded, text, layout=layout)
    first = sequence(text, seeing.PROMPTS[0])
    run(engine, first)
    engine.release(first)
    again = sequence(text, seeing.PROMPTS[0], b"y")
    run(engine, again)
    assert engine.encoded.encoded == 1
    assert again.cached >= again.media[0].end, "the prefix with the image was found"
    assert again.ids == first.ids == expected["ids_0"].tolist()


def test_another_image_in_the_same_place_is_another_prefix(
    loaded: Any, text: ChatTokenizer
) -> None:
    engine = engine_of(loaded, text)
    run(engine, first := sequence(text, ("Look: ", 0, "?")))
    engine.release(first)
    run(engine, other := sequence(text, ("Look: ", 0, "?"), b"z", pictures=[1]))
    assert other.cached <= other.media[0].start == first.media[0].start
    assert engine.encoded.encoded == 2
    alone = sequence(text, ("Look: ", 0, "?"), b"z", pictures=[1])
    run(engine_of(loaded, text, prefix="off"), alone)
    assert other.ids == alone.ids != first.ids
