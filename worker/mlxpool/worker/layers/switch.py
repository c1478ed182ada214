"""Linear layers of a mixture of experts: each token uses the few experts chosen for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from mlxpool.worker.layers.interface import Activation
from mlxpool.worker.layers.quantised_weight import QuantisedWeight

SORT_CHOICES = 64  # choices (tokens times k) from which on sorting them by expert pays

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
            out = mx.gather_mm(x, weight, rhs_indices=experts, sorted_indices=is_sorted)
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
