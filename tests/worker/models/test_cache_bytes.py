"""Compares the formula for a sequence's bytes with the allocated bytes, for all architectures.

Admission and the memory limit use the formula.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.worker_checkpoints import write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker import models  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402

CHUNK, CHUNKS = 256, 4
FLOAT = 4  # bytes
PAIR = 2 * (64 + 64)  # numbers of a token in a layer with keys and values: two heads of 64
STATE = 3 * (2 * 2 * 64 + 4 * 64) + 4 * 64 * 64  # numbers of a recurrent layer: inputs, memory
BASE = {"max_position_embeddings": 4096, "head_dim": 64}  # arrays of many pages
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 96,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
DELTA = {
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 24,
}
# model -> changes to config.json; cached numbers of each token; further numbers of each sequence.
# A model has two layers unless config.json has another number. A window also holds a chunk, and a
# state has the two earlier states with it.
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama": ({}, 2 * PAIR, 0),
    "mistral": ({"sliding_window": 250}, 0, 2 * (250 + CHUNK) * PAIR),
    "mllama": ({"num_hidden_layers": 3, "cross_attention_layers": [1]}, 2 * PAIR, 0),
    "qwen2": ({"hidden_size": 256}, 2 * PAIR, 0),
    "qwen3": ({}, 2 * PAIR, 0),
    "qwen3_vl": ({"rope_scaling": {"mrope_section": [12, 10, 10]}}, 2 * PAIR, 0),
    "qwen3_moe": (EXPERTS, 2 * PAIR, 0),
    "gemma3_text": (
        {"num_hidden_layers": 3, "sliding_window_pattern": 3, "sliding_window": 250},
        1 * PAIR,
        2 * (250 + CHUNK) * PAIR,
    ),
    "glm4_moe_lite": (LATENT, 2 * (96 + 32), 0),
    "gpt_oss": (
        {"sliding_window": 250, "num_local_experts": 4, "num_experts_per_tok": 2},
        1 * PAIR,
        1 * (250 + CHUNK) * PAIR,
    ),
    "qwen3_next": ({**DELTA, **EXPERTS, "partial_rotary_factor": 0.25}, 1 * PAIR, 2 * 3 * STATE),
    "qwen3_5": (
        {**DELTA, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        1 * PAIR,
        2 * 3 * STATE,
    ),
}
HERE = [name for name in CASES if name in models.SUPPORTED]


@pytest.fixture(autouse=True)
def no_buffers_kept() -> Iterator[None]:
    """Turns off the reuse of freed buffers: a reused buffer may be larger than requested."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


def test_every_architecture_is_measured() -> None:
    files = models.ARCHITECTURES
    assert {files[name] for name in HERE} == set(files.values())


@pytest.mark.parametrize("model_type", HERE)
def test_the_formula_equals_the_allocated_bytes(model_type: str, tmp_path: Path) -> None:
    changes, of_token, fixed = CASES[model_type]
    config = {**BASE, "model_type": model_type, **changes}
    loaded = load(inspect(write_checkpoint(tmp_path, **config)))
    shape = RowShape(loaded.folder.plan.caches, loaded.dtype, 4096, CHUNK)
    assert (shape.token_bytes, shape.fixed_bytes) == (of_token * FLOAT, fixed * FLOAT)
    row = RowCache(shape)
    before = active()
    for _ in range(CHUNKS):
        prefill(loaded, row)
    taken = active() - before
    assert row.offset == CHUNKS * CHUNK
    assert taken == pytest.approx(fixed * FLOAT + row.offset * of_token * FLOAT, rel=0.02)


def prefill(loaded: LoadedModel, row: RowCache) -> None:
    step = RowBatch([RowSpan(row, CHUNK)], ())
    out = loaded.model(mx.arange(CHUNK), step)
    step.done()
    mx.eval(out, *row.arrays())


def active() -> int:
    """Returns the bytes of all live arrays."""
    gc.collect()
    mx.synchronize()
    return int(mx.get_active_memory())
