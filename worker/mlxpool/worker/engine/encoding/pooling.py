"""Vectors of texts: pools the states of a text's tokens; loads the linear layers after pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.attention.packed_batch import EqualTexts
from mlxpool.worker.encoders.sentence_transformers import Dense
from mlxpool.worker.layers.activations import FUNCTIONS
from mlxpool.worker.layers.encoder_plan import Pooling
from mlxpool.worker.layers.layer_types import LayerFunction


def _weighted_mean(states: mx.array) -> mx.array:
    """Returns the mean with weights 1, 2, 3, ...: later tokens have attended to more tokens."""
    length = states.shape[1]
    weights = mx.arange(1, length + 1, dtype=states.dtype)[:, None]
    return mx.sum(states * weights, axis=1) / (length * (length + 1) / 2)


# States [texts, length, d] of texts of one length -> [texts, d].
POOLS: Mapping[Pooling, LayerFunction] = {
    "cls": lambda states: states[:, 0],
    "lasttoken": lambda states: states[:, -1],
    "max": lambda states: mx.max(states, axis=1),
    "mean": lambda states: mx.mean(states, axis=1),
    "mean_sqrt_len_tokens": lambda states: mx.sum(states, axis=1) / states.shape[1] ** 0.5,
    "weightedmean": _weighted_mean,
}


def pooled(states: mx.array, texts: Sequence[EqualTexts], poolings: Sequence[Pooling]) -> mx.array:
    """Returns vectors [n, d * poolings] of states [T, d] of a pass, in the order of the texts."""
    vectors = []
    for some in texts:
        grouped = states[some.begin : some.end].reshape(some.count, some.length, -1)
        parts = [POOLS[pooling](grouped) for pooling in poolings]
        vectors.append(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1))
    return vectors[0] if len(vectors) == 1 else mx.concatenate(vectors)


def load_dense(file: Path, dense: Dense, dtype: mx.Dtype) -> LayerFunction:
    """Returns a linear layer with its activation. Raises ModelLoadFailed for a bad file."""
    try:
        tensors = mx.load(str(file), format="safetensors")
    except (RuntimeError, OSError) as error:
        raise ModelLoadFailed(f"{file} cannot be read: {error}") from error
    assert isinstance(tensors, dict)
    expected = {"linear.weight": (dense.outputs, dense.inputs)}
    if dense.bias:
        expected["linear.bias"] = (dense.outputs,)  # type: ignore[assignment]
    shapes = {name: array.shape for name, array in tensors.items()}
    if shapes != expected:
        raise ModelLoadFailed(f"{file} has the tensors {shapes}, must have {expected}")
    weight = tensors["linear.weight"].astype(dtype).T
    bias = tensors["linear.bias"].astype(dtype) if dense.bias else mx.zeros((dense.outputs,), dtype)
    mx.eval(weight, bias)
    activation = {"": lambda x: x, "tanh": mx.tanh, **FUNCTIONS}[dense.activation]
    return lambda x: activation(x @ weight + bias)
