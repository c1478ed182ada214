"""Experts with quantised weights in the memory order in which a GPU's kernels read them."""

from __future__ import annotations

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels import expert_fragments, expert_products, expert_routing
from mlxpool.worker.kernels.expert_fragments import MAX_MXFP4_SCALE, PackedArrays, PackedFormat
from mlxpool.worker.kernels.expert_products import ExpertWeights
from mlxpool.worker.kernels.kernel_builder import WARP_SIZE
from mlxpool.worker.kernels.routing_params import RoutingParams
from mlxpool.worker.layers.experts import SwitchGLU, SwitchLinear, kernel_sum
from mlxpool.worker.layers.layer_types import (
    LayerFunction,
    LinearInput,
    PendingNorm,
    PendingProduct,
)
from mlxpool.worker.layers.layer_types import Linear as AnyLinear
from mlxpool.worker.layers.quantised_weight import QuantisedWeight


class PackedGLU(Struct, frozen=True):
    """Implements layer_types.SwitchGLU over weights in fragments, see expert_fragments.cuh."""

    weights: ExpertWeights
    count: int  # the number of experts
    dtype: mx.Dtype  # dtype of x in the kernels

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Returns the outputs [T, k, in] of each token's experts [T, k] for x [T, in]."""
        tokens, chosen = experts.shape
        most = expert_routing.MAX_CHOICES // chosen
        if chosen > WARP_SIZE:
            parts = [experts[:, :WARP_SIZE], experts[:, WARP_SIZE:]]
            return mx.concatenate([self(x, part) for part in parts], axis=1)
        if tokens > most:
            return mx.concatenate([self(x[:most], experts[:most]), self(x[most:], experts[most:])])
        # The plan needs logits: they fall from each expert of a token to the token's next expert.
        ranks = mx.broadcast_to(mx.arange(chosen, 0, -1).astype(mx.float32), experts.shape)
        logits = mx.put_along_axis(mx.zeros((tokens, self.count)), experts, ranks, axis=1)
        routing = RoutingParams(self.count, chosen, sigmoid=False, normed=False)
        plan = expert_routing.plan_logits(logits, None, routing, shared=False)
        numbers = x.astype(self.dtype)
        outputs, _ = expert_products.pending_mixture(numbers, plan, routing, self.weights)
        return outputs.reshape(tokens, chosen, -1).astype(x.dtype)

    def routed_sum(
        self,
        x: LinearInput,
        router: AnyLinear,
        routing: RoutingParams,
        added: mx.array | None = None,
        shared: LayerFunction | None = None,
    ) -> PendingProduct | None:
        """Returns the pending weighted sum of the experts that `router` chooses.

        Returns None if no kernel computes the sum. See layer_types.SwitchGLU.
        """
        lines = x.x if isinstance(x, PendingNorm) else x
        fits = lines.ndim == 2 and lines.dtype == self.dtype
        return kernel_sum(self.weights if fits else None, x, router, routing, added, shared)


def in_fragments(experts: SwitchGLU, dtype: mx.Dtype) -> SwitchGLU | PackedGLU:
    """Returns the experts with weights in our kernels' memory order, if the kernels support them.

    Otherwise returns `experts`. `dtype`: the dtype of the experts' inputs. The result is evaluated,
    so that at most one weight is in memory twice.
    """
    if experts.batch_invariant or experts.limit is None or len(experts.gate_up) != 1:
        return experts
    layers = experts.gate_up[0], experts.down
    gate_up, down = (_packed_arrays(layer, dtype) for layer in layers)
    if gate_up is None or down is None:
        return experts
    count, size, _ = down.weight.shape
    formats, width = (gate_up.packed, down.packed), gate_up.weight.shape[1] // 2
    routing = RoutingParams(count, 1, sigmoid=False, normed=False)
    if not expert_products.supports(size, width, dtype, formats):
        return experts
    if not expert_routing.supports(1, routing) or not all(map(_has_small_scales, (gate_up, down))):
        return experts
    weights = [
        expert_products.of_packed(arrays, gated=arrays is gate_up, bias=layer.bias)
        for arrays, layer in zip((gate_up, down), layers, strict=True)
    ]
    mx.eval([weight.weight for weight in weights])
    return PackedGLU(ExpertWeights(weights[0], weights[1], experts.limit), count, dtype)


def _packed_arrays(layer: SwitchLinear, dtype: mx.Dtype) -> PackedArrays | None:
    """Returns a layer's packed weight if our kernels support it with x of `dtype`; else None."""
    weight, bias = layer.weight, layer.bias
    if not isinstance(weight, QuantisedWeight) or weight.factor is not None:
        return None
    if bias is not None and bias.dtype != dtype:
        return None
    layout, scales, biases = weight.layout, weight.scales, weight.biases
    packed = PackedFormat(layout.bits, layout.group_size, layout.mode == "mxfp4")
    if packed.mode != layout.mode or packed not in expert_fragments.PACKED_FORMATS:
        return None
    if not packed.floats and (biases is None or not scales.dtype == biases.dtype == dtype):
        return None
    return PackedArrays(weight.weight, scales, biases, packed)


def _has_small_scales(arrays: PackedArrays) -> bool:
    """Returns True if all scales are small enough for our kernels; reads the scales."""
    return not arrays.packed.floats or bool((arrays.scales.max() <= MAX_MXFP4_SCALE).item())
