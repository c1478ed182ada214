"""Compares heads that predict further tokens (MTP) with NumPy, and tests their tensor names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from support.predicting_models import EVERY, FAMILIES, REFERENCES, settings, weights_with_head
from support.stored_checkpoints import after, converted, glm_released, inside, one_by_one
from support.worker_checkpoints import write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker import models  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.layers.model_plan import PredictingModel, Prediction  # noqa: E402
from mlxpool.worker.scheduling.memory_estimate import estimate_memory  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402

Weights = dict[str, np.ndarray]
TOKENS = 19
TOLERANCE = 2e-4  # relative to the largest number


def head_of(path: Path) -> tuple[Prediction, RowShape | None]:
    """Returns the prediction head of a model folder, and the shape of the head's rows.

    The shape is None if the head has no cache.
    """
    loaded = load(inspect(path, predicts=True))
    plan = loaded.folder.plan
    assert plan.predicts
    head, cache = cast(PredictingModel, loaded.model).prediction, plan.prediction_cache
    return head, None if cache is None else RowShape((cache,), loaded.dtype, 512, 64)


def computed(path: Path, tokens: list[int], states: np.ndarray, parts: list[int]) -> Any:
    """Returns states and logits of the tokens, which are read in parts of these sizes."""
    head, shape = head_of(path)
    row, outputs = None if shape is None else RowCache(shape), []
    begin = 0
    for count in parts:
        ids = mx.array(tokens[begin : begin + count], dtype=mx.int32)
        given = mx.array(states[begin : begin + count].astype(np.float32))
        batch = None if row is None else RowBatch([RowSpan(row, count)], None)
        outputs.append(head(ids, given, batch))
        if batch is not None:
            batch.done()
        begin += count
    out = mx.concatenate(outputs)
    return np.array(out), np.array(head.logits_of(out))


def require_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()


def inputs(seed: int, width: int) -> tuple[list[int], np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, TOKENS).tolist(), draw.standard_normal((TOKENS, width))


CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in EVERY),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"tie_word_embeddings": True, "mtp_draft_vocab_size": 40}),
    ("glm4_moe_lite", {"own": True}),
    ("qwen3_5", {"tie_word_embeddings": True}),
    ("qwen3_next", {"num_experts": None}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("parts", [[TOKENS], [1, 1, 12, 1, 4]])
def test_a_head_computes_what_numpy_does(
    family: str, changes: dict[str, Any], parts: list[int], tmp_path: Path
) -> None:
    """The tokens are read at once or in parts; the head may have its own embeddings."""
    own = changes.get("own", False)
    others = {key: value for key, value in changes.items() if key != "own"}
    stored = converted(weights_with_head(family, 3, own=own, **others))
    whole = settings(family, **others)
    path = write_checkpoint(tmp_path, weights=stored, **{**EVERY[family], **others})
    tokens, states = inputs(5, whole["hidden_size"])
    wanted = REFERENCES[family](stored, whole, tokens, states)
    for ours, theirs in zip(computed(path, tokens, states, parts), wanted, strict=True):
        require_close(ours, theirs)


def qwen_released(weights: Weights) -> Weights:
    """Returns weights in Qwen's released form.

    Norm weights are smaller by 1, convolutions have swapped axes, and each expert has its own
    tensors.
    """
    return {
        name: array - 1 if _shifted(name) else array for name, array in one_by_one(weights).items()
    }


def _shifted(name: str) -> bool:
    return "norm" in name and "linear_attn.norm" not in name


def multimodal(weights: Weights) -> Weights:
    """Renames a text model's tensors as in a multimodal checkpoint; the head keeps its names."""
    return {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: x
        for name, x in weights.items()
    }


STORED: dict[str, tuple[str, Callable[[Weights], Mapping[str, np.ndarray]], bool]] = {
    "GLM": ("glm4_moe_lite", glm_released, False),
    "GLM with tokens and output of its own": ("glm4_moe_lite", glm_released, True),
    "Qwen3-Next": ("qwen3_next", qwen_released, False),
    "Qwen3.5, multimodal": ("qwen3_5", after(qwen_released, multimodal), False),
    "Qwen3.5, converted": ("qwen3_5_moe", after(converted, inside), False),
}


@pytest.mark.parametrize("form", STORED)
def test_a_released_checkpoint_has_the_same_head(form: str, tmp_path: Path) -> None:
    family, stored, own = STORED[form]
    weights = weights_with_head(family, 4, own=own)
    ours = write_checkpoint(tmp_path / "ours", weights=converted(weights), **FAMILIES[family])
    other = write_checkpoint(tmp_path / "other", weights=stored(weights), **FAMILIES[family])
    tokens, states = inputs(6, settings(family)["hidden_size"])
    outputs = [computed(path, tokens, states, [TOKENS]) for path in (ours, other)]
    for actual, same in zip(*outputs, strict=True):
        np.testing.assert_allclose(actual, same, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", EVERY)
def test_a_head_is_read_only_if_it_is_asked_for(family: str, tmp_path: Path) -> None:
    """Reading the head changes neither a model's digest nor its caches, only its weight bytes."""
    path = write_checkpoint(tmp_path, weights=converted(weights_with_head(family)), **EVERY[family])
    without, whole = inspect(path), inspect(path, predicts=True)
    assert whole.plan.predicts and not without.plan.predicts
    assert (whole.plan.prediction_cache is None) == (family not in FAMILIES)
    assert without.digest == whole.digest
    assert without.weight_bytes < whole.weight_bytes
    assert without.plan.caches == whole.plan.caches


@pytest.mark.parametrize("family", EVERY)
def test_a_tensor_that_a_head_lacks_is_named(family: str, tmp_path: Path) -> None:
    stored = converted(weights_with_head(family))
    lost = next(name for name in stored if name.endswith(("hnorm.weight", "mtp.norm.weight")))
    del stored[lost]
    path = write_checkpoint(tmp_path, weights=stored, **EVERY[family])
    inspect(path)
    with pytest.raises(ModelLoadFailed, match=f"the weights lack the tensor '{lost}'"):
        inspect(path, predicts=True)


def test_further_heads_are_left_out(tmp_path: Path) -> None:
    """Of several heads only the first is loaded, which drafts at every depth."""
    changes = {**FAMILIES["glm4_moe_lite"], "num_nextn_predict_layers": 2}
    stored = weights_with_head("glm4_moe_lite", num_nextn_predict_layers=2)
    stored["model.layers.3.eh_proj.weight"] = np.ones((4, 8), np.float32)
    inspect(write_checkpoint(tmp_path / "glm", weights=stored, **changes), predicts=True)
    stored = converted(weights_with_head("qwen3_next"))
    stored["mtp.layers.1.mlp.gate.weight"] = np.ones((4, 8), np.float32)
    path = write_checkpoint(tmp_path / "qwen", weights=stored, **FAMILIES["qwen3_next"])
    inspect(path, predicts=True)
    stored = weights_with_head("llama")
    stored["mtp.layers.1.mlp.up_proj.weight"] = np.ones((4, 8), np.float32)
    path = write_checkpoint(tmp_path / "llama", weights=stored, **EVERY["llama"])
    inspect(path, predicts=True)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("glm4_moe_lite", {"num_nextn_predict_layers": 0}),
        ("llama", {"mtp_intermediate_size": 0}),
        ("llama", {"mtp_intermediate_size": None}),
    ],
)
def test_models_without_a_head_have_no_plan_of_one(family: str, changes: dict[str, Any]) -> None:
    assert models.plan(settings(family, **changes)).prediction is None


DRAFTED: dict[str, Any] = {"tie_word_embeddings": True, "mtp_draft_vocab_size": 40}


def drafting(path: Path, weights: Weights) -> Path:
    """Writes a model whose head has a vocabulary of only 40 tokens."""
    return write_checkpoint(path, weights=weights, **{**EVERY["llama"], **DRAFTED})


def test_a_head_that_drafts_some_tokens_gives_these(tmp_path: Path) -> None:
    """With a reduced vocabulary the head still returns ids of the whole vocabulary."""
    stored = weights_with_head("llama", 3, **DRAFTED)
    path = drafting(tmp_path, stored)
    head, _ = head_of(path)
    states = mx.array(inputs(7, settings("llama")["hidden_size"])[1].astype(np.float32))
    places = np.argmax(np.array(head.logits_of(states)), axis=1)
    wanted = stored["mtp.draft_tokens"][places].astype(int)
    assert np.array_equal(np.array(head.likeliest(states)), wanted)


def test_the_output_head_for_some_tokens_is_counted_as_weights(tmp_path: Path) -> None:
    """The head has its own output weights, copied from the embeddings.

    Both the load and the estimate include them in the bytes of weights.
    """
    path = drafting(tmp_path, weights_with_head("llama", 3, **DRAFTED))
    head_size = DRAFTED["mtp_draft_vocab_size"] * settings("llama")["hidden_size"]
    for predicts in (False, True):
        loaded = load(inspect(path, predicts=predicts))
        stored = sum(math.prod(tensor.shape) for tensor in loaded.folder.tensors.values())
        assert loaded.weight_bytes == (stored + predicts * head_size) * loaded.dtype.size
        need = estimate_memory(
            loaded.folder,
            context=64,
            sequences=1,
            prefix_cache="off",
            prefix_bytes=0,
            limit=2**30,
            chunk=64,
            float32=loaded.dtype == mx.float32,
        )
        assert need.weights == loaded.weight_bytes


def test_tokens_that_a_head_cannot_draft_are_refused(tmp_path: Path) -> None:
    untied = settings("llama", mtp_draft_vocab_size=40)
    with pytest.raises(ModelLoadFailed, match="mtp_draft_vocab_size 40 and untied embeddings"):
        models.plan(untied)
    stored = weights_with_head("llama", 3, **DRAFTED)
    stored["mtp.draft_tokens"][:3] = (-1, 264, 1.5)
    path = drafting(tmp_path, stored)
    with pytest.raises(ModelLoadFailed, match=r"3 of the 40 tokens .* whole numbers from 0 to 263"):
        load(inspect(path, predicts=True))
