"""Prompts with images on an engine, without the compute thread: tests of models use it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from mlxpool.common.options import Options
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.media.places import with_images
from mlxpool.worker.preparation.jobs import Encoded, Render, image_of, perform
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.scheduling.sequence import Sequence
from support import seeing_models as seeing
from support.engine_steps import decode, read_chunk
from support.model_engines import model_engine


def encoded(
    text: ChatTokenizer, prompt: Many[str | int], pictures: Many[int] = range(2)
) -> Encoded:
    """Returns the prepared prompt of a chat with one message; image n is picture `pictures[n]`."""
    files = [seeing.file_of(seeing.picture(number)) for number in pictures]
    parts = seeing.parts_of(prompt)
    used = sorted({part for part in prompt if isinstance(part, int)})
    job = Render([{"role": "user", "content": parts}], (), None, 0.0, 500, files[: len(used)])
    result = perform(text, job)
    assert isinstance(result, Encoded), result
    return result


def sequence(
    text: ChatTokenizer, prompt: Many[str | int], name: bytes = b"x", pictures: Many[int] = range(2)
) -> Sequence:
    prepared = encoded(text, prompt, pictures)
    assert text.images is not None
    images = [*map(image_of, prepared.images)]
    inputs = with_images(unpack_ids(prepared.packed), text.images.places, prepared.named, images)
    options = Options(temperature=0.0, logprobs=True)
    seq = Sequence(name, 1, inputs.items, options, 0, seeing.STEPS)
    seq.media, seq.images = inputs.media, inputs.images
    seq.restore_at = inputs.moved(prepared.restore_at)
    return seq


def run(
    engine: ModelEngine, seq: Sequence, chunk: int | None = None, steps: int = seeing.STEPS
) -> list[float]:
    """Reads the prompt and draws `steps` tokens; returns their log-probabilities."""
    engine.admit(seq)
    while seq.unread > 1:
        image = seq.next_image
        if image is not None and image.image not in engine.encoded:
            engine.encode(seq.images[image.image], ())
        assert read_chunk(engine, seq, chunk)
    drawn = decode(engine, [seq], steps)
    return [sample.logprob.logprob for sample in drawn if sample.logprob is not None]


def engine_of(loaded: Any, text: ChatTokenizer, **options: Any) -> ModelEngine:
    return model_engine(loaded, text, lookahead=False, blocks=8, **options)
