"""Names, settings and bounds of Qwen3-VL."""

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
from worker.models.seeing_cases import QWEN3_VL, Case  # noqa: E402
from worker.models.seeing_runs import engine_of, run, sequence  # noqa: E402


@pytest.fixture(scope="module")
def case() -> Case:
    return QWEN3_VL


def test_the_convolution_in_mlxs_order_and_its_names(
    tmp_path: Path, text: ChatTokenizer, expected: Any
) -> None:
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
    assert seq.ids == expected["ids_0"].tolist()


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
