"""Llama 3.2 Vision: cross-attention to images, names of weights, settings and bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker.engine.description import features  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.scheduling.spans import Span  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from support import seeing_models as seeing  # noqa: E402
from support.engine_steps import decode, read_chunk, step  # noqa: E402
from worker.models.seeing_cases import MLLAMA, Case  # noqa: E402
from worker.models.seeing_runs import engine_of, run, sequence  # noqa: E402


@pytest.fixture(scope="module")
def case() -> Case:
    return MLLAMA


def test_a_prompt_may_end_with_an_image(loaded: Any, text: ChatTokenizer) -> None:
    found = []
    for chunk in (None, 1):
        engine = engine_of(loaded, text)
        seq = sequence(text, ("x", 0))
        seq.prompt = seq.prompt[: seq.media[0].end]
        run(engine, seq, chunk)
        found.append(seq.ids)
    assert found[0] == found[1]


def test_a_cached_prefix_does_not_read_without_its_image(
    loaded: Any, text: ChatTokenizer, expected: Any
) -> None:
    """Inputs behind an image attend to it, so it is encoded again where its features are gone."""
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


def test_newer_names_make_the_same_weights(
    tmp_path: Path, text: ChatTokenizer, expected: Any
) -> None:
    newer = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head.", "lm_head.")
        .replace("vision_model.", "model.vision_model.")
        .replace("multi_modal_projector.", "model.multi_modal_projector."): array
        for name, array in seeing.mllama_weights().items()
    }
    engine = engine_of(load(inspect(seeing.write_mllama(tmp_path / "newer", newer))), text)
    run(engine, seq := sequence(text, seeing.PROMPTS[0]))
    assert seq.ids == expected["ids_0"].tolist()


def test_a_checkpoint_without_its_encoder_takes_text(tmp_path: Path, folder: Path) -> None:
    assert "vision" in features(inspect(folder))
    weights = {k: v for k, v in seeing.mllama_weights().items() if k.startswith("language_model")}
    found = inspect(seeing.write_mllama(tmp_path, weights))
    assert found.vision is None and "vision" not in features(found)
    engine = engine_of(load(found), ChatTokenizer.from_folder(found))
    seq = sequence(ChatTokenizer.from_folder(inspect(folder)), ("no image",))
    engine.admit(seq)
    assert len(step(engine, [Span(seq, 0, seq.length, draws=1)])) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"image_token_index": 268}, "image_token_index 268, must be below 268"),
        ({"image_token_index": 265}, "no token with the id 265"),
        ({"vision_config": 3}, "vision_config 3, must be a map"),
        ({"vision_config": {**seeing.MLLAMA_VISION, "image_size": 18}}, "image_size 18, no mult"),
        ({"vision_config": {**seeing.MLLAMA_VISION, "attention_heads": 7}}, "attention_heads 7"),
        (
            {"vision_config": {**seeing.MLLAMA_VISION, "intermediate_layers_indices": [3]}},
            r"intermediate_layers_indices \[3\], must be layers below 3",
        ),
        ({"vision_config": {**seeing.MLLAMA_VISION, "vision_output_dim": 7}}, "vision_output_dim"),
        (
            {"vision_config": {**seeing.MLLAMA_VISION, "supported_aspect_ratios": [[1, 1]]}},
            "supported_aspect_ratios",
        ),
        (
            {"text_config": {**seeing.MLLAMA["text_config"], "cross_attention_layers": [4]}},
            r"cross_attention_layers \[4\], must be different layers below 4",
        ),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadFailed, match=why):
        ChatTokenizer.from_folder(inspect(seeing.write_mllama(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("max_image_tiles", 2, "max_image_tiles 2, config.json has 4"),
        ("do_pad", False, "do_pad False, must be true"),
        ("size", {"height": 8, "width": 8}, "takes images of 16 x 16 pixels"),
    ],
)
def test_settings_of_images_are_checked(tmp_path: Path, key: str, value: Any, why: str) -> None:
    path = seeing.write_mllama(tmp_path, preprocessor={**seeing.MLLAMA_PREPROCESSOR, key: value})
    with pytest.raises(ModelLoadFailed, match=why):
        inspect(path)
