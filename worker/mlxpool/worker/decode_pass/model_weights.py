"""Decides which models the kernel of a whole pass supports, and collects their weights."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels import matmul_tiled
from mlxpool.worker.kernels.kernel_builder import HALF_DTYPES
from mlxpool.worker.layers.attention import GroupedQueryAttentionLayer
from mlxpool.worker.layers.decoder import DecoderModel
from mlxpool.worker.layers.decoder_layer import PreNorm
from mlxpool.worker.layers.gated_mlp import GatedMLPLayer
from mlxpool.worker.layers.layer_types import Rope
from mlxpool.worker.layers.linear import Embedding, GatedLinearUnit, Linear, RMSNorm
from mlxpool.worker.layers.model_plan import Model

MAX_GROUP = 16  # query heads of a key head
# Supported head sizes. The kernel also has tiles for 128, which were not measured yet.
HEAD_SIZES = (64,)
NORM_NUMBERS = 8  # numbers of a line that each thread norms


class PassShape(Struct, frozen=True):
    """The model shape for which the kernel is compiled.

    `eps` is for the norms of layers, `head_eps` for the norms of heads' queries and keys;
    `head_eps` 0: no such norms. `biased`: queries, keys and values have a bias.
    """

    layers: int
    hidden: int
    width: int  # width of the feed-forward
    kv_heads: int
    group: int  # query heads of a key head
    size: int  # numbers of a head
    rope: Rope
    scale: float  # factor of the scores
    eps: float
    head_eps: float
    biased: bool
    dtype: mx.Dtype

    @property
    def queries(self) -> int:
        """The size of all queries of a line together."""
        return self.kv_heads * self.group * self.size

    @property
    def qkv(self) -> int:
        """The size of all queries, keys and values of a line together."""
        return self.queries + 2 * self.kv_heads * self.size

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """The rows and columns of the weights of a layer, in the order of their use."""
        return (
            (self.qkv, self.hidden),
            (self.hidden, self.queries),
            (2 * self.width, self.hidden),
            (self.hidden, self.width),
        )


class LayerWeights(Struct, frozen=True):
    """The weights of a layer.

    If the layer lacks `bias`, `query_norm` or `key_norm`, the field has the array of `norm` as a
    placeholder, which the kernel does not read.
    """

    norm: mx.array
    qkv: mx.array
    bias: mx.array
    query_norm: mx.array
    key_norm: mx.array
    out: mx.array
    feed_norm: mx.array
    gate_up: mx.array
    down: mx.array

    def arrays(self) -> list[mx.array]:
        """Returns all weights, in the order of decode_pass.cu's Layer."""
        return [
            self.norm, self.qkv, self.bias, self.query_norm, self.key_norm, self.out,
            self.feed_norm, self.gate_up, self.down,
        ]  # fmt: skip


class PassWeights(Struct, frozen=True):
    """The weights of a model that the kernel supports, and the model's shape."""

    shape: PassShape
    embedding: mx.array
    layers: tuple[LayerWeights, ...]
    norm: mx.array  # the norm after the last layer


def weights_of(model: Model, dtype: mx.Dtype) -> PassWeights | str:
    """Returns the model's weights for the kernel, or why the kernel does not support the model."""
    if not isinstance(model, DecoderModel) or type(model.embed) is not Embedding:
        return "the model is of another kind, or its embedding is quantised"
    if model.spec.embed_scale != 1.0:
        return "its embedding is scaled"
    layers = [layer for layer in map(_layer, model.layers) if layer is not None]
    norm = _rms_norm(model.norm)
    if len(layers) < len(model.layers) or not layers or norm is None:
        return "its layers are of another kind, or their weights are quantised"
    kinds = {kind for kind, _ in layers}
    weights = tuple(layer for _, layer in layers)
    (kind, _), embedding = layers[0], model.embed.weight
    if len(kinds) > 1 or norm.eps != kind.eps:
        return "its layers are of different kinds"
    arrays = [embedding, norm.weight, *(array for layer in weights for array in layer.arrays())]
    if any(array.dtype != dtype for array in arrays):
        return f"some of its weights are not {dtype}"
    shape = _pass_shape(kind, weights, dtype)
    return unsupported(shape) or PassWeights(shape, embedding, weights, norm.weight)


def unsupported(shape: PassShape) -> str:
    """Returns why the kernel does not support models of this shape; "" if it does."""
    if shape.dtype not in HALF_DTYPES:
        return f"it computes in {shape.dtype}"
    for rows, columns in shape.products:
        if rows % matmul_tiled.ROWS or columns % matmul_tiled.COLUMNS:
            return f"a weight is {rows} x {columns}"
        if rows * columns * shape.dtype.size > matmul_tiled.MAX_WEIGHT_BYTES:
            return f"a weight is {rows} x {columns}: the device takes longer than the host"
    rotates = 0 < shape.rope.dims <= shape.size and shape.rope.axes is None
    if shape.size not in HEAD_SIZES or shape.group > MAX_GROUP or not rotates:
        return f"its heads have {shape.size} numbers, and {shape.rope.dims} of them rotate"
    if shape.hidden % NORM_NUMBERS:
        return f"its lines have {shape.hidden} numbers"
    return ""


class _LayerKind(Struct, frozen=True):
    """The properties that all layers must have in common, except the sizes of their weights."""

    kv_heads: int
    query_heads: int
    size: int
    rope: Rope
    scale: float
    eps: float
    head_eps: float
    biased: bool


def _layer(layer: object) -> tuple[_LayerKind, LayerWeights] | None:
    """Returns a layer's properties and weights; None if the kernel does not compute such layers."""
    if not isinstance(layer, PreNorm):
        return None
    mixer, feed = layer.mixer, layer.feed
    if not isinstance(mixer, GroupedQueryAttentionLayer) or not isinstance(feed, GatedMLPLayer):
        return None
    gated = feed.gated
    if not isinstance(gated, GatedLinearUnit) or not gated.swiglu:
        return None
    norm, feed_norm = _rms_norm(layer.before_mixer), _rms_norm(layer.before_feed)
    if norm is None or feed_norm is None or norm.eps != feed_norm.eps:
        return None
    query_norm, key_norm = map(_rms_norm, mixer.norms or (norm, norm))
    qkv, out, gate_up, down = map(_dense, (mixer.qkv, mixer.o, gated.gate_up, feed.down))
    if query_norm is None or key_norm is None or qkv is None:
        return None
    if out is None or gate_up is None or down is None:
        return None
    scores, heads = mixer.scores, mixer.spec.heads
    biased = any(linear.bias is not None for linear in (out, gate_up, down))
    if biased or scores.softcap or scores.sinks is not None:
        return None
    kind = _LayerKind(
        heads.kv,
        heads.query,
        heads.dim,
        mixer.spec.rope,
        scores.scale,
        norm.eps,
        mixer.spec.norm_eps,
        qkv.bias is not None,
    )
    return kind, LayerWeights(
        norm.weight,
        qkv.weight,
        norm.weight if qkv.bias is None else qkv.bias,
        query_norm.weight,
        key_norm.weight,
        out.weight,
        feed_norm.weight,
        gate_up.weight,
        down.weight,
    )


def _dense(layer: object) -> Linear | None:
    """Returns `layer` if it is an unquantised Linear that is not batch-invariant; else None."""
    return layer if type(layer) is Linear and not layer.batch_invariant else None


def _rms_norm(norm: object) -> RMSNorm | None:
    return norm if type(norm) is RMSNorm else None


def _pass_shape(kind: _LayerKind, layers: Sequence[LayerWeights], dtype: mx.Dtype) -> PassShape:
    hidden, width = layers[0].down.shape
    return PassShape(
        layers=len(layers),
        hidden=hidden,
        width=width,
        kv_heads=kind.kv_heads,
        group=kind.query_heads // kind.kv_heads,
        size=kind.size,
        rope=kind.rope,
        scale=kind.scale,
        eps=kind.eps,
        head_eps=kind.head_eps,
        biased=kind.biased,
        dtype=dtype,
    )
