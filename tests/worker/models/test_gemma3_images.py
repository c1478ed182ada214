"""Images of Gemma 3 against transformers, whose answers are stored: see seeing_reference.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker.engine.description import features  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from support import seeing_models as seeing  # noqa: E402
from worker.models.seeing_runs import engine_of, run, sequence  # noqa: E402

FEATURE_TOLERANCE = 1e-5  # absolute; the features are about 1
LOGPROB_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def expected() -> Any:
    return np.load(seeing.EXPECTED / "gemma3_images.npz")


@pytest.fixture(scope="module")
def text(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.from_folder(inspect(folder))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load(inspect(folder))


def test_features_are_those_of_transformers(
    loaded: Any, text: ChatTokenizer, expected: Any
) -> None:
    engine = engine_of(loaded, text)
    seq = sequence(text, seeing.PROMPTS[1])
    for number in range(2):
        image = seq.images[seq.media[number].image]
        engine.encode(image, ())
        (found,) = np.array(engine.encoded.get(image.key))
        assert np.abs(found - expected[f"features_{number}"]).max() < FEATURE_TOLERANCE


@pytest.mark.parametrize("number", range(len(seeing.PROMPTS)))
def test_prompts_have_the_inputs_of_transformers(
    text: ChatTokenizer, expected: Any, number: int
) -> None:
    seq = sequence(text, seeing.PROMPTS[number])
    slots = {place for span in seq.media for place in range(span.start, span.end)}
    slot = seeing.FIRST_ID + 1
    ids = [slot if place in slots else item for place, item in enumerate(seq.prompt)]
    assert ids == expected[f"prompt_{number}"].tolist()


@pytest.mark.parametrize("chunk", [None, 7, 1])
@pytest.mark.parametrize("layout", ["rows", "pool"])
@pytest.mark.parametrize("number", range(len(seeing.PROMPTS)))
def test_answers_are_those_of_transformers(
    loaded: Any, text: ChatTokenizer, expected: Any, number: int, layout: str, chunk: int | None
) -> None:
    engine = engine_of(loaded, text, layout=layout)
    seq = sequence(text, seeing.PROMPTS[number])
    logprobs = run(engine, seq, chunk)
    assert seq.ids == expected[f"ids_{number}"].tolist()
    assert np.abs(logprobs - expected[f"logprobs_{number}"]).max() < LOGPROB_TOLERANCE


def test_a_second_conversation_finds_the_image_and_the_prefix(
    loaded: Any, text: ChatTokenizer, expected: Any
) -> None:
    engine = engine_of(loaded, text)
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
    other = sequence(text, ("Look: ", 0, "?"), b"z", pictures=[1])
    run(engine, other)
    assert other.cached <= other.media[0].start == first.media[0].start
    assert engine.encoded.encoded == 2
    alone = sequence(text, ("Look: ", 0, "?"), b"z", pictures=[1])
    run(engine_of(loaded, text, prefix="off"), alone)
    assert other.ids == alone.ids != first.ids


def test_names_and_layouts_of_other_checkpoints(tmp_path: Path, text: ChatTokenizer) -> None:
    """Newer names, and the convolution in MLX's order, make the same weights."""
    weights = seeing.gemma_weights()
    name = "vision_tower.vision_model.embeddings.patch_embedding.weight"
    weights[name] = weights[name].transpose(0, 2, 3, 1)
    newer = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("vision_tower.vision_model.", "model.vision_tower.")
        .replace("multi_modal_projector.", "model.multi_modal_projector."): array
        for name, array in weights.items()
    }
    path = seeing.write_gemma(tmp_path / "newer", newer)
    engine = engine_of(load(inspect(path)), text)
    seq = sequence(text, seeing.PROMPTS[0])
    run(engine, seq)
    assert seq.ids == np.load(seeing.EXPECTED / "gemma3_images.npz")["ids_0"].tolist()


def test_a_checkpoint_without_settings_of_images_or_without_an_encoder_takes_text(
    tmp_path: Path, folder: Path
) -> None:
    assert "vision" in features(inspect(folder))
    weights = {k: v for k, v in seeing.gemma_weights().items() if k.startswith("language_model")}
    without = [
        seeing.write_gemma(tmp_path / "no settings", preprocessor=None),
        seeing.write_gemma(tmp_path / "no encoder", weights),
    ]
    for path in without:
        found = inspect(path)
        assert found.vision is None and "vision" not in features(found)
        assert load(found).model is not None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mm_tokens_per_image": 15}, "mm_tokens_per_image 15, must be a square"),
        ({"vision_config": 3}, "vision_config 3, must be a map"),
        ({"vision_config": {**seeing.VISION, "image_size": 33}}, "image_size 33, no multiple"),
        ({"vision_config": {**seeing.VISION, "hidden_act": "sine"}}, "hidden_act 'sine'"),
        ({"image_token_index": 99_999}, "no token with the id 99999"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadFailed, match=why):
        ChatTokenizer.from_folder(inspect(seeing.write_gemma(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("size", {"height": 16, "width": 32}, "takes images of 32 x 32 pixels"),
        ("image_std", [0.5, 0, 0.5], "image_std"),
        ("image_mean", [0.5], "image_mean"),
        ("do_pan_and_scan", True, "do_pan_and_scan, which is not supported"),
        ("do_resize", False, "do_resize False, must be true"),
        ("resample", 9, "resample 9, must be one of"),
        ("rescale_factor", "x", "rescale_factor 'x'"),
    ],
)
def test_settings_of_images_are_checked(tmp_path: Path, key: str, value: Any, why: str) -> None:
    path = seeing.write_gemma(tmp_path, preprocessor={**seeing.PREPROCESSOR, key: value})
    with pytest.raises(ModelLoadFailed, match=why):
        inspect(path)
