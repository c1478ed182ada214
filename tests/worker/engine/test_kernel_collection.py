"""A load builds each pass once and lists its kernels, before it computes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import force_setattr

from support.worker_checkpoints import GLM, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.engine import trial_kernels  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.engine.trial_passes import (  # noqa: E402
    compile_kernels,
    kinds_of_passes,
)
from mlxpool.worker.kernels import (  # noqa: E402
    kernel_cache,
    matmul_small,
    matmul_tiled,
    sampling,
)
from mlxpool.worker.kernels.kernel_cache import KernelJob  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from support.built_kernels import built_kernels  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "vocab_size": 288,
    "max_position_embeddings": 1024,
}
LATENT: dict[str, Any] = {
    **GLM,
    **SIZES,
    "head_dim": None,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "first_k_dense_replace": 2,  # dense layers: a CPU has no experts in bfloat16
}


class Counted:
    """A model that counts its calls: each call builds a pass."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.calls = 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        return self._model(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def engine_of(tmp_path: Path, sizes: dict[str, Any], rows: int) -> ModelEngine:
    loaded = load(inspect(write_checkpoint(tmp_path, **sizes)), dtype=mx.bfloat16)
    force_setattr(loaded, "model", Counted(loaded.model))
    return model_engine(loaded, layout="pool", context=300, max_sequences=rows, blocks=30)


@pytest.mark.parametrize(
    ("sizes", "attention"),
    [
        (SIZES, "ragged_attention"),
        (LATENT, "ragged_latents"),
    ],
    ids=["keys and values", "latents"],
)
def test_each_pass_is_built_once_and_stays_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, Any],
    attention: str,
) -> None:
    """The kernels of all passes are listed at the first compilation.

    A second compilation builds no pass again.
    """
    given: list[list[KernelJob]] = []
    monkeypatch.setattr(kernel_cache, "compile_together", lambda jobs, _: given.append([*jobs]))
    with built_kernels():
        engine = engine_of(tmp_path, sizes, 9)
        layout = engine.inspect().layout
        assert isinstance(layout, PagedLayout) and layout.ragged is not None
        model: Any = engine.parts.loaded.model
        free = engine.blocks.available
        before = model.calls
        compile_kernels(engine, kinds_of_passes(engine), lambda: None)
        built = model.calls - before
        compile_kernels(engine, kinds_of_passes(engine), lambda: None)
        assert model.calls == before + built  # passes of all kinds were built, and none twice
        assert engine.blocks.available == free and not engine.inspect().rows
        kinds = list(kinds_of_passes(engine))
    assert built == len(layout.ragged.passes) == len(kinds)
    names = {job.text.name.removeprefix("mlxpool_") for job in given[-2]}
    assert {attention, "sampling"} <= names
    assert given[-1] and {*given[-1]} <= {*given[-2]}


@pytest.mark.parametrize("sizes", [SIZES, LATENT], ids=["ragged", "latent"])
def test_kernels_of_trials_are_compiled_together_before_they_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
) -> None:
    """The compilation calls no kernel, and no cache keeps the results of the trial run."""
    given: list[list[KernelJob]] = []
    monkeypatch.setattr(kernel_cache, "compile_together", lambda jobs, _: given.append([*jobs]))
    loaded = load(inspect(write_checkpoint(tmp_path, **sizes)), dtype=mx.bfloat16)
    shape = RowShape(loaded.folder.plan.caches, mx.bfloat16, 300, 300)
    tried: list[str] = []

    def works(what: str, trial: Any) -> bool:
        tried.append(what)
        return True

    with built_kernels(right=False) as called:
        trial_kernels.compile_trials(loaded.model, shape, 288)
        assert called == []
        for kernels in (sampling, matmul_small, matmul_tiled):
            monkeypatch.setattr(kernels, "kernel_works", works)
        assert sampling.supports(288, mx.bfloat16) and tried == ["drawing tokens"]
        for kernels, tokens in ((matmul_small, 1), (matmul_tiled, 64)):
            assert kernels.supports(tokens, 256, 64, mx.bfloat16)
        assert tried[1:] == ["products of few tokens", "products of some tokens"]
    names = {job.text.name.removeprefix("mlxpool_") for job in given[0]}
    attention = {"ragged_latents"} if sizes is LATENT else {"ragged_attention"}
    assert attention | {"sampling", "matmul_small", "matmul_tiled", "host_write"} <= names
    assert {"rms_norm", "rope_tables", "take_rows", "column_sums"} <= names
