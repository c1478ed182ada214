"""Tests `work` messages with images: the sequence's inputs have slots for the images."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, PoolError
from mlxpool.common.protocol.to_worker import Work
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.engine.counting_engine import CountingText
from mlxpool.worker.media.spans import is_slot
from mlxpool.worker.preparation.jobs import Encode, perform
from mlxpool.worker.process.prompts import Arrival, prepare_run
from mlxpool.worker.prompt.text_model import Opened
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import inspect
from support import seeing_models as seeing

ID = bytes(16)
FILES = [seeing.file_of(seeing.picture(number)) for number in range(2)]
COUNT = 16  # inputs of an image


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer.from_folder(inspect(seeing.write_gemma(tmp_path_factory.mktemp("gemma"))))


def admitted(text: ChatTokenizer, prompt: str, *, context: int = 400, **body: Any) -> Admit:
    opened = Opened("digest", context, 264, text, text.source)
    blobs = [*FILES, *body.pop("behind", [])]
    message = Work.parse({"prompt": prompt, "images": 2, **body}, blobs)
    preparation = prepare_run(opened, (ID, 1), message, Arrival(0.0, 0.0))
    assert isinstance(preparation.job, Encode)
    result = perform(text, preparation.job)
    if isinstance(result, PoolError):
        raise result
    admit = preparation.finish(result)
    assert isinstance(admit, Admit)
    return admit


PROMPT = "a[img-0]b[img-1]c[img-0]" + "d" * 20


def test_slots_stand_where_images_are_named(text: ChatTokenizer) -> None:
    admit = admitted(text, PROMPT)
    seq = admit.sequence
    assert [span.count for span in seq.media] == [COUNT] * 3
    assert seq.media[0].image == seq.media[2].image != seq.media[1].image
    places = [place for place, item in enumerate(seq.prompt) if is_slot(item)]
    assert places == [at for span in seq.media for at in range(span.start, span.end)]
    assert set(seq.images) == {span.image for span in seq.media}
    assert all(span.group for span in seq.media)
    assert admit.facts.prompt_tokens == len(seq.prompt)


def test_truncation_takes_whole_images(text: ChatTokenizer) -> None:
    whole = admitted(text, PROMPT).sequence
    context = len(whole.prompt) - 10
    seq = admitted(text, PROMPT, context=context, options={"truncate": True}).sequence
    assert len(seq.prompt) < context
    for span in seq.media:
        assert [is_slot(item) for item in seq.prompt[span.start : span.end]] == [True] * COUNT
    left = sum(map(is_slot, seq.prompt))
    assert left == COUNT * len(seq.media) < COUNT * 3
    assert set(seq.images) == {span.image for span in seq.media}


def test_a_resume_with_shifts_has_the_images_that_are_left(text: ChatTokenizer) -> None:
    context = len(admitted(text, PROMPT).sequence.prompt) + 10
    options = {"shift": True, "num_keep": 2, "max_tokens": 300}
    ids = bytes(4 * 60)
    seq = admitted(
        text, PROMPT, context=context, options=options, resume={"count": 60}, behind=[ids]
    ).sequence
    assert seq.discarded > 0 and len(seq.media) < 3
    for span in seq.media:
        inputs = seq.token_range(span.start, span.end)
        assert len(inputs) == COUNT and all(map(is_slot, inputs))


def test_a_text_model_refuses_images() -> None:
    opened = Opened("digest", 99, 264, CountingText())
    message = Work.parse({"prompt": "[img-0]", "images": 1}, FILES[:1])
    with pytest.raises(BadRequest, match="this model does not support image input"):
        prepare_run(opened, (ID, 1), message, Arrival(0.0, 0.0))
