"""Random model folders of known shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

import mlx.core as mx

from mlxpool.bench import bytes_bound, checkpoint, tensors
from mlxpool.bench.load.workload import text_of
from mlxpool.bench.our_engine import OurEngine, prompt
from mlxpool.bench.shapes import SHAPES
from mlxpool.worker import models
from mlxpool.worker.layers import experts
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.json_files import read_json

# Sizes that make a shape with experts small.
CUTS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "gpt-oss-20b": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "glm-4.7-flash": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 48,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    },
}
# Dtypes of some tensors of layer 1, by their names after "model.layers.1.".
STORED: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen3-30b-a3b", ""): {
        "mlp.gate.weight": mx.bfloat16,
        "mlp.switch_mlp.gate_proj.weight": mx.bfloat16,
        "self_attn.q_norm.weight": mx.bfloat16,
    },
    ("qwen3-30b-a3b", "affine"): {
        "mlp.gate.weight": mx.uint32,
        "mlp.switch_mlp.down_proj.weight": mx.uint32,
        "mlp.switch_mlp.down_proj.biases": mx.bfloat16,
        "self_attn.k_proj.weight": mx.uint32,
    },
    ("gpt-oss-20b", ""): {
        "mlp.experts.up_proj.weight": mx.bfloat16,
        "self_attn.sinks": mx.bfloat16,
    },
    ("gpt-oss-20b", "mxfp4"): {
        "mlp.experts.up_proj.weight": mx.uint32,
        "mlp.experts.up_proj.scales": mx.uint8,
        "mlp.experts.up_proj.bias": mx.bfloat16,
        "mlp.router.weight": mx.bfloat16,
        "self_attn.q_proj.weight": mx.bfloat16,
    },
    ("glm-4.7-flash", "affine"): {
        "mlp.gate.weight": mx.bfloat16,
        "mlp.switch_mlp.gate_proj.weight": mx.uint32,
    },
}
VOCABULARY = 512


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces sizes in the model shapes by the smaller sizes that CUTS has for them."""
    for shape, sizes in CUTS.items():
        monkeypatch.setitem(SHAPES, shape, {**SHAPES[shape], **sizes})


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(("shape", "quantise"), STORED)
def test_shapes_with_experts_are_stored_as_conversions_have_them(
    tmp_path: Path, shape: str, quantise: str
) -> None:
    folder = checkpoint.write(
        tmp_path / "cut", shape, layers=2, vocabulary=VOCABULARY, quantise=quantise
    )
    (file,) = folder.glob("model-*.safetensors")
    arrays: Any = mx.load(str(file))
    dtypes = {name: array.dtype for name, array in arrays.items()}
    wanted = STORED[shape, quantise]
    assert {name: dtypes[f"model.layers.1.{name}"] for name in wanted} == wanted
    planned = tensors.planned(read_json(folder / "config.json"))
    assert sum(tensor.nbytes(2) for tensor in planned) == sum(
        tensor.nbytes for tensor in arrays.values()
    )
    ours = OurEngine(folder)
    step = ours.steps([5, 9])
    tokens = step()
    assert isinstance(tokens, list) and len(tokens) >= 2
    assert all(0 <= token.token < VOCABULARY for token in tokens)


@pytest.mark.usefixtures("cut")
def test_rows_use_about_as_many_experts_as_with_balanced_routing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of a random model use over 90 % of the experts that the bound assumes."""
    sizes = {"n_routed_experts": 64, "num_experts_per_tok": 4}
    monkeypatch.setitem(SHAPES, "glm", {**SHAPES["glm-4.7-flash"], **sizes})
    ours = OurEngine(checkpoint.write(tmp_path / "cut", "glm", layers=3))
    step = ours.steps([5] * 32)
    step()
    used = []
    plain = experts.SwitchGLU.__call__

    def counted(layer: experts.SwitchGLU, x: mx.array, chosen: mx.array) -> mx.array:
        used.append(len(np.unique(np.array(chosen))))
        return plain(layer, x, chosen)

    monkeypatch.setattr(experts.SwitchGLU, "__call__", counted)
    mx.disable_compile()
    try:
        step()
    finally:
        mx.enable_compile()
    assert np.mean(used) > 0.9 * 64 * bytes_bound.Routing(64, 4).share(32)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(("shape", "quantise"), STORED)
def test_mlx_lm_reads_them(tmp_path: Path, shape: str, quantise: str) -> None:
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
    sizes: dict[str, Any] = {"layers": 2, "vocabulary": VOCABULARY, "dtype": "float32"}
    folder = checkpoint.write(tmp_path / "cut", shape, quantise=quantise, **sizes)
    model, _ = utils.load_model(folder, strict=True)
    logits = model(mx.array([[1, 2, 3]]))
    assert logits.shape == (1, 3, VOCABULARY)
    assert mx.isfinite(logits).all().item()


@pytest.mark.parametrize("quantise", ["", "affine", "mxfp4"])
def test_the_folder_of_a_shape_can_be_loaded(tmp_path: Path, quantise: str) -> None:
    folder = checkpoint.write(tmp_path / "tiny", "tiny", layers=1, quantise=quantise)
    ours = OurEngine(folder)
    step = ours.steps([5, 9])
    step()
    assert ours.vocabulary == SHAPES["tiny"]["vocab_size"]
    assert len(inspect(folder).plan.caches) == 1


def test_every_byte_of_a_prompt_is_a_token(tmp_path: Path) -> None:
    ours = OurEngine(checkpoint.write(tmp_path / "tiny", "tiny"))
    text = text_of(range(30))
    assert len(ours.text.encode(text)) == len(text)
    words = b"".join(ours.text.piece(token) for token in prompt(50, ours.vocabulary))
    assert words.decode(errors="ignore")


def test_weights_are_split_into_shards(tmp_path: Path) -> None:
    folder = checkpoint.write(tmp_path / "tiny", "tiny", max_shard_bytes=50_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    OurEngine(folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_a_supported_architecture(shape: str) -> None:
    assert models.plan(checkpoint.config_of(shape)).vocab_size == SHAPES[shape]["vocab_size"]


def test_an_unknown_shape_or_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no shape 'big'; there are tiny, small, llama-3.2-1b"):
        checkpoint.config_of("big")
    with pytest.raises(ValueError, match=r"no mode 'q4'; there are affine, mxfp4"):
        checkpoint.config_of("tiny", quantise="q4")
