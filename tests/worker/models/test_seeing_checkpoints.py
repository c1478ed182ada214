"""Checkpoints of models that read images: other names of tensors, missing parts, settings."""

from __future__ import annotations

from collections.abc import Callable
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
from support.engine_steps import step  # noqa: E402
from worker.models.seeing_cases import GEMMA3, MLLAMA, QWEN3_VL, Case  # noqa: E402
from worker.models.seeing_runs import engine_of, run, sequence  # noqa: E402

# For each model: its weights, its convolution (if any) that MLX stores in another order of axes,
# and other names of tensors.
RENAMED: dict[Case, tuple[Callable[[], Any], str, dict[str, str]]] = {
    GEMMA3: (
        seeing.gemma_weights,
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        {
            "language_model.model.": "model.language_model.",
            "vision_tower.vision_model.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ),
    QWEN3_VL: (
        seeing.qwen_weights,
        "model.visual.patch_embed.proj.weight",
        {
            "model.visual.": "vision_tower.",
            "model.language_model.": "language_model.model.",
            "lm_head.": "language_model.lm_head.",
        },
    ),
    MLLAMA: (
        seeing.mllama_weights,
        "",
        {
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
            "vision_model.": "model.vision_model.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ),
}


def test_other_names_and_orders_of_axes_make_the_same_model(
    case: Case, tmp_path: Path, text: ChatTokenizer, expected: Any
) -> None:
    make, convolution, names = RENAMED[case]
    weights = {}
    for name, array in make().items():
        if name == convolution:
            array = array.transpose(0, *range(2, array.ndim), 1)
        old = next((prefix for prefix in names if name.startswith(prefix)), "")
        weights[names.get(old, "") + name.removeprefix(old)] = array
    assert not weights.keys() & {name for name in make() if name.startswith(tuple(names))}
    engine = engine_of(load(inspect(case.write(tmp_path / "other", weights))), text)
    run(engine, seq := sequence(text, seeing.PROMPTS[0]))
    assert seq.ids == expected["ids_0"].tolist()


def test_a_checkpoint_without_settings_of_images_or_without_an_encoder_takes_text(
    case: Case, tmp_path: Path, folder: Path, text: ChatTokenizer
) -> None:
    assert "vision" in features(inspect(folder))
    assert case is not QWEN3_VL or "deterministic" not in features(inspect(folder))
    parts = [case.write(tmp_path / "no settings", preprocessor=None)]
    if case is not QWEN3_VL:
        tensors = RENAMED[case][0]().items()
        weights = {name: array for name, array in tensors if name.startswith("language_model")}
        parts.append(case.write(tmp_path / "no encoder", weights))
    for path in parts:
        model_folder = inspect(path)
        assert model_folder.vision is None and "vision" not in features(model_folder)
        engine = engine_of(load(model_folder), ChatTokenizer.from_folder(model_folder))
        engine.admit(seq := sequence(text, ("no image",)))
        assert len(step(engine, [Span(seq, 0, seq.length, draws=1)])) == 1


def of_text(case: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"text_config": {**case["text_config"], **changes}}


def of_gemma(**changes: Any) -> dict[str, Any]:
    return {"vision_config": {**seeing.VISION, **changes}}


def of_qwen(**changes: Any) -> dict[str, Any]:
    return {"vision_config": {**seeing.QWEN_VISION, **changes}}


def of_mllama(**changes: Any) -> dict[str, Any]:
    return {"vision_config": {**seeing.MLLAMA_VISION, **changes}}


@pytest.mark.parametrize(
    ("write", "changes", "why"),
    [
        (seeing.write_gemma, {"mm_tokens_per_image": 15}, "mm_tokens_per_image 15, must be a sq"),
        (seeing.write_gemma, {"vision_config": 3}, "vision_config 3, must be a map"),
        (seeing.write_gemma, of_gemma(image_size=33), "image_size 33, no multiple"),
        (seeing.write_gemma, of_gemma(hidden_act="sine"), "hidden_act 'sine'"),
        (seeing.write_gemma, {"image_token_index": 99_999}, "no token with the id 99999"),
        (seeing.write_qwen, {"vision_config": 3}, "vision_config 3, must be a map"),
        (seeing.write_qwen, of_qwen(num_position_embeddings=35), "35, must be a square"),
        (seeing.write_qwen, of_qwen(deepstack_visual_indexes=[3]), "layers below 3"),
        (seeing.write_qwen, of_qwen(deepstack_visual_indexes=[0, 1, 2]), "must be fewer"),
        (seeing.write_qwen, of_qwen(num_heads=3), "num_heads 3"),
        (seeing.write_qwen, of_qwen(out_hidden_size=32), "out_hidden_size 32"),
        (
            seeing.write_qwen,
            of_text(seeing.QWEN, rope_scaling={"mrope_section": 5}),
            "mrope_section 5, must be 3 numbers",
        ),
        (
            seeing.write_qwen,
            of_text(seeing.QWEN, rope_scaling={"mrope_section": [4, 2, 1]}),
            "must have the sum 8, and its last two",
        ),
        (seeing.write_mllama, {"image_token_index": 268}, "image_token_index 268, must be below 2"),
        (seeing.write_mllama, {"image_token_index": 265}, "no token with the id 265"),
        (seeing.write_mllama, {"vision_config": 3}, "vision_config 3, must be a map"),
        (seeing.write_mllama, of_mllama(image_size=18), "image_size 18, no mult"),
        (seeing.write_mllama, of_mllama(attention_heads=7), "attention_heads 7"),
        (
            seeing.write_mllama,
            of_mllama(intermediate_layers_indices=[3]),
            r"intermediate_layers_indices \[3\], must be layers below 3",
        ),
        (seeing.write_mllama, of_mllama(vision_output_dim=7), "vision_output_dim"),
        (seeing.write_mllama, of_mllama(supported_aspect_ratios=[[1, 1]]), "supported_aspect_rat"),
        (
            seeing.write_mllama,
            of_text(seeing.MLLAMA, cross_attention_layers=[4]),
            r"cross_attention_layers \[4\], must be different layers below 4",
        ),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, write: Callable[..., Path], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=why):
        ChatTokenizer.from_folder(inspect(write(tmp_path, **changes)))


GEMMA = seeing.write_gemma, seeing.PREPROCESSOR
QWEN = seeing.write_qwen, seeing.QWEN_PREPROCESSOR
LLAMA = seeing.write_mllama, seeing.MLLAMA_PREPROCESSOR


@pytest.mark.parametrize(
    ("model", "key", "value", "why"),
    [
        (GEMMA, "size", {"height": 16, "width": 32}, "takes images of 32 x 32 pixels"),
        (GEMMA, "image_std", [0.5, 0, 0.5], "image_std"),
        (GEMMA, "image_mean", [0.5], "image_mean"),
        (GEMMA, "do_pan_and_scan", True, "do_pan_and_scan, which is not supported"),
        (GEMMA, "do_resize", False, "do_resize False, must be true"),
        (GEMMA, "resample", 9, "resample 9, must be one of"),
        (GEMMA, "rescale_factor", "x", "rescale_factor 'x'"),
        (QWEN, "size", {"shortest_edge": 256}, "max_pixels None, must be a whole number above 0"),
        (QWEN, "size", {"shortest_edge": 9000, "longest_edge": 1600}, "9000 to 1600 pixels"),
        (QWEN, "patch_size", 8, "patch_size 8, config.json has 4"),
        (QWEN, "merge_size", 4, "merge_size 4, config.json has 2"),
        (LLAMA, "max_image_tiles", 2, "max_image_tiles 2, config.json has 4"),
        (LLAMA, "do_pad", False, "do_pad False, must be true"),
        (LLAMA, "size", {"height": 8, "width": 8}, "takes images of 16 x 16 pixels"),
    ],
)
def test_settings_of_images_are_checked(
    tmp_path: Path, model: tuple[Any, dict[str, Any]], key: str, value: Any, why: str
) -> None:
    write, settings = model
    with pytest.raises(ModelLoadFailed, match=why):
        inspect(write(tmp_path, preprocessor={**settings, key: value}))
