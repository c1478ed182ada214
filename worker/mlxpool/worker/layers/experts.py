"""The stacked layers of experts over MLX weights: outputs of a token's experts, and their sum."""

from __future__ import annotations

from typing import TypeAlias

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels import expert_products, expert_routing, expert_token, matmul_small
from mlxpool.worker.kernels.device import on_cuda
from mlxpool.worker.kernels.expert_products import ExpertWeight, ExpertWeights, WeightedSum
from mlxpool.worker.kernels.expert_routing import LineNorm
from mlxpool.worker.kernels.expert_token import TokenMixture
from mlxpool.worker.kernels.routing_params import RoutingParams
from mlxpool.worker.layers.gated_mlp import GatedMLPLayer
from mlxpool.worker.layers.layer_types import (
    Activation,
    LayerFunction,
    LinearInput,
    PendingNorm,
    PendingProduct,
)
from mlxpool.worker.layers.layer_types import Linear as AnyLinear
from mlxpool.worker.layers.linear import GatedLinearUnit, Linear, RMSNorm
from mlxpool.worker.layers.quantised_weight import QuantisedWeight

SORT_CHOICES = 64  # the least choices (tokens times k) for which sorting by expert is faster
# The most sorted choices for which a CUDA GPU computes a product for each choice: the previous
# choice's expert is then in its cache. MLX's grouped product takes as long for a few rows of an
# expert as for 256 rows.
SINGLE_CHOICES = 512

Weight: TypeAlias = "mx.array | QuantisedWeight"


class SwitchLinear(Struct, frozen=True):
    """The stacked linear layers of E experts: weight [E, out, in] and bias [E, out] or None."""

    weight: Weight
    bias: mx.array | None

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Multiplies x [T, in] or [T, k, in] with the weights of experts [T, k] -> [T, k, out]."""
        rows = x[:, None, None] if x.ndim == 2 else x[:, :, None]
        return self.rows(rows, experts, is_sorted=False).squeeze(-2)

    def rows(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        """Multiplies each row of x [..., 1, in] with its expert's weight -> [..., 1, out].

        `experts` [...]: the expert of each row. `is_sorted`: they are in ascending order.
        """
        if isinstance(self.weight, QuantisedWeight):
            out = self.weight.gathered_product(x, experts, is_sorted)
        else:
            weight = self.weight.swapaxes(-1, -2)
            grouped = is_sorted and not (on_cuda() and experts.size <= SINGLE_CHOICES)
            out = mx.gather_mm(x, weight, rhs_indices=experts, sorted_indices=grouped)
        return out if self.bias is None else out + self.bias[experts][..., None, :]


class SwitchGLU(Struct, frozen=True):
    """The outputs down(activation(gate(x), up(x))) of the chosen experts.

    With `batch_invariant` rows are never sorted by expert, so that each row is a separate product.
    """

    gate_up: tuple[SwitchLinear, ...]  # one layer with concatenated outputs, or gate and up
    down: SwitchLinear
    activation: Activation
    batch_invariant: bool = False
    # The activation of our kernels: 0: silu(gate) * up; above 0: the activation of gpt-oss, clamped
    # to this limit; None: our kernels do not have `activation`.
    limit: float | None = None

    def __call__(self, x: mx.array, experts: mx.array) -> mx.array:
        """Returns the outputs [T, k, in] of each token's experts [T, k] for x [T, in]."""
        if self.batch_invariant or experts.size < SORT_CHOICES:
            return self._rows(x[:, None, None], experts, is_sorted=False).squeeze(-2)
        flat = experts.flatten()
        order = mx.argsort(flat)
        # The new axis is inserted before rows are gathered. Otherwise MLX 0.32 on a GPU takes the
        # axis's stride for a row's stride, and multiplies wrong rows (its issue 4253).
        rows = x[:, None][order // experts.shape[1]]
        out = self._rows(rows, flat[order], is_sorted=True)
        return out.squeeze(-2)[mx.argsort(order)].reshape(*experts.shape, -1)

    def _rows(self, x: mx.array, experts: mx.array, *, is_sorted: bool) -> mx.array:
        outs = [layer.rows(x, experts, is_sorted=is_sorted) for layer in self.gate_up]
        gate, up = outs if len(outs) == 2 else mx.split(outs[0], 2, axis=-1)
        return self.down.rows(self.activation(gate, up), experts, is_sorted=is_sorted)

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
        weights = self._kernel_weights(x.x if isinstance(x, PendingNorm) else x)
        return kernel_sum(weights, x, router, routing, added, shared)

    def _kernel_weights(self, x: mx.array) -> ExpertWeights | None:
        """Returns the weights if our kernels multiply x [T, in] with them; else None."""
        if self.batch_invariant or self.limit is None or len(self.gate_up) != 1 or x.ndim != 2:
            return None
        gate_up, down = (_dense_weight(layer, x.dtype) for layer in (self.gate_up[0], self.down))
        if gate_up is None or down is None:
            return None
        size, width = down.rows, gate_up.rows // 2
        if size != x.shape[1] or not expert_products.supports(size, width, x.dtype):
            return None
        return ExpertWeights(gate_up, down, self.limit)


def _dense_weight(layer: SwitchLinear, dtype: mx.Dtype) -> ExpertWeight | None:
    """Returns a layer's weight for our kernels; None if it is not dense or not of `dtype`."""
    weight, bias = layer.weight, layer.bias
    if bias is not None and bias.dtype != dtype:
        return None
    if not isinstance(weight, mx.array) or weight.dtype != dtype:
        return None
    return ExpertWeight(weight, bias)


def kernel_sum(
    weights: ExpertWeights | None,
    x: LinearInput,
    router: AnyLinear,
    routing: RoutingParams,
    added: mx.array | None,
    shared: LayerFunction | None,
) -> PendingProduct | None:
    """Computes layer_types.SwitchGLU.routed_sum by our kernels.

    `weights`: the experts' weights; None: no kernel supports the weights and x.
    """
    lines = x.x if isinstance(x, PendingNorm) else x
    if weights is None or not expert_routing.supports(lines.shape[0], routing):
        return None
    alike = _weights_alike(shared, weights)
    if shared is None or alike is not None:
        token = _token_mixture(x, router, routing, added, weights, alike)
        if token is not None:
            return PendingProduct(ExpertSum(token), lines)
    plan, normed = _plan(x, router, routing, added, shared=alike is not None)
    beside = shared(normed) if shared is not None and alike is None else None
    outputs, whole = expert_products.pending_mixture(normed, plan, routing, weights, alike, beside)
    return PendingProduct(ExpertSum(whole), outputs)


class ExpertSum(Struct, frozen=True):
    """Implements layer_types.Linear: the experts' weighted sum [T, d].

    A WeightedSum sums the outputs [T * k, d] of the chosen experts. A TokenMixture also computes
    these outputs, from one token [1, d] that is not normed yet.
    """

    whole: WeightedSum | TokenMixture

    def __call__(self, x: LinearInput) -> mx.array:
        assert isinstance(x, mx.array)
        return self.whole(x)

    def add_to(self, x: mx.array, residual: mx.array) -> mx.array | None:
        """Returns the sum plus `residual`; None for more than a few tokens.

        For more tokens, the next norm adds the residual.
        """
        few = matmul_small.is_fusable(residual) and residual.dtype == x.dtype
        return self.whole(x, residual) if few else None


def _token_mixture(
    x: LinearInput,
    router: AnyLinear,
    routing: RoutingParams,
    added: mx.array | None,
    experts: ExpertWeights,
    shared: tuple[mx.array, mx.array] | None,
) -> TokenMixture | None:
    """Returns the mixture for one token; None if no kernel computes all of it."""
    chooser = _chooser(router, routing, added)
    if chooser is None or not isinstance(x, PendingNorm) or not isinstance(x.norm, RMSNorm):
        return None
    gate, more = chooser
    norm = LineNorm(x.norm.weight, x.norm.eps)
    if not expert_token.supports(x.x, norm, gate, routing, experts):
        return None
    return TokenMixture(norm, gate, more, routing, experts, shared)


def _chooser(
    router: AnyLinear, routing: RoutingParams, added: mx.array | None
) -> tuple[mx.array, mx.array | None] | None:
    """Returns the router's weight and the bias for the choice of experts, as our kernels need them.

    Returns None if the kernels do not support this router.
    """
    if not isinstance(router, Linear):
        return None
    if router.bias is None:
        return router.weight, added
    return (router.weight, router.bias) if added is None and not routing.sigmoid else None


def _plan(
    x: LinearInput,
    router: AnyLinear,
    routing: RoutingParams,
    added: mx.array | None,
    *,
    shared: bool,
) -> tuple[mx.array, mx.array]:
    """Returns the plan of experts for x [T, in], see expert_routing.py, and the normed x."""
    lines = x.x if isinstance(x, PendingNorm) else x
    gate: mx.array | None = None
    chooser = _chooser(router, routing, added)
    if chooser is not None and expert_routing.multiplies(lines, chooser[0]):
        gate, added = chooser
    if isinstance(x, PendingNorm):
        norm = x.norm
        if gate is not None and isinstance(norm, RMSNorm) and expert_routing.can_norm(lines):
            line_norm = LineNorm(norm.weight, norm.eps)
            return expert_routing.plan_normed_tokens(
                lines, line_norm, gate, added, routing, shared=shared
            )
        lines = x()
    if gate is None:
        return expert_routing.plan_logits(router(lines), added, routing, shared=shared), lines
    return expert_routing.plan_tokens(lines, gate, added, routing, shared=shared), lines


def _weights_alike(
    shared: LayerFunction | None, others: ExpertWeights
) -> tuple[mx.array, mx.array] | None:
    """Returns a shared expert's weights if they have the form of `others`; else None.

    All weights must be dense.
    """
    if not isinstance(shared, GatedMLPLayer) or others.limit:
        return None
    gated = shared.gated
    if not isinstance(gated, GatedLinearUnit) or not gated.swiglu:
        return None
    weights = []
    for layer, experts in ((gated.gate_up, others.gate_up), (shared.down, others.down)):
        if not isinstance(layer, Linear) or layer.bias is not None:
            return None
        if experts.packed is not None or experts.bias is not None:
            return None
        weight = experts.weight
        if layer.weight.shape != weight.shape[1:] or layer.weight.dtype != weight.dtype:
            return None
        weights.append(layer.weight)
    return weights[0], weights[1]
