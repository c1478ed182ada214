"""The gated delta net: a recurrent layer in place of attention, with a state of constant size.

Its arithmetic is in delta_rule.py. MLX is imported only when a model is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.caches.specs import RecurrentSpec
from mlxpool.worker.layers.config_fields import integer, number
from mlxpool.worker.layers.decoder_layer import (
    FusableSublayer,
    MixerFunction,
    WeightShapes,
    linear_shapes,
)
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, reordered
from mlxpool.worker.layers.layer_types import (
    ForwardBatch,
    LayerBuilder,
    LinearInput,
    PendingProduct,
)

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxpool.worker.kernels.recurrent.gated_delta import DeltaNetShape, DeltaNetWeights
    from mlxpool.worker.kernels.recurrent.span_states import SpanStates
    from mlxpool.worker.layers.delta_rule import GatedDeltaRule
    from mlxpool.worker.layers.linear import RMSNorm

FLOAT32 = ("A_log", "dt_bias")  # tensors in float32: the decay rates of states depend on them


class GatedDeltaNet(Struct, frozen=True):
    """A Mixer: groups of value heads share the queries and keys of one key head.

    One product gives the inputs of all heads: queries, keys, values, gates (z), rates (b) and
    decays (a). A checkpoint stores the weight of this product as two layers, ordered by key head
    (`fused`), or as four layers.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int  # the width of the convolution in tokens
    eps: float
    fused: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, fused: bool) -> GatedDeltaNet:
        """Reads config.json. Raises ModelLoadFailed with the missing or unusable key."""
        spec = cls(
            hidden=integer(config, "hidden_size"),
            key_heads=integer(config, "linear_num_key_heads"),
            value_heads=integer(config, "linear_num_value_heads"),
            key_dim=integer(config, "linear_key_head_dim"),
            value_dim=integer(config, "linear_value_head_dim"),
            width=integer(config, "linear_conv_kernel_dim"),
            eps=number(config, "rms_norm_eps"),
            fused=fused,
        )
        if spec.value_heads % spec.key_heads:
            raise ModelLoadFailed(
                f"config.json has linear_num_value_heads {spec.value_heads}, which is no multiple "
                f"of linear_num_key_heads {spec.key_heads}"
            )
        return spec

    @property
    def keys(self) -> int:
        """The size of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The size of the values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The number of channels of the convolution, which reads queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def cache(self) -> RecurrentSpec:
        """The layer's state: the last inputs of the convolution, and the matrix of each head."""
        state = (self.value_heads, self.key_dim, self.value_dim)
        return RecurrentSpec(((self.width - 1, self.channels), state))

    @property
    def inputs(self) -> Mapping[str, int]:
        """The names and output sizes of the linear layers that compute the inputs."""
        if self.fused:
            return {
                "in_proj_qkvz": self.channels + self.values,
                "in_proj_ba": 2 * self.value_heads,
            }
        return {
            "in_proj_qkv": self.channels,
            "in_proj_z": self.values,
            "in_proj_b": self.value_heads,
            "in_proj_a": self.value_heads,
        }

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the layer's tensors; the names begin with `name`."""
        for module, size in self.inputs.items():
            yield from linear_shapes(f"{name}.{module}", size, self.hidden)
        yield f"{name}.conv1d.weight", (self.channels, 1, self.width)
        yield f"{name}.A_log", (self.value_heads,)
        yield f"{name}.dt_bias", (self.value_heads,)
        yield f"{name}.norm.weight", (self.value_dim,)
        yield from linear_shapes(f"{name}.out_proj", self.hidden, self.values)

    def derived(self, found: StoredTensors, name: str) -> Iterator[DerivedWeights]:
        """Yields the weights whose inputs or axes a checkpoint stores in another order."""
        if self.fused:
            for module, sizes in zip(self.inputs, self._sizes_per_key_head(), strict=True):
                yield from reordered(found, f"{name}.{module}", rows_by_kind(self.key_heads, sizes))
        conv, shape = f"{name}.conv1d.weight", (self.channels, 1, self.width)
        stored = found.get(conv)
        if stored is not None and stored.shape == (self.channels, self.width, 1):
            outputs = {conv: replace(stored, shape=shape)}
            yield DerivedWeights((conv,), outputs, lambda arrays: [arrays[0].reshape(shape)])

    def build(self, builder: LayerBuilder, name: str, layer: int) -> MixerFunction:
        """Builds the layer over the builder's weights, whose names begin with `name`."""
        from mlxpool.worker.kernels.recurrent.gated_delta import DeltaNetShape
        from mlxpool.worker.layers.delta_rule import GatedDeltaRule

        shape = DeltaNetShape(
            key_heads=self.key_heads,
            heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            width=self.width,
            eps=self.eps,
        )
        rule = GatedDeltaRule(
            key_heads=self.key_heads,
            conv=builder.tensor(f"{name}.conv1d.weight").squeeze(1).T,
            log_speed=builder.tensor(f"{name}.A_log"),
            bias=builder.tensor(f"{name}.dt_bias"),
        )
        return GatedDeltaNetLayer(self, shape, rule, builder, name, layer)

    def _sizes_per_key_head(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the sizes of one key head's inputs, for each of the fused layers."""
        ratio = self.value_heads // self.key_heads
        values = ratio * self.value_dim
        return (self.key_dim, self.key_dim, values, values), (ratio, ratio)


class GatedDeltaNetLayer(FusableSublayer):
    """A GatedDeltaNet with its weights; on a GPU, our kernel may compute it."""

    def __init__(
        self,
        spec: GatedDeltaNet,
        shape: DeltaNetShape,
        rule: GatedDeltaRule,
        builder: LayerBuilder,
        name: str,
        layer: int,
    ) -> None:
        from mlxpool.worker.kernels.recurrent.gated_delta import delta_net
        from mlxpool.worker.layers.delta_rule import kernel_serves

        self.spec, self.shape, self.rule, self.layer = spec, shape, rule, layer
        self._kernel_serves, self._delta_net = kernel_serves, delta_net
        self.inputs = builder.concatenated([f"{name}.{module}" for module in spec.inputs])
        self.norm = builder.rms_norm(f"{name}.norm", spec.eps)
        self.swiglu = builder.swiglu
        self.out = builder.linear(f"{name}.out_proj")

    def pending(self, x: LinearInput, *batches: ForwardBatch) -> PendingProduct:
        """Returns the layer's output; its last product, the projection `out`, is not computed yet.

        One kernel can compute this product together with the residual addition after it.
        """
        (batch,), mixed = batches, self.inputs(x)
        if self._serves(mixed.dtype):
            return PendingProduct(self.out, batch.recur_spans(self.layer, mixed, self._scan))
        return PendingProduct(self.out, self._by_operations(mixed, batch))

    def _by_operations(self, mixed: mx.array, batch: ForwardBatch) -> mx.array:
        """Computes the gated delta net of token vectors `mixed` [T, n] by MLX's operations only."""
        spec = self.spec
        gates = spec.channels + spec.values
        z = batch.lines_after(self.layer, mixed[:, spec.channels : gates])
        z = z.reshape(z.shape[0], spec.value_heads, -1)
        b, a = mixed[:, gates : gates + spec.value_heads], mixed[:, gates + spec.value_heads :]
        out = self.norm(batch.recur(self.layer, (mixed[:, : spec.channels], a, b), self.rule))
        gated = self.swiglu(z.astype(out.dtype), out)
        return gated.reshape(z.shape[0], -1).astype(mixed.dtype)

    def _serves(self, dtype: mx.Dtype) -> bool:
        """Returns True if our kernel supports token vectors of this dtype."""
        return self._kernel_serves(self.shape, dtype)

    def _scan(self, lines: mx.array, states: SpanStates) -> tuple[mx.array, mx.array]:
        """Computes the gated delta net and its norm for all spans of a pass, by our kernel.

        The method is a SpanScan.
        """
        return self._delta_net(self.shape, lines, states, self._weights)

    @cached_property
    def _weights(self) -> DeltaNetWeights:
        """The weights for our kernel."""
        return self.rule.kernel_weights(cast("RMSNorm", self.norm).weight)


def rows_by_kind(heads: int, sizes: tuple[int, ...]) -> list[int]:
    """Returns the indices that sort rows by kind, then by head.

    The unsorted rows are in the order of the heads; each head has `sizes[i]` rows of kind i, in the
    order of the kinds.
    """
    stride = sum(sizes)
    starts = [sum(sizes[:kind]) for kind in range(len(sizes))]
    return [
        head * stride + start + row
        for start, size in zip(starts, sizes, strict=True)
        for head in range(heads)
        for row in range(size)
    ]
