"""The stacked layers of experts over MLX weights: those that a token has chosen, and their sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from mlxpool.worker.kernels import expert_products, expert_routing
from mlxpool.worker.kernels.device import on_cuda
from mlxpool.worker.kernels.routing_params import RoutingParams
from mlxpool.worker.layers.gated_mlp import GatedMLPLayer
from mlxpool.worker.layers.layer_types import Activation, LayerFunction
from mlxpool.worker.layers.layer_types import Linear as AnyLinear
from mlxpool.worker.layers.linear import GatedLinearUnit, Linear
from mlxpool.worker.layers.quantised_weight import QuantisedWeight

SORT_CHOICES = 64  # choices (tokens times k) from which on sorting them by expert pays
# Sorted choices up to which a CUDA GPU computes a product for each, which finds the expert of the
# choice before in its cache: MLX's grouped product takes as long for a few rows of an expert as for
# 256.
SINGLE_CHOICES = 256

Weight: TypeAlias = "mx.array | QuantisedWeight"


@dataclass(frozen=True, slots=True)
class SwitchLinear:
    """The stacked linear layers of E experts: weight [E, out, in] and bias [E, out] or None."""

    weight: Weight
    bias: mx.array | None

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """x [T, in] or [T, k, in] and the experts [T, k] of each token -> [T, k, out]."""
        rows = x[:, None, None] if x.ndim == 2 else x[:, :, None]
        return self.rows(rows, experts, is_sorted=False).squeeze(-2)

    def rows(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """x [..., 1, in] and the expert [...] of each row -> [..., 1, out].

        `is_sorted`: the experts are in ascending order.
        """
        if isinstance(self.weight, QuantisedWeight):
            out = self.weight.gathered_product(x, experts, is_sorted)
        else:
            weight = self.weight.swapaxes(-1, -2)
            grouped = is_sorted and not (on_cuda() and experts.size <= SINGLE_CHOICES)
            out = mx.gather_mm(x, weight, rhs_indices=experts, sorted_indices=grouped)
        return out if self.bias is None else out + self.bias[experts][..., None, :]


@dataclass(frozen=True, slots=True)
class SwitchGLU:
    """down(activation(gate(x), up(x))) of the chosen experts.

    With `batch_invariant` rows are never sorted by expert, so that each is a product of its own.
    """

    gate_up: tuple[SwitchLinear, ...]  # one layer with concatenated outputs, or gate and up
    down: SwitchLinear
    activation: Activation
    batch_invariant: bool = False
    swiglu: bool = False  # whether `activation` is silu(gate) * up

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """x [T, in] and the experts [T, k] of each token -> [T, k, in]."""
        if self.batch_invariant or experts.size < SORT_CHOICES:
            return self._rows(x[:, None, None], experts, is_sorted=False).squeeze(-2)
        flat = experts.flatten()
        order = mx.argsort(flat)
        # The new axis is inserted before rows are gathered: if it is inserted afterwards, MLX 0.32
        # on a GPU takes its stride for that of a row and multiplies other rows (its issue 4253).
        rows = x[:, None][order // experts.shape[1]]
        out = self._rows(rows, flat[order], is_sorted=True)
        return out.squeeze(-2)[mx.argsort(order)].reshape(*experts.shape, -1)

    def _rows(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        outs = [layer.rows(x, experts, is_sorted=is_sorted) for layer in self.gate_up]
        gate, up = outs if len(outs) == 2 else mx.split(outs[0], 2, axis=-1)
        return self.down.rows(self.activation(gate, up), experts, is_sorted=is_sorted)

    def routed_sum(
        self,
        x: mx.array,
        router: AnyLinear,
        routing: RoutingParams,
        added: mx.array | None = None,
        shared: LayerFunction | None = None,
    ) -> mx.array | None:
        """See layer_types.SwitchGLU."""
        weights = self._kernel_weights(x)
        if weights is None or not expert_routing.supports(x.shape[0], routing):
            return None
        gate_up, down = weights
        alike = _weights_alike(shared, gate_up, down)
        beside = shared(x) if shared is not None and alike is None else None
        plan = _plan(x, router, routing, added, shared=alike is not None)
        return expert_products.mixture(x, plan, routing, gate_up, down, alike, beside)

    def _kernel_weights(self, x: mx.array) -> tuple[mx.array, mx.array] | None:
        """The weights of gate and up, and of down, if our kernels multiply x [T, in] with them."""
        layers = (*self.gate_up, self.down)
        if self.batch_invariant or not self.swiglu or len(layers) != 2 or x.ndim != 2:
            return None
        gate_up, down = (layer.weight for layer in layers)
        if isinstance(gate_up, QuantisedWeight) or isinstance(down, QuantisedWeight):
            return None
        if any(layer.bias is not None for layer in layers):
            return None
        if not gate_up.dtype == down.dtype == x.dtype:
            return None
        fits = expert_products.supports(down.shape[1], down.shape[2], x.dtype)
        return (gate_up, down) if fits else None


def _plan(
    x: mx.array,
    router: AnyLinear,
    routing: RoutingParams,
    added: mx.array | None,
    *,
    shared: bool,
) -> mx.array:
    """The experts of x [T, in] and their work, see expert_routing.py."""
    if isinstance(router, Linear) and expert_routing.multiplies(x, router.weight):
        if router.bias is None:
            return expert_routing.plan_tokens(x, router.weight, added, routing, shared=shared)
        if added is None and not routing.sigmoid:
            return expert_routing.plan_tokens(x, router.weight, router.bias, routing, shared=shared)
    return expert_routing.plan_logits(router(x), added, routing, shared=shared)


def _weights_alike(
    shared: LayerFunction | None, gate_up: mx.array, down: mx.array
) -> tuple[mx.array, mx.array] | None:
    """The weights of a shared expert that has the shape and dtype of the others."""
    if not isinstance(shared, GatedMLPLayer):
        return None
    gated = shared.gated
    if not isinstance(gated, GatedLinearUnit) or not gated.swiglu:
        return None
    found = []
    for layer, experts in ((gated.gate_up, gate_up), (shared.down, down)):
        if not isinstance(layer, Linear) or layer.bias is not None:
            return None
        if layer.weight.shape != experts.shape[1:] or layer.weight.dtype != experts.dtype:
            return None
        found.append(layer.weight)
    return found[0], found[1]
