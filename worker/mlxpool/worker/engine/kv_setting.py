"""Checks that a model can store keys and values as the setting `kv` demands. No MLX."""

from __future__ import annotations

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.caches.specs import KeyValueSpec, LatentSpec
from mlxpool.worker.caches.stored import AUTO, INT8
from mlxpool.worker.kernels.work_list import QUANTISED_SIZES
from mlxpool.worker.weights.inspect import ModelFolder

NO_KV = "kv = {kv!r} is not built for {what}, {why}; leave it out"


def require_kv(kv: str, folder: ModelFolder) -> None:
    """Raises ModelLoadFailed if the model's caches cannot be stored as `kv` demands."""
    caches = folder.plan.caches
    why = ""
    if folder.uses_mlx_lm:
        why = "which is computed by mlx-lm's code, with caches of its own"
    elif any(isinstance(cache, LatentSpec) for cache in caches):
        why = "whose layers store latent vectors instead of keys and values (MLA)"
    elif not any(isinstance(cache, KeyValueSpec) for cache in caches):
        why = "whose layers store no keys and values"
    if kv != AUTO and why:
        raise ModelLoadFailed(
            NO_KV.format(kv=kv, what=f"model_type {folder.model_type!r}", why=why)
        )


def resume_note(kv: str, *, deterministic: bool) -> str:
    """Returns a warning for operators: with this KV cache format, resumed answers may differ.

    Returns "" if there is nothing to warn of.
    """
    if kv != INT8 or deterministic:
        return ""
    return (
        "kv = 'int8': an answer that goes on after the loss of its worker, a preemption or a"
        " context shift loses and doubles no token, but may go on with other tokens where two are"
        " nearly tied; only with deterministic = true, on a CPU, it goes on with the same"
    )


def require_no_kv(kv: str, what: str) -> None:
    """Raises ModelLoadFailed if `kv` is set for a model without a cache of keys and values."""
    if kv != AUTO:
        raise ModelLoadFailed(NO_KV.format(kv=kv, what=what, why="which stores no keys and values"))


def kernels_read_int8(folder: ModelFolder) -> bool:
    """Returns True if a GPU's kernels may be able to read 8-bit keys and values of the model.

    Only a load finds out, because it tries the kernels.
    """
    layers = [cache for cache in folder.plan.caches if isinstance(cache, KeyValueSpec)]
    return len(layers) == len(folder.plan.caches) and all(
        layer.key_dim == layer.value_dim and layer.key_dim in QUANTISED_SIZES for layer in layers
    )


def no_int8_kernels(folder: ModelFolder, *, cuda: bool) -> str:
    """Returns the error message for 8-bit keys and values that this GPU's kernels cannot read.

    `folder`: the model with these keys and values. `cuda`: True if the GPU is from NVIDIA.
    """
    if not cuda:
        return NO_KV.format(
            kv=INT8,
            what=f"model_type {folder.model_type!r} on this GPU",
            why=(
                "as the kernels that read keys and values as integers are written for CUDA, not"
                " for Metal"
            ),
        )
    heads = sorted(
        {
            f"{cache.heads} of {cache.key_dim} and {cache.value_dim}"
            for cache in folder.plan.caches
            if isinstance(cache, KeyValueSpec)
        }
    )
    return NO_KV.format(
        kv=INT8,
        what=f"model_type {folder.model_type!r} on this GPU",
        why=(
            f"as no kernel of ours reads its keys and values as integers (heads: {', '.join(heads)}"
            " numbers): they read heads of 32 to 256 numbers, a multiple of 32, in float16 or"
            " bfloat16, of models without recurrent layers"
        ),
    )
