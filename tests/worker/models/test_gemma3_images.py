"""Names, settings and bounds of Gemma 3 with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker.engine.description import features  # noqa: E402
from mlxpool.worker.prompt.tokenizer import ChatTokenizer  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from support import seeing_models as seeing  # noqa: E402
from worker.models.seeing_cases import GEMMA3, Case  # noqa: E402
from worker.models.seeing_runs import engine_of, run, sequence  # noqa: E402


@pytest.fixture(scope="module")
def case() -> Case:
    return GEMMA3


def test_names_and_layouts_of_other_checkpoints(
    tmp_path: Path, text: ChatTokenizer, expected: Any
) -> None:
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
    assert seq.ids == expected["ids_0"].tolist()


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
