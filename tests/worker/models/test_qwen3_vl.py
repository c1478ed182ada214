"""Qwen3-VL against transformers, whose answers are stored: see seeing_reference.py."""

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
from support.engine_steps import decode  # noqa: E402
from worker.models.seeing_runs import engine_of, run, sequence  # noqa: E402

FEATURE_TOLERANCE = 2e-5  # absolute; the features are about 1
LOGPROB_TOLERANCE = 1e-4
LAYOUTS = ["rows", "slabs", "pool"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing.write_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def expected() -> Any:
    return np.load(seeing.EXPECTED / "qwen3_vl_images.npz")


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
        found = np.array(engine.encoded.get(image.key))
        assert found.shape[0] == 3, "two layers of the encoder go to the text part, too"
        assert np.abs(found[0] - expected[f"features_{number}"]).max() < FEATURE_TOLERANCE


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
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(seeing.PROMPTS)))
def test_answers_are_those_of_transformers(
    loaded: Any, text: ChatTokenizer, expected: Any, number: int, layout: str, chunk: int | None
) -> None:
    engine = engine_of(loaded, text, layout=layout)
    seq = sequence(text, seeing.PROMPTS[number])
    logprobs = run(engine, seq, chunk)
    assert seq.ids == expected[f"ids_{number}"].tolist()
    assert np.abs(logprobs - expected[f"logprobs_{number}"]).max() < LOGPROB_TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefix_may_end_inside_an_image(
    loaded: Any, text: ChatTokenizer, expected: Any, layout: str
) -> None:
    """Its inputs see only those before, so any number of them is a prefix."""
    engine = engine_of(loaded, text, layout=layout)
    first = sequence(text, seeing.PROMPTS[0])
    run(engine, first)
    engine.release(first)
    again = sequence(text, seeing.PROMPTS[0], b"y")
    run(engine, again)
    assert engine.encoded.encoded == 1 and again.cached >= again.media[0].end
    assert again.ids == first.ids == expected["ids_0"].tolist()


def test_the_convolution_in_mlxs_order_and_its_names(tmp_path: Path, text: ChatTokenizer) -> None:
    weights = seeing.qwen_weights()
    name = "model.visual.patch_embed.proj.weight"
    weights[name] = weights[name].transpose(0, 2, 3, 4, 1)
    other = {
        name.replace("model.visual.", "vision_tower.")
        .replace("model.language_model.", "language_model.model.")
        .replace("lm_head.", "language_model.lm_head."): array
        for name, array in weights.items()
    }
    engine = engine_of(load(inspect(seeing.write_qwen(tmp_path / "mlx", other))), text)
    seq = sequence(text, seeing.PROMPTS[0])
    run(engine, seq)
    assert seq.ids == np.load(seeing.EXPECTED / "qwen3_vl_images.npz")["ids_0"].tolist()


def test_a_checkpoint_without_settings_of_images_takes_text(tmp_path: Path, folder: Path) -> None:
    assert "vision" in features(inspect(folder))
    assert "deterministic" not in features(inspect(folder))
    found = inspect(seeing.write_qwen(tmp_path, preprocessor=None))
    assert found.vision is None and "vision" not in features(found)
    assert load(found).model is not None


VISION = seeing.QWEN_VISION


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"vision_config": 3}, "vision_config 3, must be a map"),
        ({"vision_config": {**VISION, "num_position_embeddings": 35}}, "35, must be a square"),
        ({"vision_config": {**VISION, "deepstack_visual_indexes": [3]}}, "layers below 3"),
        ({"vision_config": {**VISION, "deepstack_visual_indexes": [0, 1, 2]}}, "must be fewer"),
        ({"vision_config": {**VISION, "num_heads": 3}}, "num_heads 3"),
        ({"vision_config": {**VISION, "out_hidden_size": 32}}, "out_hidden_size 32"),
        (
            {"text_config": {**seeing.QWEN["text_config"], "rope_scaling": {"mrope_section": 5}}},
            "mrope_section 5, must be 3 numbers",
        ),
        (
            {
                "text_config": {
                    **seeing.QWEN["text_config"],
                    "rope_scaling": {"mrope_section": [4, 2, 1]},
                }
            },
            "does not divide 8 pairs",
        ),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadFailed, match=why):
        inspect(seeing.write_qwen(tmp_path, **changes))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("size", {"shortest_edge": 256}, "max_pixels None, must be a whole number above 0"),
        ("size", {"shortest_edge": 9000, "longest_edge": 1600}, "9000 to 1600 pixels"),
        ("patch_size", 8, "patch_size 8, config.json has 4"),
        ("merge_size", 4, "merge_size 4, config.json has 2"),
    ],
)
def test_settings_of_images_are_checked(tmp_path: Path, key: str, value: Any, why: str) -> None:
    settings = {**seeing.QWEN_PREPROCESSOR, key: value}
    with pytest.raises(ModelLoadFailed, match=why):
        inspect(seeing.write_qwen(tmp_path, preprocessor=settings))
