"""Tests Llama 3.2 Vision, whose layers attend to images by cross-attention."""

from __future__ import annotations

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from support import seeing_models as seeing  # noqa: E402
from support.engine_steps import decode, read_chunk  # noqa: E402
from worker.models.seeing_cases import MLLAMA, Case  # noqa: E402
from worker.models.seeing_runs import engine_of, run, sequence  # noqa: E402


@pytest.fixture(scope="module")
def case() -> Case:
    return MLLAMA


def test_a_prompt_may_end_with_an_image(loaded: Any, text: ChatTokenizer) -> None:
    answers = []
    for chunk in (None, 1):
        engine = engine_of(loaded, text)
        seq = sequence(text, ("x", 0))
        seq.prompt = seq.prompt[: seq.media[0].end]
        run(engine, seq, chunk)
        answers.append(seq.ids)
    assert answers[0] == answers[1]


def test_a_cached_prefix_does_not_read_without_its_image(
    loaded: Any, text: ChatTokenizer, expected: Any
) -> None:
    """Inputs after an image attend to the image's features.

    If these were evicted, a row from the prefix cache waits until the image is encoded again.
    """
    engine = engine_of(loaded, text)
    run(engine, first := sequence(text, seeing.PROMPTS[0]))
    engine.release(first)
    engine.encoded.clear()
    again = sequence(text, seeing.PROMPTS[0], b"y")
    engine.admit(again)
    assert again.submitted > again.media[0].start
    assert engine.clip(again, 100) == 0, "it waits for the image"
    assert [span.image for span in again.needed_images] == [again.media[0].image]
    engine.encode(again.images[again.media[0].image], ())
    while again.unread > 1:
        assert read_chunk(engine, again, None)
    decode(engine, [again], seeing.STEPS)
    assert again.ids == expected["ids_0"].tolist()
