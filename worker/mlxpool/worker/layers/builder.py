"""Builds layers over loaded weights; a model does not depend on whether weights are quantised."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

import mlx.core as mx

from mlxpool.worker.kernels import cpu_exp
from mlxpool.worker.kernels.device import on_gpu
from mlxpool.worker.layers.activations import ClampedSwiGLU
from mlxpool.worker.layers.byte_columns import ByteColumns, byte_columns
from mlxpool.worker.layers.dense_weights import concatenated as concatenated_dense
from mlxpool.worker.layers.dense_weights import dense, laid_out
from mlxpool.worker.layers.derived_weights import MODULE_TENSORS
from mlxpool.worker.layers.experts import SwitchGLU, SwitchLinear
from mlxpool.worker.layers.latent_token import latent_token_of
from mlxpool.worker.layers.layer_types import (
    Activation,
    LatentParts,
    LatentToken,
    PendingProduct,
)
from mlxpool.worker.layers.layer_types import Linear as AnyLinear
from mlxpool.worker.layers.linear import (
    ConcatenatedLinear,
    Embedding,
    GatedLinearUnit,
    Linear,
    MultiLinear,
    QuantisedEmbedding,
    QuantisedLinear,
    RMSNorm,
)
from mlxpool.worker.layers.packed_experts import PackedGLU, in_fragments
from mlxpool.worker.layers.quantisation import GLOBAL_SCALES, QuantLayout
from mlxpool.worker.layers.quantised_weight import QuantisedWeight, concatenated
from mlxpool.worker.layers.tiled_weight import in_tiles


class WeightLayerBuilder:
    """Implements LayerBuilder over `weights`; layers compute in `dtype`.

    `layouts` maps modules with a quantised weight to its layout. With `dequantise` quantised
    weights are dequantised once, by the builder. With `batch_invariant` the bits of a row of x do
    not depend on other rows of x (see `tiled_matmul`); quantised weights are then always
    dequantised. Each layer removes its weights from `weights`, so that no weight is in memory
    twice.
    """

    def __init__(
        self,
        weights: MutableMapping[str, mx.array],
        layouts: Mapping[str, QuantLayout],
        dtype: mx.Dtype,
        *,
        batch_invariant: bool = False,
        dequantise: bool = False,
    ) -> None:
        self._weights = weights
        self._layouts = layouts
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self._dequantise = dequantise or batch_invariant

    def linear(self, name: str) -> AnyLinear:
        return self.concatenated([name])

    def concatenated(self, names: Sequence[str]) -> AnyLinear:
        """Returns one layer for the linear layers `names`, whose outputs it concatenates.

        The linear layers have the same input. Fewer and larger products are faster. Quantised
        weights may stay separate inside the layer, see `_concatenated_weight`.
        """
        if self._are_dense(names):
            stored = [self._stored(name) for name in names]
            weight, bias = laid_out(stored, self._dtype), self._concatenated_bias(names)
            return Linear(weight, bias, self._batch_invariant, self._byte_columns(stored))
        packed = self._concatenated_weight(names)
        if packed is None:
            return ConcatenatedLinear(tuple(self.linear(name) for name in names))
        assert isinstance(packed, QuantisedWeight)
        return QuantisedLinear(in_tiles(packed), self._concatenated_bias(names))

    def gated_linear_unit(
        self, names: Sequence[str], width: int, activation: Activation | None = None
    ) -> GatedLinearUnit:
        """Builds a unit of two layers, gate and up [width, in].

        If `activation` is None, the unit is a SwiGLU.
        """
        gate_up = self.concatenated(names)
        return GatedLinearUnit(gate_up, width, activation or self.swiglu, activation is None)

    def rms_norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight"), eps)

    def embedding(self, name: str) -> Embedding | QuantisedEmbedding:
        if self._are_dense([name]):
            stored = self._stored(name)
            weight = dense(stored, self._dtype)
            return Embedding(weight, self._batch_invariant, self._byte_columns([stored]))
        return QuantisedEmbedding(in_tiles(self._packed(name, self._layouts[name])), self._dtype)

    def tensor(self, name: str) -> mx.array:
        """Returns a tensor by its whole name."""
        return self._weights.pop(name)

    def multi_linear(self, name: str) -> MultiLinear:
        """Builds one linear layer for each head, weight [H, out, in]."""
        return MultiLinear(self._weight(name), self._batch_invariant)

    def latent_token(self, parts: LatentParts) -> LatentToken | None:
        """Builds the products of latent attention (MLA) for passes of one token, in fewer kernels.

        Returns None if a weight is quantised, a layer has a bias, or the `eps` of the norms differ.
        """
        return latent_token_of(parts)

    def switch_linear(self, name: str) -> SwitchLinear:
        """Builds the stacked linear layers of experts, weight [E, out, in]."""
        return SwitchLinear(self._weight(name), self._concatenated_bias([name]))

    def switch_glu(self, name: str, activation: Activation | None = None) -> SwitchGLU | PackedGLU:
        """Builds experts of `name`.gate_proj, .up_proj and .down_proj.

        If `activation` is None, the experts are SwiGLUs.
        """
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        weight = self._concatenated_weight(names)
        if weight is None:
            gate_up = tuple(self.switch_linear(layer) for layer in names)
        else:
            gate_up = (SwitchLinear(weight, self._concatenated_bias(names)),)
        down = self.switch_linear(f"{name}.down_proj")
        limit = 0.0 if activation is None else None
        if isinstance(activation, ClampedSwiGLU):
            limit = activation.limit
        function = activation or self.swiglu
        experts = SwitchGLU(gate_up, down, function, self._batch_invariant, limit)
        return in_fragments(experts, self._dtype)

    def swiglu(self, gate: mx.array, up: mx.array) -> mx.array:
        if on_gpu():
            return _fused_swiglu(gate, up)
        if self._batch_invariant or not cpu_exp.supports(gate):
            return _swiglu(gate, up)
        return cpu_exp.swiglu(gate, up)

    def whole_sum(self, x: mx.array) -> mx.array:
        return x

    def whole_product(self, product: PendingProduct) -> PendingProduct:
        return product

    def _weight(self, name: str) -> mx.array | QuantisedWeight:
        weight = self._concatenated_weight([name])
        assert weight is not None, "a single weight needs no common layout"
        return weight

    def _are_dense(self, names: Sequence[str]) -> bool:
        """Returns True if the weights are unquantised or will be dequantised."""
        return self._dequantise or not any(self._layouts.get(name) for name in names)

    def _concatenated_weight(self, names: Sequence[str]) -> mx.array | QuantisedWeight | None:
        """Returns weights [..., out, in] concatenated along `out`; None if they stay separate.

        Quantised weights of different layouts stay separate. On the CPU all quantised weights stay
        separate: there the copy at load takes more time than larger products save.
        """
        layouts = {self._layouts.get(name) for name in names}
        if self._are_dense(names):
            return concatenated_dense(
                [dense(self._stored(name), self._dtype) for name in names], axis=-2
            )
        scales = [f"{name}.{kind}" for name in names for kind in GLOBAL_SCALES]
        globally_scaled = any(scale in self._weights for scale in scales)
        if len(names) > 1 and (len(layouts) > 1 or globally_scaled or not on_gpu()):
            return None
        return concatenated([self._packed(name, self._layouts[name]) for name in names])

    def _concatenated_bias(self, names: Sequence[str]) -> mx.array | None:
        if f"{names[0]}.bias" not in self._weights:
            return None
        return concatenated_dense([self._weights.pop(f"{name}.bias") for name in names], axis=-1)

    def _stored(self, name: str) -> mx.array | QuantisedWeight:
        """Returns the weight of a module as it is stored."""
        layout = self._layouts.get(name)
        return self._weights.pop(f"{name}.weight") if layout is None else self._packed(name, layout)

    def _byte_columns(self, stored: Sequence[mx.array | QuantisedWeight]) -> ByteColumns | None:
        """Returns a layer's weights in byte columns, if all of them are quantised; else None."""
        packed = [weight for weight in stored if isinstance(weight, QuantisedWeight)]
        if self._batch_invariant or len(packed) < len(stored):
            return None
        return byte_columns(packed)

    def _packed(self, name: str, layout: QuantLayout) -> QuantisedWeight:
        names = [tensor for kind in MODULE_TENSORS if (tensor := f"{name}.{kind}") in self._weights]
        arrays = {
            tensor: self._weights.pop(tensor) for tensor in names if not tensor.endswith(".bias")
        }
        return QuantisedWeight.of(arrays, name, layout)


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


_fused_swiglu = mx.compile(_swiglu, shapeless=True)  # one kernel; a CPU may lack a compiler
